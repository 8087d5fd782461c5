"""The process of one logger: it reads the run's event file as it grows, and hands the metrics to a library.

    python -m mlxdist.coordinator.loggers.process NAME FOLDER LIFE TELL

FOLDER is the run's, with config.json written. LIFE and TELL are descriptors: LIFE is closed when the run has ended, or
the coordinator is gone; into TELL go lines of JSON, {"say": sentence} and {"step": last step that was logged}.

The library may print, ask, block, raise and end the process: the run does not wait for it. The file
`state/NAME.json` has the run's id at the service and the last step of each kind that was logged, so that a resumed run
goes on where this one was.
"""

import fcntl
import json
import os
import select
import signal
import sys
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdist.coordinator.config.keys import flat, hints
from mlxdist.coordinator.loggers.scalars import scalars_of
from mlxdist.coordinator.loggers.services import SERVICES, Opened, Service
from mlxdist.coordinator.report.event_log import MOST_LINES, EventLog
from mlxdist.coordinator.report.history import is_whole
from mlxdist.coordinator.storage.run_folder import RunFolder, read_json, write_json

LOOK_SECONDS = 0.5
ALONE_SECONDS = 20  # that are left to a logger whose coordinator is gone
NICE = 10  # the coordinator goes first


@dataclass
class Place:
    """The place of a logger in the events of its run, kept in a file."""

    path: Path
    id: str
    again: bool  # an earlier session has logged
    steps: dict[str, int]  # the last one that was logged, by kind of event

    def is_new(self, kind: str, step: int) -> bool:
        """Returns true for an event that was not logged yet; a step that is done again has the same values."""
        return step > self.steps.get(kind, 0)

    def save(self) -> None:
        """Writes the file."""
        write_json(self.path, {"id": self.id, "steps": self.steps})


def place_of(path: Path) -> Place:
    """Returns the place that an earlier session has left, or that of a new run with a new id."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = read_json(path)
        return Place(path, str(found["id"]), True, {str(kind): int(step) for kind, step in found["steps"].items()})
    return Place(path, uuid.uuid4().hex[:8], False, {})


def settings_of(run: RunFolder) -> dict[str, Any]:
    """Returns the run's settings by dotted key, as its config.json has them."""
    known = hints()
    return {key: value for key, value in flat(read_json(run.config)) if key in known}


def new_events(log: EventLog) -> Iterator[dict[str, Any]]:
    """Yields the events since the last call."""
    lines = None
    while lines is None or len(lines) == MOST_LINES:
        _, lines = log.news()
        yield from (line.event for line in lines if is_whole(line.event))


def follow(service: Service, log: EventLog, place: Place, run_pipe: int, tell: int) -> str | None:
    """Logs events until the run has told its end, or its coordinator is gone. Returns the end's status."""
    while True:
        over = bool(select.select([run_pipe], [], [], LOOK_SECONDS)[0])  # before the last events are read
        if over:
            signal.alarm(ALONE_SECONDS)
        status, logged = None, False
        for event in new_events(log):
            scalars = scalars_of(event)
            if scalars is not None and place.is_new(event["event"], scalars.step):
                service.log(scalars)
                place.steps[event["event"]] = scalars.step
                logged = True
            status = event["status"] if event.get("event") == "done" else None
        if logged:
            service.flush()
            place.save()
            _tell(tell, {"step": max(place.steps.values())})
        if status is not None or over:
            return status


def main(name: str, folder: str, run_pipe: int, tell: int) -> int:
    """Runs one logger to its end. Returns the exit code."""
    for descriptor in (run_pipe, tell):
        os.set_inheritable(descriptor, False)  # a process that a library starts does not hold them open
    os.nice(NICE)
    run = RunFolder(Path(folder))
    try:
        with (run.state / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the logger of an earlier session may still be at work
            place = place_of(run.state / f"{name}.json")
            service = SERVICES[name](Opened(run.path, run.path.name, place.id, place.again, settings_of(run)))
            place.save()
            status = follow(service, EventLog(run.metrics_jsonl), place, run_pipe, tell)
            service.close(succeeded=status == "done")
    except Exception as error:
        traceback.print_exc()
        _tell(tell, {"say": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _tell(tell: int, message: Mapping[str, object]) -> None:
    with suppress(OSError):  # the coordinator is gone
        os.write(tell, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
