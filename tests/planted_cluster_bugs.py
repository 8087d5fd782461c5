"""Bugs of the kinds that clusters have, each planted into the coordinator or the session, and the law that sees it.

A machine that finds nothing proves something only when it finds these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from mlxdist.coordinator import sharing, work
from mlxdist.coordinator.membership import Membership
from mlxdist.coordinator.roster import Node
from mlxdist.coordinator.rounds import Attempt, Round
from mlxdist.coordinator.uploads import Uploads
from mlxdist.coordinator.work import Work
from mlxdist.node.session import Session
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import StaleError, WireError
from mlxdist.protocol.messages import VectorOffer
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import IncomingVector, Vector

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Bug:
    """What is wrong, how it is planted, and a part of what the machine says then."""

    what: str
    plant: Plant
    seen: str


def stale_attempts_count(patch: pytest.MonkeyPatch) -> None:
    """An answer of a lost attempt counts where another one works on the same leaves."""
    right = Round.check

    def check(self: Round, name: str, step: int, attempt: int, adapter_version: int, span: Span) -> Attempt:
        try:
            return right(self, name, step, attempt, adapter_version, span)
        except StaleError:
            for one in self.attempts.values():
                if one.run.start <= span.start < span.stop <= one.run.stop:
                    return one
            raise

    patch.setattr(Round, "check", check)


def stale_steps_count(patch: pytest.MonkeyPatch) -> None:
    """Step, attempt and adapter version of an answer are not looked at."""

    def check(self: Round, name: str, step: int, attempt: int, adapter_version: int, span: Span) -> Attempt:
        for one in self.of(name):
            if one.run.start <= span.start < span.stop <= one.run.stop:
                return one
        raise StaleError("not this node's work")

    patch.setattr(Round, "check", check)


def lost_leaves_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What a lost node had is not given to anybody."""

    def drop(self: Round, attempt: Attempt) -> list[Span]:
        self.attempts.pop(attempt.number, None)
        return []

    patch.setattr(Round, "drop", drop)


def copies_are_given_twice(patch: pytest.MonkeyPatch) -> None:
    """A lost attempt's leaves are pending although a copy is still at work on them."""

    def drop(self: Round, attempt: Attempt) -> list[Span]:
        self.attempts.pop(attempt.number, None)
        left = sorted(attempt.missing)
        self.pending = sorted([*self.pending, *left])
        return left

    patch.setattr(Round, "drop", drop)


def both_of_a_race_count(patch: pytest.MonkeyPatch) -> None:
    """The second result of a subtree counts like the first."""

    def came(self: Round, piece: Span) -> list[Attempt]:
        for one in list(self.attempts.values()):
            if piece in one.missing:
                one.missing.discard(piece)
                if not one.missing:
                    del self.attempts[one.number]
                break
        return []

    patch.setattr(Round, "_came", came)


def damage_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    """The hash of a vector is not looked at, on either side."""
    patch.setattr(IncomingVector, "end", lambda self, digest: None)


def half_partials_keep_their_buffers(patch: pytest.MonkeyPatch) -> None:
    """The half partial of a lost node is never thrown away."""
    patch.setattr(Uploads, "drop", lambda self, name: None)


def summed_buffers_are_kept(patch: pytest.MonkeyPatch) -> None:
    """What was summed away still counts as held."""
    patch.setattr(Uploads, "release", lambda self, buffer: self._free.append(buffer))


def everything_is_let_in(patch: pytest.MonkeyPatch) -> None:
    """Memory has no bound."""
    right = Uploads.admit

    def admit(self: Uploads, lowest_missing: int) -> Iterator[tuple[str, int, int]]:
        self.limit = 1000
        return right(self, lowest_missing)

    patch.setattr(Uploads, "admit", admit)


def losers_of_a_race_are_liars(patch: pytest.MonkeyPatch) -> None:
    """The rest of a vector that nobody needs any more is taken for nonsense."""

    def find(self: Uploads, name: str, stream: int) -> tuple[VectorOffer, IncomingVector]:
        if (name, stream) not in self._arriving:
            raise WireError(f"vector {stream} of {name} was not let in")
        return self._arriving[name, stream]

    patch.setattr(Uploads, "_find", find)


def silence_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """Who does not beat is waited for."""
    patch.setattr(Membership, "tick", lambda self, now: None)


def idleness_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """A worker that does nothing is waited for while its supervisor beats."""
    patch.setattr(Work, "stuck", lambda self, node, now: None)


def old_incarnations_count(patch: pytest.MonkeyPatch) -> None:
    """A message belongs to a node whatever coordinator it was meant for."""

    def by_life(self: Membership, life: object) -> Node | None:
        if not isinstance(life, m.Life):
            return None
        return next((one for one in self.nodes.values() if one.life.session == life.session and not one.gone), None)

    patch.setattr(Membership, "by_life", by_life)


def a_new_worker_is_taken_for_the_old_one(patch: pytest.MonkeyPatch) -> None:
    """What the last worker was sent is not sent to the next one."""
    right = Node.forget_worker

    def forget(self: Node) -> None:
        version = self.adapter_version
        right(self)
        self.adapter_version = version

    patch.setattr(Node, "forget_worker", forget)


def one_nan_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A NaN ends the run without being computed elsewhere."""
    patch.setattr(work, "FATAL_NONFINITE", 1)


def one_death_is_enough(patch: pytest.MonkeyPatch) -> None:
    """Any death ends the run, where its leaf was alone."""
    patch.setattr(work, "FATAL_DEATHS", 1)
    patch.setattr(sharing, "ALONE_AFTER", 0)


def the_suspicious_are_not_alone(patch: pytest.MonkeyPatch) -> None:
    """A leaf at which workers die is given beside other leaves, again and again."""
    patch.setattr(sharing, "suspicious", lambda round_: [])


def a_damaged_reference_is_the_base(patch: pytest.MonkeyPatch) -> None:
    """Work begins although the reference has to come again."""
    right = Session._start_ready

    def start(self: Session) -> None:
        self._reference_damaged = False
        right(self)

    patch.setattr(Session, "_start_ready", start)


def row_numbers_of_the_last_one_count(patch: pytest.MonkeyPatch) -> None:
    """Row numbers are kept under the leaf before."""
    right = Round.answer

    def answer(self: Round, attempt: Attempt, leaf: int, numbers: Vector) -> list[Attempt]:
        return right(self, attempt, max(leaf - 1, attempt.run.start), numbers)

    patch.setattr(Round, "answer", answer)


BUGS = {
    plant.__name__.replace("_", " "): Bug((plant.__doc__ or "").strip(), plant, seen)
    for plant, seen in (
        (stale_attempts_count, "changed something"),
        (lost_leaves_are_forgotten, "number of places"),
        (both_of_a_race_count, "already summed|number of places"),
        (damage_is_not_seen, "has other values"),
        (stale_steps_count, "changed something"),
        (copies_are_given_twice, "number of places"),
        (half_partials_keep_their_buffers, "held"),
        (summed_buffers_are_kept, "count as held"),
        (losers_of_a_race_are_liars, "makes no sense"),
        (silence_is_not_noticed, "did not end"),
        (idleness_is_not_noticed, "did not end"),
        (old_incarnations_count, "changed something"),
        (a_new_worker_is_taken_for_the_old_one, "did not end"),
        (one_nan_is_enough, "no leaf gave NaN twice"),
        (one_death_is_enough, "not so many died"),
        (the_suspicious_are_not_alone, "did not end"),
        (a_damaged_reference_is_the_base, "has other values"),
        (row_numbers_of_the_last_one_count, "did not end"),
    )
}
