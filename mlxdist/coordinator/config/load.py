"""Turns run.toml and the command line's overrides into a RunConfig, or tells every fault at once.

The steps: dotted keys with the overrides laid over them; types, ranges and paths; defaults of the method; rules between
keys. A key with a fault is left out of the later steps, so that one mistake gives one message.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxdist.coordinator.config.field_types import checked, shown
from mlxdist.coordinator.config.keys import build, flat, hints, nested, tables
from mlxdist.coordinator.config.overrides import parse_overrides
from mlxdist.coordinator.config.paths import BadPathError, absolute, resolve_path
from mlxdist.coordinator.config.rules import Broken, broken_rules
from mlxdist.coordinator.config.schema import SECRET, RunConfig
from mlxdist.coordinator.config.toml_file import TomlFile, raise_faults, read_toml
from mlxdist.coordinator.config.unknown_keys import nearest, unknown_key, unknown_table
from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.methods import METHODS

RUN_FILE = "run.toml"
EXCLUSIVE = (("train.steps", "train.epochs", "train.max_hours"), ("data.valid_path", "data.valid_fraction"))
NEEDED = {"model": 'a folder or hub id, model = "…"', "data.path": 'the rows to train on, data = "folder"'}


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the resolved configuration of the file `path` (a folder: its run.toml; None: run.toml here).

    `overrides` are texts "key=value". Their paths are relative to the current directory, those of the file to the file.
    Raises ConfigError with up to ten faults.
    """
    return resolved(read_toml(find_run_file(path)), overrides)


def configured(given: "str | os.PathLike[str] | Mapping[str, Any] | RunConfig", overrides: Sequence[str]) -> RunConfig:
    """Returns the resolved configuration of a file, of a mapping with the keys of one, or of a finished one.

    Raises ConfigError, as `load_config`; also for overrides of a finished one.
    """
    if isinstance(given, RunConfig):
        if overrides:
            raise ConfigError("overrides change the keys of a file or a mapping, and a RunConfig is finished")
        return given
    if isinstance(given, Mapping):
        return resolved(TomlFile(Path(RUN_FILE), given, {}), overrides)
    return load_config(Path(given), overrides)


def resolved(file: TomlFile, overrides: Sequence[str]) -> RunConfig:
    """Returns the configuration of a file's values with the overrides. Raises ConfigError with up to ten faults."""
    parsed, faults = parse_overrides(overrides)
    given = lay_over(file, parsed, faults)
    values = check_values(given)
    config = with_defaults(values, file.path)
    for rule in broken_rules(config, frozenset(values)):
        if given.faulty.isdisjoint({rule.key, "method", *rule.looked_at}):
            given.faults.append(f"{given.blame(rule)} {rule.text}")
            given.faulty.add(rule.key)
    raise_faults(given.faults)
    return config


def find_run_file(path: Path | None) -> Path:
    """Returns the file that `path` means. Raises ConfigError when there is none."""
    cure = "write one (run.example.toml shows every key) or name another: mlxdist launch my-run.toml"
    if path is None or path.is_dir():
        file = (path or Path()) / RUN_FILE
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
class GivenValues:
    """The values as they were given, by dotted key; which of them by --set; and the faults found so far."""

    file: TomlFile
    raw: dict[str, Any]
    faults: list[str]
    overridden: set[str] = field(default_factory=set)
    faulty: set[str] = field(default_factory=set)

    def place(self, key: str) -> str:
        """Returns where `key` was given, to begin a sentence: `run.toml:3: batch.size` or `--set batch.size`."""
        given = key if key in self.raw else key.rpartition(".")[0]
        return f"--set {key}" if given in self.overridden else self.file.place(key)

    def blame(self, rule: Broken) -> str:
        """Returns the place of the first given key of a broken `rule`, then the key that its sentence is about."""
        given = [key for key in (rule.key, *rule.looked_at) if key in self.raw or key.rpartition(".")[0] in self.raw]
        return self.place(rule.key) if rule.key in given or not given else f"{self.place(given[0])}: {rule.key}"

    def fault(self, key: str, text: str) -> None:
        """Notes what is wrong with `key`. Later steps leave this key alone."""
        self.faulty.add(key)
        self.faults.append(f"{self.place(key)} {text}")


def lay_over(file: TomlFile, overrides: Sequence[tuple[str, Any]], faults: list[str]) -> GivenValues:
    """Lays the overrides over the file's keys. One of several exclusive keys displaces the file's other ones."""
    given = GivenValues(file, dict(flat(file.values)), faults)
    for dotted, override in overrides:
        for key, value in flat(nested(dotted, override)):
            old = given.raw.get(key)
            given.raw[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
            given.overridden.add(key)
            for group in EXCLUSIVE:
                for other in set(group) - given.overridden if key in group else ():
                    given.raw.pop(other, None)
    return given


def check_values(given: GivenValues) -> dict[str, Any]:
    """Returns the values that their keys take, with absolute paths, and notes the faults of the others."""
    known, values = hints(), {}
    for key, value in given.raw.items():
        if key not in known:
            given.fault(key, _unknown(key, value))
            continue
        base = Path.cwd() if key in given.overridden else given.file.path.parent.absolute()
        try:
            values[key] = resolve_path(key, checked(known[key], value), base)
        except BadPathError as error:
            given.fault(key, f"= {shown(value)} {error}")
        except ValueError as error:
            given.fault(key, f"{error}" if key in SECRET else f"= {shown(value)}: {error}")
    for key, meaning in NEEDED.items():
        name = key.removesuffix(".path")
        if key not in values and given.faulty.isdisjoint({key, name}):
            given.faults.append(f"{given.file.path}: {name} is missing: {meaning}")
    return values


def _unknown(key: str, value: Any) -> str:
    known = tables()
    if key in known:
        return f"= {shown(value)}: must be a table, [{key}]" + (', or data = "folder"' if key == "data" else "")
    if isinstance(value, dict) and "." not in key:
        return unknown_table(key, known)
    return unknown_key(key, known)


def with_defaults(values: Mapping[str, Any], file: Path) -> RunConfig:
    """Returns the configuration with the defaults of its method, file name and other keys filled in."""
    runs = absolute(f"runs/{file.name.removesuffix('.toml')}", file.parent.absolute())
    defaults = {
        "model": "",
        "data.path": "",
        "output": runs,
        **METHODS[values.get("method", RunConfig.method)].defaults,
    }
    if "train.epochs" in values or "train.max_hours" in values:
        defaults["train.steps"] = None
    if values.get("memory.grad_checkpoint"):
        defaults["memory.segment_size"] = "off"
    return build({**defaults, **values})
