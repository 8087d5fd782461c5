"""Keys: pairs, files for their owner alone, and names and keys that are bound to each other."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mlxdist.commands.keys import node_lines
from mlxdist.keys.choose import chosen_keys
from mlxdist.keys.files import read_private, write_private
from mlxdist.keys.pair import NodeKeys, Pair, keys_line, keys_of_line, new_pair, public_key, public_of
from mlxdist.keys.store import KeyStore, Sighting
from mlxdist.node.process import Order
from mlxdist.protocol.errors import SaveError, UserError
from mlxdist.protocol.messages import SessionId

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
A, B = new_pair(), new_pair()


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "home" / ".mlxdist")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_public_half_follows_from_the_secret_one() -> None:
    assert public_of(A.secret) == A.public
    assert NodeKeys(A.secret, B.public).public == A.public
    assert A != B


def test_no_repr_shows_a_secret() -> None:
    keys = NodeKeys(A.secret, B.public)
    order = Order("tcp://127.0.0.1:1", "a", SessionId("run", 1, "1"), keys=keys)
    for value in (A, keys, order):
        assert A.secret not in repr(value)
        assert A.secret not in str(value)


def test_keys_pass_through_the_line_of_a_launched_node() -> None:
    keys = NodeKeys(A.secret, B.public)
    assert keys_of_line(keys_line(keys)) == keys
    assert keys_of_line(keys_line(None)) is None


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"{}", b'{"secret": "%s"}' % A.secret.encode(), A.secret.encode()],
    ids=["empty", "a line", "no key", "a secret alone", "a bare secret"],
)
def test_another_line_is_refused_without_being_shown(line: bytes) -> None:
    with pytest.raises(UserError, match="--launched reads its keys") as caught:
        keys_of_line(line)
    assert A.secret not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "0" * 63, "g" * 64, A.public + "0", "-" + A.public],
    ids=["empty", "short", "no digits", "long", "with a sign"],
)
def test_a_mistyped_public_key_is_a_sentence(text: str) -> None:
    with pytest.raises(UserError, match="is no public key"):
        public_key(text)


def test_a_public_key_may_be_typed_in_capitals_and_with_spaces_around() -> None:
    assert public_key(f" {A.public.upper()}\n") == A.public


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_key_file_is_its_owners_alone_whatever_the_umask(umask: int, store: KeyStore) -> None:
    before = os.umask(umask)
    try:
        pair = store.coordinator_pair()
        store.admit("a", A.public, now=NOW)
        store.trust("mini-0.local", B.public, now=NOW)
    finally:
        os.umask(before)
    files = [path for path in store.folder.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {mode(path) for path in files} == {0o600}
    assert mode(store.folder) == 0o700
    assert store.coordinator_pair() == pair


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o666])
def test_a_key_file_that_others_may_open_is_refused_with_the_command_to_type(bits: int, tmp_path: Path) -> None:
    path = tmp_path / "my key"
    write_private(path, A)
    path.chmod(bits)
    with pytest.raises(UserError, match=f"chmod 600 '{path}'") as caught:
        read_private(path, Pair)
    assert f"mode {bits:04o}" in str(caught.value)
    path.chmod(0o600)
    assert read_private(path, Pair) == A


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"public": 1}', b'{"secret": "' + A.secret.encode(), b"\xff" * 9000],
    ids=["empty", "a list", "no key", "a number", "cut", "no text"],  # a random key is no name for a test
)
def test_a_damaged_key_file_is_a_sentence_that_shows_none_of_it(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(UserError, match="does not hold the keys") as caught:
        read_private(path, Pair)
    assert A.secret not in str(caught.value)


def test_a_key_file_that_is_missing_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_private(tmp_path / "none", Pair)


def test_a_key_that_cannot_be_written_leaves_no_half(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    with pytest.raises(SaveError, match="Could not write the key file"):
        write_private(tmp_path / "key", A)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


# --- the store


def test_a_name_is_bound_to_one_key_and_a_key_to_one_name(store: KeyStore) -> None:
    store.admit("mini-1", A.public, now=NOW)
    store.admit("mini-1", A.public, now=NOW)
    for name, key in (("mini-1", B.public), ("MINI-1", B.public), ("mini-2", A.public), ("Mini-1", A.public)):
        with pytest.raises(UserError, match="mlxdist nodes forget mini-1"):
            store.admit(name, key, now=NOW)
    assert {name: known.public for name, known in store.known_nodes()[0].items()} == {"mini-1": A.public}
    assert store.forget("mini-1")
    assert not store.forget("mini-1")
    store.admit("mini-1", B.public, now=NOW)


@pytest.mark.parametrize("name", ["", ".", "..", "../node.key", "a/b", ".hidden", "a b", "x" * 65])
def test_a_name_leads_to_no_other_file(name: str, store: KeyStore) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.admit(name, A.public, now=NOW),
        lambda: store.node_pair(name, now=NOW),
        lambda: store.forget(name),
    ]
    for call in calls:
        with pytest.raises(UserError, match="cannot be named"):
            call()


@pytest.mark.parametrize("host", ["..", "../x", "/etc/passwd", "fe80::1%en0", "a" * 40])
def test_a_host_leads_to_no_other_folder(host: str, store: KeyStore) -> None:
    store.trust(host, A.public, now=NOW)
    trusted = store.trusted(host)
    assert trusted is not None
    assert trusted.public == A.public
    assert [path.parent for path in store.folder.rglob("*") if path.is_file()] == [store.folder / "coordinators"]


def test_a_pair_that_is_made_for_a_node_stays_the_same(store: KeyStore) -> None:
    pair = store.node_pair("mini-1", now=NOW)
    assert store.node_pair("mini-1", now=NOW) == pair
    assert store.known_nodes()[0]["mini-1"].public == pair.public


def test_no_pair_is_made_for_a_node_that_has_its_own_key(store: KeyStore) -> None:
    store.admit("mini-1", A.public, now=NOW)
    with pytest.raises(UserError, match="mlxdist nodes forget mini-1"):
        store.node_pair("mini-1", now=NOW)


def test_a_file_of_the_store_that_cannot_be_used_admits_no_node(store: KeyStore) -> None:
    store.admit("a", A.public, now=NOW)
    store.admit("b", B.public, now=NOW)
    (store.nodes / "b").chmod(0o644)
    found, faults = store.known_nodes()
    assert set(found) == {"a"}
    assert len(faults) == 1
    assert "chmod 600" in faults[0]


# --- the keys of a node that was started by hand


def choose(store: KeyStore, host: str, **options: object) -> NodeKeys | None:
    values = {"coordinator": "", "file": None, "insecure_lan": False} | options
    return chosen_keys(store, "mini-1", host, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "::1"])
def test_a_connection_on_this_machine_needs_no_key(host: str, store: KeyStore) -> None:
    assert choose(store, host) is None
    assert not store.folder.exists()


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "mini-0.local", "fe80::1%en0", "localhost.evil.example", "::ffff:10.0.0.1"]
)
def test_a_connection_beyond_this_machine_is_refused_without_a_key(host: str, store: KeyStore) -> None:
    with pytest.raises(UserError, match="mlxdist nodes admit mini-1 ") as caught:
        choose(store, host)
    assert store.own_pair().public in str(caught.value)
    assert choose(store, host, insecure_lan=True) is None


def test_the_key_of_a_coordinator_is_remembered_by_its_host(store: KeyStore) -> None:
    first = choose(store, "mini-0.local", coordinator=B.public)
    assert first == choose(store, "MINI-0.local") == NodeKeys(store.own_pair().secret, B.public)
    with pytest.raises(UserError, match="knows no key"):
        choose(store, "mini-9.local")


def test_keys_may_lie_in_a_file(store: KeyStore, tmp_path: Path) -> None:
    keys = NodeKeys(A.secret, B.public)
    write_private(tmp_path / "keys", keys)
    assert choose(store, "10.0.0.1", file=tmp_path / "keys") == keys
    (tmp_path / "keys").chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        choose(store, "10.0.0.1", file=tmp_path / "keys")


@pytest.mark.parametrize(
    "options",
    [
        {"insecure_lan": True, "coordinator": B.public},
        {"insecure_lan": True, "file": Path("keys")},
        {"coordinator": B.public, "file": Path("keys")},
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, object], store: KeyStore) -> None:
    with pytest.raises(UserError, match="leave"):
        choose(store, "10.0.0.1", **options)


def test_the_list_of_nodes_says_what_each_one_is(store: KeyStore) -> None:
    store.admit("mini-1", A.public, now=NOW)
    store.admit("studio", B.public, now=NOW)
    store.saw("mini-1", Sighting("2026-05-02T13:14:15+00:00", "Apple M4\x1b[31m", "3fa9c17e", 1234.5))
    store.saw("stranger", Sighting("2026-05-02T13:14:15+00:00"))
    titles, first, second = node_lines(
        {name: (known, store.sighting(name)) for name, known in store.known_nodes()[0].items()}
    )
    assert titles.split() == ["node", "since", "last", "seen", "chip", "bits", "tokens/s", "key"]
    assert first.split("  ")[0] == "mini-1"
    assert "2026-05-01  2026-05-02 13:14  Apple M4\\x1b[31m  3fa9c17e  1,23" in first
    assert "never" in second
    assert store.sighting("stranger") is None
    assert store.forget("mini-1")
    assert store.sighting("mini-1") is None


def test_a_wish_gets_the_next_free_name_and_a_known_key_keeps_its_own(store: KeyStore) -> None:
    store.admit("Mini", A.public, now=NOW)
    assert store.welcome("other", A.public, now=NOW) == "Mini"
    assert store.welcome("mini", B.public, taken=("mini-2",), now=NOW) == "mini-3"
    assert store.known_nodes()[0]["mini-3"].public == B.public
