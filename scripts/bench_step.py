"""Measure a training step on this machine: against mlx-lm's own trainer, and against the same step without a wire.

    python scripts/demo_model.py models/SmolLM2-135M-Instruct
    python scripts/bench_step.py --model models/SmolLM2-135M-Instruct
    python scripts/bench_step.py --tiny        # a tiny random model: shows that it works, its figures say nothing

Both trainers get the same rows with the prompts masked, the same LoRA layers, one thread and the same BLAS. Each makes
passes over all rows in its own order and batches, and they take turns: one step of ours, on a real node over the wire,
one of `mlx_lm.tuner.train`. A pair is one pass of each; the first, in which mlx-lm compiles, does not count. Then the same
leaves are computed by a node and in this process alone, in turns again. Prints JSON; docs/benchmarks.md explains it.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from mlxdist.node.blas import use_openblas

THREADS = "1"  # what a node fixes on Linux; read when OpenBLAS is loaded, which is before mlx
os.environ.update(OPENBLAS_NUM_THREADS=THREADS, OMP_NUM_THREADS=THREADS, MLX_ENABLE_TF32="0", HF_HUB_OFFLINE="1")
OPENBLAS = use_openblas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402

from mlxdist.coordinator import adapter as adapters  # noqa: E402
from mlxdist.coordinator.cluster import Cluster  # noqa: E402
from mlxdist.coordinator.rules import Rules  # noqa: E402
from mlxdist.coordinator.config import RunConfig  # noqa: E402
from mlxdist.coordinator.config_load import load as load_config  # noqa: E402
from mlxdist.coordinator.fleet import Fleet  # noqa: E402
from mlxdist.coordinator.hosts import local_hosts  # noqa: E402
from mlxdist.coordinator.launch import LocalNodes  # noqa: E402
from mlxdist.coordinator.leaves import cut  # noqa: E402
from mlxdist.coordinator.optimize import Moments, adamw, clip, no_moments  # noqa: E402
from mlxdist.coordinator.order import Step  # noqa: E402
from mlxdist.coordinator.order import steps as order_steps  # noqa: E402
from mlxdist.coordinator.read import read  # noqa: E402
from mlxdist.coordinator.rounds import Request  # noqa: E402
from mlxdist.coordinator.rows import Rows  # noqa: E402
from mlxdist.coordinator.sockets import RouterHub  # noqa: E402
from mlxdist.coordinator.spec import run_spec  # noqa: E402
from mlxdist.node import model as models  # noqa: E402
from mlxdist.node.compute import Computer, add  # noqa: E402
from mlxdist.protocol import manifest as manifests  # noqa: E402
from mlxdist.protocol.leaves import Leaf, Row  # noqa: E402
from mlxdist.protocol.transport import CONTROL, DATA  # noqa: E402
from mlxdist.protocol.tree import Span, fold_span  # noqa: E402
from mlxdist.protocol.vectors import Vector  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
GEMM_SIZE = 1024
FORMULA = (
    "sum over rows of t (4 P + 6 A) + 12 t^2 D L, plus 4 s V D: t tokens into the layers, P their matrix parameters, "
    "A LoRA parameters, D hidden size, L layers, s positions in the head, V vocabulary; the frozen layers cost 2 forward "
    "and 2 backward, LoRA 2 and 4, attention counts its full square"
)
RUN_TOML = """
model = {model}
output = "run"
data = "train.jsonl"
[batch]
size = {batch}
micro_size = {micro}
max_length = {max_length}
[lora]
rank_scaling = "constant"
"""
Gradient = Callable[[tuple[Leaf, ...], int, Vector], tuple[Vector, float]]  # leaves, version, adapter -> sum, loss


def say(sentence: str) -> None:
    """Progress goes to stderr: stdout is for the JSON."""
    print(f"[{time.strftime('%H:%M:%S')}] {sentence}", file=sys.stderr, flush=True)


# ---- our step


@dataclass
class Training:
    """Our training between two steps: what the loop of a run keeps."""

    config: RunConfig
    rows: Rows
    adapter: Vector
    moments: Moments
    version: int = 0

    def compute(self, step: Step, gradient: Gradient) -> tuple[float, float, Vector, Moments]:
        """Seconds, summed loss, and what the step would change: the adapter and the moments."""
        train, batch = self.config.train, self.config.batch
        began = time.perf_counter()
        leaves = cut(step, self.rows, batch.micro_size, batch.max_length, "sft")
        grad_sum, loss = gradient(leaves, self.version, self.adapter)
        clipped, _ = clip(grad_sum, targets_of(leaves), train.max_grad_norm)
        adapter, moments = adamw(
            self.adapter,
            clipped,
            self.moments,
            learning_rate=train.learning_rate,
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
        )
        return time.perf_counter() - began, loss, adapter, moments

    def advance(self, adapter: Vector, moments: Moments) -> None:
        """Take the step."""
        self.adapter, self.moments, self.version = adapter, moments, self.version + 1


def over_the_wire(fleet: Fleet) -> Gradient:
    """The adapter goes out, the leaves go out, the sum comes back."""

    def gradient(leaves: tuple[Leaf, ...], version: int, adapter: Vector) -> tuple[Vector, float]:
        fleet.send_adapter(version, adapter)
        grad_sum, numbers = fleet.gradient(Request("gradient", version + 1, version, leaves))
        return grad_sum, float(sum(column[:, 0].sum() for column in numbers))

    return gradient


def in_one_process(computer: Computer) -> Gradient:
    """The same leaves, one after the other, added up in the same tree."""

    def gradient(leaves: tuple[Leaf, ...], version: int, adapter: Vector) -> tuple[Vector, float]:
        computer.use(adapter)
        losses: list[float] = []

        def one(index: int) -> mx.array:
            flat, numbers = computer.gradient(leaves[index], step=version + 1, inputs={})
            losses.append(float(numbers[:, 0].sum()))
            return flat

        total = fold_span(Span(0, len(leaves)), one, add)
        return np.array(total, dtype=np.float32), sum(losses)

    return gradient


@contextmanager
def one_node(config: RunConfig, logs: Path) -> Iterator[Fleet]:
    """A fleet of one local node in processes of its own, as `mlxdist launch` starts it."""
    hub = RouterHub("127.0.0.1", 0)
    rules = Rules(
        run="bench",
        incarnation=time.time_ns(),
        spec=run_spec(config),
        versions={name: version(name) for name in ("mlx", "mlx-lm")},
        data_port=hub.ports[DATA],
        beat_seconds=config.timing.beat_seconds,
        suspect_seconds=config.timing.suspect_seconds,
        dead_seconds=config.timing.dead_seconds,
    )
    nodes = LocalNodes(logs, config.timing.stop_seconds)
    fleet = Fleet(Cluster(rules), hub, on_news=lambda news: say(f"{news.name}: {news.message}"), watch=nodes.failure)
    try:
        nodes.start(local_hosts(1).nodes, hub.ports[CONTROL])
        fleet.wait_for_nodes(1, 1, config.timing.start_timeout)
        yield fleet
    finally:
        fleet.close("the measurement is over")
        nodes.stop()


# ---- their step


@dataclass
class Theirs:
    """What mlx-lm reports of its steps, and the shapes of its batches."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # means over a batch, weighted by `targets`
    targets: list[int] = field(default_factory=list)  # as mlx-lm counts them: one pad more for every padded row
    pads: list[int] = field(default_factory=list)
    shapes: list[tuple[int, int]] = field(default_factory=list)

    def on_train_loss_report(self, info: Mapping[str, float]) -> None:
        """One step is done."""
        self.seconds.append(1 / info["iterations_per_second"])
        self.losses.append(info["train_loss"])
        self.targets.append(round(info["tokens_per_second"] / info["iterations_per_second"]))

    def on_val_loss_report(self, info: Mapping[str, float]) -> None:
        """No validation here."""


def train_theirs(model: nn.Module, data: Any, config: RunConfig, steps: int, folder: Path, turn: Callable[[], None]) -> Theirs:
    """`mlx_lm.tuner.train` for so many steps; `turn` is called before each of them, outside of its clock."""
    from mlx.optimizers import AdamW
    from mlx_lm.tuner.trainer import TrainingArgs, iterate_batches, train

    seen = Theirs()

    def batches(*args: Any, **kwargs: Any) -> Iterator[tuple[mx.array, mx.array]]:
        for batch, spans in iterate_batches(*args, **kwargs):
            turn()
            rows, width = batch.shape
            seen.shapes.append((rows, width - 1))
            seen.pads.append(sum(end < width for _, end in spans.tolist()))
            yield batch, spans

    arguments = TrainingArgs(
        batch_size=config.batch.size,
        iters=steps,
        steps_per_report=1,
        steps_per_save=steps + 1,
        max_seq_length=config.batch.max_length,
        adapter_file=str(folder / "theirs.safetensors"),
    )
    optimizer = AdamW(config.train.learning_rate, bias_correction=True)
    np.random.seed(0)  # the order of mlx-lm's batches
    with redirect_stdout(sys.stderr):
        train(model, optimizer, data, args=arguments, iterate_batches=batches, training_callback=seen)
    return seen


def their_data(config: RunConfig, lines: Sequence[str], rows: Sequence[Row]) -> Any:
    """The lines as mlx-lm's data set with masked prompts. Exits when it would train other tokens than ours."""
    from types import SimpleNamespace

    from mlx_lm.tuner.datasets import CacheDataset, create_dataset
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(Path(config.model))
    data = CacheDataset(create_dataset([json.loads(line) for line in lines], tokenizer, SimpleNamespace(mask_prompt=True)))
    for row in rows:
        ids, start = data[row.row_id]
        first = max(start, 1)
        same = ids[: config.batch.max_length] == row.ids.tolist() and not row.targets[:first].any()
        if not same or not row.targets[first:].all():
            raise SystemExit(f"row {row.row_id + 1}: mlx-lm would train other tokens of it than mlxdist; give rows of messages")
    return data


# ---- counting


def targets_of(leaves: Sequence[Leaf]) -> int:
    """The supervised tokens of leaves."""
    return sum(int(row.targets.sum()) for leaf in leaves for row in leaf.rows)


def gemm_gflops(repeat: int = 5) -> float:
    """The best float32 matrix product of this moment, in 10^9 operations a second."""
    a, b = (mx.random.normal((GEMM_SIZE, GEMM_SIZE), key=mx.random.key(seed)) for seed in (1, 2))
    mx.eval(a, b, a @ b)
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        mx.eval(a @ b)
        seconds.append(time.perf_counter() - began)
    return 2e-9 * GEMM_SIZE**3 / min(seconds)


def flops_of(loaded: models.LoadedModel) -> Callable[[Sequence[int], int], float]:
    """FORMULA for this model, a function of the tokens of each row and the positions in the head."""
    layers = [layer for layer in loaded.model.layers if layer is not None]
    matrices = 0
    for layer in layers:
        for _, module in layer.named_modules():
            if isinstance(module, nn.Linear | nn.QuantizedLinear):
                packed = 32 // module.bits if isinstance(module, nn.QuantizedLinear) else 1
                matrices += module.weight.size * packed
    lora, hidden = manifests.size(loaded.manifest), loaded.model.args.hidden_size

    def flops(rows: Sequence[int], positions: int) -> float:
        through = sum(t * (4 * matrices + 6 * lora) + 12 * t * t * hidden * len(layers) for t in rows)
        return float(through + 4 * positions * loaded.vocab_size * hidden)

    return flops


def pairs_of(values: Sequence[float], steps: int) -> list[float]:
    """Sums over each pass but the first."""
    return [sum(values[start : start + steps]) for start in range(steps, len(values), steps)]


# ---- the measurement


def measure(folder: Path, lines: Sequence[str], steps: int, pairs: int) -> dict[str, Any]:
    """Everything, in one run; `folder` holds run.toml and the rows, `steps` make a pass."""
    config = load_config(folder / "run.toml")
    dataset = read(config, progress=lambda what, share: None).train
    rows = [dataset.rows(index)[0] for index in range(len(dataset))]
    data = their_data(config, lines, rows)
    loaded = models.load(run_spec(config), say)
    first = adapters.draw(loaded.manifest, config.batch.seed)
    loaded.use({name: mx.array(part) for name, part in manifests.split(loaded.manifest, first).items()})
    ours = Training(config, dataset, first, no_moments(len(first)))
    peaks = [gemm_gflops()]
    with one_node(config, folder) as fleet:
        wire = over_the_wire(fleet)
        upcoming = order_steps(dataset.lengths.tolist(), config.batch, "sft")
        seconds, losses, padded = [], [], []

        def turn() -> None:
            if len(seconds) % steps == 0:
                say(f"pass {len(seconds) // steps} of {pairs}" + ("" if seconds else ", to warm up"))
                peaks.append(gemm_gflops())
            step = next(upcoming)
            took, loss, *after = ours.compute(step, wire)
            ours.advance(*after)
            seconds.append(took)
            losses.append(loss)
            leaves = cut(step, dataset, config.batch.micro_size, config.batch.max_length, "sft")
            padded.extend(leaf.widths[0] - 1 for leaf in leaves for _ in leaf.rows)

        theirs = train_theirs(loaded.model, data, config, steps * (pairs + 1), folder, turn)
        say("the same leaves over the wire and in one process")
        overhead = measure_wire(ours, list(islice(upcoming, steps)), pairs, wire, in_one_process(Computer(loaded, run_spec(config))))
    peaks.append(gemm_gflops())

    targets = sum(int(row.targets.sum()) for row in rows)
    of_theirs = sum(theirs.targets[-steps:]) - sum(theirs.pads[-steps:])
    if of_theirs != targets:
        raise SystemExit(f"mlx-lm trained {of_theirs} targets in a pass where mlxdist trained {targets}")
    flops, peak = flops_of(loaded), max(peaks)
    mine, its = pairs_of(seconds, steps), pairs_of(theirs.seconds, steps)
    needed = flops([len(row.ids) - 1 for row in rows], targets)
    done = {
        "mlxdist": flops(padded[-len(rows) :], targets),
        "mlx_lm": flops([w for b, w in theirs.shapes[-steps:] for _ in range(b)], sum(b * w for b, w in theirs.shapes[-steps:])),
    }
    loss_theirs = sum(loss * count for loss, count in zip(theirs.losses[-steps:], theirs.targets[-steps:], strict=True))
    sides = {}
    for name, passes, loss in (("mlxdist", mine, sum(losses[-steps:]) / targets), ("mlx_lm", its, loss_theirs / sum(theirs.targets[-steps:]))):
        middle = statistics.median(passes)
        sides[name] = {
            "supervised_tokens_per_second": targets / middle,
            "step_seconds": middle / steps,
            "needed_share_of_gemm_peak": needed / middle / peak / 1e9,
            "computed_share_of_gemm_peak": done[name] / middle / peak / 1e9,
            "targets_per_pass": targets if name == "mlxdist" else of_theirs,
            "loss_in_the_last_pass": loss,
        }
    sides["mlx_lm"]["pads_trained_per_pass"] = sum(theirs.pads[-steps:])
    ratios = [right / left for left, right in zip(mine, its, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratio_by_pair": ratios,
        **sides,
        "gemm_peak_gflops": peak,
        "flops": FORMULA,
        "wire": overhead,
        "rows": len(rows),
        "row_tokens": [int(np.percentile([len(row.ids) for row in rows], q)) for q in (0, 50, 100)],
        "trainable_parameters": len(first),
    }


def measure_wire(ours: Training, steps: Sequence[Step], pairs: int, wire: Gradient, alone: Gradient) -> dict[str, Any]:
    """The steps with and without a wire, in turns, each from the same adapter and moments; the order changes each time."""
    seconds: dict[Gradient, list[float]] = {wire: [], alone: []}
    same = True
    for turn in range(-1, pairs * len(steps)):  # the first does not count
        results = {}
        for side in (wire, alone) if turn % 2 else (alone, wire):
            took, _, *results[side] = ours.compute(steps[turn % len(steps)], side)
            if turn >= 0:
                seconds[side].append(took)
        same &= np.array_equal(results[wire][0], results[alone][0])
        ours.advance(*results[wire])
    over = [100 * (left / right - 1) for left, right in zip(seconds[wire], seconds[alone], strict=True)]
    return {
        "overhead_percent": statistics.median(over),
        "overhead_percent_by_step": over,
        "step_seconds_over_the_wire": statistics.median(seconds[wire]),
        "step_seconds_in_one_process": statistics.median(seconds[alone]),
        "same_bits": same,
    }


# ---- the command


def write_tiny_model(folder: Path) -> None:
    """A random llama of two layers and a tokenizer with one token for each byte."""
    from mlx_lm.models import llama
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as token_models

    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(letters),
        "tie_word_embeddings": True,
    }
    mx.random.seed(0)
    llama.Model(llama.ModelArgs.from_dict(config)).save_weights(str(folder / "model.safetensors"))
    tokenizer = Tokenizer(token_models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<end>", "chat_template": template}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "models/SmolLM2-135M-Instruct"), help="folder, as for mlx_lm.load")
    parser.add_argument("--data", type=Path, default=ROOT / "examples/sft/train.jsonl", help="rows as JSON lines")
    parser.add_argument("--skip", type=int, default=0, help="rows to leave out at the start of the file")
    parser.add_argument("--steps", type=int, default=3, help="steps in a pass over the rows")
    parser.add_argument("--pairs", type=int, default=3, help="passes of each side that count")
    parser.add_argument("--batch", type=int, default=4, help="rows in a step")
    parser.add_argument("--micro", type=int, default=1, help="rows in a leaf of ours; mlx-lm takes the batch whole")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead")
    given = parser.parse_args()
    if not given.tiny and not (Path(given.model) / "config.json").is_file():
        parser.error(f"{given.model} is not a model folder; scripts/demo_model.py makes one, --model names another")
    path = given.data / "train.jsonl" if given.data.is_dir() else given.data
    lines = path.read_text(encoding="utf-8").splitlines()[given.skip :][: given.steps * given.batch]
    if len(lines) < given.steps * given.batch:
        parser.error(f"{path} has too few rows for {given.steps} steps of {given.batch}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if given.tiny:
            write_tiny_model(folder)
        model = json.dumps(str(folder if given.tiny else Path(given.model).resolve()))
        settings = {"batch": given.batch, "micro": given.micro, "max_length": given.max_length}
        (folder / "run.toml").write_text(RUN_TOML.format(model=model, **settings))
        (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        result = measure(folder, lines, given.steps, given.pairs)
    about = {"model": "tiny" if given.tiny else Path(given.model).name, "data": path.name, "steps": given.steps, "pairs": given.pairs}
    machine = {"system": platform.system(), "machine": platform.machine(), "threads": THREADS, "openblas": OPENBLAS}
    packages = {name: version(name) for name in ("mlxdist", "mlx", "mlx-lm")}
    print(json.dumps({**result, "settings": {**about, **settings}, "machine": machine, "versions": packages}, indent=2))


if __name__ == "__main__":
    main()
