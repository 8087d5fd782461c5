"""Asks a model the same questions without and with a trained adapter, using only mlx-lm.

    python scripts/demo_generate.py models/SmolLM2-135M-Instruct runs/quickstart examples/sft/valid.jsonl

The questions are the first user messages (or prompts) of the rows of a JSONL file; take rows that were not trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mlxdist.node.work.blas import use_openblas

MAX_TOKENS = 48  # a longer answer is cut: about five seconds on a slow machine


def questions_of(file: Path, count: int) -> list[str]:
    """Returns the first user message of each of the first `count` rows of a JSONL file."""
    with file.open(encoding="utf-8") as lines:
        return [question_of(json.loads(line)) for line in islice(lines, count)]


def question_of(row: dict[str, Any]) -> str:
    """Returns the first user message of one row; its prompt may be a text or a list of messages."""
    turns = row.get("messages") or row["prompt"]
    if isinstance(turns, str):
        return turns
    return next(str(turn["content"]) for turn in turns if turn["role"] == "user")


def answer(model: Any, tokenizer: Any, question: str, indent: str) -> str:
    """Prints the greedy answer to `question` while it is generated, and returns it."""
    from mlx_lm import stream_generate

    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    said = ""
    for piece in stream_generate(model, tokenizer, prompt, max_tokens=MAX_TOKENS):
        said += piece.text
        print(piece.text.replace("\n", f"\n{indent}"), end="", flush=True)
    print(flush=True)
    return said


def compare(model: Path, adapter: Path, questions: Sequence[str], form: str) -> tuple[int, int]:
    """Prints both answers to every question. Returns how many match `form`, without and with the adapter."""
    import mlx_lm

    print("Loading the model twice: as it was, and with the adapter.", flush=True)
    plain, tokenizer, *_ = mlx_lm.load(str(model))
    tuned, *_ = mlx_lm.load(str(model), adapter_path=str(adapter))
    counts = [0, 0]
    for question in questions:
        print(f"\n{question}")
        for place, (name, side) in enumerate((("without", plain), ("with", tuned))):
            label = f"  {name:<9}"
            print(label, end="", flush=True)
            counts[place] += re.search(form, answer(side, tokenizer, question, " " * len(label))) is not None
    return counts[0], counts[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, and prints what was learned. Returns 1 when most answers lack the form."""
    parser = argparse.ArgumentParser(description="Answer questions without and with an adapter.")
    parser.add_argument("model", type=Path, help="the model folder")
    parser.add_argument("adapter", type=Path, help="the run folder, or any folder with an mlx-lm adapter")
    parser.add_argument("questions", type=Path, help="JSONL file with the questions")
    parser.add_argument("--count", type=int, default=3, help="how many questions (3)")
    parser.add_argument("--form", default="", help="regular expression that a trained answer matches")
    options = parser.parse_args(arguments)

    # Set before mlx and transformers are imported: the fast BLAS, and no advice about optional libraries.
    use_openblas()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    questions = questions_of(options.questions, options.count)
    before, after = compare(options.model, options.adapter, questions, options.form)
    if not options.form:
        return 0
    print(f"\nAnswers with {options.form!r}: {before} of {len(questions)} without, {after} of {len(questions)} with.")
    return 0 if 2 * after > len(questions) else 1


if __name__ == "__main__":
    raise SystemExit(main())
