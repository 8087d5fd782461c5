"""Prompts from the command line or a file, as the tokens that the run was trained to answer."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdist.coordinator.encode.encoding import Encoding
from mlxdist.coordinator.encode.messages import Message, last_assistant, messages_of
from mlxdist.coordinator.encode.row_errors import RowError
from mlxdist.protocol.errors import DataError
from mlxdist.protocol.methods import METHODS


@dataclass(frozen=True)
class Prompt:
    """One question: the text that a person sees, and the tokens that the model gets."""

    text: str
    ids: tuple[int, ...]


def prompt_of(question: str | list[Message], encoding: Encoding, system: str = "") -> Prompt:
    """Returns a text or a conversation in the form of the run's rows: as turns of the chat template, or as it stands.

    `system`: a text in front of it. Raises DataError for a conversation where there is no template, or that the
    template refuses.
    """
    if isinstance(question, str) and not encoding.wraps:
        shown, text = question, f"{system}{question}"
    else:
        turns = [{"role": "user", "content": question}] if isinstance(question, str) else question
        if system and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": system}, *turns]
        # as in training: pairs and labeled rows are rendered with thinking off
        thinking = {"enable_thinking": False} if METHODS[encoding.config.method].losses else {}
        try:
            text = encoding.template.render(turns, add_generation_prompt=True, **encoding.render_kwargs({}, **thinking))
        except RowError as error:
            raise DataError(str(error)) from None
        shown = question if isinstance(question, str) else str(turns[-1]["content"])
    ids = encoding.tokenizer.encode(text)
    return Prompt(shown, (*encoding.bos, *ids[encoding.without_bos(ids) :]))


def read_prompts(path: Path) -> Iterator[str | list[Message]]:
    """Yields the prompts of a file: the `messages` or `prompt` of JSON lines, each line with text of any other file.

    The last answer of a conversation is left out. Raises DataError with file:line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not any(line.strip() for line in lines):
        raise DataError(f"{path} has no prompt: write one on each line")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _question(json.loads(line)) if path.suffix == ".jsonl" else line
        except (ValueError, RowError) as error:
            raise DataError(f"{path}:{number}: {error}") from None


def _question(row: Any) -> str | list[Message]:
    """Raises ValueError or RowError with the reason."""
    if isinstance(row, str):
        return row
    given = (row.get("messages") or row.get("prompt")) if isinstance(row, dict) else None
    if isinstance(given, str):
        return given
    if given is None:
        raise ValueError("a text, or an object with messages or prompt is needed")
    turns = messages_of(given, "messages")
    last = last_assistant(turns)
    turns = turns[:last] if last == len(turns) - 1 else turns
    if not turns:
        raise ValueError("it has no turn before the answer")
    return turns
