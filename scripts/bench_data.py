"""Measures the reading of data on this machine: speed and memory against `datasets.map`, padding against mlx-lm.

    pip install 'mlxdist[data]'
    python scripts/bench_data.py --model models/SmolLM2-135M-Instruct
    python scripts/bench_data.py --model models/SmolLM2-135M-Instruct --padding data/gsm8k-sft/train.jsonl --rows 0

The synthetic rows are chats of random words. Every way of reading renders a row with the chat template and finds where
its answer begins, so that all do the same work. Each way runs twice in its own process, and the faster run counts.
Without the library datasets, only mlxdist is measured. Prints JSON.
"""

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

RUNS = 2
WORDS = (
    "the",
    "a",
    "of",
    "and",
    "in",
    "is",
    "it",
    "you",
    "that",
    "was",
    "for",
    "on",
    "are",
    "with",
    "they",
    "from",
    "this",
)


def main() -> None:
    """Measures what the command line asks for and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a tokenizer and a chat template")
    parser.add_argument("--rows", type=int, default=100_000, help="synthetic chat rows; 0 leaves this part out")
    parser.add_argument("--padding", type=Path, help="a .jsonl file of messages: the padding of both trainers' batches")
    parser.add_argument("--batch", type=int, default=8, help="rows per batch for --padding")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)  # one measurement, in its own process
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measured(WAYS[given.way], given)))
        return
    result: dict[str, Any] = {"machine": machine(), "model": given.model}
    if given.rows:
        result["tokenizing"] = tokenizing(given)
    if given.padding:
        result["padding"] = padding_of_both(given)
    print(json.dumps(result, indent=2))


def machine() -> dict[str, Any]:
    """Returns the system and the versions of the measurement."""
    names = ("mlx-lm", "transformers", "tokenizers", "datasets")
    versions = {name: version(name) for name in names if find_spec(name.replace("-", "_"))}
    return {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version(), **versions}


def tokenizing(given: argparse.Namespace) -> dict[str, Any]:
    """Measures rows per second and peak memory of every way."""
    ways = [way for way in WAYS if way == "ours" or find_spec("datasets")]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.jsonl"
        write_synthetic(file, given.rows)
        results: dict[str, Any] = {"rows": given.rows, "file_mb": round(file.stat().st_size / 1e6, 1)}
        for _ in range(RUNS):  # the ways alternate, so that a busy minute does not affect only one
            for way in ways:
                run = apart(way, file, given)
                if way not in results or run["rows_per_second"] > results[way]["rows_per_second"]:
                    results[way] = run
    if "datasets_map" in results:
        results["ratio"] = round(results["ours"]["rows_per_second"] / results["datasets_map"]["rows_per_second"], 2)
    return results


def apart(way: str, file: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Measures one way of reading `file` in its own process."""
    words = [sys.executable, __file__, "--model", given.model, "--way", way, "--file", str(file)]
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "HF_DATASETS_CACHE": cache}
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=env)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measured(
    read: Callable[[argparse.Namespace], tuple[Callable[[], int], dict[str, Any]]], given: argparse.Namespace
) -> dict[str, Any]:
    """Measures seconds and peak memory of one way, without loading the tokenizer."""
    work, extra = read(given)
    before = peak_mb()
    start, start_cpu = time.perf_counter(), time.process_time()
    n_rows = work()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    return {
        "rows_per_second": round(n_rows / seconds, 1),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),  # of all threads: does not depend on the load of the machine
        "peak_mb": round(peak_mb(), 1),
        "peak_mb_before": round(before, 1),
        **extra,
    }


def peak_mb() -> float:
    """The peak memory of this process so far, in MB; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def ours(given: argparse.Namespace) -> tuple[Callable[[], int], dict[str, Any]]:
    """Reads rows with `mlxdist.coordinator.data.load`."""
    from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, RunConfig
    from mlxdist.coordinator.data.load import encoding_of, read_splits
    from mlxdist.coordinator.data.sources import find

    data = DataConfig(path=str(given.file))
    config = RunConfig(model=given.model, output=Path("runs"), data=data, batch=BatchConfig(max_cut=1.0))
    encoding = encoding_of(config)
    extra: dict[str, Any] = {}

    def work() -> int:
        rows = read_splits(find(config.data.path), encoding, progress=lambda message, share: None).train
        extra["tokens"] = int(rows.lengths.sum())
        return len(rows)

    return work, extra


def datasets_map(given: argparse.Namespace) -> tuple[Callable[[], int], dict[str, Any]]:
    """Reads rows with `datasets.map`, one row at a time, as TRL prepares conversations."""
    return with_datasets(given, batched=False)


def datasets_map_batched(given: argparse.Namespace) -> tuple[Callable[[], int], dict[str, Any]]:
    """Reads rows with `datasets.map` over batches of 1000 rows, each encoded at once."""
    return with_datasets(given, batched=True)


def with_datasets(given: argparse.Namespace, *, batched: bool) -> tuple[Callable[[], int], dict[str, Any]]:
    """Reads the same rows with the same template and tokenizer through the library datasets."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    extra: dict[str, Any] = {}

    def texts(messages: list[dict[str, str]]) -> tuple[str, str]:
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        return whole, prompt

    def masked(ids: list[int], prompt: list[int]) -> dict[str, list[int]]:
        start = len(prompt) if ids[: len(prompt)] == prompt else 0
        return {"input_ids": ids, "completion_mask": [0] * start + [1] * (len(ids) - start)}

    def one(row: dict[str, Any]) -> dict[str, list[int]]:
        ids, prompt = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts(row["messages"]))
        return masked(ids, prompt)

    def many(rows: dict[str, Any]) -> dict[str, list[list[int]]]:
        both = [texts(messages) for messages in rows["messages"]]
        ids = tokenizer([whole for whole, _ in both], add_special_tokens=False)["input_ids"]
        prompts = tokenizer([prompt for _, prompt in both], add_special_tokens=False)["input_ids"]
        done = [masked(*each) for each in zip(ids, prompts, strict=True)]
        return {key: [each[key] for each in done] for key in ("input_ids", "completion_mask")}

    def work() -> int:
        rows = datasets.load_dataset("json", data_files=str(given.file), split="train")
        if batched:
            mapped = rows.map(many, batched=True, remove_columns=["messages"])
        else:
            mapped = rows.map(one, remove_columns=["messages"])
        return len(mapped)

    return work, extra


WAYS: dict[str, Callable[[argparse.Namespace], tuple[Callable[[], int], dict[str, Any]]]] = {
    "ours": ours,
    "datasets_map": datasets_map,
    "datasets_map_batched": datasets_map_batched,
}


def write_synthetic(file: Path, n_rows: int) -> None:
    """Writes chats of two to six turns of random words, the same ones each time."""
    draw = random.Random(0)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(n_rows):
            turns = [
                {
                    "role": "user" if place % 2 == 0 else "assistant",
                    "content": " ".join(draw.choices(WORDS, k=draw.randint(5, 40))),
                }
                for place in range(2 * draw.randint(1, 3))
            ]
            out.write(json.dumps({"messages": turns}) + "\n")


def padding_of_both(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the share of padding in the batches of each trainer, over one epoch with the same rows per batch."""
    from mlx_lm.tuner.datasets import CacheDataset, ChatDataset
    from mlx_lm.tuner.trainer import iterate_batches

    from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, RunConfig
    from mlxdist.coordinator.data.load import read
    from mlxdist.coordinator.encode.tokenizer import load
    from mlxdist.coordinator.inspect.facts import batch_facts

    results: dict[str, Any] = {"file": given.padding.name, "rows_per_batch": given.batch}
    batch = BatchConfig(size=given.batch, max_length=given.max_length, max_cut=1.0)
    config = RunConfig(model=given.model, output=Path("runs"), data=DataConfig(path=str(given.padding)), batch=batch)
    results["ours"] = 0.0  # rows are packed
    results["ours_leaf_fill"] = round(batch_facts(read(config, progress=lambda *_: None).train, config).fill, 4)
    chats = [json.loads(line) for line in given.padding.read_text(encoding="utf-8").splitlines() if line.strip()]
    theirs = CacheDataset(ChatDataset(chats, load(given.model), mask_prompt=True))
    places = tokens = 0
    for ids, spans in iterate_batches(theirs, given.batch, given.max_length, seed=0):
        places += ids.size
        tokens += int(spans[:, 1].sum())
    results["mlx_lm_iterate_batches"] = round((places - tokens) / places, 4)
    return results


if __name__ == "__main__":
    main()
