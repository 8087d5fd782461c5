"""A person is told of ends, pauses, lost nodes and best evaluations, a flapping node does not send a hundred."""

from collections.abc import Iterator
from typing import Any

import pytest

from mlxdist.coordinator.notify.notices import HOUR_SECONDS, MOST_IN_AN_HOUR, QUIET_SECONDS, Notice, Notices

STEP = {"event": "train", "step": 40, "total_steps": 100, "loss": 1.0}
LOST = {"event": "node", "name": "mini-1", "state": "dead", "message": "not heard for 15 s; leaves 0-3 go to others"}


def told(*events: dict[str, Any]) -> Iterator[Notice]:
    notices = Notices()
    for event in events:
        if (notice := notices.of(event, 0.0)) is not None:
            yield notice


@pytest.mark.parametrize(
    ("event", "kind", "priority", "words"),
    [
        ({"event": "done", "status": "done", "message": "…", "wall_seconds": 90.0}, "done", "default", "1 min 30 s"),
        ({"event": "done", "status": "interrupted", "message": "…"}, "interrupted", "default", "after step 40 of 100"),
        ({"event": "done", "status": "failed", "message": "no nodes"}, "failed", "high", "step 40 of 100: no nodes"),
        ({"event": "stage", "paused": True, "message": "1 of 2 nodes"}, "paused", "high", "step 40 of 100: 1 of 2"),
        ({**LOST, "state": "connecting", "stays": True}, "node lost", "default", "step 40 of 100: mini-1: not heard"),
        (LOST, "node lost", "default", "mini-1: not heard for 15 s; leaves 0-3 go to others"),
    ],
)
def test_an_event_that_matters_is_told_with_its_step(
    event: dict[str, Any], kind: str, priority: str, words: str
) -> None:
    (notice,) = told(STEP, event)
    assert (notice.kind, notice.priority) == (kind, priority)
    assert words in notice.text


def test_what_needs_no_person_is_not_told() -> None:
    node = {"event": "node", "name": "a", "message": ""}
    ordinary = [{"event": "stage", "message": "training"}, {"event": "stage", "paused": False, "message": "goes on"}]
    states = [{**node, "state": state} for state in ("ready", "busy", "suspect", "connecting", "loading")]
    other = [{"event": "val", "step": 5, "loss": 1.0}, {"event": "checkpoint", "best": False, "path": "x"}]
    assert list(told(STEP, *ordinary, *states, *other, {"event": "promise"}, {})) == []


def test_the_best_evaluation_is_told_with_its_loss_and_once_more_at_the_end() -> None:
    val = {"event": "val", "step": 40, "loss": 1.25, "metrics": {}}
    worse = {"event": "val", "step": 50, "loss": float("nan"), "metrics": {}}
    end = {"event": "done", "status": "done", "message": "…", "wall_seconds": 7200.0, "seconds_lost": 31.4}
    best, done = told(STEP, val, {"event": "checkpoint", "best": True, "path": "…"}, worse, end)
    assert best.text == "validation loss 1.2500 after step 40, the best so far"
    assert (
        done.text
        == "after step 40 of 100; 2 h 00 min; best: validation loss 1.2500 after step 40; 31 s lost to failures"
    )


def test_a_node_that_flaps_is_told_once_in_ten_minutes_with_the_number_left_out() -> None:
    notices = Notices()
    sent = [notice for second in range(100) if (notice := notices.of(LOST, float(second))) is not None]
    assert len(sent) == 1
    other = notices.of({**LOST, "name": "mini-2"}, 100.0)
    assert other is not None
    later = notices.of(LOST, QUIET_SECONDS)
    assert later is not None
    assert later.text.endswith("(99 messages like this since the last one were left out)")


def test_a_hundred_nodes_that_fail_do_not_send_a_hundred_but_the_end_is_always_told() -> None:
    notices = Notices()
    events = [{**LOST, "name": f"mini-{number}"} for number in range(100)]
    assert sum(notices.of(event, 0.0) is not None for event in events) == MOST_IN_AN_HOUR
    assert notices.of({"event": "done", "status": "failed", "message": "no node is left"}, 1.0) is not None
    assert notices.of({**LOST, "name": "new"}, HOUR_SECONDS) is not None
