"""`mlxdist doctor`: looks at all hosts at the same time, and says what would keep them from training, with the cure."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import SystemRandom

from mlxdist.coordinator.config.hosts import Hosts, NodeSpec, is_local, listening_address
from mlxdist.coordinator.doctor import checks
from mlxdist.coordinator.doctor.checks import Check, of_finding
from mlxdist.coordinator.doctor.link_answers import link_answers
from mlxdist.coordinator.fleet.access import Access
from mlxdist.coordinator.launch.findings import Finding, finding, talk_finding, version_finding
from mlxdist.coordinator.launch.quoting import path_word
from mlxdist.coordinator.launch.ssh import Answer, Target, everywhere, run, target_of
from mlxdist.coordinator.launch.workdir import interpreter_of, model_name, model_of, workdir_of
from mlxdist.coordinator.sync.files import File, differing
from mlxdist.coordinator.sync.host_facts import HostFacts, facts_script, read_facts
from mlxdist.keys.pair import keys_line, new_pair
from mlxdist.keys.store import KeyStore
from mlxdist.macos import SETTINGS_SCRIPT, read_settings
from mlxdist.protocol.errors import ConfigError, NodeError

FORWARDED = range(20_000, 32_000)  # ports on a host that ssh listens at; no system gives these out by itself
HEALTH_SECONDS = 240.0  # it waits until the links of the other hosts were measured


@dataclass(frozen=True)
class HostReport:
    """All checks of one host."""

    name: str
    host: str
    checks: tuple[Check, ...]

    @property
    def blocked(self) -> bool:
        """True when a run cannot use the host as it is."""
        return any(check.level == "blocks" for check in self.checks)


@dataclass(frozen=True)
class Expected:
    """The versions and files with which every host is compared, and the order for its health check."""

    versions: Mapping[str, str]
    model: str  # folder or hub id; "" where no run is named
    files: tuple[File, ...]  # of the model; empty where it is not on this machine
    dial: str  # the coordinator's address for nodes; "" = the one by which ssh came in
    ports: Mapping[str, int]  # of the link check, by channel
    access: Access  # to the ports of the link check


def examine(hosts: Hosts, versions: Mapping[str, str], model: str, files: Sequence[File]) -> list[HostReport]:
    """Returns the report of every host, in the order of the file, and first the coordinator's when it has findings.

    `versions`: those of this machine, by package.
    """
    coordinator = hosts.coordinator
    reports, port = [], coordinator.port
    access = Access(new_pair(), KeyStore.of_user())
    addresses = [_address(coordinator.bind, hosts.nodes)]
    try:
        with link_answers(addresses, port, access):
            pass
    except ConfigError as error:
        port = 0
        cure = "Wait for that run to end, or take another coordinator.port in hosts.toml"
        reports.append(Check("network", "port in use", "blocks", str(error), cure))
    if sys.platform == "darwin" and is_local(coordinator.host):
        found = read_settings(run(Target("localhost"), SETTINGS_SCRIPT).out)
        reports += [checks.settings(found), checks.firewall(found)]
    if not is_local(coordinator.host):
        what = f"the links were measured to this machine, and the coordinator runs on {coordinator.host}"
        reports.append(Check("network", "not from here", "unknown", what, "Run mlxdist doctor on that Mac as well"))
    own = [HostReport("coordinator", coordinator.host, tuple(reports))] if reports else []
    with link_answers(addresses, port, access) as ports:
        dial = coordinator.bind if coordinator.bind not in ("auto", "*") else ""
        expected = Expected(versions, model, tuple(files), dial, ports, access)
        return own + everywhere(lambda node: examine_host(node, expected), hosts.nodes)


def examine_host(node: NodeSpec, expected: Expected) -> HostReport:
    """Returns the report of one host: every check that its state allows."""
    target = target_of(node)
    answer = run(target, facts_script(workdir_of(node)))
    if failed := _failed(target, answer, ""):
        return HostReport(node.name, node.host, (of_finding("ssh", failed),))
    found = [Check("ssh", "this machine" if target.local else "yes")]
    talk = talk_finding(answer)
    found.append(of_finding("shell", talk, "warning") if talk else Check("shell", "quiet"))
    facts = read_facts(answer)
    if not isinstance(facts, HostFacts):
        return HostReport(node.name, node.host, (*found, Check("system", "other", "blocks", facts, "Leave it out")))
    found += _health(node, target, facts, expected)
    found.append(_model(node, target, expected))
    found.append(checks.disk(facts.free_bytes, facts.workdir))
    if facts.platform.system == "Darwin":
        found.append(checks.settings(read_settings(run(target, SETTINGS_SCRIPT).out)))
    return HostReport(node.name, node.host, tuple(found))


def _health(node: NodeSpec, target: Target, facts: HostFacts, expected: Expected) -> list[Check]:
    """Returns the checks that the node's own interpreter makes."""
    interpreter = sys.executable if target.local and not node.python else interpreter_of(node)
    script = f"exec {path_word(interpreter)} -m mlxdist.node.health"
    host, ports, options = expected.dial, expected.ports, list[str]()
    if node.transport == "ssh" and not target.local:
        host, ports, options = _through_ssh(expected)
    lines = (
        keys_line(expected.access.keys_for(node.name))
        + json.dumps({"host": host, "ports": dict(ports)}).encode()
        + b"\n"
    )
    answer = run(target, script, stdin=lines, timeout=HEALTH_SECONDS, options=options)
    if failed := _failed(target, answer, interpreter):
        return [of_finding("Python", failed)]
    try:
        said = json.loads(answer.out)
        total, available, versions = int(said["memory"]), int(said["available"]), dict(said["versions"])
        found = [Check("Python", str(said["python"])), _versions(expected.versions, versions)]
        size = sum(file.size for file in expected.files if file.path.suffix == ".safetensors")
        found.append(checks.memory(total, available, size, node.memory_limit_gb))
        return [
            *found,
            *checks.link(said["link"], facts.platform.system),
            checks.metal(said["metal"], facts.platform.system),
        ]
    except (ValueError, KeyError, TypeError) as error:
        return [Check("Python", "unknown", "unknown", f"its answer is not understood ({error!r})", "Type mlxdist sync")]


def _through_ssh(expected: Expected) -> tuple[str, dict[str, int], list[str]]:
    """Returns address, ports and options of ssh with which a node reaches the coordinator through its own ssh."""
    there = dict(zip(expected.ports, SystemRandom().sample(FORWARDED, len(expected.ports)), strict=True))
    options = ["-o", "ControlPath=none", "-o", "ControlMaster=no", "-o", "ExitOnForwardFailure=yes"]
    for channel, port in there.items():
        options += ["-R", f"127.0.0.1:{port}:{expected.dial or '127.0.0.1'}:{expected.ports[channel]}"]
    return "127.0.0.1", there, options


def _versions(here: Mapping[str, str], there: Mapping[str, str]) -> Check:
    if other := version_finding(here, there):
        return of_finding("versions", other)
    return Check("versions", ", ".join(f"{name} {there[name]}" for name in ("mlxdist", "mlx")))


def _model(node: NodeSpec, target: Target, expected: Expected) -> Check:
    if not expected.model:
        return Check("model", "no run named")
    if target.local:
        return Check("model", "this machine's")
    if not expected.files:
        return Check(
            "model",
            "unknown",
            "unknown",
            "its model cannot be compared: this machine does not have it",
            "Type mlxdist sync --hosts hosts.toml run.toml, which fetches it",
        )
    folder = model_of(node, expected.model)
    files = [File(file.path.name, file.path, file.size, file.sha256) for file in expected.files]
    try:
        return checks.model(model_name(expected.model), differing(target, folder, files), files, folder)
    except NodeError as error:
        return Check("model", "unknown", "unknown", str(error), "Type mlxdist sync --hosts hosts.toml run.toml")


def _failed(target: Target, answer: Answer, interpreter: str) -> Finding | None:
    """Returns the finding of a command that failed, also when the reason is not known."""
    if answer.ok:
        return None
    last = (answer.err or answer.ssh).strip().splitlines()[-1:] or [f"exit code {answer.code}"]
    unknown = Finding("failed", f"a command there failed: {last[0]}", "Try it by hand")
    return finding(target, answer, interpreter) or unknown


def _address(bind: str, nodes: Sequence[NodeSpec]) -> str:
    """Returns the address that a run would listen on: with "auto" every one, as soon as a node is elsewhere."""
    elsewhere = not all(is_local(node.host) for node in nodes)
    return "*" if bind == "auto" and elsewhere else listening_address(bind)
