"""The moment at which a run first read its data: a chat template that writes the date writes that one for good."""

import json
from datetime import datetime

from mlxdist.coordinator.storage.run_folder import RunFolder, write_json
from mlxdist.protocol.errors import UserError

FILE = "first_reading.json"


def first_reading(folder: RunFolder, now: datetime) -> datetime:
    """The moment kept in the run's state, as its first reader's clock showed it; without one, `now` is kept.

    Raises UserError for a file that cannot be read, SaveError where it cannot be written.
    """
    kept = kept_reading(folder)
    if kept is None:
        write_json(folder.state / FILE, {"moment": now.isoformat()})
    return kept or now


def kept_reading(folder: RunFolder) -> datetime | None:
    """The moment kept in the run's state; None without one. Raises UserError for a file that cannot be read."""
    path = folder.state / FILE
    try:
        return datetime.fromisoformat(json.loads(path.read_text(encoding="utf-8"))["moment"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): it holds the date that the chat template writes into the rows, as "
            '{"moment": "2026-01-31T12:00:00"}; write the day on which the run began'
        ) from error
