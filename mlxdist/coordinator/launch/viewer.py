"""`mlxdist launch` for a run whose coordinator is another Mac: start it there, watch it, fetch its results."""

from collections.abc import Sequence
from pathlib import Path

from mlxdist.coordinator.config.hosts import HOSTS_FILE, Hosts
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.launch import elsewhere
from mlxdist.coordinator.launch.detached import AWAY
from mlxdist.protocol.errors import UserError

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
    code = elsewhere.watch(place)
    again = f"mlxdist launch --hosts {hosts_file}"
    if code == AWAY:
        print(f"\nthe run goes on at {host}: {again} --attach shows it again, {again} --stop ends it")
        return 0
    if code == 0:
        elsewhere.fetch(place, output)
        print(f"its results were copied to {output}")
    return code
