"""The state tables: closed, without dead ends, and moved only where they say so."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from mlxdist.protocol.states import (
    NODE_TRANSITIONS,
    STEP_TRANSITIONS,
    NodeEvent,
    NodeState,
    StepEvent,
    StepState,
    advance,
)

TABLES = [
    pytest.param(NODE_TRANSITIONS, NodeState, NodeEvent, NodeState.CONNECTING, id="node"),
    pytest.param(STEP_TRANSITIONS, StepState, StepEvent, StepState.PLANNED, id="step"),
]
Table = Mapping[tuple[Enum, Enum], Enum]
ALIVE = set(NodeState) - {NodeState.DEAD, NodeState.LEFT}


def reachable(table: Table, start: Enum) -> set[Enum]:
    found, waiting = {start}, [start]
    while waiting:
        here = waiting.pop()
        for (state, _), there in table.items():
            if state is here and there not in found:
                found.add(there)
                waiting.append(there)
    return found


@pytest.mark.parametrize(("table", "states", "events", "start"), TABLES)
def test_a_table_speaks_of_its_own_states_and_events_only(table: Table, states: Any, events: Any, start: Enum) -> None:
    assert {type(state) for state, _ in table} == {states}
    assert {type(event) for _, event in table} == {events}
    assert {type(state) for state in table.values()} == {states}


@pytest.mark.parametrize(("table", "states", "events", "start"), TABLES)
def test_every_state_is_reached_and_every_event_has_a_place(
    table: Table, states: Any, events: Any, start: Enum
) -> None:
    assert reachable(table, start) == set(states)
    assert {event for _, event in table} == set(events)


@pytest.mark.parametrize(("table", "states", "events", "start"), TABLES)
def test_only_what_the_table_has_can_happen_and_refusals_name_both(
    table: Table, states: Any, events: Any, start: Enum
) -> None:
    before = dict(table)
    for state in states:
        for event in events:
            if (state, event) in before:
                assert advance(table, state, event) is before[state, event]
            else:
                with pytest.raises(ValueError, match=f"{event.value!r} cannot happen while {state.value!r}"):
                    advance(table, state, event)
    assert dict(table) == before


def test_nothing_leaves_left_and_only_a_goodbye_leaves_dead() -> None:
    assert {(event, to) for (state, event), to in NODE_TRANSITIONS.items() if state is NodeState.LEFT} == {
        (NodeEvent.BYE, NodeState.LEFT)
    }
    assert {(event, to) for (state, event), to in NODE_TRANSITIONS.items() if state is NodeState.DEAD} == {
        (NodeEvent.BYE, NodeState.LEFT)
    }


def test_any_node_alive_can_be_lost_or_lose_its_worker_and_any_node_hears_the_goodbye() -> None:
    for state in ALIVE:
        assert NODE_TRANSITIONS[state, NodeEvent.LOST] is NodeState.DEAD
        assert NODE_TRANSITIONS[state, NodeEvent.WORKER_EXIT] is NodeState.CONNECTING
    assert {NODE_TRANSITIONS[state, NodeEvent.BYE] for state in NodeState} == {NodeState.LEFT}


def test_a_node_works_only_after_its_canary() -> None:
    without = {key: to for key, to in NODE_TRANSITIONS.items() if key[1] is not NodeEvent.CANARY_ANSWERED}
    assert reachable(without, NodeState.CONNECTING) & {NodeState.READY, NodeState.BUSY, NodeState.SUSPECT} == set()  # type: ignore[arg-type]


def test_every_node_alive_can_get_ready_again() -> None:
    for state in ALIVE:
        assert NodeState.READY in reachable(NODE_TRANSITIONS, state)  # type: ignore[arg-type]


def test_a_step_is_summed_with_a_first_round_of_scores_or_without_and_never_goes_back() -> None:
    paths: set[tuple[StepEvent, ...]] = set()

    def walk(state: StepState, path: tuple[StepEvent, ...]) -> None:
        assert len(path) <= len(StepEvent), "a step goes round in circles"
        if state is StepState.SUMMED:
            paths.add(path)
        for (here, event), there in STEP_TRANSITIONS.items():
            if here is state and event is not StepEvent.AUDIT_BEGUN:
                walk(there, (*path, event))

    walk(StepState.PLANNED, ())
    plain = (StepEvent.GRADIENT_BEGUN, StepEvent.PARTIALS_IN)
    assert paths == {plain, (StepEvent.SCORE_BEGUN, StepEvent.SCORES_IN, *plain)}


def test_only_a_whole_sum_is_audited_and_it_is_whole_afterwards() -> None:
    audits = {key: there for key, there in STEP_TRANSITIONS.items() if StepState.AUDITING in (key[0], there)}
    assert audits == {
        (StepState.SUMMED, StepEvent.AUDIT_BEGUN): StepState.AUDITING,
        (StepState.AUDITING, StepEvent.AUDIT_IN): StepState.SUMMED,
    }
