"""The promises of a run about its bits, each with its first step: their history in config.json."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.storage.run_folder import RunFolder, read_json, write_json
from mlxdist.protocol.errors import SaveError
from mlxdist.protocol.numerics import TOLERANCE, Promise


def earlier_promises(folder: RunFolder, steps_done: int) -> tuple[Promise, ...]:
    """Returns the promises of the steps that earlier sessions have done, the one that holds last; empty before step 1.

    Where config.json does not say it, the bits of these steps are not known, and nothing is promised.
    """
    if not steps_done:
        return ()
    try:
        told = msgspec.convert(read_json(folder.config)["promises"], tuple[Promise, ...])
        if found := tuple(each for each in told if each.from_step <= steps_done):
            return found
    except (OSError, ValueError, KeyError):
        pass
    return (Promise(TOLERANCE, f"{folder.config.name} does not say on which nodes the first steps were computed"),)


def promise_keys(promises: Sequence[Promise]) -> dict[str, Any]:
    """Returns the keys of config.json for promises: the one that holds now, and all of them."""
    now = promises[-1]
    return {
        "promise": now.kind,
        "promise_reason": now.reason,
        "promise_from_step": now.from_step,
        "promises": [asdict(each) for each in promises],
    }


@dataclass
class PromiseFile:
    """The promises in config.json. One that cannot be written is kept, and written with the next news."""

    folder: RunFolder
    report: Reporter
    _waiting: list[Promise] = field(default_factory=list)

    def add(self, promise: Promise) -> None:
        """Tells that the promise has changed, and writes it."""
        self.report.promise(promise)
        self._waiting.append(promise)
        self.flush()

    def flush(self) -> None:
        """Writes what waits."""
        if not self._waiting:
            return
        try:
            config = read_json(self.folder.config)
            before = msgspec.convert(config["promises"], tuple[Promise, ...])
            write_json(self.folder.config, config | promise_keys([*before, *self._waiting]))
        except (OSError, ValueError, KeyError) as error:  # changed by hand: the event says it
            self._waiting.clear()
            self.report.note(f"{self.folder.config} does not have the promise that has changed: {error}")
        except SaveError as error:
            self.report.could_not_save("config", error)
        else:
            self._waiting.clear()
            self.report.saved("config")
