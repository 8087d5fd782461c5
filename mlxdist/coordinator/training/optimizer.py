"""The optimizers by name. A new one is a file of its own, with `init` and `update`, and a line here."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from mlxdist.coordinator.config.schema import TrainConfig
from mlxdist.coordinator.training.adamw import AdamW
from mlxdist.coordinator.training.moments import Optimizer

OPTIMIZERS: Mapping[str, Callable[[TrainConfig], Optimizer]] = MappingProxyType({"adamw": AdamW.of})


def optimizer_of(train: TrainConfig, name: str = "adamw") -> Optimizer:
    """Returns the optimizer of a run's [train] table."""
    return OPTIMIZERS[name](train)
