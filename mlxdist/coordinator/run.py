"""One run from its configuration to its exit code: opens what the loop needs, tells the person, closes it all."""

import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata

from mlxdist.coordinator.batch.batch_order import total_steps
from mlxdist.coordinator.cluster.audit import Audit
from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.config.hosts import Hosts
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import RunConfig, as_json
from mlxdist.coordinator.data.load import Dataset, read
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.fleet.launch import LocalNodes
from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.coordinator.memory.fit import fit, kept_settings, this_machine
from mlxdist.coordinator.report.format import count
from mlxdist.coordinator.report.plain import open_display
from mlxdist.coordinator.report.reporter import Reporter, Status, Summary
from mlxdist.coordinator.storage.node_log import append_line
from mlxdist.coordinator.storage.open_run import open_run
from mlxdist.coordinator.storage.run_folder import RunFolder, write_json
from mlxdist.coordinator.train import Run, train
from mlxdist.coordinator.training import startup as begin
from mlxdist.coordinator.training.resume import (
    Earlier,
    continued,
    earlier_life,
    other_validation,
    resume_notes,
    same_bits_as,
)
from mlxdist.coordinator.training.saver import Saver
from mlxdist.coordinator.training.startup import method_of
from mlxdist.coordinator.training.state import identity_of
from mlxdist.coordinator.training.validation import Validation
from mlxdist.protocol.errors import MlxdistError, SaveError
from mlxdist.protocol.transport import CONTROL, DATA

INTERRUPTED = 130


def run(
    config: RunConfig,
    hosts: Hosts,
    *,
    resume: bool,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Train, and return the command's exit code: 0 all steps done, 130 interrupted after a save.

    Raises MlxdistError, whose `exit_code` is the command's: 1 the run could not go on, 2 nothing was trained.
    """
    with (
        interruptible(),
        open_run(
            config.output,
            resume=resume,
            base_model=config.model,
            method=config.method,
            created_at=datetime.now(UTC),
        ) as folder,
        open_display(
            sys.stdout, title=config.output.name, report_every=config.train.report_every, environ=environ
        ) as display,
    ):
        report = Reporter(folder, display, clock=clock)
        try:
            dataset = read(config, progress=report.stage)
            earlier = earlier_life(folder) if resume else None
            notes = []
            if earlier is not None:
                config = kept_settings(folder, config)
                notes = resume_notes(folder, config, dataset.digest)
            elif resume:
                notes = ["the run had ended before anything was saved, and begins again at its first step"]
            dataset = replace(dataset, notes=(*notes, *dataset.notes))
            return _with_nodes(config, hosts, folder, dataset, report, earlier, resume, clock)
        except KeyboardInterrupt:
            report.note("interrupted before a step was taken: there is nothing new to save")
            return INTERRUPTED


def _with_nodes(
    config: RunConfig,
    hosts: Hosts,
    folder: RunFolder,
    dataset: Dataset,
    report: Reporter,
    earlier: Earlier | None,
    resume: bool,
    clock: Callable[[], float],
) -> int:
    bind = "127.0.0.1" if hosts.coordinator.bind in ("auto", "localhost") else hosts.coordinator.bind
    rows = [each for each in (dataset.train, dataset.valid) if each is not None]
    fitted = fit(config, rows, hosts.nodes, this_machine())
    config = fitted.config
    spec = run_spec(config)
    if earlier is not None:
        same_bits_as(earlier, folder, spec.numerics_id)
    hub = RouterHub(bind, hosts.coordinator.port)
    if resume:
        report.resume_after(earlier.state.step if earlier is not None else 0)
    settings = ClusterSettings(
        run=f"{config.output.name}-{uuid.uuid4().hex[:8]}",
        incarnation=time.time_ns(),
        spec=spec,
        versions={name: metadata.version(name) for name in ("mlx", "mlx-lm")},
        data_port=hub.ports[DATA],
        timing=config.timing,
        memory=fitted.memory,
        min_nodes=hosts.coordinator.min_nodes,
        launched=frozenset(node.name for node in hosts.nodes),
    )
    nodes = LocalNodes(folder.logs, config.timing.stop_seconds, config.timing.restart_seconds, clock)
    fleet = Fleet(
        Cluster(settings),
        hub,
        on_news=lambda news: tell(news, report, folder),
        watch=nodes.watch,
        clock=clock,
        audit=Audit(config.train.audit, config.batch.seed),
    )
    farewell = "the run is over"
    try:
        report.stage(f"starting {count(len(hosts.nodes), 'node')}" if hosts.nodes else "waiting for nodes")
        nodes.start(hosts.nodes, hub.ports[CONTROL])
        introduction = fleet.wait_for_model()
        manifest = introduction.manifest
        method = method_of(config, dataset.train, dataset.valid)
        identity = identity_of(spec.numerics_id, manifest, introduction.model_hash, dataset.valid_digest)
        if earlier is None:
            state = begin.first_state(config, manifest, method)
        else:
            state = continued(earlier, folder, identity, method.references)
            method.references = state.references
            if dataset.valid is not None and other_validation(earlier, identity):
                report.note("the validation rows are others than before: their best evaluation is looked for anew")
        if (reference := begin.reference(config, folder, state)) is not None:
            fleet.send_reference(reference)
        fleet.send_adapter(state.step, state.adapter)
        ready = fleet.wait_for_nodes(
            max(len(hosts.nodes), hosts.coordinator.min_nodes), hosts.coordinator.min_nodes, config.timing.start_timeout
        )
        promise = fleet.promise()
        steps = total_steps(config.train, len(dataset.train), config.batch, config.method)
        saver = Saver(folder, config, manifest, identity, report)
        write_json(
            folder.config,
            {
                **as_json(config),
                "data_digest": dataset.digest,
                "numerics_id": spec.numerics_id,
                "promise": promise.kind,
                "promise_reason": promise.reason,
            },
        )
        plan = begin.plan_sentences(config, manifest, len(dataset.train), steps, ready)
        for sentence in (*dataset.notes, *plan, *fitted.notes, f"{promise.kind}: {promise.reason}"):
            report.note(sentence)
        report.stage("training")
        loop = Run(
            config=config,
            method=method,
            rows=dataset.train,
            validation=Validation(config, method, len(dataset.valid or ()), report),
            total_steps=steps,
            fleet=fleet,
            report=report,
            saver=saver,
            clock=clock,
        )
        try:
            state = train(loop, state)
            saver.final(state, lambda: report.summary(**_summary(saver, config, "done")))
        except KeyboardInterrupt:
            farewell = "the run was interrupted"
            done = f"after step {saver.saved_step}; saved in {folder.path}" if saver.saved_step >= 0 else "unsaved"
            message = f"interrupted {done}. Go on with: --resume"
            finish(report, saver, config, message, "interrupted")
            return INTERRUPTED
        except MlxdistError as error:
            farewell = "the run failed"
            finish(report, saver, config, str(error), "failed")
            raise
        for sentence in (*begin.saved_sentences(state), *begin.audit_sentences(config, fleet.audited)):
            report.note(sentence)
        finish(report, saver, config, f"all {state.step} steps are done; the adapter is in {folder.path}", "done")
        return 0
    finally:
        fleet.close(farewell)
        nodes.stop()


def finish(report: Reporter, saver: Saver, config: RunConfig, message: str, status: Status) -> None:
    """The last event and metrics.json; that it cannot be written hides no other failure."""
    try:
        report.done(message, **_summary(saver, config, status))
    except SaveError as error:
        report.could_not_save("summary", error)


def _summary(saver: Saver, config: RunConfig, status: Status) -> Summary:
    return {
        "status": status,
        "config": as_json(config),
        "applied_ranks": saver.applied_ranks(),
        "checkpoints": saver.checkpoints(),
    }


def tell(news: NodeNews, report: Reporter, folder: RunFolder) -> None:
    """A node's news: its own lines to its log, the rest to the report."""
    if news.log:
        try:
            append_line(folder.logs / f"{news.name}.log", news.message)
        except SaveError as error:
            report.could_not_save("log", error)
        else:
            report.saved("log")
    elif news.state == "awake":
        report.note(news.message)
    elif not news.name:
        report.paused(news)
    else:
        report.node(news if news.cause != news.state else replace(news, cause=""))


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and (not under nohup) a closed terminal interrupt: the last whole step is saved."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # A shell that starts a command in the background has it ignore SIGINT, but whoever sends one means it.
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
