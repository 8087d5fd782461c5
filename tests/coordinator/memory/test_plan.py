import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mlxdist.coordinator.config.hosts import CoordinatorHost, Hosts, NodeSpec, local_hosts
from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, LoraConfig, RunConfig, TrainConfig
from mlxdist.coordinator.memory.fit import UNKNOWN_MAC, Machine, fit, free_bytes, node_limits
from mlxdist.coordinator.memory.model_files import read_model
from mlxdist.coordinator.plan.estimates import (
    busy_nodes,
    measured_speed,
    size_for_all,
    step_seconds,
    traffic,
    useful_nodes,
    usual_leaves,
    values_for_all,
)
from mlxdist.coordinator.plan.plan import PlanOptions, RunPlan, make_plan, model_files, planned_nodes
from mlxdist.coordinator.plan.view import print_plan
from mlxdist.coordinator.training.startup import plan_sentences
from mlxdist.protocol.budget import usable_bytes
from mlxdist.protocol.errors import ConfigError
from tests.laws.memory_fleet import ListRows, make_row

MACHINE = Machine(32 * 2**30, 24 * 2**30, "Darwin")
ROWS = ListRows([make_row(i, list(range(20 + i)), 3) for i in range(16)])


def plan_of(model: Path, *nodes: NodeSpec, batch: BatchConfig | None = None, **options: Any) -> RunPlan:
    config = RunConfig(
        model=str(model),
        output=model / "run",
        data=DataConfig(path="none"),
        batch=batch or BatchConfig(size=8),
        lora=LoraConfig(rank=4),
        train=TrainConfig(steps=100),
    )
    return make_plan(config, nodes, [ROWS], read_model(model), MACHINE, PlanOptions(**options))


def test_the_plan_names_the_settings_that_a_launch_would_take(model: Path) -> None:
    nodes = local_hosts(2).nodes
    plan = plan_of(model, *nodes)
    config = RunConfig(model=str(model), output=model / "run", data=DataConfig(path="none"), lora=LoraConfig(rank=4))
    memory = fit(config, [ROWS], nodes, MACHINE).config.memory
    assert (plan.segment_size, plan.head_chunk) == (memory.segment_size, memory.head_chunk)
    assert plan.total == next(held.total for held in plan.table if (held.segment_size or "off") == plan.segment_size)
    assert [held.segment_size for held in plan.table] == [0, 2, 1]


def test_bytes_and_seconds_of_a_step_are_the_adapter_down_and_the_partials_up() -> None:
    costs, vector = [100.0] * 8, 4_000_000
    for nodes, partials in ((1, 1), (2, 2), (4, 4), (3, 5)):
        sent = traffic(costs, nodes, vector, 1e8)
        assert (sent.partials, sent.bytes_down, sent.bytes_up) == (partials, nodes * vector, partials * vector)
        assert sent.seconds == pytest.approx((nodes + partials) * 0.04)
    assert step_seconds(costs, 2, 50.0, traffic(costs, 2, vector, 1e8)) == pytest.approx(8 + 0.16)


def test_a_run_takes_its_steps_times_the_step(model: Path) -> None:
    plan = plan_of(model, *local_hosts(1).nodes, tokens_per_second=100.0)
    mean = sum(20 + i for i in range(16)) / 2  # two windows of eight rows
    assert plan.tokens == pytest.approx(mean)
    assert plan.hours == pytest.approx(100 * (mean / 100) / 3600, rel=0.2)
    assert plan_of(model, *local_hosts(1).nodes).hours is None


def test_a_run_limited_by_hours_is_planned_with_them_and_with_the_most_steps_that_they_hold(model: Path) -> None:
    config = RunConfig(
        model=str(model),
        output=model / "run",
        data=DataConfig(path="none"),
        train=TrainConfig(steps=None, max_hours=2.0),
    )

    def shown(options: PlanOptions) -> str:
        plan = make_plan(config, local_hosts(1).nodes, [ROWS], read_model(model), MACHINE, options)
        console = Console(width=160, record=True, file=StringIO())
        print_plan(plan, console)
        return console.export_text()

    assert "2 h 00 min with evaluations and saves; number of steps not known" in shown(PlanOptions())
    said = shown(PlanOptions(tokens_per_second=100.0))
    assert re.search(r"2 h 00 min with evaluations and saves: at most [\d,]+ steps of", said)
    assert "without evaluations" not in said


@pytest.mark.parametrize(("leaves", "nodes", "busy", "size"), [(4, 3, 2, 5), (2, 3, 2, 3), (8, 3, 3, 8), (6, 5, 3, 9)])
def test_idle_nodes_are_reported_at_the_start_with_the_values_that_would_use_all(
    leaves: int, nodes: int, busy: int, size: int
) -> None:
    batch, tokens = BatchConfig(size=leaves, leaf_tokens=60), 60 * leaves  # each leaf has one row
    assert usual_leaves(batch, tokens) == leaves
    assert (busy_nodes(leaves, nodes), size_for_all(batch, tokens, nodes)) == (busy, size)
    config = RunConfig(model="m", output=Path("o"), data=DataConfig(path="d"), batch=batch)
    said = "\n".join(plan_sentences(config, (), 100, tokens, 10, nodes))
    assert ("idle" in said) == (busy < nodes)
    assert busy == nodes or f"batch.size = {size} would use all" in said
    assert -(-size // nodes) < -(-size // (nodes - 1))  # with one node fewer the step would be longer


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8])
def test_the_smaller_leaves_that_are_named_give_every_node_work(nodes: int) -> None:
    batch, tokens = BatchConfig(size=64, leaf_tokens=512), 600
    said = values_for_all(batch, tokens, nodes)
    if nodes > 2:
        smaller = int(said.removeprefix("batch.leaf_tokens = ").split()[0])
        assert busy_nodes(usual_leaves(replace(batch, leaf_tokens=smaller), tokens), nodes) == nodes


def test_the_plan_compares_values_of_leaf_tokens_for_the_nodes_at_hand(model: Path) -> None:
    batch = BatchConfig(size=8, leaf_tokens=100)
    plan = plan_of(model, *local_hosts(3).nodes, batch=batch)
    mine = next(choice for choice in plan.choices if choice.leaf_tokens == 100)
    assert (plan.leaf_tokens, plan.leaves, plan.busy_nodes) == (100, mine.leaves, mine.busy_nodes)
    assert 0 < plan.fill <= 1
    assert [choice.leaf_tokens for choice in plan.choices] == sorted(choice.leaf_tokens for choice in plan.choices)
    whole = next(choice for choice in plan.choices if choice.leaves == 3)
    assert whole.busy_nodes == 3
    assert whole.slowest <= mine.slowest


def test_another_node_is_worthwhile_until_leaves_or_the_network_run_out() -> None:
    fast, slow = 1e12, 1e6
    assert useful_nodes([100.0] * 8, 10.0, 4_000_000, fast) == 8
    assert useful_nodes([100.0] * 8, 1000.0, 4_000_000, slow) == 1
    few = useful_nodes([100.0] * 32, 100.0, 4_000_000, 1e7)
    assert 1 < few < 32


def test_the_speed_of_a_node_is_read_from_an_earlier_run(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [{"event": "node", "name": name} for name in ("a", "b", "a")]
    common = {"event": "train", "step": 1, "loss": 1.0}
    events += [{**common, "all_tokens_per_second": speed} for speed in (10.0, 300.0, 200.0, None, "fast")]
    lines = [*map(json.dumps, events), "[]", "null", '{"event": "train", "st']  # and some that are no event
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert measured_speed(tmp_path / "metrics.jsonl") == 100.0
    assert measured_speed(tmp_path / "none") is None


def test_a_node_that_cannot_hold_the_run_is_shown_red_and_last(model: Path) -> None:
    small = NodeSpec(name="small", host="far", memory_limit_gb=0.3)
    unknown = NodeSpec(name="unknown", host="far-too")
    plan = plan_of(model, small, unknown, tokens_per_second=50.0)
    assert [bool(node.refusal) for node in plan.nodes] == [True, False]
    console = Console(width=160, record=True, file=StringIO())
    print_plan(plan, console)
    text = console.export_text()
    assert "node small may use 300 MB" in text.splitlines()[-1]
    assert "unknown: its memory is not known here" in text


def test_nodes_that_join_by_hand_are_planned_as_many_as_the_run_waits_for(model: Path) -> None:
    hosts = Hosts(None, CoordinatorHost(min_nodes=2), ())
    plan = plan_of(model, *planned_nodes(hosts), tokens_per_second=50.0)
    assert [(node.name, node.limit) for node in plan.nodes] == [("node-1", 0), ("node-2", 0)]
    assert planned_nodes(local_hosts(1)) == local_hosts(1).nodes


def test_plan_and_launch_assume_the_same_memory_for_nodes_that_are_not_known(model: Path) -> None:
    unknown = NodeSpec(name="unknown", host="far")
    for nodes in ((), (unknown,), (*local_hosts(1).nodes, unknown)):
        assert free_bytes(nodes, node_limits(nodes, MACHINE)) <= usable_bytes(UNKNOWN_MAC, "Darwin")
    known = local_hosts(2).nodes
    assert free_bytes(known, node_limits(known, MACHINE)) == usable_bytes(MACHINE.total, "Darwin") // 2


def test_a_model_that_is_not_here_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="fetch it first"):
        model_files("nobody/has-this")
