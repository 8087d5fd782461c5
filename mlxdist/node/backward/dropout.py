"""Dropout that can be drawn again: the random state as one number, and layers that drop nothing for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

DROPOUTS = (nn.Dropout, nn.Dropout2d, nn.Dropout3d)


def random_key() -> int:
    """Returns the seed that gives mlx's random state: `mx.random.seed(random_key())` changes nothing."""
    state: Any = mx.random.state  # the stubs call it an object
    high, low = state[0].tolist()
    return int(high) << 32 | int(low)


def has_dropout(model: nn.Module) -> bool:
    """Returns True when some layer of `model` draws random numbers in training."""
    return any(isinstance(module, DROPOUTS) and module._p_1 < 1 for module in model.modules())


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Puts `model` into training mode, in which it takes its differentiable kernels, but drops nothing meanwhile."""
    dropouts = [module for module in model.modules() if isinstance(module, DROPOUTS)]
    model.train()
    for module in dropouts:
        module.eval()
    try:
        yield
    finally:
        for module in dropouts:
            module.train()


@contextmanager
def no_dropout(model: nn.Module) -> Iterator[None]:
    """Makes every layer of `model` drop nothing meanwhile, whatever its mode."""
    dropouts = [module for module in model.modules() if isinstance(module, DROPOUTS)]
    before = [module._p_1 for module in dropouts]
    for module in dropouts:
        module._p_1 = 1
    try:
        yield
    finally:
        for module, kept in zip(dropouts, before, strict=True):
            module._p_1 = kept
