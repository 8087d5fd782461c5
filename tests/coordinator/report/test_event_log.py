"""The event file read while it grows, is torn, and is replaced."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.report.event_log import EventLog


def line(number: int, text: str = "x") -> bytes:
    return f'{{"event": "stage", "message": "{text}", "number": {number}}}\n'.encode()


def numbers(log: EventLog) -> list[int]:
    return [one.event["number"] for one in log.news()[1]]


@given(cuts=st.lists(st.integers(0, 600), max_size=12))
def test_every_event_is_read_once_wherever_the_writes_were_cut(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    whole = b"".join(line(number, "ä" * number) for number in range(10))
    log, read, before = EventLog(path), list[int](), 0
    for cut in [*sorted(min(cut, len(whole)) for cut in cuts), len(whole)]:
        with path.open("ab") as stream:
            stream.write(whole[before:cut])
        before = cut
        read += numbers(log)
    assert read == list(range(10))


def test_a_file_that_is_not_there_yet_has_no_events_and_is_read_when_it_comes(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "metrics.jsonl")
    assert log.news() == (False, [])
    log.path.write_bytes(line(1))
    assert numbers(log) == [1]


def test_a_replaced_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2))
    log = EventLog(path)
    log.news()
    aside = tmp_path / "aside"
    aside.write_bytes(line(1) + line(3) + line(4))
    aside.replace(path)
    replaced, lines = log.news()
    assert replaced
    assert [one.event["number"] for one in lines] == [1, 3, 4]
    assert log.news() == (False, [])


@pytest.mark.parametrize("content", [line(7), line(7) * 5], ids=["shorter", "longer"])
def test_a_new_file_under_the_same_inode_is_read_from_its_start(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2))
    log = EventLog(path)
    log.news()
    path.write_bytes(content)  # truncates the same file
    replaced, lines = log.news()
    assert replaced
    assert {one.event["number"] for one in lines} == {7}


def test_lines_that_are_no_events_are_passed_over_and_places_are_right(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + b'{"event": "sta\n[1]\n{}\n\xff\xfe\n' + b"[" * 100_000 + b"\n" + line(2))
    lines = EventLog(path).news()[1]
    assert [one.event["number"] for one in lines] == [1, 2]
    data = path.read_bytes()
    assert [data[one.start : one.start + one.length] for one in lines] == [line(1), line(2)]
