"""`mlxdist launch` for a run whose coordinator is another Mac: start it there, watch it, fetch its results."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mlxdist.coordinator.config.hosts import HOSTS_FILE, Hosts
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.launch import elsewhere
from mlxdist.coordinator.launch.detached import NOTHING, PID
from mlxdist.coordinator.launch.ssh import target_of
from mlxdist.coordinator.report.display import open_display
from mlxdist.coordinator.status.remote import RemoteRun
from mlxdist.coordinator.status.watch import say_stopped, show
from mlxdist.protocol.errors import NodeError, UserError

RUN_FILE = "run.toml"


def view(
    config: RunConfig,
    hosts: Hosts,
    hosts_file: Path,
    run_file: Path | None,
    changes: Sequence[str],
    options: Sequence[str],
    *,
    attach: bool,
    stop: bool,
) -> int:
    """Starts a run on the coordinator's host unless `attach` or `stop`, shows it, and returns its exit code.

    An interrupt ends the viewer alone. `changes`: of --set; `options`: further words of launch there.

    Raises UserError for results that would be overwritten, NodeError where the host cannot do it.
    """
    output, host = config.output, hosts.coordinator.host
    place = elsewhere.elsewhere(hosts, output.name)
    if stop:
        elsewhere.stop(place)
        print(f"the run was ended at {host}; its last step is saved there, and --resume continues it")
        return 0
    if not attach:
        if (output / "adapters.safetensors").exists():
            raise UserError(f"{output} holds an adapter already: give another output, or move that folder")
        files = hosts_file / HOSTS_FILE if hosts_file.is_dir() else hosts_file
        sent = elsewhere.send(place, config, run_file or hosts.run or Path(RUN_FILE), files)
        elsewhere.start(place, config, [*changes, *sent], options)  # the last one of a key counts
        print(f"the run was started at {host}; Ctrl-C ends this view, not the run")
    again = f"mlxdist launch --hosts {hosts_file}"
    try:
        code = watched(place, config)
    except KeyboardInterrupt:
        print(f"\nthe run goes on at {host}: {again} --attach shows it again, {again} --stop ends it")
        return 0
    if code == 0:
        elsewhere.fetch(place, output)
        print(f"its results were copied to {output}")
    return code


def watched(place: elsewhere.Elsewhere, config: RunConfig) -> int:
    """Shows a run on its host until it ends, and returns its exit code.

    Raises NodeError where the host was lost, or the run has left no exit code.
    """
    folder, owner = f"{place.folder}/{elsewhere.RESULTS}", f"{place.folder}/{PID}"
    with (
        RemoteRun(target_of(place.node), folder, owner) as run,
        open_display(
            sys.stdout, title=config.output.name, report_every=config.train.report_every, environ=os.environ
        ) as display,
    ):
        try:
            seen = show(run, display, watch=True)
        except NodeError as error:
            raise NodeError(f"{error}. The run goes on there: --attach shows it again") from error
        answer = elsewhere.result(place)
        if seen.told is None and seen.last is not None and answer.code == NOTHING:
            say_stopped(seen, display)
    if answer.code == NOTHING or answer.code is None:
        raise NodeError(f"{place.node.host}: {answer.err.strip() or 'no exit code of the run was found'}")
    if seen.told is None:  # else its last event has said it
        sys.stderr.write(answer.err)
    return answer.code
