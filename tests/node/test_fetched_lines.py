"""The supervisor knows how much of the model is here from lines of its worker, which no person is shown."""

from types import SimpleNamespace

import pytest

from mlxdist.node.process import HAS, HAS_ALL, Worker


def new_worker() -> Worker:
    return Worker(SimpleNamespace(pid=1))  # type: ignore[arg-type]


def test_a_line_says_how_much_of_the_model_is_here_and_is_not_passed_on() -> None:
    worker = new_worker()
    worker.printed(f"{HAS}450 of 1200")
    assert worker.fetched == (450, 1200)
    worker.printed("a line of its own")
    assert worker.take_lines() == ["a line of its own"]


@pytest.mark.parametrize("last", [HAS_ALL, f"{HAS}1200 of 1200"])
def test_a_model_that_is_here_is_not_on_its_way(last: str) -> None:
    worker = new_worker()
    for line in (f"{HAS}450 of 1200", last):
        worker.printed(line)
    assert worker.fetched is None


@pytest.mark.parametrize("line", [f"{HAS}-1 of 5", f"{HAS}x", f"{HAS}1 of 2 and more", f"{HAS}{10**20} of {10**21}"])
def test_a_line_that_only_looks_like_it_is_passed_on(line: str) -> None:
    worker = new_worker()
    worker.printed(line)
    assert worker.fetched is None
    assert worker.take_lines() == [line]
