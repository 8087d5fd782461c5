"""Bugs of the kinds that clusters have, each planted into the coordinator or the session, and the law that sees it.

A machine that finds nothing proves something only when it finds these.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mlxdist.coordinator.cluster import nonfinite, placement
from mlxdist.coordinator.cluster.bit_classes import BitClasses
from mlxdist.coordinator.cluster.buffers import BufferPool
from mlxdist.coordinator.cluster.membership import Membership
from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.cluster.uploads import Uploads
from mlxdist.coordinator.schedule.assignments import Assignment
from mlxdist.coordinator.schedule.rounds import Round
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import StaleError, WireError
from mlxdist.protocol.messages import VectorOffer
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import IncomingVector, Vector

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Bug:
    """A bug: what is wrong, how it is planted, and a part of what the machine says then."""

    what: str
    plant: Plant
    seen: str


def stale_attempts_count(patch: pytest.MonkeyPatch) -> None:
    """An answer of a lost attempt counts where another one works on the same leaves."""
    right = Round.check

    def check(self: Round, name: str, step: int, attempt: int, adapter_version: int, span: Span) -> Assignment:
        try:
            return right(self, name, step, attempt, adapter_version, span)
        except StaleError:
            for one in self.assignments.values():
                if one.span.start <= span.start < span.stop <= one.span.stop:
                    return one
            raise

    patch.setattr(Round, "check", check)


def stale_steps_count(patch: pytest.MonkeyPatch) -> None:
    """Step, attempt and adapter version of an answer are not looked at."""

    def check(self: Round, name: str, step: int, attempt: int, adapter_version: int, span: Span) -> Assignment:
        for one in self.of(name):
            if one.span.start <= span.start < span.stop <= one.span.stop:
                return one
        raise StaleError("not this node's work")

    patch.setattr(Round, "check", check)


def lost_leaves_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The leaves of a lost node are not given to others."""

    def drop(self: Round, attempt: Assignment) -> list[Span]:
        self.assignments.pop(attempt.attempt, None)
        return []

    patch.setattr(Round, "drop", drop)


def copies_are_given_twice(patch: pytest.MonkeyPatch) -> None:
    """A lost attempt's leaves are pending although a copy is still at work on them."""

    def drop(self: Round, attempt: Assignment) -> list[Span]:
        self.assignments.pop(attempt.attempt, None)
        left = sorted(attempt.missing)
        self.pending = sorted([*self.pending, *left])
        return left

    patch.setattr(Round, "drop", drop)


def both_of_a_race_count(patch: pytest.MonkeyPatch) -> None:
    """The second result of a subtree counts like the first."""

    def came(self: Round, piece: Span) -> list[Assignment]:
        for one in list(self.assignments.values()):
            if piece in one.missing:
                one.missing.discard(piece)
                if not one.missing:
                    del self.assignments[one.attempt]
                break
        return []

    patch.setattr(Round, "_came", came)


def damage_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    """The hash of a vector is not looked at, on either side."""
    patch.setattr(IncomingVector, "end", lambda self, digest: None)


def summed_buffers_are_kept(patch: pytest.MonkeyPatch) -> None:
    """A buffer that was summed away still counts as held."""
    patch.setattr(BufferPool, "give_back", lambda self, buffer: self._free.append(buffer))


def losers_of_a_race_are_blamed(patch: pytest.MonkeyPatch) -> None:
    """The rest of a vector that is not needed any more is taken for nonsense."""

    def find(self: Uploads, name: str, stream: int) -> tuple[VectorOffer, IncomingVector]:
        if (name, stream) not in self._arriving:
            raise WireError(f"vector {stream} of {name} was not let in")
        return self._arriving[name, stream]

    patch.setattr(Uploads, "_find", find)


def old_incarnations_count(patch: pytest.MonkeyPatch) -> None:
    """A message belongs to a node whatever coordinator it was meant for."""

    def by_session(self: Membership, session: object) -> Node | None:
        if not isinstance(session, m.SessionId):
            return None
        return next((one for one in self.nodes.values() if one.session.number == session.number and not one.gone), None)

    patch.setattr(Membership, "by_session", by_session)


def one_nan_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A NaN ends the run without being computed elsewhere."""
    patch.setattr(nonfinite, "believed", lambda *_: True)


def wrong_partials_are_summed(patch: pytest.MonkeyPatch) -> None:
    """A partial that arrived as it was sent is summed, whatever it holds."""
    right = Uploads.end

    def end(self: Uploads, name: str, stream: int, digest: str) -> tuple[VectorOffer, Vector, bool]:
        offer, vector, _ = right(self, name, stream, digest)
        return offer, vector, True

    patch.setattr(Uploads, "end", end)


def spares_of_another_class_are_used(patch: pytest.MonkeyPatch) -> None:
    """The canary of a late node is not looked at."""
    patch.setattr(BitClasses, "_is_other", lambda self, node: False)


def spares_work_beside_the_others(patch: pytest.MonkeyPatch) -> None:
    """A node of another class is used at once, and the promise taken back."""
    patch.setattr(BitClasses, "_is_spare", lambda self, node: False)


def the_suspicious_are_not_alone(patch: pytest.MonkeyPatch) -> None:
    """A leaf at which workers die is given beside other leaves, again and again."""
    patch.setattr(placement, "suspicious", lambda round_: [])


def row_numbers_of_the_last_one_count(patch: pytest.MonkeyPatch) -> None:
    """Row outputs are kept under the leaf before."""
    right = Round.answer

    def answer(self: Round, attempt: Assignment, leaf: int, numbers: Vector) -> list[Assignment]:
        return right(self, attempt, max(leaf - 1, attempt.span.start), numbers)

    patch.setattr(Round, "answer", answer)


BUGS = {
    plant.__name__.replace("_", " "): Bug((plant.__doc__ or "").strip(), plant, seen)
    for plant, seen in (
        (stale_attempts_count, "changed something"),
        (lost_leaves_are_forgotten, "number of places"),
        (both_of_a_race_count, "already summed|number of places"),
        (damage_is_not_seen, "has other values|number of places"),
        (stale_steps_count, "changed something"),
        (copies_are_given_twice, "number of places"),
        (summed_buffers_are_kept, "count as held"),
        (losers_of_a_race_are_blamed, "changed something|makes no sense"),
        (old_incarnations_count, "changed something|not everybody works again|did not end"),
        (one_nan_is_enough, "no two workers found NaN"),
        (wrong_partials_are_summed, "has other values"),
        (spares_of_another_class_are_used, "computes in a run of the same bits"),
        (spares_work_beside_the_others, "nodes of the class can work"),
        (the_suspicious_are_not_alone, "did not end"),
        (row_numbers_of_the_last_one_count, "did not end|makes no sense"),
    )
}
