"""hosts.toml becomes a cluster, or a message that names the node, the key and what is allowed."""

import socket
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from mlxdist.coordinator.config.hosts import (
    CoordinatorHost,
    dialed_address,
    is_local,
    is_loopback,
    listening_address,
    load_hosts,
    local_hosts,
)
from mlxdist.protocol.errors import ConfigError
from tests.coordinator.config.run_files import example_values

EXAMPLE = Path(__file__).parents[3] / "hosts.example.toml"
TWO = '[[nodes]]\nhost = "localhost"\n[[nodes]]\nhost = "localhost"\n'

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a hosts.toml and returns its path."""

    def put(text: str) -> Path:
        path = tmp_path / "hosts.toml"
        path.write_text(text)
        return path

    return put


def refusal(path: Path) -> str:
    """Returns the message of a refused file, without the folder."""
    with pytest.raises(ConfigError) as caught:
        load_hosts(path)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_a_host_is_enough_and_several_local_nodes_get_names_of_their_own(write: Write) -> None:
    hosts = load_hosts(write(TWO))
    assert hosts == local_hosts(2)
    assert [node.name for node in hosts.nodes] == ["localhost", "localhost-2"]
    assert (hosts.run, hosts.coordinator) == (None, CoordinatorHost())


def test_a_made_up_name_never_takes_one_that_was_given(write: Write) -> None:
    hosts = load_hosts(
        write(TWO + '[[nodes]]\nname = "LOCALHOST-2"\nhost = "127.0.0.1"\n[[nodes]]\nhost = "fe80::1%en0"')
    )
    assert [node.name for node in hosts.nodes] == ["localhost", "localhost-3", "LOCALHOST-2", "fe80--1-en0"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_local_hosts_are_as_many_as_asked_with_distinct_names(count: int) -> None:
    hosts = local_hosts(count)
    assert len({node.name for node in hosts.nodes}) == count


def test_defaults_are_for_the_nodes_without_a_value_of_their_own(write: Write) -> None:
    text = '[defaults]\nuser = "ada"\nmemory_limit_gb = 12\n[[nodes]]\nhost = "a"\n[[nodes]]\nhost = "b"\nuser = "bob"'
    one, two = load_hosts(write(text)).nodes
    assert (one.user, one.memory_limit_gb) == ("ada", 12.0)
    assert (two.user, two.memory_limit_gb) == ("bob", 12.0)


def test_the_run_is_relative_to_the_file(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/run.toml").touch()
    path = write('run = "jobs/run.toml"\n' + TWO)
    monkeypatch.chdir(tmp_path / "jobs")
    assert load_hosts(Path("../hosts.toml")).run == tmp_path / "jobs/run.toml"
    assert load_hosts(tmp_path) == load_hosts(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run = 'gone.toml'\n" + TWO, 'hosts.toml:1: run = "gone.toml" leads to gone.toml, where there is no file'),
        ("run = 3\n" + TWO, "hosts.toml:1: run = 3: must be the path of a run.toml in quotes"),
        ("rum = 'run.toml'\n" + TWO, "hosts.toml:1: rum is not a key; the nearest is run"),
        ("[node]\nhost = 'a'\n" + TWO, "hosts.toml:1: node is not a key; the nearest is nodes"),
        ("", "hosts.toml: nodes are missing: write [[nodes]] with a host"),
        ("[nodes]\nhost = 'a'", 'hosts.toml:1: nodes must be at least one [[nodes]] with host = "…"'),
        ("nodes = ['a']", 'hosts.toml:1: nodes must be at least one [[nodes]] with host = "…"'),
        ("[[nodes]]\nname = 'a'", 'hosts.toml:1: nodes has no host: write host = "mini-1" or "localhost"'),
        ("[[nodes]]\nhots = 'a'\nhost = 'b'", "hosts.toml:2: nodes.hots is not a key; the nearest is host"),
        ("[[nodes]]\nhost = ''", 'hosts.toml:2: nodes.host = "": must be text in quotes, not empty'),
        (
            "[[nodes]]\nhost = 'a b'",
            'hosts.toml:2: nodes.host = "a b": must be a name or address as ssh takes it, without user or port',
        ),
        (
            "[[nodes]]\nhost = 'a:22'",
            'hosts.toml:2: nodes.host = "a:22": must be a name or address as ssh takes it, without user or port',
        ),
        (
            "[[nodes]]\nhost = '-oProxyCommand=x'",
            'hosts.toml:2: nodes.host = "-oProxyCommand=x": must be a name or address as ssh takes it, '
            "without user or port",
        ),
        (
            "[[nodes]]\nhost = 'ada@mini'",
            'hosts.toml:2: nodes.host = "ada@mini": the user is a key of its own: user = "ada", host = "mini"',
        ),
        (
            "[[nodes]]\nhost = 'a'\nname = '../a'",
            'hosts.toml:3: nodes.name = "../a": must be at most 64 letters, digits, points, dashes or underscores, '
            "a letter or digit first",
        ),
        (
            "[[nodes]]\nhost = 'a'\npython = 'python3'",
            'hosts.toml:3: nodes.python = "python3": must be an absolute path on that host',
        ),
        (
            "[defaults]\npython = 'python3'\n" + TWO,
            'hosts.toml:2: defaults.python = "python3": must be an absolute path on that host',
        ),
        (
            "[defaults]\nhost = 'a'\n" + TWO,
            "hosts.toml:2: defaults.host belongs in each of [[nodes]]; it has no default",
        ),
        ("defaults = 1\n" + TWO, "hosts.toml:1: defaults = 1: must be a table, [defaults]"),
        (
            "[[nodes]]\nhost = 'a'\ntransport = 'shh'",
            'hosts.toml:3: nodes.transport = "shh": must be "tcp" or "ssh"; did you mean "ssh"?',
        ),
        (
            "[[nodes]]\nhost = 'a'\nmemory_limit_gb = -1",
            "hosts.toml:3: nodes.memory_limit_gb = -1: must be a number, at least 0",
        ),
        ("[[nodes]]\nhost = 'a'\ncaffeinate = 'yes'", 'hosts.toml:3: nodes.caffeinate = "yes": must be true or false'),
        (
            "[[nodes]]\nhost = 'a'\nname = 'x'\n[[nodes]]\nhost = 'b'\nname = 'X'",
            'hosts.toml:6: nodes.name = "X": another node in line 3 has this name; each needs its own',
        ),
        (
            "[coordinator]\nport = 80\n" + TWO,
            "hosts.toml:2: coordinator.port = 80: must be a whole number, at least 1024 and at most 65534, or 0",
        ),
        (
            "[coordinator]\nport = 65535\n" + TWO,
            "hosts.toml:2: coordinator.port = 65535: must be a whole number, at least 1024 and at most 65534, or 0",
        ),
        (
            "[coordinator]\nbind = 'en0'\n" + TWO,
            'hosts.toml:2: coordinator.bind = "en0": must be "auto", "*" or an IP address of the coordinator',
        ),
        (
            "[coordinator]\nhost = 'ada@a'\n" + TWO,
            'hosts.toml:2: coordinator.host = "ada@a": must be a name or address as ssh takes it, without user or port',
        ),
        (
            "[coordinator]\nmin_nodes = 3\n" + TWO,
            "hosts.toml:2: coordinator.min_nodes is 3, and there are 2 [[nodes]]: the run would wait forever",
        ),
        (
            "[coordinator]\nmin_nodes = 0\n" + TWO,
            "hosts.toml:2: coordinator.min_nodes = 0: must be a whole number, at least 1",
        ),
        (
            "[coordinator]\nmixed = 'yes'\n" + TWO,
            'hosts.toml:2: coordinator.mixed = "yes": must be "spare" or "allow"',
        ),
        (
            "[coordinator]\nhost = 'a'\nhost = 'b'",
            "hosts.toml:3:11: is not TOML: Cannot overwrite a value\n    host = 'b'",
        ),
    ],
)
def test_the_message_about_a_faulty_file_says_what_where_and_what_to_do(write: Write, text: str, said: str) -> None:
    assert refusal(write(text)) == said


def test_all_faults_are_listed_together(write: Write) -> None:
    said = refusal(write("[coordinator]\nport = 1\n[[nodes]]\nhots = 'a'\n[[nodes]]\nhost = 'a b'"))
    assert said.startswith("4 things to fix, nothing was started:\n")


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "cluster.toml", tmp_path):
        with pytest.raises(ConfigError, match=r"there is no such file; hosts.example.toml shows every key"):
            load_hosts(path)


# --- what is this machine


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "::1", socket.gethostname(), socket.gethostname() + ".local"]
)
def test_names_of_this_machine_are_local(host: str) -> None:
    assert is_local(host)


@pytest.mark.parametrize(
    ("bind", "loopback", "listens", "dialed"),
    [
        ("auto", True, "127.0.0.1", "127.0.0.1"),
        ("localhost", True, "127.0.0.1", "127.0.0.1"),
        ("::1", True, "::1", "::1"),
        ("192.168.1.5", False, "192.168.1.5", "192.168.1.5"),
        ("fe80::1%en0", False, "fe80::1%en0", "fe80::1%en0"),
        ("0.0.0.0", False, "0.0.0.0", "127.0.0.1"),
        ("::", False, "::", "::1"),
        ("*", False, "*", "127.0.0.1"),
    ],
)
def test_the_chosen_address_is_bound_and_no_other(bind: str, loopback: bool, listens: str, dialed: str) -> None:
    assert (is_loopback(bind), listening_address(bind), dialed_address(bind)) == (loopback, listens, dialed)


# --- the example


def test_the_example_is_two_nodes_on_this_machine() -> None:
    hosts = load_hosts(EXAMPLE)
    assert hosts == local_hosts(2)


def test_the_example_shows_every_key_with_its_real_default() -> None:
    shown = example_values(EXAMPLE)
    first = local_hosts(1)
    assert set(shown) == {"", "coordinator", "defaults", "nodes"}
    assert list(shown[""]) == ["run"]
    for part, keys in ((first.coordinator, shown["coordinator"]), (first.nodes[0], shown["nodes"])):
        plain = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
        assert {key.name: getattr(part, key.name) for key in fields(part)} == plain
    assert shown["defaults"] == {"caffeinate": first.nodes[0].caffeinate}
