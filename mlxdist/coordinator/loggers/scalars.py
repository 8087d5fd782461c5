"""An event of a run as the scalars of a logger, under the names of TRL and of the callbacks of Hugging Face.

A trainer logs `loss` and `eval_loss`, and the callbacks write `train/loss` and `eval/loss`; so do these.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

# Keys of an event "train" that are no metric of its step.
NO_METRIC = frozenset(
    {"event", "time", "wall_seconds", "step", "total_steps", "progress", "message", "disturbed", "elapsed_seconds"}
)
STEP = "train/global_step"


@dataclass(frozen=True, slots=True)
class Scalars:
    """The values of one step or one evaluation."""

    step: int
    values: Mapping[str, float]
    seconds: float | None  # of the wall clock, since 1970

    @property
    def with_step(self) -> dict[str, float]:
        """The values and the step, for loggers that take it as one of them."""
        return {**self.values, STEP: self.step}


def scalars_of(event: Mapping[str, Any]) -> Scalars | None:
    """Returns the scalars of an event "train" or "val"; None for any other. Values that are not finite are left out."""
    match event.get("event"):
        case "train":
            found = {f"train/{name}": value for name, value in event.items() if name not in NO_METRIC}
        case "val":
            found = {f"eval/{name}": value for name, value in {"loss": event["loss"], **event["metrics"]}.items()}
            found["eval/runtime"] = event.get("seconds")
        case _:
            return None
    values = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return Scalars(event["step"], values, _seconds(event.get("time")))


def _seconds(time: object) -> float | None:
    try:
        return datetime.fromisoformat(str(time)).timestamp()
    except ValueError:
        return None
