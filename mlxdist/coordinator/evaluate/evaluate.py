"""One evaluation from a run folder to its result: read the rows, start the nodes, judge the adapters."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxdist.coordinator.batch.row_store import StoredRows
from mlxdist.coordinator.config.hosts import Hosts, is_loopback
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.saved import saved_config
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.data.checks import valid_cut_notes
from mlxdist.coordinator.data.ingest import Progress, read_source
from mlxdist.coordinator.data.load import Dataset, encoding_of, read_splits, template_notes
from mlxdist.coordinator.data.sources import find, find_split
from mlxdist.coordinator.encode.row_errors import RowFault, skipped
from mlxdist.coordinator.evaluate.judge import Candidate, Judged, judge
from mlxdist.coordinator.fleet.access import SERVER_KEY, Access, open_access
from mlxdist.coordinator.launch.roster import look_at_hosts
from mlxdist.coordinator.memory.fit import leaf_limit, node_limits, resolved_leaf_tokens, this_machine
from mlxdist.coordinator.memory.node_memory import NodeMemory
from mlxdist.coordinator.methods.kinds import KINDS
from mlxdist.coordinator.report.format import count
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.storage.first_reading import kept_reading
from mlxdist.coordinator.storage.run_folder import RunFolder, read_json
from mlxdist.coordinator.storage.saved_adapters import SavedAdapter, choose_adapters
from mlxdist.coordinator.storage.sealed import read_sealed
from mlxdist.coordinator.training.initial_adapter import start_from
from mlxdist.coordinator.training.nodes import started_nodes
from mlxdist.coordinator.training.prepare import Prepared, machines_of
from mlxdist.coordinator.training.resume import saved_reference
from mlxdist.coordinator.training.state import FILE
from mlxdist.keys.store import KeyStore
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.errors import DataError, UserError
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.numerics import TOLERANCE

BASE = "base model"


@dataclass(frozen=True)
class Question:
    """The adapters to judge, the rows to judge them on, and the place of the base model."""

    checkpoints: Sequence[str] = ()  # best, last, all, or steps; none: the best and the last
    data: str = ""  # a file, a folder with test rows, or a hub id; "": the run's own validation rows
    model: str = ""  # where the base model has moved
    insecure_lan: bool = False  # other Macs connect without encryption and keys


@dataclass(frozen=True)
class TestRows:
    """The rows of an evaluation, and those that were left out: without targets, or faulty."""

    name: str
    rows: StoredRows
    faults: tuple[RowFault, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Evaluation:
    """The result: the base model first, then the adapters, oldest step first."""

    config: RunConfig
    rows: TestRows
    judged: tuple[Judged, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> Judged:
        """The one with the lowest loss on these rows."""
        return min(self.judged, key=lambda each: each.loss.value)


def work_folder(run: RunFolder) -> RunFolder:
    """Returns the folder for the logs and the events of evaluations: the run's own files are only read."""
    return RunFolder(run.path / "evaluation")


def evaluate(
    run: RunFolder,
    question: Question,
    hosts: Hosts,
    report: Reporter,
    clock: Callable[[], float] = time.monotonic,
) -> Evaluation:
    """Judges adapters of a run, which may still be training, with the nodes of `hosts`.

    Raises UserError for a run, rows or a checkpoint that are not there, and MlxdistError where the nodes fail.
    """
    config = saved_config(run, model=question.model)
    adapters = choose_adapters(run, question.checkpoints)
    reference = saved_reference(config, run)
    rows = read_rows(run, config, question.data, report.stage)
    config = resolved_leaf_tokens(config, rows.rows)  # a run of an earlier version had none
    spec = run_spec(config, largest_leaf=leaf_limit(config, [rows.rows]))
    notes = [*rows.notes, *changes(run, spec.numerics_id, None if question.data else rows.rows)]
    roster = look_at_hosts(hosts, config.model)
    for sentence in roster.sentences:
        report.note(sentence)
    limits = node_limits(roster.ready, this_machine(), machines_of(roster))
    memory = NodeMemory(limits={node.name: limits[node.name][0] for node in roster.ready if node.memory_limit_gb})
    dataset = Dataset(rows.rows, rows.rows, (), 0)
    prepared = Prepared(config, spec, dataset, None, memory, None, {}, (), ())
    alone = is_loopback(hosts.coordinator.bind) and not roster.seen
    access = None if question.insecure_lan or alone else access_of(run)
    with started_nodes(prepared, hosts, roster, work_folder(run), report, clock, access) as fleet:
        loaded = fleet.wait_for_model()
        same_base(run, loaded.model_hash)
        if reference is not None:
            fleet.send_reference(reference)
        candidates = candidates_of(adapters, loaded.manifest, config.lora.scale)
        fleet.send_adapter(0, candidates[0].adapter)
        needed = hosts.coordinator.min_nodes
        fleet.wait_for_nodes(max(len(roster.ready), needed), needed, config.timing.start_timeout)
        promise = fleet.begin_promise(1, None)
        if promise.kind == TOLERANCE:  # nodes of several kinds: the last digits may differ the next time
            notes.append(promise.sentence)
        method = KINDS[config.method](config, rows.rows, rows.rows)
        scoring = f"scoring {count(len(rows.rows), method.spec.item)} with"
        judged = judge(fleet, method, len(rows.rows), candidates, lambda name: report.stage(f"{scoring} {name}"))
    return Evaluation(config, rows, tuple(judged), tuple(notes))


def access_of(run: RunFolder) -> Access:
    """Returns the list of those who may connect, under the key that the run's nodes trust, or that of this Mac.

    Raises UserError for a key file that cannot be used.
    """
    kept = (run.state / SERVER_KEY).exists()
    return open_access(run.state if kept else work_folder(run).state, KeyStore.of_user(), resume=True)


def read_rows(run: RunFolder, config: RunConfig, data: str, progress: Progress) -> TestRows:
    """Returns the test rows `data`, or the run's own validation rows as the run read them.

    Raises UserError where the run has none, and DataError for files that cannot be read or have no row with a target.
    """
    encoding = encoding_of(config, kept_reading(run))
    splits = None if data else find(config.data.path, config.data.valid_path)
    if splits is not None and splits.valid is None:
        kept_back = read_splits(splits, encoding, progress=progress).valid if config.data.valid_fraction else None
        if kept_back is None:
            raise UserError(f"{run.path} has no validation rows: name rows of the same form with --data test.jsonl")
        return TestRows(f"the rows kept back from {splits.train.name}", kept_back, (), ())
    source = find_split(data, "test", "--data") if splits is None else splits.valid
    assert source is not None, "validation rows, or test rows"
    file = read_source(source, encoding, progress)
    if not len(file.store):
        first = f": {file.faults[0].where}: {file.faults[0].reason}" if file.faults else ""
        raise DataError(f"{source.name} has no row that can be scored{first}")
    notes = [skipped(file.faults, file.n_rows)] if file.faults else []
    notes += [*valid_cut_notes(file.store.lengths, config.batch, config.method), *template_notes(file, encoding)]
    return TestRows(source.name, StoredRows(file.store), file.faults, tuple(notes))


def changes(run: RunFolder, numerics_id: str, rows: StoredRows | None) -> list[str]:
    """Returns sentences where the rules or the validation rows (None: other rows) are not those of the run."""
    said = []
    if read_json(run.config).get("numerics_id", numerics_id) != numerics_id:
        said.append(
            "the run was trained under the rules of another version: the last digits may differ from those it reported"
        )
    about = _about(run)
    if rows is None:
        return said
    if about.get("valid_digest", rows.digest) != rows.digest:
        said.append("the validation rows are not those of the run's last step: they have changed since")
    elif 0 < (scored := about.get("eval_rows", 0)) < len(rows):
        said.append(f"the run itself scored the first {scored} of these rows each time, so the losses it told differ")
    return said


def same_base(run: RunFolder, model_hash: str) -> None:
    """Raises UserError where the base model that was loaded is not the one that the run was trained on."""
    trained = str(_about(run).get("model_hash", model_hash))
    if trained != model_hash:
        raise UserError(
            f"{run.path} was trained on another base model: its files have changed (hash {trained[:12]}, now "
            f"{model_hash[:12]}). Restore the model, or name the right one with --model."
        )


def candidates_of(adapters: Sequence[SavedAdapter], manifest: Manifest, scale: float) -> list[Candidate]:
    """Returns the base model and the adapters. Raises UserError for one that is damaged or does not fit."""
    base = Candidate(BASE, np.zeros(manifests.size(manifest), np.float32))
    rest = [Candidate(each.name, start_from(each.folder, manifest, scale), each.step) for each in adapters]
    return [base, *rest]


def _about(run: RunFolder) -> dict[str, Any]:
    """The facts beside the run's saved state; empty where it was not saved yet, or cannot be read."""
    try:
        return read_sealed(run.state / FILE)[1]
    except (OSError, ValueError):
        return {}
