"""One run from its configuration to its exit code: read, fit, start the nodes, begin or go on, train, finish."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from mlxdist.coordinator.config.hosts import Hosts, is_local, is_loopback
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.fleet.access import open_access
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.launch.roster import look_at_hosts
from mlxdist.coordinator.loggers.libraries import check_libraries
from mlxdist.coordinator.loggers.loggers import Loggers
from mlxdist.coordinator.notify.address import address_of
from mlxdist.coordinator.notify.notifier import Notifier
from mlxdist.coordinator.report.display import open_display
from mlxdist.coordinator.report.follower import Follower
from mlxdist.coordinator.report.format import count, hours_phrase
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.report.sinks import Sink
from mlxdist.coordinator.report.summary import Ending
from mlxdist.coordinator.storage.open_run import open_run
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.train import Run, train
from mlxdist.coordinator.training.nodes import started_nodes
from mlxdist.coordinator.training.prepare import Prepared, prepare
from mlxdist.coordinator.training.saver import Saver
from mlxdist.coordinator.training.startup import Start, announce, closing_sentences, start
from mlxdist.coordinator.training.state import State, stops_early, take_previous
from mlxdist.coordinator.training.validation import Validation
from mlxdist.keys.store import KeyStore
from mlxdist.protocol.errors import MlxdistError, SaveError, UserError

INTERRUPTED = 130


def run(
    config: RunConfig,
    hosts: Hosts,
    *,
    resume: bool,
    previous: bool = False,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.monotonic,
    keys: KeyStore | None = None,
    insecure_lan: bool = False,
    follower: Follower | None = None,
    invite: int = 0,
) -> int:
    """Trains, and returns the command's exit code: 0 all steps done, 130 interrupted after a save.

    `previous`: a resumed run goes on from the state before the last one, which is dropped. `keys`: the store of this
    Mac, default: that of the user; it is used when other Macs may connect. `insecure_lan`: they connect without.
    `invite`: so many of them may join by a code that is shown. `follower`: the program that calls.

    Raises MlxdistError, whose `exit_code` is the command's: 1 the run could not go on, 2 nothing was trained.
    """
    check_libraries(config.train.report_to)
    address_of(config.train.notify, environ)  # raises for one that cannot be used
    title, report_every = config.output.name, config.train.report_every
    follower = follower or Follower()
    with (
        open_run(
            config.output,
            resume=resume,
            base_model=config.model,
            method=config.method,
            created_at=datetime.now(UTC),
        ) as folder,
        open_display(follower.stream or sys.stdout, title=title, report_every=report_every, environ=environ) as display,
    ):
        report = Reporter(folder, display, clock=clock, listen=follower.listen, sinks=sinks_of(config, folder, environ))
        try:
            if not all(is_local(node.host) for node in hosts.nodes):
                report.stage("looking at the hosts")
            roster = look_at_hosts(hosts, config.model)
            for sentence in roster.sentences:
                report.note(sentence)
            prepared = prepare(config, roster, folder, report, resume=resume, previous=previous)
            if previous:
                take_previous(folder)  # before the events of its later steps are cut off
            if resume:
                report.resume_after(prepared.steps_done)
            access = None
            if not insecure_lan and (roster.seen or not is_loopback(hosts.coordinator.bind)):
                access = open_access(folder.state, keys or KeyStore.of_user(), resume=resume)
            with started_nodes(prepared, hosts, roster, folder, report, clock, access, invite) as fleet:
                begun = start(prepared, hosts, roster, folder, fleet, report)
                announce(prepared, begun, folder, report)
                loop = loop_of(prepared, begun, folder, fleet, report, clock)
                train_to_the_end(replace(loop, wants_stop=follower.wants_stop), begun.state)
        except KeyboardInterrupt:
            if not report.ended:
                report.note("interrupted before a step was taken: there is nothing new to save")
            return INTERRUPTED
        except Exception as error:
            report.close("" if isinstance(error, UserError) else str(error))
            raise
        finally:
            report.close()
    return 0


def sinks_of(config: RunConfig, folder: RunFolder, environ: Mapping[str, str]) -> list[Sink]:
    """Returns the receivers of the run's events that its configuration asks for."""
    sinks: list[Sink] = []
    if config.train.report_to:
        sinks.append(Loggers(config.train.report_to, folder, environ))
    if (address := address_of(config.train.notify, environ)) is not None:
        sinks.append(Notifier(address, config.output.name))
    return sinks


def loop_of(
    prepared: Prepared, begun: Start, folder: RunFolder, fleet: Fleet, report: Reporter, clock: Callable[[], float]
) -> Run:
    """Returns the parts of the training loop."""
    config, dataset = prepared.config, prepared.dataset
    return Run(
        config=config,
        method=begun.method,
        rows=dataset.train,
        validation=Validation(config, begun.method, len(dataset.valid or ()), report),
        total_steps=prepared.total_steps,
        fleet=fleet,
        report=report,
        saver=Saver(folder, config, begun.manifest, begun.identity, report),
        clock=clock,
        recorded_seconds=prepared.recorded_seconds,
    )


def train_to_the_end(loop: Run, state: State) -> None:
    """Trains from `state` on, saves, and tells the end of the run, whichever it is.

    Raises what the training raises: KeyboardInterrupt after a save, MlxdistError where it could not go on.
    """
    saver, folder = loop.saver, loop.saver.folder.path
    try:
        state = train(loop, state)
        saver.final(state)
        for sentence in closing_sentences(loop.config, state, loop.fleet.audited):
            loop.report.note(sentence)
        loop.report.done(f"{closing(loop, state)}; the adapter is in {folder}", "done")
    except KeyboardInterrupt:
        if loop.report.ended:
            raise
        done = (
            f"after step {saver.saved_step}, saved in {folder}" if saver.saved_step >= 0 else "before it could be saved"
        )
        finish(loop, f"interrupted {done}; add --resume to the same command to go on", "interrupted")
        raise
    except MlxdistError as error:
        kept = f"; its last save is after step {saver.saved_step}, in {folder}" if saver.saved_step >= 0 else ""
        finish(loop, str(error), "failed", shown=f"the run failed{kept}")  # the command prints the error
        raise


def closing(loop: Run, state: State) -> str:
    """Returns the reason why a run has come to its end."""
    evals = loop.config.train.early_stop_evals
    if state.step != loop.total_steps and stops_early(evals, state):
        return f"stopped early after step {state.step}, as {count(evals, 'evaluation')} brought no better one"
    if loop.total_steps is None:
        return (
            f"{hours_phrase(loop.config.train.max_hours or 0)} of training are over, after {count(state.step, 'step')}"
        )
    return "the one step is done" if state.step == 1 else f"all {state.step:,} steps are done"


def finish(loop: Run, message: str, ending: Ending, shown: str = "") -> None:
    """Writes the summary and tells the end; a summary that cannot be written hides no other failure.

    `shown`: the closing sentence on the terminal, where it is not `message`.
    """
    try:
        loop.report.write_summary(ending, loop.saver.results())
    except SaveError as error:
        loop.report.note(str(error))
    loop.report.done(message, ending, shown)
