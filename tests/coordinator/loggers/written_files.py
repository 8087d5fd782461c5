"""The files of the real libraries, read back without them where they have no reader of their own."""

import json
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

Row = tuple[str, int, float]  # name, step, value

BLOCK = 32768  # bytes of a block in W&B's file, which is a log of LevelDB
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def tensorboard_rows(folder: Path) -> list[Row]:
    """The scalars of all event files in a folder, in the order of the sessions."""
    from tensorboardX.proto.event_pb2 import Event

    rows = []
    for path in sorted(folder.iterdir()):
        for record in _tf_records(path.read_bytes()):
            event = Event()
            event.ParseFromString(record)
            rows += [(each.tag, event.step, each.simple_value) for each in event.summary.value if each.simple_value]
    return rows


def tensorboard_text(folder: Path) -> bytes:
    """All bytes of the event files."""
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def _tf_records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + size]
        at += 12 + size + 4


def wandb_runs(folder: Path) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Of each session its run's id, its settings, and its rows of history."""
    from wandb.proto import wandb_internal_pb2 as pb

    runs = []
    for path in sorted(folder.glob("offline-run-*/run-*.wandb")):
        run_id, settings, rows = "", {}, []
        for data in _leveldb_records(path.read_bytes()):
            record = pb.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                run_id = record.run.run_id
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        runs.append((run_id, settings, rows))
    return runs


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    at, parts = 7, b""  # behind the magic bytes
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        part = data[at + 7 : at + 7 + size]
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield parts
        at += 7 + size


def trackio_rows(folder: Path) -> tuple[set[str], list[Row]]:
    """The names of all runs in a folder of trackio, and the rows of all."""
    (path,) = folder.glob("*.db")
    with closing(sqlite3.connect(path)) as database:
        found = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    rows = [(name, step, value) for _, step, metrics in found for name, value in json.loads(metrics).items()]
    return {name for name, _, _ in found}, rows
