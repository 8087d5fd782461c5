"""A host is known from what it prints: macOS, Linux, or something else."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from mlxdist.coordinator.config.hosts import (
    CoordinatorHost,
    Hosts,
    NodeSpec,
    is_local,
    load_hosts,
    own_address,
    own_addresses,
)
from mlxdist.coordinator.launch.findings import Finding
from mlxdist.coordinator.launch.hosts_init import Found, hosts_text, node_names, target_named, write_hosts
from mlxdist.coordinator.launch.looking import Seen, judged, look_script, read_look
from mlxdist.coordinator.launch.quoting import remote_command
from mlxdist.coordinator.launch.roster import listening, roster_of
from mlxdist.coordinator.launch.ssh import Answer, Target, new_marker
from mlxdist.keys.store import KeyStore
from mlxdist.protocol.errors import NodeError, UserError
from mlxdist.protocol.versions import versions
from tests.coordinator.launch.recorded_ssh import LINUX_LOOK, MAC_LOOK

OWN = ("127.0.0.1", "10.0.0.1", "fe80::1c2d:ff%bridge0", "192.168.1.7")
FAR = Target("mini-1")


def look_of(printed: str, folders: tuple[str, ...] = (), code: int = 0, err: str = "") -> Seen:
    return judged(FAR, Answer(code, printed, err, True), "/opt/python", folders)


def printed_with_own_versions(printed: str) -> str:
    lines = [line for line in printed.splitlines() if not line.startswith("version")]
    return "\n".join([*lines, *(f"version {name} {version}" for name, version in versions().items())])


def test_a_mac_and_a_linux_machine_are_read() -> None:
    mac, linux = read_look(Answer(0, MAC_LOOK, "", True)), read_look(Answer(0, LINUX_LOOK, "", True))
    assert (mac.system, mac.chip, mac.memory_bytes, mac.release) == ("Darwin", "Apple M4", 2**34, "15.3.1")
    assert (mac.user, mac.home, mac.address) == ("ada", "/Users/ada lovelace", "fe80::1c2d:ff%en0")
    assert mac.models == ("/Users/ada lovelace/mlxdist/models/qwen",)
    assert (linux.system, linux.memory_bytes, linux.home) == ("Linux", 32768000 * 1024, "/home of/ada")
    assert dict(linux.versions) == {"mlxdist": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}


@pytest.mark.parametrize("printed", ["", "nonsense", "bytes many\nkilobytes 9" + "9" * 40, "version\nversion x\nmodel"])
def test_output_that_is_not_understood_is_unknown_and_no_crash(printed: str) -> None:
    assert read_look(Answer(0, printed, "", True)).memory_bytes == 0


def test_the_script_runs_here_and_fits_through_csh() -> None:
    script = look_script("~/mlxdist/env/current/bin/python", ["~/x", "/a b/c"])
    assert len(remote_command(script, new_marker())) < 2500
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False)
    seen = read_look(Answer(done.returncode, done.stdout, done.stderr, True))
    assert done.returncode == 127
    assert seen.memory_bytes > 2**28
    assert "" not in (seen.system, seen.user, seen.home)


def test_what_keeps_a_host_from_training_is_found_and_what_does_not_is_told() -> None:
    fine = look_of(printed_with_own_versions(MAC_LOOK), ("~/mlxdist/models/qwen",))
    assert fine.blocks is None
    assert fine.notes == ("other runs work there and share its memory: pairs",)
    cases = {
        "model missing": look_of(printed_with_own_versions(LINUX_LOOK), ("~/mlxdist/models/qwen",)),
        "other version": look_of(LINUX_LOOK.replace("version mlx 0.32.4", "version mlx 0.1")),
        "interpreter missing": look_of("", code=127, err="/opt/python: not found"),
        "interpreter": look_of("", code=1, err="SyntaxError: invalid syntax"),
        "mlxdist missing": look_of("", code=1, err="ModuleNotFoundError: No module named 'mlxdist'"),
    }
    assert {kind: seen.blocks and seen.blocks.kind for kind, seen in cases.items()} == {kind: kind for kind in cases}


# ---- the roster


def cluster(*nodes: NodeSpec, **coordinator: object) -> Hosts:
    return Hosts(None, CoordinatorHost(**coordinator), nodes)  # type: ignore[arg-type]


def node(name: str, **keys: object) -> NodeSpec:
    return NodeSpec(name=name, host=name, **keys)  # type: ignore[arg-type]


def test_a_host_that_fails_is_named_and_the_others_go_on_if_they_are_enough() -> None:
    lost = Seen(blocks=Finding("unreachable", "it is off", "Turn it on", transient=True))
    other = Seen(blocks=Finding("other version", "it has mlx 1", "Type mlxdist sync"))
    seen = {"a": Seen(address="10.0.0.1"), "b": lost, "c": other}
    hosts = cluster(node("a"), node("b"), node("c"))
    roster = roster_of(hosts, seen, OWN)
    assert [each.name for each in roster.ready] == ["a"]
    assert [each.name for each in roster.later] == ["b"]
    assert any(sentence.startswith("b does not take part: it is off") for sentence in roster.sentences)
    with pytest.raises(NodeError, match="1 of 3 hosts can take part, and 2 are needed:\n  b: it is off"):
        roster_of(cluster(*hosts.nodes, min_nodes=2), seen, OWN)


def test_a_cure_that_several_hosts_need_is_said_once() -> None:
    seen = {name: Seen(blocks=Finding("refused", f"{name} is off", "Turn them on")) for name in "abc"}
    seen["c"] = Seen(blocks=Finding("no way", "it is far", "Come nearer"))
    with pytest.raises(NodeError) as error:
        roster_of(cluster(node("a"), node("b"), node("c")), seen, OWN)
    assert str(error.value).splitlines() == [
        "0 of 3 hosts can take part, and 1 is needed:",
        "  a: a is off",
        "  b: b is off",
        "  c: it is far. Come nearer",
        "Turn them on.",
    ]


def test_the_other_runs_of_a_host_are_one_note_that_names_each_run_once() -> None:
    line = "other {} /x/python -u -m mlxdist node --launched --name {} --tag {}.0a1b2c3d4e5f"
    lines = (line.format(pid, name, run) for pid, name, run in ((1, "a", "x.y"), (2, "b", "x.y"), (3, "a", "other")))
    seen = look_of("\n".join([printed_with_own_versions(LINUX_LOOK), *lines, "other 9 something else"]))
    assert seen.notes == ("other runs work there and share its memory: x.y, other, 9 something else",)


def test_the_coordinator_listens_where_its_hosts_see_it_and_nowhere_else() -> None:
    seen = {"a": Seen(address="10.0.0.1"), "b": Seen(address="fe80::1c2d:ff%en5"), "localhost": Seen()}
    lan = cluster(node("a"), node("b"))
    assert listening(lan, roster_of(lan, seen, OWN), OWN) == ["10.0.0.1", "fe80::1c2d:ff%bridge0"]
    mixed = cluster(node("a"), node("localhost"))
    assert listening(mixed, roster_of(mixed, seen, OWN), OWN) == ["127.0.0.1", "10.0.0.1"]
    tunnels = cluster(node("a", transport="ssh"))
    assert listening(tunnels, roster_of(tunnels, seen, OWN), OWN) == ["127.0.0.1"]
    bound = cluster(node("a"), bind="192.168.1.7")
    assert listening(bound, roster_of(bound, seen, OWN), OWN) == ["192.168.1.7"]


def test_a_node_behind_a_jump_host_is_told_how_to_reach_the_coordinator() -> None:
    seen = {"a": Seen(address="203.0.113.9")}
    with pytest.raises(NodeError, match='Set transport = "ssh"'):
        roster_of(cluster(node("a")), seen, OWN)
    for allowed in (cluster(node("a", transport="ssh")), cluster(node("a"), bind="192.168.1.7")):
        assert roster_of(allowed, seen, OWN).blocked == {}


def test_a_host_that_is_an_address_of_this_machine_is_this_machine() -> None:
    assert all(is_local(address) for address in own_addresses())
    assert not is_local("192.0.2.77")
    assert not is_local("fe80::ffff:7%en0")


def test_the_zone_of_a_link_local_address_is_ours_here_and_theirs_there() -> None:
    assert own_address("fe80::1c2d:ff%en0", OWN) == "fe80::1c2d:ff%bridge0"
    assert own_address("", OWN) == own_address("10.0.0.9", OWN) == ""


# ---- hosts init


def found(name: str, printed: str = MAC_LOOK) -> Found:
    return Found(name, Target(name, options=("-p", "2222")), read_look(Answer(0, printed, "", True)), None)


def test_the_file_that_is_written_is_read_as_the_hosts_that_were_seen(tmp_path: Path) -> None:
    lost = Found("lost", Target("lost.local", "bob"), Seen(), Finding("refused", "it is off", "Turn it on"))
    (tmp_path / "hosts.toml").write_text(hosts_text([found("mini-1"), lost], "hosts.toml", ("-p", "2222")))
    hosts = load_hosts(tmp_path / "hosts.toml")
    first, second = hosts.nodes
    assert (first.name, first.user, first.workdir) == ("mini-1", "ada", "/Users/ada lovelace/mlxdist")
    assert (second.host, second.user, second.ssh_options) == ("lost.local", "bob", ("-p", "2222"))
    text = (tmp_path / "hosts.toml").read_text()
    assert "# Apple M4, 17.2 GB, macOS 15.3.1" in text
    assert "# not looked at: it is off. Turn it on" in text


@pytest.mark.parametrize("awkward", ['a "b" \\ c', "tab\there", "é\x7f", "\u2028"])
def test_any_folder_of_a_host_is_written_as_it_is(awkward: str) -> None:
    seen = Seen(user="ada", home=f"/{awkward}")
    text = hosts_text([Found("a", Target("a"), seen, None)], "hosts.toml", ())
    assert tomllib.loads(text)["nodes"][0]["workdir"] == f"/{awkward}/mlxdist"


def test_a_file_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    for name, make in (("file", Path.touch), ("link", lambda path: path.symlink_to("nowhere"))):
        make(tmp_path / name)
        with pytest.raises(UserError, match="is not overwritten"):
            write_hosts(tmp_path / name, ["localhost"], (), KeyStore(tmp_path / "keys"))
    assert (tmp_path / "file").read_bytes() == b""


def test_hosts_init_makes_a_private_key_pair_for_each_node(tmp_path: Path) -> None:
    write_hosts(tmp_path / "hosts.toml", ["localhost"], (), KeyStore(tmp_path / "keys"))
    (key,) = (tmp_path / "keys" / "nodes").iterdir()
    assert key.name == "localhost"
    assert key.stat().st_mode & 0o777 == 0o600
    assert set(json.loads(key.read_text())) == {"public", "since", "secret"}


def test_nodes_are_named_after_their_hosts_and_each_has_its_own_name() -> None:
    assert node_names(["mini-1.local", "MINI-1", "10.0.0.2", "fe80::1%en0"]) == [
        "mini-1",
        "MINI-1-2",
        "10.0.0.2",
        "fe80--1-en0",
    ]


@pytest.mark.parametrize("text", ["-oProxyCommand=x", "a b", "@mini", "-x@mini", "mini;rm"])
def test_a_word_that_is_no_host_reaches_no_command_line(text: str) -> None:
    with pytest.raises(UserError, match="no host as ssh takes it"):
        target_named(text, ())
