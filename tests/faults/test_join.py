"""Macs that join by a code, as people do it: by the commands, between network namespaces, from no key to a training.

Nothing here announces or finds runs: addresses are given. test_join_bonjour.py has the other case.
"""

import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from mlxdist.coordinator.invite.invite import invite_to_running
from mlxdist.keys.exchange import FIRST_PORT, LENGTH_BYTES, OFFSET, Granted, framed, length_of, unpacked
from mlxdist.keys.invitation import CODE_SECONDS
from mlxdist.keys.pair import new_pair
from mlxdist.keys.store import FOLDER, KeyStore
from mlxdist.node.pairing import receive
from mlxdist.protocol.errors import MismatchError
from tests.faults.between import between
from tests.faults.fault_runs import sha
from tests.faults.join_desk import CTRL_C, WAIT, Desk, code_of
from tests.faults.namespaces import COORDINATOR, OfficeNodes, office_nodes, why_not

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
RUN_PORTS = (FIRST_PORT, FIRST_PORT + 1, FIRST_PORT + OFFSET)  # control, data, exchange of keys
OTHERS = new_pair().public


@pytest.fixture
def macs(tmp_path: Path) -> Iterator[OfficeNodes]:
    """A coordinator and three Macs, with no key and nothing running."""
    if reason := why_not():
        pytest.skip(reason)
    with office_nodes(tmp_path, others=("a", "b", "c")) as macs:
        yield macs


@pytest.fixture
def desk(macs: OfficeNodes, model: Path, tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(macs, tmp_path, model)
    yield desk
    desk.end()


def address(macs: OfficeNodes, name: str) -> str:
    return f"10.77.0.{macs.office.names.index(name) + 2}"


def with_his_key(_: int, piece: bytes) -> bytes:
    """Returns messages of the exchange with the key of the man in the middle instead of the one in them."""
    changed = b""
    while piece:
        length = length_of(piece[:LENGTH_BYTES])
        message, piece = piece[LENGTH_BYTES : LENGTH_BYTES + length], piece[LENGTH_BYTES + length :]
        fields = msgspec.msgpack.decode(message)
        changed += framed(msgspec.msgpack.encode(fields | ({"public": OTHERS} if "public" in fields else {})))
    return changed


@dataclass
class OneBit:
    """Flips one bit of the encrypted training, once so many bytes have passed at the data port."""

    after: int
    passed: int = 0
    done: bool = False

    def __call__(self, port: int, piece: bytes) -> bytes:
        if port != FIRST_PORT + 1:
            return piece
        self.passed += len(piece)
        if self.done or self.passed <= self.after:
            return piece
        self.done = True
        return bytes([*piece[:-1], piece[-1] ^ 1])


def test_two_macs_join_by_a_code_and_the_bits_are_those_of_one_machine(desk: Desk) -> None:
    """Beside a wrong code, a man in the middle who changes keys, one who relays and damages, one who plays again."""
    macs, middle = desk.macs, address(desk.macs, "c")
    launch = desk.launch("--hosts", desk.hosts(2), "--invite", "2", "--set", "timing.data_seconds=4")
    code = code_of(launch)
    wrong = desk.type("a", "join", COORDINATOR, code="0000-0001")
    assert wrong.ends() == 2
    wrong.until("the codes differ")
    launch.until(rf"{address(macs, 'a')} tried to join without the right code: 4 of 5")

    with between(macs.office, "c", COORDINATOR, RUN_PORTS[2:], with_his_key):
        deceived = desk.type("a", "join", middle, code=code)
        assert deceived.ends() == 2
    deceived.until("the codes differ, or someone between the two Macs has changed a message")
    launch.until(rf"{middle} tried to join without the right code: 3 of 5")
    assert macs.store.known_nodes() == ({}, [])
    assert KeyStore(macs.home("a") / FOLDER).coordinators() == []

    with between(macs.office, "c", COORDINATOR, RUN_PORTS, flip := OneBit(20_000)) as man:
        first = desk.type("a", "join", middle, "--name", "a", code=code)
        first.until("keys were exchanged: this Mac is a there")
        launch.until(r"\ba: (connected|ready)")
        said = b"".join(man.up[RUN_PORTS[2]])
        end = LENGTH_BYTES + length_of(said[:LENGTH_BYTES])
        hello, proof = said[:end], said[end:]
        with macs.office.inside("c"), socket.create_connection((COORDINATOR, RUN_PORTS[2]), WAIT) as again:
            again.sendall(hello)
            receive(again)
            again.sendall(proof)
            with pytest.raises(MismatchError):
                unpacked(receive(again), Granted)
        launch.until(rf"{middle} tried to join without the right code: 2 of 5")
        with macs.office.inside("c"), socket.create_connection((COORDINATOR, FIRST_PORT), WAIT) as again:
            again.sendall(man.up[FIRST_PORT][0])  # the whole encrypted session of a, until now
            while again.recv(65536):
                pass

        second = desk.type("b", "join", COORDINATOR, "--name", "a", code=code.replace("-", " "))
        second.until("keys were exchanged: this Mac is a-2 there")
        late = desk.type("c", "join", COORDINATOR, code=code)
        assert late.ends() == 2, "the code was for two"
        late.until(f"{COORDINATOR} takes no code now")
        assert launch.ends() == 0, launch.said
        heard = b"".join(piece for way in (man.up, man.down) for port in RUN_PORTS[:2] for piece in way[port])
    assert flip.done
    assert len(heard) > 100_000, "the training went through his Mac"
    assert not [word for word in (b"Register", b"Heartbeat", b"Assignment", b"VectorBlock") if word in heard]
    assert set(re.findall(r"(\S+): (?:connected|ready)", launch.said)) == {"a", "a-2"}
    assert sha(desk.folder / "run") == desk.one_machine()
    assert code not in "".join(path.read_text(errors="replace") for path in (desk.folder / "run").rglob("*.json*"))


def test_a_mac_joins_a_running_run_and_the_next_one_without_a_code_until_it_is_forgotten(desk: Desk) -> None:
    """Two Macs are needed throughout, so that the run waits for each of them. Codes end by wrong tries and by time."""
    words = ("--hosts", desk.hosts(2))
    launch = desk.launch(*words, "--invite", steps=3)
    one = desk.type("a", "join", COORDINATOR, "--name", "one", code=code_of(launch))
    one.until("keys were exchanged: this Mac is one there")
    launch.until("one: connected")

    tried = desk.launch(*words, "--invite", steps=3)
    code = code_of(tried)
    thieves = [desk.type(where, "join", COORDINATOR, code="0000-0001") for where in ("b", "b", "b", "c", "c")]
    assert [thief.ends() for thief in thieves] == [2] * 5
    tried.until("the code for other Macs has ended: it was tried 5 times with another code")
    assert tried.ends() == 0
    honest = desk.type("b", "join", COORDINATOR, code=code)
    assert honest.ends() == 2
    honest.until(f"{COORDINATOR} takes no code now: .* --invite gives a new code")
    code_ends_while_it_is_typed(desk)

    again = desk.launch(*words, "--invite", steps=3)
    two = desk.type("b", "join", COORDINATOR, "--name", "two", code=code_of(again))
    two.until("keys were exchanged: this Mac is two there")
    assert again.ends() == 0
    assert launch.ends() == 0
    listed = desk.type("coordinator", "nodes")
    assert listed.ends() == 0
    for name in ("one", "two"):
        assert re.search(rf"(?m)^{name} +20\S+ +20\S+ \S+ +\S.* [0-9a-f]{{8}}  +[\d,]+ +[0-9a-f]{{8}}\s*$", listed.said)
    one.close()
    desk.typed.remove(one)
    desk.type("a", "join").until(f"works for {COORDINATOR}:7550, as one")
    launch = desk.launch(*words, "--invite", "0", "--set", f"output={desk.folder}/next", steps=10_000)
    launch.until("step 1 of")
    assert desk.type("coordinator", "nodes", "forget", "two").ends() == 0
    launch.until("two: .*turned away: its key was taken off the list")
    two.until("refused: its key was taken off the list")
    assert two.ends() == 1
    launch.process.terminate()
    assert launch.ends() == 130


def code_ends_while_it_is_typed(desk: Desk) -> None:
    """Asserts what a person sees at a prompt: another text is asked for again, Ctrl-C leaves, a late code is refused.

    The invitation is that of the run that goes on, with a clock that the test sets.
    """
    said, now = list[str](), [0.0]
    with desk.macs.office.inside():
        arguments = (desk.folder / "run", 1, desk.macs.store, said.append, lambda: now[0])
        invitation = threading.Thread(target=invite_to_running, args=arguments, daemon=True)
        invitation.start()
    late, leaving = (desk.type("c", "join", COORDINATOR, terminal=True) for _ in range(2))
    for typed in (late, leaving):
        typed.until("The code that the other Mac shows: ")
    late.press("12\n")
    late.until("a code has two groups of four digits[^\n]*\n[^\n]*The code that the other Mac shows: ")
    leaving.press(CTRL_C)
    assert leaving.ends() == 130
    assert "Traceback" not in leaving.said
    now[0] = CODE_SECONDS
    invitation.join(WAIT)
    assert "the code for other Macs has ended: its time is over" in said[-1]
    (code,) = re.findall(r"\d{4}-\d{4}", said[1])
    late.press(f"{code}\n")
    assert late.ends() == 2
    assert f"{COORDINATOR} takes no code now" in late.said
