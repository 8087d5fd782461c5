"""`mlxdist inspect`: reads data as a run does, and shows what would be trained, cut, left out or refused."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from mlxdist.coordinator.config.field_types import checked
from mlxdist.coordinator.config.keys import build, hints
from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.schema import PreferenceConfig, RunConfig
from mlxdist.coordinator.data.checks import file_notes
from mlxdist.coordinator.data.ingest import Progress, read_source, row_of
from mlxdist.coordinator.data.load import checks, column_notes, encoding_of, parted, template_notes
from mlxdist.coordinator.data.records import Source, Splits
from mlxdist.coordinator.data.sources import find
from mlxdist.coordinator.encode.chat_template import ChatTemplate
from mlxdist.coordinator.encode.encoding import Encoding
from mlxdist.coordinator.encode.row_errors import RowError
from mlxdist.coordinator.encode.row_formats import Shaping, shape_of
from mlxdist.coordinator.inspect.facts import Inspection, batch_facts, file_facts, samples
from mlxdist.coordinator.inspect.view import print_inspection
from mlxdist.protocol.errors import ConfigError, DataError
from mlxdist.protocol.methods import METHODS

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class InspectOptions:
    """The options of the command line beside the data. None or "": the default, or the value of the run file."""

    method: str = ""  # "": found out from the first rows
    max_length: int | None = None
    batch_size: int | None = None
    leaf_tokens: int | None = None
    train_on: str | None = None
    overrides: Sequence[str] = ()  # for a run file, like --set of launch
    as_json: bool = False


def show_inspection(path: str, model: str, options: InspectOptions, console: Console) -> int:
    """Shows the data of `path`: a folder, a file, a hub id, or a run.toml, whose settings are then used.

    Without a `model`, lengths are characters and conversations are shown plainly. Returns the exit code: 0 when a run
    would start, 2 when it would be refused. Raises DataError or ConfigError when the data cannot be read at all.
    """
    config = inspected_config(path, model, options)
    splits = find(config.data.path, config.data.valid_path)
    tokenized = bool(model) or Path(path).suffix == ".toml"
    with console.status("") as status:
        encoding = encoding_of(config) if tokenized else plain_encoding(config)

        def progress(message: str, share: float) -> None:
            status.update(f"{message}: {share:.0%}")

        facts = examine(splits, encoding, unit="tokens" if tokenized else "characters", progress=progress)
    if options.as_json:
        console.out(json.dumps(asdict(facts), ensure_ascii=False, indent=2), highlight=False)
    else:
        print_inspection(facts, console)
    return 2 if facts.refused else 0


def inspected_config(path: str, model: str, options: InspectOptions) -> RunConfig:
    """Returns the configuration that the data are read with. Raises ConfigError for options that cannot be."""
    given: dict[str, Any] = {
        "model": model,
        "method": options.method,
        "batch.max_length": options.max_length,
        "batch.size": options.batch_size,
        "batch.leaf_tokens": options.leaf_tokens,
        "data.train_on": options.train_on,
    }
    values = {key: value for key, value in given.items() if value}
    if Path(path).suffix == ".toml":
        overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        return load_config(Path(path), [*options.overrides, *overrides])
    if options.overrides:
        raise ConfigError(f"--set changes the keys of a run.toml, and {path} is not one")
    for key, value in values.items():
        try:
            checked(hints()[key], value)
        except ValueError as error:
            raise ConfigError(f"--{key.rpartition('.')[2].replace('_', '-')} {value}: {error}") from None
    values.setdefault("method", guess_method(find(path).train))
    defaults = METHODS[values["method"]].defaults
    return build({"model": "none", "output": Path("runs"), "data.path": path, **defaults, **values})


def guess_method(source: Source) -> str:
    """Returns the method whose format the first rows have; sft when they have none."""
    for record in islice(source.records(), 100):
        for method in sorted(METHODS, key=lambda name: not METHODS[name].losses):
            try:
                shaping = Shaping(method, {})
                shape_of(row_of(record, shaping).fields, shaping)
            except RowError:
                continue
            return method
    return RunConfig.method


def examine(splits: Splits, encoding: Encoding, *, unit: str, progress: Progress) -> Inspection:
    """Returns all facts of `splits`. Raises DataError for a file that cannot be read."""
    config = encoding.config
    sources = {"train": splits.train, "valid": splits.valid, "test": splits.test}
    files = {split: read_source(source, encoding, progress) for split, source in sources.items() if source is not None}
    notes: list[str] = []
    refused: list[str] = []
    faults = [fault for file in files.values() for fault in file.faults]
    counting = [fault for split, file in files.items() if split != "test" for fault in file.faults]
    if counting and config.data.on_bad_row == "error":
        are = "row is" if len(counting) == 1 else "rows are"
        refused.append(f'{len(counting)} {are} faulty (data.on_bad_row = "skip" trains without them)')
    batch, shown = None, []
    try:
        train, _, notes = parted(files["train"], files.get("valid"), config)
        notes = [*column_notes([files[split] for split in ("train", "valid") if split in files]), *notes]
        notes += file_notes(splits.unread)
        for check in checks(files["train"], train, encoding):
            try:
                notes += check()
            except DataError as error:
                refused.append(str(error))
        if unit == "tokens":  # without a model there is no template
            notes += template_notes(files["train"], encoding)
        batch, shown = batch_facts(train, config), samples(train, encoding.tokenizer)
    except DataError as error:
        refused.append(str(error))
    return Inspection(
        data=config.data.path,
        method=config.method,
        model=config.model if unit == "tokens" else "",
        unit=unit,
        files=[file_facts(split, file, config) for split, file in files.items()],
        batch=batch,
        samples=shown,
        notes=notes,
        faults=[{"where": fault.where, "reason": fault.reason} for fault in faults],
        refused=refused,
    )


@dataclass(frozen=True)
class CharacterTokenizer:
    """Takes characters for tokens, when no model is named."""

    bos_id: int | None = None
    eos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    pad_id: int = 0

    def encode(self, text: str) -> list[int]:
        """Returns the code of each character."""
        return list(map(ord, text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the codes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the codes."""
        return "".join(map(chr, ids))


def plain_encoding(config: RunConfig) -> Encoding:
    """Returns an encoding in characters, with plain conversations. It cuts nothing: `max_length` counts tokens."""
    uncut = replace(config, batch=replace(config.batch, max_length=NO_LIMIT), preference=PreferenceConfig())
    uncut = replace(uncut, data=replace(config.data, plain_text="raw"))
    return Encoding(uncut, CharacterTokenizer(), ChatTemplate(plain_template))


def plain_template(messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool, **kwargs: Any) -> str:
    """Renders each message as a line with its role, its content and an empty line."""
    text = "".join(f"{message['role']}:\n{message['content']}\n\n" for message in messages)
    return text + ("assistant:\n" if add_generation_prompt else "")
