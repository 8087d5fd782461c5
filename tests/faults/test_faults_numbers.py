"""Wrong numbers on one node, on all nodes, or on the wire: none of them reaches the adapter."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.state import load_state
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.messages import Message
from mlxdist.protocol.vectors import digest
from tests.faults.fault_nodes import FaultNodes, a
from tests.faults.fault_proxy import DOWN, UP, Seen
from tests.faults.fault_runs import Undisturbed, config_of, events, sha, told, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEP = 3  # of the fault: by then all three nodes work


@pytest.mark.parametrize(("method", "verb"), [("dpo", "gradient"), ("kto", "score")])
def test_a_nan_on_one_bad_node_is_computed_elsewhere(
    method: str, verb: str, nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    # The memory of the node is bad: its adapter has a NaN that arrived with the right hash.
    folder = tmp_path / "run"
    expected = undisturbed(method)
    nodes.ready("a", "b", "c")

    def spoil(name: str, seen: Seen) -> None:
        vector = np.frombuffer(seen.payload, np.float32).copy()
        vector[0] = np.nan
        seen.payload = vector.tobytes()
        nodes.proxies[name].when(
            DOWN, a(m.VectorEnd, stream=seen.message.stream), lambda end: set_digest(end, digest(vector))
        )

    caught = nodes.catch_adapter(STEP, spoil)
    assert train(config_of(model, folder, method), nodes.port) == 0
    event = next(event for event in events(folder, "node") if "NaN or Inf" in str(event["message"]))
    assert (event["name"], event["action"]) == (caught.name, "computed on another node")
    found = re.fullmatch(rf"NaN or Inf in leaf (\d) of step {STEP + 1} \(rows [\d, ]+\)", str(event["cause"]))
    assert found, event
    alone = a(m.Assignment, verb=verb, step=STEP + 1, start=int(found[1]), stop=int(found[1]) + 1)
    again = {name for name, proxy in nodes.proxies.items() if any(map(alone, proxy.saw(DOWN, m.Assignment)))}
    assert again - {caught.name}, "no other node was asked"
    assert sha(folder) == expected


@pytest.mark.parametrize("method", ["kto", "sft"])
def test_a_nan_on_all_nodes_stops_the_run_before_the_step_and_names_the_rows(
    method: str, nodes: FaultNodes, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    nodes.ready("a", "b")
    config = config_of(model, folder, method)
    wild = replace(config, train=replace(config.train, learning_rate=1e30))  # step 1 is taken, then all overflows
    with pytest.raises(NonFiniteError) as caught:
        train(wild, nodes.port)
    sentence = {
        "kto": r"NaN or Inf in the KL pairs of leaf \d of step 2 \(rows [\d, ]+\): no step was taken",
        "sft": r"NaN or Inf in leaf \d of step 2 \(rows [\d, ]+\), on [ab] and on [ab]: no step was taken",
    }
    assert re.match(sentence[method], str(caught.value)), str(caught.value)
    assert " NaN or Inf in leaf " in told(folder)  # it had been computed a second time before
    assert [event["step"] for event in events(folder, "train")] == [1]
    state, _ = load_state(RunFolder(folder))
    assert state.step == 1
    assert np.isfinite(state.adapter).all()


def test_a_partial_that_is_damaged_on_the_way_is_sent_again(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b", "c")
    caught = nodes.catch(UP, lambda name, message: is_partial(nodes, name, message), lambda _, seen: flip(seen))
    assert train(config_of(model, folder, "kto"), nodes.port) == 0
    assert caught.done.is_set()
    (line,) = [line for line in told(folder).splitlines() if " arrived damaged" in line]
    assert re.match(rf"{caught.name} busy the partial over \[\d, \d\) arrived damaged; sent again", line)
    assert [end.whole for end in nodes.proxies[caught.name].saw(DOWN, m.Received)].count(False) == 1
    assert sha(folder) == expected


def test_an_adapter_that_is_damaged_on_the_way_is_sent_again(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b", "c")
    caught = nodes.catch_adapter(STEP, lambda _, seen: flip(seen))
    assert train(config_of(model, folder, "kto"), nodes.port) == 0
    proxy = nodes.proxies[caught.name]
    assert [end.whole for end in proxy.saw(UP, m.Received)].count(False) == 1
    assert [offer.adapter_version for offer in proxy.saw(DOWN, m.VectorOffer)].count(STEP) == 2
    assert f"{caught.name} busy an adapter arrived damaged there; sent again" in told(folder)
    assert sha(folder) == expected


def test_a_worker_whose_partials_are_always_damaged_is_restarted(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b", "c")

    def always(name: str, seen: Seen) -> None:
        flip(seen)
        nodes.proxies[name].when(UP, a(m.VectorBlock), flip, once=False)

    caught = nodes.catch(UP, lambda name, message: is_partial(nodes, name, message), always)
    assert train(config_of(model, folder, "kto"), nodes.port) == 0
    damage = "it sent what makes no sense: 3 vectors in a row arrived damaged"
    cause = f"{caught.name} connecting {damage}; its worker is restarted"
    assert any(line.startswith(cause) for line in told(folder).splitlines()), told(folder)
    assert sha(folder) == expected


def is_partial(nodes: FaultNodes, name: str, message: Message) -> bool:
    """True for a block of a partial, of a step in which all nodes work."""
    offer = nodes.offer(name, UP, message) if isinstance(message, m.VectorBlock) else None
    return offer is not None and offer.step >= STEP


def flip(seen: Seen) -> None:
    """Flips one bit of one number."""
    payload = bytearray(seen.payload)
    payload[len(payload) // 2] ^= 1
    seen.payload = bytes(payload)


def set_digest(end: Seen, hashed: str) -> None:
    """Sets the hash that the sender would give."""
    end.message = msgspec.structs.replace(end.message, digest=hashed)
