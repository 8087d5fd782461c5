"""A worker's session: a job starts when all that it needs has arrived, in any order, and nothing else counts."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.node.link.jobs import ComputeAssignment, ComputeCanary, Finish, LoadModel, Partial
from mlxdist.node.link.session import MOST_VECTORS, Session
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MismatchError, WireError
from mlxdist.protocol.leaves import Leaf, Row, pack_leaf
from mlxdist.protocol.messages import Message, SessionId
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import BLOCK_BYTES, BLOCK_ELEMENTS, WINDOW, Vector, block_count, digest
from tests.protocol.example_messages import EXAMPLES, example

SESSION = SessionId("run", 10, "3")
OTHER_SESSIONS = (SessionId("run", 10, "4"), SessionId("run", 11, "3"), SessionId("another", 10, "3"))
SMALL = 5
LARGE = (WINDOW + 3) * BLOCK_ELEMENTS + 1
SPEC: m.RunSpec = example(m.RunSpec)

Sent = tuple[Message, bytes]


def new_session(elements: int = SMALL) -> Session:
    return Session("mini-1", SESSION, elements=elements)


def vector_of(elements: int, version: int) -> Vector:
    return np.full(elements, np.float32(version) + np.float32(0.5))


def leaf_of(index: int) -> Leaf:
    ids = np.arange(index + 2, dtype=np.int32)
    return Leaf(index, (Row(100 + index, ids, np.ones(index + 2, np.uint8)),))


def task_of(
    start: int, stop: int, *, version: int = 1, step: int = 2, attempt: int = 1, **changes: Any
) -> m.Assignment:
    task = m.Assignment(SESSION, "gradient", step, attempt, version, start, stop, 8, "sft", "current", {})
    return msgspec.structs.replace(task, **changes)


def rows_of(task: m.Assignment, index: int, **changes: Any) -> Sent:
    leaf = leaf_of(index)
    message = m.LeafRows(
        session=SESSION,
        step=task.step,
        attempt=task.attempt,
        leaf=index,
        branches=leaf.branches,
        row_ids=tuple(row.row_id for row in leaf.rows),
        lengths=tuple(len(row.ids) for row in leaf.rows),
        row_inputs={"reference": (index + 0.5,)},
    )
    return msgspec.structs.replace(message, **changes), pack_leaf(leaf)


def offer_of(elements: int, *, stream: int = 1, version: int = 1, kind: str = "adapter") -> m.VectorOffer:
    return m.VectorOffer(SESSION, stream, kind, version, elements, slice_stop=elements)


def adapter_messages(elements: int, *, stream: int = 1, version: int = 1, kind: str = "adapter") -> list[Sent]:
    vector = vector_of(elements, version)
    raw = vector.tobytes()
    blocks: list[Sent] = [
        (m.VectorBlock(SESSION, stream, index), raw[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES])
        for index in range(block_count(elements))
    ]
    offer = offer_of(elements, stream=stream, version=version, kind=kind)
    return [(offer, b""), *blocks, (m.VectorEnd(SESSION, stream, digest(vector)), b"")]


def tell(session: Session, *sent: Sent) -> None:
    for message, payload in sent:
        session.handle(message, memoryview(payload))


def said(session: Session) -> list[Message]:
    return [message for message, _ in session.take_outgoing()]


def state_of(session: Session) -> Any:
    """All that a session remembers, comparable."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.tobytes()
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple) or type(value).__name__ == "deque":
            return [plain(one) for one in value]
        if type(value).__name__ == "HASH":
            return value.hexdigest()
        if hasattr(value, "__dict__"):
            return {key: plain(one) for key, one in vars(value).items()}
        if type(value).__name__ in ("Leaf", "Row"):
            return repr(value)
        return value

    return plain(session)


def assert_whole(job: Any, task: m.Assignment, elements: int = SMALL) -> None:
    """The job is this assignment, with its own leaves in order and the adapter that it names."""
    assert isinstance(job, ComputeAssignment)
    assert job.assignment == task
    assert [leaf.index for leaf in job.leaves] == list(range(task.start, task.stop))
    for leaf, numbers in zip(job.leaves, job.row_inputs, strict=True):
        (row,), (expected,) = leaf.rows, leaf_of(leaf.index).rows
        assert (row.row_id, row.ids.tolist(), row.targets.tolist()) == (
            expected.row_id,
            expected.ids.tolist(),
            expected.targets.tolist(),
        )
        assert numbers == {"reference": (leaf.index + 0.5,)}
    assert job.adapter.tobytes() == vector_of(elements, task.adapter_version).tobytes()


# ---- assignments wait for their rows and their adapter


def test_an_assignment_starts_with_its_last_row_or_block_whatever_the_order() -> None:
    task = task_of(2, 5)
    adapter, rows = adapter_messages(SMALL), [rows_of(task, index) for index in (2, 3, 4)]
    for order in permutations(rows):
        for place in range(len(order) + 1):
            for split in range(len(adapter) + 1):
                # The adapter comes in two parts: before the task, and after `place` of the rows.
                session = new_session()
                tell(session, *adapter[:split], (task, b""))
                sequence = [*order[:place], *adapter[split:], *order[place:]]
                for sent in sequence:
                    assert not session.jobs
                    tell(session, sent)
                assert len(session.jobs) == 1
                assert_whole(session.jobs.pop(), task)


@settings(max_examples=200)
@given(st.data())
def test_any_interleaving_of_adapters_and_assignments_does_every_one_once_in_order(data: st.DataObject) -> None:
    # An assignment follows the one before it, its rows follow it in any order, and the adapter's stream is apart.
    tasks = [
        task_of(0, 2, version=1, step=2),
        task_of(3, 4, version=1, step=2, attempt=2),
        task_of(5, 8, version=1, step=2, attempt=3),
    ]
    streams: list[list[Sent]] = [adapter_messages(SMALL)]
    streams.append([(task, b"") for task in tasks])
    rows = {index: [rows_of(task, leaf) for leaf in range(task.start, task.stop)] for index, task in enumerate(tasks)}
    session, done = new_session(), []
    while any(streams):
        choice = data.draw(st.sampled_from([index for index, stream in enumerate(streams) if stream]))
        sent = streams[choice].pop(data.draw(st.integers(0, len(streams[choice]) - 1)) if choice > 1 else 0)
        tell(session, sent)
        if isinstance(sent[0], m.Assignment):
            streams.append(rows[tasks.index(sent[0])])
        done += [session.jobs.popleft() for _ in range(len(session.jobs))]
    for job, task in zip(done, tasks, strict=True):
        assert_whole(job, task)


def test_an_assignment_waits_for_the_adapter_version_that_it_names() -> None:
    session, task = new_session(), task_of(0, 1, version=2)
    tell(session, *adapter_messages(SMALL, stream=1, version=1), (task, b""), rows_of(task, 0))
    assert not session.jobs
    tell(session, *adapter_messages(SMALL, stream=2, version=2))
    assert_whole(session.jobs.pop(), task)


def test_an_adapter_that_is_not_whole_yet_is_not_computed_with() -> None:
    session, task = new_session(LARGE), task_of(0, 1)
    *most, end = adapter_messages(LARGE)
    tell(session, (task, b""), rows_of(task, 0), *most)
    assert not session.jobs
    tell(session, end)
    assert_whole(session.jobs.pop(), task, LARGE)


def test_the_next_step_uses_the_next_adapter_and_the_work_of_the_last_one_keeps_its_own() -> None:
    session = new_session()
    first, second = task_of(0, 1, version=1), task_of(0, 1, version=2, step=3, attempt=2)
    tell(session, *adapter_messages(SMALL, version=1), (first, b""), rows_of(first, 0))
    tell(session, *adapter_messages(SMALL, stream=2, version=2), (second, b""), rows_of(second, 0))
    assert_whole(session.jobs.popleft(), first)
    assert_whole(session.jobs.popleft(), second)


def test_an_older_adapter_that_comes_late_replaces_nothing() -> None:
    session, task = new_session(), task_of(0, 1, version=2)
    late = adapter_messages(SMALL, stream=1, version=1)
    tell(session, *late[:1], *adapter_messages(SMALL, stream=2, version=2), *late[1:])
    tell(session, (task, b""), rows_of(task, 0))
    assert_whole(session.jobs.pop(), task)


def test_an_assignment_for_an_adapter_that_was_replaced_is_refused_and_does_not_wait_for_ever() -> None:
    session, task = new_session(), task_of(0, 1, version=1)
    tell(session, *adapter_messages(SMALL, version=2), (task, b""))
    with pytest.raises(WireError, match="adapter version 1, which was replaced"):
        tell(session, rows_of(task, 0))


def test_an_assignment_waits_for_the_reference_that_was_offered_before_it() -> None:
    session, task = new_session(), task_of(0, 1)
    offer, *rest = adapter_messages(SMALL, stream=9, version=0, kind="reference")
    tell(session, offer, *adapter_messages(SMALL), (task, b""), rows_of(task, 0))
    assert not session.jobs
    tell(session, *rest)
    job = session.jobs.pop()
    assert_whole(job, task)
    assert isinstance(job, ComputeAssignment)
    assert job.reference is not None
    assert job.reference.tobytes() == vector_of(SMALL, 0).tobytes()


def test_without_a_reference_the_base_is_meant() -> None:
    session, task = new_session(), task_of(0, 1)
    tell(session, *adapter_messages(SMALL), (task, b""), rows_of(task, 0))
    job = session.jobs.pop()
    assert isinstance(job, ComputeAssignment)
    assert job.reference is None


# ---- what makes no sense here


@pytest.mark.parametrize(
    "change",
    [
        {"verb": "guess"},
        {"verb": ""},
        {"start": 3, "stop": 3},
        {"start": 4, "stop": 3},
        {"start": -1},
        {"stop": 9},
        {"total": 2},
    ],
    ids=str,
)
def test_an_assignment_that_cannot_be_done_is_refused(change: dict[str, Any]) -> None:
    session = new_session()
    before = state_of(session)
    with pytest.raises(WireError, match="an assignment to"):
        tell(session, (msgspec.structs.replace(task_of(0, 3), **change), b""))
    assert state_of(session) == before


@pytest.mark.parametrize(
    "change", [{"leaf": 5}, {"leaf": 1}, {"leaf": -1}, {"step": 1}, {"step": 3}, {"attempt": 2}], ids=str
)
def test_rows_that_no_assignment_names_are_refused(change: dict[str, Any]) -> None:
    session, task = new_session(), task_of(2, 5)
    tell(session, (task, b""))
    message, payload = rows_of(task, 2)
    with pytest.raises(WireError, match="which no assignment names"):
        tell(session, (msgspec.structs.replace(message, **change), payload))


def test_rows_before_their_assignment_are_refused() -> None:
    with pytest.raises(WireError, match="which no assignment names"):
        tell(new_session(), rows_of(task_of(0, 1), 0))


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": ()},
        {"lengths": (), "row_ids": ()},
        {"lengths": (3,)},
        {"lengths": (5,)},
        {"lengths": (5, -1), "row_ids": (1, 2)},
        {"lengths": (4, 0), "row_ids": (1, 2)},
        {"row_ids": ()},
        {"row_ids": (1, 2)},
        {"branches": 0},
        {"branches": 2},
    ],
    ids=str,
)
def test_rows_whose_sizes_do_not_belong_together_are_refused(change: dict[str, Any]) -> None:
    session, task = new_session(), task_of(2, 5)
    tell(session, (task, b""))
    message, payload = rows_of(task, 2)
    with pytest.raises(WireError, match="leaf 2"):
        tell(session, (msgspec.structs.replace(message, **change), payload))


@pytest.mark.parametrize("elements", [0, 1, SMALL - 1, SMALL + 1, 10**12])
def test_a_vector_of_another_size_is_refused_with_both_sizes_and_reserves_nothing(elements: int) -> None:
    session = new_session()
    before = state_of(session)
    with pytest.raises(MismatchError, match=f"vector of {elements}; this model's adapter has {SMALL}"):
        tell(session, (offer_of(elements), b""))
    assert state_of(session) == before


@pytest.mark.parametrize("change", [{"slice_start": 1}, {"slice_stop": SMALL - 1}, {"slice_stop": 0}], ids=str)
def test_a_slice_of_the_adapter_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match="mini-1"):
        tell(new_session(), (msgspec.structs.replace(offer_of(SMALL), **change), b""))


def test_a_partial_is_not_sent_to_a_worker_and_no_vector_is_offered_twice() -> None:
    session = new_session()
    with pytest.raises(WireError, match="not offered the partial"):
        tell(session, (offer_of(SMALL, kind="partial"), b""))
    tell(session, (offer_of(SMALL), b""))
    with pytest.raises(WireError, match="not offered the adapter vector 1"):
        tell(session, (offer_of(SMALL), b""))


def test_blocks_and_ends_of_what_was_not_offered_are_refused() -> None:
    session = new_session()
    tell(session, *adapter_messages(SMALL))
    for sent in (
        (m.VectorBlock(SESSION, 1, 0), b"1234"),
        (m.VectorEnd(SESSION, 1, ""), b""),
        (m.VectorBlock(SESSION, 7, 0), b""),
    ):
        with pytest.raises(WireError, match="was not offered"):
            tell(session, sent)


@pytest.mark.parametrize("kind", ["adapter", "reference"])
def test_a_damaged_adapter_is_never_computed_with_and_asked_for_again(kind: str) -> None:
    session, task = new_session(), task_of(0, 1)
    if kind == "reference":
        tell(session, *adapter_messages(SMALL, stream=8))
    offer, (block, payload), end = adapter_messages(SMALL, kind=kind)
    damaged = bytes([payload[0] ^ 1]) + payload[1:]
    tell(session, offer, (task, b""), rows_of(task, 0), (block, damaged), end)
    assert said(session)[-1] == m.Received(SESSION, 1, whole=False)
    tell(session, rows_of(task, 0))
    assert not session.jobs
    tell(session, *adapter_messages(SMALL, stream=2, kind=kind))
    job = session.next_job()
    assert_whole(job, task)
    assert isinstance(job, ComputeAssignment)
    assert (job.reference is None) == (kind == "adapter")


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_messages_of_another_session_change_nothing(message: Message) -> None:
    session = new_session()
    task = task_of(0, 2)
    tell(session, *adapter_messages(SMALL)[:1], (task, b""), rows_of(task, 1))
    before = state_of(session)
    for other in OTHER_SESSIONS:
        if "session" in message.__struct_fields__:
            tell(session, (msgspec.structs.replace(message, session=other), b"payload"))
        elif not isinstance(message, m.Reject):
            tell(session, (message, b""))
    assert state_of(session) == before


FOR_A_WORKER = (
    m.Ping,
    m.Welcome,
    m.Canary,
    m.Assignment,
    m.LeafRows,
    m.VectorOffer,
    m.VectorBlock,
    m.VectorEnd,
    m.Credit,
    m.Cancel,
    m.Received,
    m.ModelFiles,
    m.FileBlock,
    m.Stale,
    m.Reject,
    m.Shutdown,
    m.Cancel,
    m.Received,
    m.Register,  # has no session, and so changes nothing
)


@pytest.mark.parametrize(
    "message",
    [one for one in EXAMPLES if not isinstance(one, FOR_A_WORKER)],
    ids=lambda message: type(message).__name__,
)
def test_what_a_worker_is_never_sent_is_refused(message: Message) -> None:
    session = new_session()
    with pytest.raises(WireError, match=f"a worker is not sent {type(message).__name__}"):
        tell(session, (msgspec.structs.replace(message, session=SESSION), b""))


@settings(max_examples=200)
@given(st.data())
def test_any_sequence_of_legal_messages_is_a_job_or_an_error_of_ours(data: st.DataObject) -> None:
    task = task_of(0, 2)
    pool: list[Sent] = [
        (m.Welcome(SESSION, SPEC), b""),
        (m.Canary(SESSION), b""),
        *adapter_messages(SMALL),
        *adapter_messages(SMALL, stream=2, version=2),
        *adapter_messages(SMALL, stream=3, version=0, kind="reference"),
        (task, b""),
        rows_of(task, 0),
        rows_of(task, 1),
        (m.Credit(SESSION, 1, 1), b""),
        (m.Stale(SESSION, "a step"), b""),
        (m.Stale(SESSION, "everything", over=True), b""),
        (m.Shutdown(SESSION, "over"), b""),
        (m.Reject("no"), b""),
    ]
    session = new_session()
    for sent in data.draw(st.lists(st.sampled_from(pool), max_size=25)):
        try:
            tell(session, sent)
        except (WireError, MismatchError):
            break  # the worker ends
        said(session)
    for job in session.jobs:
        if isinstance(job, ComputeAssignment):
            assert_whole(job, task)


# ---- what is asked of the worker is passed on


def test_welcome_canary_shutdown_and_rejection_become_jobs_in_order() -> None:
    session = new_session()
    tell(
        session,
        (m.Welcome(SESSION, SPEC), b""),
        (m.Canary(SESSION), b""),
        (m.Shutdown(SESSION, "done"), b""),
        (m.Reject("no"), b""),
    )
    assert list(session.jobs) == [LoadModel(SPEC), ComputeCanary(), Finish("done", False), Finish("no", True)]
    assert session.spec == SPEC


# ---- credits


def test_the_worker_gives_credit_for_one_window_and_one_more_with_every_block() -> None:
    session = new_session(LARGE)
    offer, *blocks, end = adapter_messages(LARGE)
    tell(session, offer)
    assert said(session) == [m.Credit(SESSION, 1, WINDOW)]
    for index, block in enumerate(blocks):
        tell(session, block)
        assert said(session) == [m.Credit(SESSION, 1, min(WINDOW + index + 1, len(blocks)))]
    tell(session, end)
    assert said(session) == [m.Received(SESSION, 1, whole=True)]


def offered(session: Session, elements: int, span: Span) -> tuple[m.VectorOffer, Vector]:
    vector = np.random.default_rng(span.start).random(elements, dtype=np.float32)
    session.deliver(Partial(task_of(0, 4, version=6, step=7, attempt=8), span, vector))
    (offer,) = said(session)
    assert isinstance(offer, m.VectorOffer)
    return offer, vector


def test_an_offer_names_step_attempt_version_subtree_and_slice() -> None:
    session = new_session()
    offer, _ = offered(session, SMALL, Span(2, 4))
    assert offer == m.VectorOffer(SESSION, 1, "partial", 6, SMALL, 7, 8, 2, 4, 0, SMALL)
    assert offered(session, SMALL, Span(0, 1))[0].stream == 2


@settings(max_examples=25)
@given(st.lists(st.integers(-1, 20), max_size=8))
def test_a_partial_goes_as_far_as_its_credits_and_ends_with_its_hash(credits: Sequence[int]) -> None:
    session = new_session(LARGE)
    offer, vector = offered(session, LARGE, Span(0, 1))
    assert session.uploading
    arrived: list[bytes] = []
    for upto in (*credits, 10**6):
        tell(session, (m.Credit(SESSION, offer.stream, upto), b""))
        for message, payload in session.take_outgoing():
            if isinstance(message, m.VectorBlock):
                assert message == m.VectorBlock(SESSION, offer.stream, len(arrived))
                arrived.append(bytes(payload))
            else:
                assert message == m.VectorEnd(SESSION, offer.stream, digest(vector))
                assert len(arrived) == block_count(LARGE)
        assert len(arrived) <= max(0, *credits, upto)
    assert b"".join(arrived) == vector.tobytes()
    assert not session.uploading
    assert said(session) == []


def test_credits_for_what_is_not_being_sent_change_nothing() -> None:
    session = new_session()
    offered(session, SMALL, Span(0, 1))
    tell(session, (m.Credit(SESSION, 5, 10), b""), (m.Credit(SESSION, 0, 10), b""))
    assert said(session) == []


def test_what_was_said_leaves_before_the_blocks_that_have_credit() -> None:
    session = new_session()
    offer, _ = offered(session, SMALL, Span(0, 1))
    tell(session, (m.Credit(SESSION, offer.stream, 1), b""))
    session.say(m.Progress(SESSION, "on my way"))
    assert [type(message) for message in said(session)] == [m.Progress, m.VectorBlock, m.VectorEnd]


def test_a_stale_vector_is_dropped_alone_and_all_of_them_when_the_session_is_over() -> None:
    session = new_session()
    first, second = offered(session, SMALL, Span(0, 1))[0], offered(session, SMALL, Span(1, 2))[0]
    tell(
        session,
        (m.Stale(SESSION, "a leaf of another step"), b""),
        (m.Stale(SESSION, "this one", stream=first.stream), b""),
    )
    for offer in (first, second):
        tell(session, (m.Credit(SESSION, offer.stream, 1), b""))
    assert [message for message in said(session) if isinstance(message, m.VectorBlock)] == [
        m.VectorBlock(SESSION, 2, 0)
    ]
    offered(session, SMALL, Span(2, 3))
    tell(session, (m.Stale(SESSION, "this session", over=True), b""))
    assert not session.uploading


# ---- what a worker keeps of a coordinator is bounded


def test_more_vectors_at_once_than_any_coordinator_of_ours_sends_are_refused() -> None:
    session = new_session()
    for stream in range(1, MOST_VECTORS + 1):
        tell(session, (offer_of(SMALL, stream=stream), b""))
    with pytest.raises(WireError, match=f"more than {MOST_VECTORS} vectors"):
        tell(session, (offer_of(SMALL, stream=MOST_VECTORS + 1), b""))


@pytest.mark.parametrize("message", [m.Canary(SESSION), m.Shutdown(SESSION, "again"), task_of(0, 2)])
def test_jobs_without_end_are_refused(message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxdist.node.link.session.MOST_JOBS", 50)
    session = new_session()
    for _ in range(50):
        session.handle(message, memoryview(b""))
    with pytest.raises(WireError, match="more than 50 jobs"):
        session.handle(message, memoryview(b""))


def test_rows_without_end_are_refused_and_rows_that_are_computed_or_cancelled_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxdist.node.link.session.MOST_ROW_BYTES", 200)
    session = new_session()
    for attempt in range(1, 100):
        task = task_of(0, 1, attempt=attempt)
        tell(session, (task, b""), rows_of(task, 0))
        tell(session, (m.Cancel(SESSION, attempt), b""))
    assert session._row_bytes == 0
    task = task_of(0, 8)
    tell(session, (task, b""))
    with pytest.raises(WireError, match="MiB of rows"):
        tell(session, *(rows_of(task, leaf) for leaf in range(8)))
