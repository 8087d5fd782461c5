"""The nodes of a run: started with it, told about while it goes on, stopped at its end."""

import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime

from mlxdist.coordinator.cluster.audit import Audit
from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.config.hosts import Hosts, is_loopback, own_addresses
from mlxdist.coordinator.fleet.access import Access
from mlxdist.coordinator.fleet.ended import Printed
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.fleet.model_source import ModelSource, remembered_hashes
from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.coordinator.invite.invite import announced_run, invited, note_joinable
from mlxdist.coordinator.invite.port import Joinable
from mlxdist.coordinator.launch.roster import Roster, listening
from mlxdist.coordinator.launch.starts import starts_of
from mlxdist.coordinator.launch.supervisors import Supervisors
from mlxdist.coordinator.memory.model_files import find_model
from mlxdist.coordinator.report.format import count
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.storage.node_log import append_line
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.prepare import Prepared
from mlxdist.coordinator.training.promises import PromiseFile
from mlxdist.keys.choose import INSECURE
from mlxdist.keys.exchange import FIRST_PORT
from mlxdist.keys.store import KeyStore, Sighting
from mlxdist.protocol.errors import ConfigError, SaveError
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.versions import package_versions

MOST_RUNS = 8  # at the same time on this machine, that other Macs find without a port


@contextmanager
def started_nodes(
    prepared: Prepared,
    hosts: Hosts,
    roster: Roster,
    folder: RunFolder,
    report: Reporter,
    clock: Callable[[], float],
    access: Access | None = None,
    invite: int = 0,
) -> Iterator[Fleet]:
    """Opens the ports, starts the nodes of `roster`, and gives the fleet that they join while the block lasts.

    The nodes are told how the block ended. With `access` all connections are encrypted. `invite`: so many Macs may
    join by a code.

    Raises UserError for ports that cannot be opened.
    """
    timing, bind = prepared.config.timing, hosts.coordinator.bind
    addresses = listening(hosts, roster, own_addresses())
    beyond = [address for address in addresses if not is_loopback(address)]
    hub = open_ports(addresses, hosts.coordinator.port, access)
    nodes = Supervisors(prepared.config.output.name, timing.stop_seconds, timing.restart_seconds, clock)
    promises = PromiseFile(folder, report)
    fleet = Fleet(
        Cluster(cluster_settings(prepared, hosts, roster, hub.ports[DATA])),
        hub,
        on_news=lambda news: told(news),
        watch=nodes.watch,
        clock=clock,
        audit=Audit(prepared.config.train.audit, prepared.config.batch.seed),
        model=model_source(prepared.spec.model),
    )

    def told(news: NodeNews) -> None:
        tell(news, report, folder, promises)
        if access is not None and news.name and not news.log:
            note_sightings(fleet, {news.name}, access.store, report)

    reason, invitation = "the run failed", ExitStack()
    try:
        report.stage(f"starting {count(len(roster.ready), 'node')}" if hosts.nodes else "waiting for nodes")
        if beyond and not invite:
            report.note(how_to_join(bind if bind != "auto" else beyond[0], hub.ports[CONTROL], access))
        names = tuple(node.name for node in hosts.nodes)
        joinable = (
            Joinable(access.server.public, hub.ports[CONTROL], tuple(addresses), names) if beyond and access else None
        )
        note_joinable(folder.state, joinable)
        if joinable is not None:
            invitation.enter_context(announced_run(joinable))
        if invite and joinable and access:
            invitation.enter_context(invited(joinable, access.store, invite, report.say, clock))
        ready, later = (
            starts_of(part, roster, hosts.coordinator, hub.ports, access, timing.away_seconds)
            for part in (roster.ready, roster.later)
        )
        nodes.start(ready, later)
        yield fleet
        reason = "the run is over"
    except KeyboardInterrupt:
        reason = "the run was interrupted"
        raise
    finally:
        try:
            invitation.close()
            if access is not None:
                note_sightings(fleet, fleet.present(), access.store, report)
            fleet.close(reason)
        finally:
            promises.flush()
            for event in nodes.stop():
                write_log(event, report, folder)


def open_ports(addresses: Sequence[str], port: int, access: Access | None) -> RouterHub:
    """Opens the two ports. Where none is given and other Macs connect, the first free ones of a short list are taken.

    So a Mac that has joined once finds the next run at the same place. Raises UserError.
    """
    if not port and not all(map(is_loopback, addresses)):
        for choice in range(FIRST_PORT, FIRST_PORT + 3 * MOST_RUNS, 3):
            with suppress(ConfigError):
                return RouterHub(addresses, choice, access)
    return RouterHub(addresses, port, access)


def how_to_join(bind: str, port: int, access: Access | None) -> str:
    """Returns the command with which another Mac joins, as a sentence, and what is said about missing encryption."""
    address, zone, _ = bind.partition("%")
    host = socket.gethostname() if bind in ("*", "0.0.0.0", "::") else address
    if ":" in host:  # the zone of a link-local address is the name of the interface, which differs between Macs
        host = f"[{host}{zone and '%INTERFACE'}]"
    command = f"mlxdist node --connect {host}:{port}"
    if access is None:
        return f"{INSECURE}. Other Macs join with: {command} --insecure-lan"
    return f"other Macs that were admitted (mlxdist nodes) join with: {command} --coordinator {access.server.public}"


def model_source(model: str) -> ModelSource | None:
    """Returns the run's model for nodes that have no copy; None: this machine has none either."""
    folder = find_model(model)
    return ModelSource(folder, remembered_hashes()) if folder is not None else None


def cluster_settings(prepared: Prepared, hosts: Hosts, roster: Roster, data_port: int) -> ClusterSettings:
    """Returns the run as the cluster takes it."""
    return ClusterSettings(
        run=f"{prepared.config.output.name}-{uuid.uuid4().hex[:8]}",
        incarnation=time.time_ns(),
        spec=prepared.spec,
        versions=package_versions(),
        data_port=data_port,
        timing=prepared.config.timing,
        min_nodes=hosts.coordinator.min_nodes,
        mixed=hosts.coordinator.mixed,
        launched=frozenset(node.name for node in roster.ready),
        packing_is_fixed=prepared.steps_done > 0,
        memory=prepared.memory,
    )


def note_sightings(fleet: Fleet, names: Collection[str], store: KeyStore, report: Reporter) -> None:
    """Notes in the store what these nodes are, which were there a moment ago."""
    speeds, now = fleet.node_speeds(), datetime.now(UTC).isoformat(timespec="seconds")
    try:
        for name, (host, canary) in fleet.hosts_and_canaries().items():
            if name in names:
                before = store.sighting(name)
                speed = speeds.get(name) or (before.tokens_per_second if before is not None else 0.0)
                bits = canary[0][:8] if len(set(canary)) == 1 else ""
                store.saw(name, Sighting(now, host.get("chip", "")[:80], bits, speed))
    except SaveError as error:
        report.could_not_save("sightings", error)
    else:
        report.saved("sightings")


def write_log(printed: Printed, report: Reporter, folder: RunFolder) -> None:
    """Writes a line that a node has printed to its log."""
    try:
        append_line(folder.logs / f"{printed.name}.log", printed.line)
    except SaveError as error:
        report.could_not_save("log", error)
    else:
        report.saved("log")


def tell(news: NodeNews, report: Reporter, folder: RunFolder, promises: PromiseFile) -> None:
    """Writes a node's own lines to its log and shows some of them, and a new promise to config.json.

    All other news go to the report.
    """
    promises.flush()
    if news.promise is not None:
        promises.add(news.promise)
    elif news.log:
        write_log(Printed(news.name, news.message), report, folder)
        report.printed(news.name, news.message)
    elif news.state == "awake":
        report.note(news.message)
    elif not news.name:
        report.paused(news)
    else:
        report.node(news if news.cause != news.state else replace(news, cause=""))
