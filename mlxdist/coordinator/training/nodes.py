"""The nodes of a run: started with it, told about while it goes on, stopped at its end."""

import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata

from mlxdist.coordinator.cluster.audit import Audit
from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.config.hosts import Hosts, is_loopback, own_addresses
from mlxdist.coordinator.fleet.access import Access
from mlxdist.coordinator.fleet.ended import Printed
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.coordinator.launch.roster import Roster, listening
from mlxdist.coordinator.launch.starts import starts_of
from mlxdist.coordinator.launch.supervisors import Supervisors
from mlxdist.coordinator.report.format import count
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.storage.node_log import append_line
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.prepare import Prepared
from mlxdist.coordinator.training.promises import PromiseFile
from mlxdist.keys.choose import INSECURE
from mlxdist.protocol.errors import SaveError
from mlxdist.protocol.transport import CONTROL, DATA


@contextmanager
def started_nodes(
    prepared: Prepared,
    hosts: Hosts,
    roster: Roster,
    folder: RunFolder,
    report: Reporter,
    clock: Callable[[], float],
    access: Access | None = None,
) -> Iterator[Fleet]:
    """Opens the ports, starts the nodes of `roster`, and gives the fleet that they join while the block lasts.

    The nodes are told how the block ended. With `access` all connections are encrypted.

    Raises UserError for ports that cannot be opened.
    """
    timing, bind = prepared.config.timing, hosts.coordinator.bind
    addresses = listening(hosts, roster, own_addresses())
    hub = RouterHub(addresses, hosts.coordinator.port, access)
    nodes = Supervisors(prepared.config.output.name, timing.stop_seconds, timing.restart_seconds, clock)
    promises = PromiseFile(folder, report)
    fleet = Fleet(
        Cluster(cluster_settings(prepared, hosts, roster, hub.ports[DATA])),
        hub,
        on_news=lambda news: tell(news, report, folder, promises),
        watch=nodes.watch,
        clock=clock,
        audit=Audit(prepared.config.train.audit, prepared.config.batch.seed),
    )
    reason = "the run failed"
    try:
        report.stage(f"starting {count(len(roster.ready), 'node')}" if hosts.nodes else "waiting for nodes")
        if beyond := [address for address in addresses if not is_loopback(address)]:
            report.note(how_to_join(bind if bind != "auto" else beyond[0], hub.ports[CONTROL], access))
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
            fleet.close(reason)
        finally:
            promises.flush()
            for event in nodes.stop():
                write_log(event, report, folder)


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


def cluster_settings(prepared: Prepared, hosts: Hosts, roster: Roster, data_port: int) -> ClusterSettings:
    """Returns the run as the cluster takes it."""
    return ClusterSettings(
        run=f"{prepared.config.output.name}-{uuid.uuid4().hex[:8]}",
        incarnation=time.time_ns(),
        spec=prepared.spec,
        versions={name: metadata.version(name) for name in ("mlx", "mlx-lm")},
        data_port=data_port,
        timing=prepared.config.timing,
        min_nodes=hosts.coordinator.min_nodes,
        mixed=hosts.coordinator.mixed,
        launched=frozenset(node.name for node in roster.ready),
        memory=prepared.memory,
    )


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
