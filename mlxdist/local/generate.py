"""`mlxdist generate`: the answers of an adapter, and of its base model beside them, as they are generated."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, cast

from mlxdist.coordinator.config.saved import run_at, saved_config
from mlxdist.coordinator.data.load import encoding_of
from mlxdist.coordinator.encode.tokenizer import HubTokenizer
from mlxdist.coordinator.storage.saved_adapters import choose_adapter
from mlxdist.local.model import adapter_off, load_model
from mlxdist.local.prompts import Prompt, prompt_of, read_prompts
from mlxdist.protocol.errors import UserError

BASE = "base model"


@dataclass(frozen=True)
class Sampling:
    """mlx-lm's keys under its names, with its defaults: the most likely token each time."""

    max_tokens: int = 100
    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int | None = None  # None: another draw each time

    def sampler(self) -> Callable[..., Any]:
        """Returns mlx-lm's sampler."""
        from mlx_lm.sample_utils import make_sampler

        sampler: Callable[..., Any] = make_sampler(self.temp, self.top_p, self.min_p, top_k=self.top_k)
        return sampler


@dataclass(frozen=True)
class Asked:
    """The questions, and the models that answer them."""

    prompts: Sequence[str] = ()
    file: Path | None = None
    checkpoint: str = ""  # best, last or a step; "": the best
    base: bool = False  # the base model answers too
    model: str = ""  # where the base model has moved
    system: str = ""


@dataclass(frozen=True)
class Piece:
    """A part of an answer as it is generated; `finish` is set in the last one: "stop" or "length"."""

    text: str
    tokens: int
    finish: str | None = None


@dataclass(frozen=True)
class Responder:
    """A model that answers prompts, with and without its adapter."""

    model: Any
    tokenizer: Any  # mlx-lm's wrapper
    name: str  # of the adapter

    def answer(self, prompt: Prompt, sampling: Sampling, *, base: bool = False) -> Iterator[Piece]:
        """Yields the answer in pieces; the same seed draws the same for the adapter and for the base model."""
        import mlx.core as mx
        from mlx_lm import stream_generate

        if sampling.seed is not None:
            mx.random.seed(sampling.seed)
        if base:
            with adapter_off(self.model):
                yield from self.answer(prompt, sampling)
            return
        ids, sampler = list(prompt.ids), sampling.sampler()
        for piece in stream_generate(self.model, self.tokenizer, ids, max_tokens=sampling.max_tokens, sampler=sampler):
            yield Piece(piece.text, piece.generation_tokens, piece.finish_reason)


def generate(run: Path, asked: Asked, sampling: Sampling, *, as_json: bool, stream: TextIO = sys.stdout) -> None:
    """Writes the answers to `stream`, piece by piece, or one JSON line for each.

    Raises UserError for a run, a checkpoint, a model or prompts that are not there.
    """
    folder = run_at(run)
    config = saved_config(folder, model=asked.model)
    adapter = choose_adapter(folder, asked.checkpoint)
    questions = [*asked.prompts, *(read_prompts(asked.file) if asked.file is not None else ())]
    if not questions:
        raise UserError('there is no prompt: mlxdist generate RUN "a question", or --prompts questions.txt')
    encoding = encoding_of(config, datetime.now())  # a template that writes the date writes that of today
    prompts = [prompt_of(question, encoding, asked.system) for question in questions]
    model, _, _ = load_model(config.model, adapter.folder)
    responder = Responder(model, cast(HubTokenizer, encoding.tokenizer).hf, adapter.name)
    names: Mapping[str, bool] = {**({BASE: True} if asked.base else {}), responder.name: False}
    show = _json_lines if as_json else _side_by_side
    for prompt in prompts:
        show(prompt, {name: responder.answer(prompt, sampling, base=base) for name, base in names.items()}, stream)


def _side_by_side(prompt: Prompt, answers: Mapping[str, Iterator[Piece]], stream: TextIO) -> None:
    """One answer under the other, so that each can be read while it comes; their names stand in front."""
    width = max(map(len, answers)) + 2
    stream.write(f"{prompt.text}\n")
    for name, pieces in answers.items():
        stream.write(f"  {name:<{width}}")
        last = Piece("", 0)
        for last in pieces:
            stream.write(last.text.replace("\n", f"\n{' ' * (width + 2)}"))
            stream.flush()
        stream.write(f" … (cut after {last.tokens} tokens: --max-tokens)\n" if last.finish == "length" else "\n")
    stream.write("\n")


def _json_lines(prompt: Prompt, answers: Mapping[str, Iterator[Piece]], stream: TextIO) -> None:
    for name, pieces in answers.items():
        given = list(pieces)
        last = given[-1] if given else Piece("", 0, "stop")
        text = "".join(piece.text for piece in given)
        record = {"prompt": prompt.text, "model": name, "text": text, "tokens": last.tokens, "finish": last.finish}
        stream.write(json.dumps(record, ensure_ascii=False) + "\n")
        stream.flush()
