"""run.toml and the command line's overrides -> RunConfig, or every fault at once.

A file goes through these stations: dotted keys, the overrides laid over them -> types, ranges, paths -> defaults of the
method -> features to come -> rules between keys. A faulty key is left out of the later ones: one mistake, one message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxdist.coordinator.config.field_types import UnfitError, fit, meant, shown, words
from mlxdist.coordinator.config.keys import build, flat, hints, nested, tables, value_at
from mlxdist.coordinator.config.overrides import Override, parse_overrides
from mlxdist.coordinator.config.paths import PATHS, BadPathError, absolute
from mlxdist.coordinator.config.rules import Broken, broken
from mlxdist.coordinator.config.schema import NOT_YET, NotYet, RunConfig
from mlxdist.coordinator.config.toml_file import Fault, TomlFile, read, refuse
from mlxdist.coordinator.config.unknown_keys import nearest, unknown_key, unknown_table
from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.methods import METHODS

RUN_FILE = "run.toml"
EXCLUSIVE = (("train.steps", "train.epochs", "train.max_hours"), ("data.valid_path", "data.valid_fraction"))
SHORT = ', or data = "folder"'
NEEDED = {"model": 'a folder or hub id, model = "…"', "data.path": 'the rows to train on, data = "folder"'}


def load(path: Path | None, overrides: Sequence[str] = (), *, not_yet: NotYet = NOT_YET) -> RunConfig:
    """The resolved configuration of the file `path` (a folder: its run.toml; None: run.toml here).

    `overrides` are texts "key=value"; their paths are relative to the current directory, those of the file to the file.
    Raises ConfigError with up to ten faults, NotYetError when all of them are features to come.
    """
    file = read(find(path))
    parsed, faults = parse_overrides(overrides)
    settings = lay_over(file, parsed)
    settings.faults.extend(faults)
    fitted = fit_all(settings)
    config = resolve(fitted, settings)
    refuse_to_come(config, fitted, settings, not_yet)
    for rule in broken(config, frozenset(fitted)):
        if settings.faulty.isdisjoint({rule.key, "method", *rule.looked_at}):
            settings.faults.append(Fault(f"{settings.blame(rule)} {rule.text}"))
    refuse(settings.faults)
    return config


def find(path: Path | None) -> Path:
    """The file meant by `path`. Raises ConfigError when there is none."""
    cure = "write one (run.example.toml shows every key) or name another: mlxdist launch my-run.toml"
    if path is None or path.is_dir():
        file = Path(RUN_FILE) if path is None else path / RUN_FILE
        if not file.is_file():
            raise ConfigError(
                f"{absolute(str(file.parent), Path.cwd())}: there is no {RUN_FILE} in this folder; {cure}"
            )
        return file
    if not path.exists():
        near = nearest(path.name, [other.name for other in path.parent.glob("*.toml")])
        raise ConfigError(f"{path}: there is no such file; {f'did you mean {path.parent / near}?' if near else cure}")
    return path


@dataclass
class Settings:
    """What was given: raw values by dotted key, which of them by --set, and the faults met so far."""

    file: TomlFile
    raw: dict[str, Any]
    overridden: set[str]
    faulty: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)

    def place(self, key: str) -> str:
        """Where `key` was given, to begin a sentence: `run.toml:3: batch.size` or `--set batch.size`."""
        given = key if key in self.raw else key.rpartition(".")[0]
        return f"--set {key}" if given in self.overridden else self.file.place(key)

    def blame(self, rule: Broken) -> str:
        """Where the first given key of a broken `rule` stands, then the key that its sentence is about."""
        given = [key for key in (rule.key, *rule.looked_at) if key in self.raw or key.rpartition(".")[0] in self.raw]
        return self.place(rule.key) if rule.key in given or not given else f"{self.place(given[0])}: {rule.key}"

    def fault(self, key: str, text: str) -> None:
        """Note what is wrong with `key`, which later stations then leave alone."""
        self.faulty.add(key)
        self.faults.append(Fault(f"{self.place(key)} {text}"))


def lay_over(file: TomlFile, overrides: Sequence[Override]) -> Settings:
    """The file's keys with the overrides over them; one of several exclusive keys displaces the file's other ones."""
    settings = Settings(file, dict(flat(file.values)), set())
    for override in overrides:
        for key, value in flat(nested(override.key, override.value)):
            old = settings.raw.get(key)
            both_tables = isinstance(old, dict) and isinstance(value, dict)
            settings.raw[key] = {**old, **value} if both_tables and isinstance(old, dict) else value
            settings.overridden.add(key)
            for group in EXCLUSIVE:
                for other in set(group) - settings.overridden if key in group else ():
                    settings.raw.pop(other, None)
    return settings


def fit_all(settings: Settings) -> dict[str, Any]:
    """The raw values that are what their keys take, paths made absolute; the others are noted as faults."""
    known, fitted = hints(), {}
    for key, value in settings.raw.items():
        if key not in known:
            settings.fault(key, _unknown(key, value))
            continue
        try:
            fitted[key] = fit(known[key], value)
            if key in PATHS:
                base = Path.cwd() if key in settings.overridden else settings.file.path.parent.absolute()
                fitted[key] = PATHS[key](str(fitted[key]), base)
        except UnfitError:
            settings.fault(key, f"= {shown(value)}: must be {words(known[key])}{meant(known[key], value)}")
        except BadPathError as bad:
            settings.fault(key, f"= {shown(value)} {bad}")
        except (OSError, ValueError) as error:  # too long, or in a folder that may not be read
            settings.fault(
                key, f"= {shown(value)} cannot be used as a path: {getattr(error, 'strerror', None) or error}"
            )
    for key, what in NEEDED.items():
        name = key.removesuffix(".path")
        if key not in fitted and settings.faulty.isdisjoint({key, name}):
            settings.faults.append(Fault(f"{settings.file.path}: {name} is missing: {what}"))
    return {key: value for key, value in fitted.items() if key not in settings.faulty}


def _unknown(key: str, value: Any) -> str:
    known = tables()
    if key in known:
        return f"= {shown(value)}: must be a table, [{key}]{SHORT if key == 'data' else ''}"
    if isinstance(value, dict) and "." not in key:
        return unknown_table(key, known)
    return unknown_key(key, known)


def resolve(fitted: Mapping[str, Any], settings: Settings) -> RunConfig:
    """The configuration with the defaults of its method, file name and other keys filled in."""
    file = settings.file.path
    runs = absolute(f"runs/{file.name.removesuffix('.toml')}", file.parent.absolute())
    defaults = {"model": "", "data.path": "", "output": runs, **METHODS[fitted.get("method", RunConfig.method)].defaults}
    if "train.epochs" in fitted or "train.max_hours" in fitted:
        defaults["train.steps"] = None
    if fitted.get("memory.grad_checkpoint"):
        defaults["memory.segment_size"] = "off"
    return build({**defaults, **fitted})


def refuse_to_come(config: RunConfig, fitted: Mapping[str, Any], settings: Settings, not_yet: NotYet) -> None:
    """Note every given key that needs a feature of a later version, and a whole table of such keys once."""
    said = set()
    for key in fitted:
        for entry in {key, key.partition(".")[0]} & set(not_yet):
            needs, sentence = not_yet[entry]
            if not needs(value_at(config, key)):
                continue
            if entry not in said:
                text = f"{settings.place(key)} = {shown(settings.raw[key])}: not yet: {sentence}"
                settings.faults.append(Fault(text, not_yet=True))
            said.add(entry)
            settings.faulty.add(key)
