"""The memory of the run's model on the machines of its nodes: remembered, or measured there before any node starts."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.config.hosts import NodeSpec, is_local
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.launch.quoting import path_word, words
from mlxdist.coordinator.launch.roster import Roster
from mlxdist.coordinator.launch.ssh import everywhere, run, target_of
from mlxdist.coordinator.launch.workdir import interpreter_of
from mlxdist.coordinator.memory.fit import Machine, free_bytes, memory_need, node_limits, requested
from mlxdist.coordinator.memory.measured import MeasuredModel
from mlxdist.coordinator.memory.model_files import ModelFiles, find_model, read_model
from mlxdist.coordinator.memory.prediction import WHOLE_GRAPH, ModelShape
from mlxdist.coordinator.memory.probes import (
    MachineKind,
    ProbeStore,
    believed,
    known_by_all,
    probe_key,
    probe_order,
    table_shape,
)
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.protocol.memory_probe import ProbeAnswer, ProbeOrder, read_answer
from mlxdist.protocol.numerics import WORKER_ENVIRONMENT
from mlxdist.protocol.untrusted import quoted

SPARE = 3  # times the memory that the table predicts; with so much free, a measurement would change nothing
PROBE_SECONDS = 120.0


def measured_on(
    config: RunConfig,
    rows: Sequence[Rows],
    roster: Roster,
    machines: tuple[Machine, Mapping[str, Machine]],
    store: ProbeStore,
    report: Reporter,
) -> tuple[MeasuredModel, ...]:
    """Returns the model as every kind of machine among the nodes has measured it; () where the table must do.

    Nothing is measured where the whole graph fits three times over by the table. `machines`: this one, and those of
    nodes elsewhere. A machine that cannot measure is named in a note.
    """
    found = _worth_it(config, rows, roster.ready, machines)
    if found is None:
        return ()
    folder, files, shape, pressing = found
    nodes = {kind_of(node, roster): node for node in sorted(roster.ready, key=lambda node: not is_local(node.host))}
    order = probe_order(config, shape)
    keys = {kind: probe_key(files, order, kind) for kind in nodes}
    missing = [kind for kind in nodes if store.answer(keys[kind]) is None]
    if missing and not pressing:
        return ()
    if missing:
        report.stage("measuring the memory of a few layers")
        answers = everywhere(lambda kind: probe(nodes[kind], roster, folder, order), missing)
        for kind, answer in zip(missing, answers, strict=True):
            if isinstance(answer, ProbeAnswer) and believed(answer, shape) is not None:
                store.keep(keys[kind], answer)
                continue
            why = answer if isinstance(answer, str) else "its answer is too far from what such a model can take"
            report.note(
                f"the memory of the model's layers was not measured on {nodes[kind].name} ({why}): it is predicted by "
                "the table of coefficients"
            )
    return known_by_all(keys.values(), shape, store)


def _worth_it(
    config: RunConfig,
    rows: Sequence[Rows],
    nodes: Sequence[NodeSpec],
    machines: tuple[Machine, Mapping[str, Machine]],
) -> tuple[Path, ModelFiles, ModelShape, bool] | None:
    """Returns the model's folder, files and shape, and True where memory may be short; None for an unknown model."""
    folder = find_model(config.model)
    files = read_model(folder) if folder is not None else None
    if folder is None or files is None or not files.tensors or not nodes:
        return None
    free = free_bytes(nodes, node_limits(nodes, *machines))
    try:
        need = memory_need(config, files, rows, free / SPARE)
    except KeyError:
        return None
    cut = requested(config.memory)[0] is None and need.settings.segment_size != WHOLE_GRAPH
    short = cut or need.total > free / SPARE
    return folder, files, table_shape(config, files), short or bool(need.shape.unmeasured)


def kind_of(node: NodeSpec, roster: Roster) -> MachineKind:
    """Returns the kind of machine that a node runs on."""
    if is_local(node.host):
        return MachineKind.here()
    seen = roster.seen[node.name]
    return MachineKind.seen(seen.system, seen.chip, seen.versions)


def probe(node: NodeSpec, roster: Roster, folder: Path, order: ProbeOrder) -> ProbeAnswer | str:
    """Measures on a node's machine, in a process of its own. Returns the answer, or why there is none.

    `folder`: of the model on this machine.
    """
    local = is_local(node.host)
    seen = roster.seen.get(node.name)
    there = seen.models[0] if seen is not None and seen.models else node.model
    model = there or (str(folder) if local else order.spec.model)
    interpreter = node.python or sys.executable if local else interpreter_of(node)
    settings = words(*(f"{name}={value}" for name, value in {**WORKER_ENVIRONMENT, "HF_HUB_OFFLINE": "1"}.items()))
    script = f"exec env {settings} {path_word(interpreter)} -m mlxdist.node.probe"
    line = msgspec.json.encode(replace_model(order, model)) + b"\n"
    answer = run(target_of(node), script, stdin=line, timeout=PROBE_SECONDS)
    if not answer.ok:
        last = (answer.err.strip().splitlines() or [f"no answer within {PROBE_SECONDS:.0f} s"])[-1]
        return quoted(last, 200)
    try:
        return read_answer((answer.out.strip().splitlines() or [""])[-1].encode())  # a model's code may print, too
    except ValueError as error:
        return quoted(str(error), 200)


def replace_model(order: ProbeOrder, model: str) -> ProbeOrder:
    """Returns the order for a machine where the model lies in another folder."""
    return msgspec.structs.replace(order, spec=msgspec.structs.replace(order.spec, model=model))
