"""The two sides of scripts/bench_step.py: the step of mlxdist, over the wire or in one process, and that of mlx-lm.

This module imports mlx, so OpenBLAS and the environment must be set before.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import AdamW
from mlx_lm.tuner.datasets import CacheDataset, create_dataset
from mlx_lm.tuner.trainer import TrainingArgs, iterate_batches
from mlx_lm.utils import load_tokenizer

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.micro_batches import cut
from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.config.hosts import local_hosts
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.coordinator.launch.roster import Roster
from mlxdist.coordinator.launch.starts import starts_of
from mlxdist.coordinator.launch.supervisors import Supervisors
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.coordinator.training.clipping import clip
from mlxdist.coordinator.training.moments import Moments
from mlxdist.coordinator.training.optimizer import optimizer_of
from mlxdist.node.link.jobs import ComputeAssignment, Partial
from mlxdist.node.work.assignment import AssignmentRun
from mlxdist.node.work.compute import Computer
from mlxdist.node.work.memory_pressure import SwapWatch
from mlxdist.protocol import messages as m
from mlxdist.protocol.leaves import Leaf, Row
from mlxdist.protocol.transport import DATA
from mlxdist.protocol.vectors import Vector

Gradient = Callable[[tuple[Leaf, ...], int, Vector], tuple[Vector, float]]  # leaves, version, adapter -> sum, loss


def say(sentence: str) -> None:
    """Prints progress on stderr, because stdout is for the JSON."""
    print(f"[{time.strftime('%H:%M:%S')}] {sentence}", file=sys.stderr, flush=True)


def targets_of(leaves: Sequence[Leaf]) -> int:
    """Counts the supervised tokens of leaves."""
    return sum(int(row.targets.sum()) for leaf in leaves for row in leaf.rows)


@dataclass
class Training:
    """The state of our training between two steps, as the loop of a run keeps it."""

    config: RunConfig
    rows: Rows
    adapter: Vector
    moments: Moments
    version: int = 0

    def compute(self, step: Step, gradient: Gradient) -> tuple[float, float, Vector, Moments]:
        """Computes a step. Returns seconds, summed loss, and the new adapter and moments, which are not taken yet."""
        train = self.config.train
        began = time.perf_counter()
        leaves = self.leaves(step)
        grad_sum, loss = gradient(leaves, self.version, self.adapter)
        clipped, _ = clip(grad_sum, targets_of(leaves), train.max_grad_norm)
        optimizer = optimizer_of(train)
        adapter, moments = optimizer.update(self.adapter, clipped, self.moments, train.learning_rate)
        return time.perf_counter() - began, loss, adapter, moments

    def leaves(self, step: Step) -> tuple[Leaf, ...]:
        """The leaves of a step."""
        leaf_tokens = self.config.batch.leaf_tokens
        assert leaf_tokens != "auto"
        return cut(step, self.rows, leaf_tokens).leaves

    def advance(self, adapter: Vector, moments: Moments) -> None:
        """Takes the step."""
        self.adapter, self.moments, self.version = adapter, moments, self.version + 1


def over_the_wire(fleet: Fleet) -> Gradient:
    """Makes a gradient that sends adapter and leaves to a node and receives the sum."""

    def gradient(leaves: tuple[Leaf, ...], version: int, adapter: Vector) -> tuple[Vector, float]:
        fleet.send_adapter(version, adapter)
        grad_sum, answers = fleet.gradient(Request("gradient", version + 1, version, leaves))
        return grad_sum, float(sum(row_outputs[:, 0].sum() for row_outputs in answers))

    return gradient


def in_one_process(computer: Computer) -> Gradient:
    """Makes a gradient that computes the leaves here, as one assignment of a worker without a wire."""

    def gradient(leaves: tuple[Leaf, ...], version: int, adapter: Vector) -> tuple[Vector, float]:
        computer.use(adapter)
        session, count = m.SessionId("bench", 0, "alone"), len(leaves)
        asked = m.Assignment(session, "gradient", version + 1, 1, version, 0, count, count, "", "current", {})
        job = ComputeAssignment(asked, leaves, ({},) * count, adapter, None)
        total, losses = np.empty(0, np.float32), []
        for result in AssignmentRun(computer, job, SwapWatch()).results():
            match result:
                case Partial(vector=total):
                    pass
                case m.LeafAnswer(columns=columns), outputs:
                    losses.append(float(np.frombuffer(outputs, np.float32).reshape(-1, columns)[:, 0].sum()))
                case message, _:
                    raise SystemExit(str(message))
        return total, sum(losses)

    return gradient


@contextmanager
def one_node(config: RunConfig, logs: Path) -> Iterator[Fleet]:
    """A fleet of one local node in its own processes, as `mlxdist launch` starts it."""
    hub = RouterHub(["127.0.0.1"], 0)
    settings = ClusterSettings(
        run="bench",
        incarnation=time.time_ns(),
        spec=run_spec(config),
        versions={name: version(name) for name in ("mlx", "mlx-lm")},
        data_port=hub.ports[DATA],
        timing=config.timing,
    )
    nodes = Supervisors("bench", config.timing.stop_seconds, config.timing.restart_seconds)
    fleet = Fleet(Cluster(settings), hub, on_news=lambda news: say(f"{news.name}: {news.message}"), watch=nodes.watch)
    try:
        hosts = local_hosts(1)
        nodes.start(starts_of(hosts.nodes, Roster(hosts.nodes), hosts.coordinator, hub.ports, None, 300.0))
        fleet.wait_for_nodes(1, 1, config.timing.start_timeout)
        yield fleet
    finally:
        fleet.close("the measurement is over")
        nodes.stop()


@dataclass
class Theirs:
    """The reports of mlx-lm about its steps, and the shapes of its batches."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # means over a batch, weighted by `targets`
    targets: list[int] = field(default_factory=list)  # as mlx-lm counts them: one more for every padded row
    pads: list[int] = field(default_factory=list)
    shapes: list[tuple[int, int]] = field(default_factory=list)

    def on_train_loss_report(self, info: Mapping[str, float]) -> None:
        """Notes a finished step."""
        self.seconds.append(1 / info["iterations_per_second"])
        self.losses.append(info["train_loss"])
        self.targets.append(round(info["tokens_per_second"] / info["iterations_per_second"]))

    def on_val_loss_report(self, info: Mapping[str, float]) -> None:
        """Does nothing: there is no validation."""


def train_theirs(
    model: nn.Module, data: Any, config: RunConfig, steps: int, folder: Path, turn: Callable[[], None]
) -> Theirs:
    """Runs `mlx_lm.tuner.train` for so many steps; calls `turn` before each of them, outside of the measured time."""
    from mlx_lm.tuner.trainer import train

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
    """Returns the lines as mlx-lm's data set with masked prompts. Raises SystemExit if it would train other tokens."""
    tokenizer = load_tokenizer(Path(config.model))
    data = CacheDataset(
        create_dataset([json.loads(line) for line in lines], tokenizer, SimpleNamespace(mask_prompt=True))
    )
    for row in rows:
        ids, start = data[row.row_id]
        first = max(start, 1)
        same = ids[: config.batch.max_length] == row.ids.tolist() and not row.targets[:first].any()
        if not same or not row.targets[first:].all():
            raise SystemExit(
                f"row {row.row_id + 1}: mlx-lm would train other tokens of it than mlxdist; give rows of messages"
            )
    return data
