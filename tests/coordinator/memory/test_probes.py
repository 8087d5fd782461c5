from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from mlxdist.coordinator.config.hosts import NodeSpec, local_hosts
from mlxdist.coordinator.config.schema import LoraConfig, RunConfig
from mlxdist.coordinator.launch.roster import Roster
from mlxdist.coordinator.memory.fit import Machine, fit, kept_settings, memory_need
from mlxdist.coordinator.memory.measured import MeasuredModel, measured_model
from mlxdist.coordinator.memory.model_files import read_model
from mlxdist.coordinator.memory.prediction import WHOLE_GRAPH, LeafSize, ModelShape, peak
from mlxdist.coordinator.memory.probes import (
    LONG,
    MachineKind,
    ProbeStore,
    believed,
    probe_key,
    probe_order,
    remembered,
    table_shape,
)
from mlxdist.coordinator.plan.plan import PlanOptions, make_plan
from mlxdist.coordinator.plan.view import print_plan
from mlxdist.coordinator.training.measure_memory import measured_on
from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.memory_probe import MOST_ANSWER, SHORT, ProbeAnswer
from scripts.check_memory_law import cells
from tests.coordinator.memory import test_fit
from tests.coordinator.memory.test_fit import long_model, rows
from tests.coordinator.memory.test_measured import answer_of

LARGE = Machine(64 * 2**30, 60 * 2**30, "Linux")
HERE = MachineKind("Darwin", "Apple M4", "0.32.4", "0.32.0")


def config_of(model: Path, **memory: object) -> RunConfig:
    return test_fit.config_of(model, max_length=8192, **memory)


def answer_like(shape: ModelShape, factor: float) -> ProbeAnswer:
    """The measurement of a machine that needs `factor` times what the table predicts for a short row."""
    layers = (0,) * shape.layers
    leaf = LeafSize(SHORT, SHORT, SHORT)
    whole = peak(shape, leaf, segment_size=WHOLE_GRAPH, head_chunk=32)
    token = round(factor * whole / SHORT / (shape.layers + 1))
    return answer_of(layers, kept=[(token, 0)], once=token, head=1000)


def law_of(model: Path, factor: float) -> MeasuredModel:
    return measured_model(answer_like(table_shape(config_of(model), read_model(model)), factor))


def test_a_measurement_is_remembered_for_the_same_model_and_kind_of_machine(tmp_path: Path, model: Path) -> None:
    store, files, config = ProbeStore(tmp_path / "memory"), read_model(model), config_of(model)
    assert remembered(config, files, {HERE}, store) == ()
    order = probe_order(config, table_shape(config, files))
    answer = answer_like(table_shape(config, files), 1.0)
    store.keep(probe_key(files, order, HERE), answer)
    assert remembered(config, files, {HERE}, store) == (measured_model(answer),)
    others = (replace(HERE, chip="Apple M1"), replace(HERE, mlx="0.33.0"), replace(HERE, system="Linux"))
    for other in others:
        assert remembered(config, files, {other}, store) == ()
        assert remembered(config, files, {HERE, other}, store) == ()
    loras = (LoraConfig(rank=8), LoraConfig(rank=4, num_layers=1), LoraConfig(rank=4, target_modules=("q_proj",)))
    for changed in (*(replace(config, lora=lora) for lora in loras), config_of(model, gated_delta="recurrent")):
        assert remembered(changed, files, {HERE}, store) == ()
    assert remembered(config, replace(files, config={**files.config, "hidden_size": 64}), {HERE}, store) == ()
    assert remembered(replace(config, output=tmp_path), files, {HERE}, store) != ()


@pytest.mark.parametrize("damage", [b"", b"{", b"null", b'{"long": 1024}', b" " * (MOST_ANSWER + 1)])
def test_a_damaged_measurement_counts_as_none(tmp_path: Path, damage: bytes) -> None:
    store = ProbeStore(tmp_path)
    answer = answer_of((0, 0), kept=[(5, 1)], once=3, head=2)
    store.keep("key", answer)
    assert store.answer("key") == answer
    (tmp_path / "key.json").write_bytes(damage)
    assert store.answer("key") is None
    store.keep("key", answer)
    assert store.answer("key") == answer
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]


def test_a_store_that_cannot_be_written_costs_nothing_but_the_next_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = ProbeStore(tmp_path / "file" / "memory")
    store.keep("key", answer_of((0, 0), kept=[(5, 1)], once=3, head=2))
    assert store.answer("key") is None


def test_a_large_model_is_measured_in_shorter_rows(tmp_path: Path, model: Path) -> None:
    for folder, long in ((model, LONG[0]), (long_model(tmp_path / "m", hidden_size=8192), LONG[-1])):
        config = config_of(folder)
        assert probe_order(config, table_shape(config, read_model(folder))).long == long


def test_runs_are_refused_and_segments_chosen_by_the_measurement(tmp_path: Path) -> None:
    folder = long_model(tmp_path / "m")
    config, nodes = config_of(folder), (NodeSpec(name="mini", host="far", memory_limit_gb=8),)
    less, more = law_of(folder, 0.1), law_of(folder, 5.0)
    table = fit(config, [rows(2048)], nodes, LARGE)
    assert table.config.memory.segment_size == 1
    assert "by the table of coefficients, as its layers were not measured" in table.notes[0]
    whole = fit(config, [rows(2048)], nodes, LARGE, measured=[less])
    assert whole.config.memory.segment_size == "off"
    assert "by a measurement of its layers" in whole.notes[0]
    with pytest.raises(ConfigError, match=r"node mini may use .* batch\.max_length = \d+ would fit"):
        fit(config, [rows(8192)], nodes, LARGE)
    assert fit(config, [rows(8192)], nodes, LARGE, measured=[less]).memory.refusal("late", {}) is None
    with pytest.raises(ConfigError, match="node mini may use"):
        fit(config, [rows(8192)], nodes, LARGE, measured=[more, less])


def test_a_joiner_is_refused_by_the_measurement(tmp_path: Path) -> None:
    folder = long_model(tmp_path / "m")
    small = {"memory_bytes": str(4 * 2**30), "system": "Darwin 24.1"}
    for factor, fits in ((0.01, True), (5.0, False)):
        memory = fit(config_of(folder), [rows(4096)], local_hosts(1).nodes, LARGE, measured=[law_of(folder, factor)])
        assert (memory.memory.refusal("late", small) is None) == fits


def test_a_resumed_run_keeps_its_settings_under_another_measurement(model: Path) -> None:
    first = fit(config_of(model), [rows()], local_hosts(1).nodes, LARGE).config
    before = {"memory.segment_size": 1, "memory.head_chunk": 32, "batch.leaf_tokens": first.batch.leaf_tokens}
    resumed = kept_settings(before, config_of(model))
    again = fit(resumed, [rows()], local_hosts(1).nodes, LARGE, measured=[law_of(model, 0.1)]).config
    assert (again.memory.segment_size, again.memory.head_chunk) == (1, 32)


@pytest.mark.parametrize(
    ("factor", "said"), [(None, "its layers were not measured on"), (1.0, "by a measurement of its")]
)
def test_the_plan_says_where_its_memory_comes_from(model: Path, factor: float | None, said: str) -> None:
    measured = [law_of(model, factor)] if factor else []
    nodes = local_hosts(1).nodes
    plan = make_plan(config_of(model), nodes, [rows()], read_model(model), LARGE, PlanOptions(), measured=measured)
    console = Console(width=160, record=True, file=StringIO())
    print_plan(plan, console)
    shown = console.export_text()
    assert said in shown
    assert "elsewhere" not in shown
    far = make_plan(
        config_of(model),
        [NodeSpec(name="far", host="far")],
        [rows()],
        read_model(model),
        LARGE,
        PlanOptions(),
        measured=measured,
    )
    assert ("which those elsewhere count as" in far.memory_from) == bool(factor)


def test_an_architecture_that_was_measured_here_is_not_doubted(tmp_path: Path) -> None:
    folder = long_model(tmp_path / "m", model_type="unheard-of")  # type: ignore[arg-type]
    files = read_model(folder)
    law = measured_model(answer_of((0,) * 24, kept=[(1000, 1)], once=10, head=10))
    assert memory_need(config_of(folder), files, [rows()], 1e12).doubt is not None
    assert memory_need(config_of(folder), files, [rows()], 1e12, measured=[law]).doubt is None


@dataclass
class Told:
    """A report that keeps what it is told."""

    stages: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def stage(self, sentence: str) -> None:
        self.stages.append(sentence)

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def measured_with(
    model: Path, store: ProbeStore, told: Told, *nodes: NodeSpec, **memory: object
) -> tuple[MeasuredModel, ...]:
    config, machines = config_of(model, **memory), (LARGE, dict[str, Machine]())
    return measured_on(config, [rows()], Roster(nodes), machines, store, told)  # type: ignore[arg-type]


SHORT_OF_MEMORY = NodeSpec(name="a", host="localhost", memory_limit_gb=0.6)


def test_nothing_is_measured_where_memory_is_plenty(model: Path, tmp_path: Path) -> None:
    told = Told()
    assert measured_with(model, ProbeStore(tmp_path), told, *local_hosts(2).nodes) == ()
    assert measured_with(model, ProbeStore(tmp_path), told, *local_hosts(1).nodes, segment_size=1) == ()
    assert measured_with(tmp_path, ProbeStore(tmp_path), told, SHORT_OF_MEMORY) == ()  # there is no model
    assert measured_with(model, ProbeStore(tmp_path), told) == ()  # all nodes join by hand
    assert (told.stages, told.notes, list(tmp_path.iterdir())) == ([], [], [])


@pytest.mark.slow
def test_a_machine_measures_once_and_nodes_on_it_share_that(model: Path, tmp_path: Path) -> None:
    told, store = Told(), ProbeStore(tmp_path)
    nodes = (SHORT_OF_MEMORY, replace(SHORT_OF_MEMORY, name="b"))
    found = measured_with(model, store, told, *nodes)
    assert len(found) == len(told.stages) == len(list(tmp_path.iterdir())) == 1
    assert told.notes == []
    assert found[0].order == (0, 0)
    assert min(found[0].kinds[0].kept.at(512, 512), found[0].segment(512, 512, 1), found[0].head) > 0
    assert measured_with(model, store, told, *nodes) == found
    assert len(told.stages) == 1


@pytest.mark.slow
def test_a_machine_that_cannot_measure_is_named_and_the_table_is_used(model: Path, tmp_path: Path) -> None:
    told = Told()
    broken = replace(SHORT_OF_MEMORY, model=str(tmp_path / "none"))
    assert measured_with(model, ProbeStore(tmp_path / "memory"), told, broken) == ()
    gone = replace(SHORT_OF_MEMORY, python=str(tmp_path / "python"))
    assert measured_with(model, ProbeStore(tmp_path / "memory"), told, gone) == ()
    assert "not measured on a" in told.notes[0]
    assert "cannot be loaded" in told.notes[0]
    assert "python" in told.notes[1]
    assert not (tmp_path / "memory").exists()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_next"])
def test_a_model_takes_what_its_measured_layers_predict_within_a_tenth(architecture: str) -> None:
    found = cells(architecture, leaves=((512, 1), (768, 1), (1024, 4)), segments=(WHOLE_GRAPH, 1), long=512)
    away = {(cell["tokens"], cell["segment"]): cell["measured_of_law"] for cell in found}
    assert all(0.9 < ratio < 1.1 for ratio in away.values()), away


def test_an_answer_of_a_node_is_judged_by_the_sizes_of_the_model(model: Path) -> None:
    shape = table_shape(config_of(model), read_model(model))
    assert believed(answer_like(shape, 1.0), shape) is not None
    assert believed(answer_like(shape, 1000.0), shape) is None
    assert msgspec.json.encode(answer_like(shape, 1.0))
