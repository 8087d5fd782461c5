"""Messages of all types with mutated values, in any order: no error but ours, and the sums stay right.

The long form is scripts/fuzz.py.
"""

from collections.abc import Callable

import pytest

from mlxdist.coordinator.cluster.downloads import Downloads
from mlxdist.node.link.outgoing import Outgoing
from tests.simulation.fuzzing import SIDES, fuzz_decoder

SEEDS = {"coordinator": range(1, 4), "node": range(1, 11)}


def test_whatever_arrives_is_a_message_or_refused() -> None:
    found = fuzz_decoder(20_000, seed=1)
    assert found["refused"] > found["decoded"] > 0


@pytest.mark.parametrize("side", SIDES)
def test_whatever_a_peer_says_finds_no_error_of_ours_and_changes_no_number(side: str) -> None:
    found = SIDES[side](SEEDS[side])
    assert len(found["by_type"]) > 20


def credit_of_an_unknown_vector(patch: pytest.MonkeyPatch) -> None:
    def credit(self: Downloads, name: str, stream: int, upto: int) -> None:
        self._under_way[name, stream].credit(upto)

    patch.setattr(Downloads, "credit", credit)


def lines_are_not_escaped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("mlxdist.coordinator.cluster.membership.quoted", lambda text, limit=0: text)


def credit_of_an_unknown_partial(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outgoing, "credit", lambda self, stream, upto: self.vectors[stream].credit(upto))


@pytest.mark.parametrize(
    ("side", "plant"),
    [
        ("coordinator", credit_of_an_unknown_vector),
        ("coordinator", lines_are_not_escaped),
        ("node", credit_of_an_unknown_partial),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_fuzzing_finds_a_planted_bug(
    side: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        SIDES[side](range(1, 30))
