"""`mlxdist inspect`: reads data as a run would, and shows what would be trained, cut, left out or refused."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console

from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.schema import METHOD_DEFAULTS, BatchConfig, DataConfig, PreferenceConfig, RunConfig
from mlxdist.coordinator.data.ingest import Progress, fields_of, read_source
from mlxdist.coordinator.data.load import checks, encoding_of, parted, template_notes
from mlxdist.coordinator.data.records import Source, Splits
from mlxdist.coordinator.data.sources import find
from mlxdist.coordinator.encode.chat_template import ChatTemplate
from mlxdist.coordinator.encode.encoding import Encoding
from mlxdist.coordinator.encode.row_errors import RowError
from mlxdist.coordinator.encode.row_formats import Shaping, shape_of
from mlxdist.coordinator.inspect.facts import Inspection, batch_facts, file_facts, samples
from mlxdist.coordinator.inspect.view import show
from mlxdist.protocol.errors import ConfigError, DataError

Method = Literal["sft", "dpo", "kto"]
TrainOn = Literal["last", "all", "everything"]
NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class InspectOptions:
    """What the command line may say besides the data. None: the default, or what the run file says."""

    method: str = ""  # "": by the first row
    max_length: int | None = None
    batch_size: int | None = None
    micro_size: int | None = None
    train_on: str | None = None
    overrides: Sequence[str] = ()  # for a run file, as launch's --set
    as_json: bool = False


def inspect(path: str, model: str, options: InspectOptions, console: Console) -> int:
    """Show what is in `path`: a folder, file or hub id, or a run.toml, whose settings then hold.

    Without a `model` lengths are characters and conversations are shown plainly. Returns the exit code: 0 where a run
    would start, 2 where it would be refused. Raises DataError or ConfigError where the data cannot be read at all.
    """
    config = run_config(path, model, options)
    splits = find(config.data.path, config.data.valid_path)
    tokenised = bool(model) or Path(path).suffix == ".toml"
    with console.status("") as status:
        encoding = encoding_of(config) if tokenised else plain_encoding(config)

        def progress(message: str, share: float) -> None:
            status.update(f"{message}: {share:.0%}")

        facts = examine(splits, encoding, unit="tokens" if tokenised else "characters", progress=progress)
    if options.as_json:
        console.out(json.dumps(facts.as_json(), ensure_ascii=False, indent=2), highlight=False)
    else:
        show(facts, console)
    return 2 if facts.refused else 0


def run_config(path: str, model: str, options: InspectOptions) -> RunConfig:
    """The configuration that the data are read with."""
    if Path(path).suffix == ".toml":
        given = {"model": model, "method": options.method}
        overrides = [f"{key}={json.dumps(value)}" for key, value in given.items() if value]
        return with_options(load_config(Path(path), [*options.overrides, *overrides]), options)
    if options.overrides:
        raise ConfigError(f"--set changes the keys of a run.toml, and {path} is none")
    data = DataConfig(path=path)
    method = options.method or guess_method(find(path).train)
    if method not in get_args(Method):
        raise ConfigError(f"--method {method}: sft, dpo or kto")
    order: Any = METHOD_DEFAULTS[method].get("batch.order", "sorted")
    batch = replace(BatchConfig(), order=order)
    config = RunConfig(model=model or "none", output=Path("runs"), data=data, batch=batch, method=method)  # type: ignore[arg-type]
    return with_options(config, options)


def with_options(config: RunConfig, options: InspectOptions) -> RunConfig:
    """`config` under the options that were given."""
    given = {"max_length": options.max_length, "size": options.batch_size, "micro_size": options.micro_size}
    batch = replace(config.batch, **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    if options.train_on not in (None, *get_args(TrainOn)):
        raise ConfigError(f"--train-on {options.train_on}: last, all or everything")
    data = config.data if options.train_on is None else replace(config.data, train_on=options.train_on)  # type: ignore[arg-type]
    return replace(config, batch=batch, data=data)


def guess_method(source: Source) -> str:
    """The method that the first rows are for, sft where none is plain."""
    for record in islice(source.records(), 100):
        for method in ("dpo", "kto", "sft"):
            try:
                shaping = Shaping(method, {})
                shape_of(fields_of(record, shaping), shaping)
            except RowError:
                continue
            return method
    return "sft"


def examine(splits: Splits, encoding: Encoding, *, unit: str, progress: Progress) -> Inspection:
    """All facts of `splits`. Raises DataError for a file that cannot be read."""
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
        for check in checks(files["train"], train, encoding):
            try:
                notes += check()
            except DataError as error:
                refused.append(str(error))
        if unit == "tokens":  # without a model there is no template to speak of
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
    """Characters as tokens, where there is no model: lengths are said to be what they are."""

    bos_id: int | None = None
    eos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    pad_id: int = 0

    def encode(self, text: str) -> list[int]:
        """The code of each character."""
        return list(map(ord, text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The same for many."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The characters."""
        return "".join(map(chr, ids))


def plain_encoding(config: RunConfig) -> Encoding:
    """Characters and a plain conversation; nothing is cut, since `max_length` counts tokens."""
    uncut = replace(config, batch=replace(config.batch, max_length=NO_LIMIT), preference=PreferenceConfig())
    return Encoding(uncut, CharacterTokenizer(), ChatTemplate(plain_template))


def plain_template(messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool, **kwargs: Any) -> str:
    """Role and content, a line each, and an empty line."""
    text = "".join(f"{message['role']}:\n{message['content']}\n\n" for message in messages)
    return text + ("assistant:\n" if add_generation_prompt else "")
