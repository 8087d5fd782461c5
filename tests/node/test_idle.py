"""A Mac that works only while no one uses it."""

from collections.abc import Iterator

import pytest

from mlxdist.macos import Use
from mlxdist.node.idle import is_free, is_used, used_again, wait_until_free
from mlxdist.protocol.errors import UserError

FREE, TOUCHED, UNPLUGGED = Use(600.0, False), Use(0.1, False), Use(600.0, True)
UNKNOWN = Use(None, None)


def test_a_mac_is_free_after_five_minutes_on_its_cable() -> None:
    assert is_free(Use(300.0, False))
    assert is_free(Use(300.0, None)), "a Mac without a battery may say nothing of one"
    assert not is_free(Use(299.0, False))
    assert not is_free(UNPLUGGED)


def test_a_touch_or_an_unplugged_cable_ends_the_work_and_an_unknown_answer_does_not() -> None:
    assert is_used(TOUCHED)
    assert is_used(UNPLUGGED)
    assert not is_used(FREE)
    assert not is_used(UNKNOWN)


def test_a_mac_that_does_not_say_when_it_was_used_is_told_so() -> None:
    with pytest.raises(UserError, match="leave --while-idle out"):
        wait_until_free(lambda: UNKNOWN)


def answers(*uses: Use) -> Iterator[Use]:
    yield from uses
    while True:
        yield uses[-1]


def test_the_work_begins_when_the_mac_is_free_and_ends_with_the_first_touch() -> None:
    uses = answers(TOUCHED, UNPLUGGED, FREE, FREE, UNKNOWN, TOUCHED)
    wait_until_free(lambda: next(uses), seconds=0.0)
    with used_again(lambda: next(uses), seconds=0.0) as used:
        assert used.wait(60)


def test_no_touch_while_it_works_changes_nothing() -> None:
    with used_again(lambda: FREE, seconds=0.0) as used:
        pass
    assert not used.is_set()
