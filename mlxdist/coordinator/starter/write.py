"""The text of a first run.toml, with the reason of each value beside it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from mlxdist.coordinator.data.checks import percent
from mlxdist.coordinator.report.format import count
from mlxdist.coordinator.starter.choose import Choice
from mlxdist.coordinator.starter.survey import Survey
from mlxdist.protocol.methods import METHODS

COLUMN = 40  # where the comments begin


def toml_text(survey: Survey, choice: Choice, file: Path) -> str:
    """Returns the text of `file`. Paths are relative to it where they lie beside or below it."""
    return "\n".join(_lines(survey, choice, file)) + "\n"


def _lines(survey: Survey, choice: Choice, file: Path) -> Iterator[str]:
    config, spec = choice.config, METHODS[survey.method]
    size, unit = config.batch.size, spec.item
    yield f"# Written by mlxdist init for {count(len(survey.rows), unit)} of {survey.name}."
    yield "# Paths are relative to this file. run.example.toml in the source of mlxdist explains every key."
    yield "#"
    for command, does in (("inspect", "shows the rows"), ("plan", "memory and time"), ("launch", "trains")):
        yield f"#     {f'mlxdist {command} {file.name}':<32}# {does}"
    yield ""
    suggestion = "" if survey.model_given else "a suggestion for this machine: any that mlx_lm.load takes"
    yield _key("model", _place(survey.model, file), suggestion)
    yield _key("method", survey.method, f"the rows have {survey.shape}")
    yield ""
    yield "[data]"
    yield _key("path", _place(survey.data, file))
    if config.data.valid_fraction:
        yield _key("valid_fraction", config.data.valid_fraction, "kept back for validation: there is no valid.jsonl")
    if survey.faults:
        yield f"# {percent(len(survey.faults), survey.n_rows)} of the rows are faulty; mlxdist inspect lists them"
        yield '# on_bad_row = "skip"      # trains without them'
    yield ""
    yield "[batch]"
    yield _key("size", size, f"{unit}s of a step, over all Macs together")
    yield _key("max_length", config.batch.max_length, _length_reason(survey, choice))
    if config.batch.max_cut != 0.1:
        yield _key("max_cut", config.batch.max_cut, f"lets the run start although {choice.cut} rows are cut")
    yield ""
    yield "[train]"
    yield _key("epochs", config.train.epochs, f"{count(choice.steps, 'step')}")
    yield _key("learning_rate", config.train.learning_rate, f"the usual one of {survey.method}")
    every = config.train.eval_every
    yield _key("eval_every", every, "steps between evaluations and checkpoints")
    preference = config.preference
    if preference.desirable_weight != 1.0:
        yield from ("", "[preference]")
        yield _key("desirable_weight", preference.desirable_weight, "balances the labels: fewer rows are true")
    if preference.undesirable_weight != 1.0:
        yield from ("", "[preference]")
        yield _key("undesirable_weight", preference.undesirable_weight, "balances the labels: fewer rows are false")


def _length_reason(survey: Survey, choice: Choice) -> str:
    longest = f"the longest has {'' if survey.model_given else 'about '}{max(survey.lengths)}"
    if choice.limited:
        return f"tokens: what fits on this machine; {longest}"
    if not choice.cut:
        return f"tokens: fits every row, {longest}"
    return f"tokens: {choice.cut} longer rows are cut, {longest}"


def _key(name: str, value: object, comment: str = "") -> str:
    text = f"{name} = {json.dumps(value, ensure_ascii=False)}"
    return f"{text:<{COLUMN}} # {comment}".rstrip() if comment else text


def _place(text: str, file: Path) -> str:
    """A path below the file's folder relative to it, another one absolute; a hub id as it is."""
    folder = file.absolute().parent
    if not os.path.isabs(text) or not Path(text).is_relative_to(folder):
        return text
    return Path(text).relative_to(folder).as_posix()
