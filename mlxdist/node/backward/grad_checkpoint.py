"""mlx-lm's gradient checkpointing, undone afterwards: the fallback for models that cannot be cut in segments."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.node.backward.dropout import has_dropout, random_key
from mlxdist.node.backward.layer_hooks import Call, replaced_calls
from mlxdist.node.backward.parameters import put, trainable


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Makes every layer of `model` recompute its forward in the backward."""
    from mlx_lm.tuner.trainer import grad_checkpoint

    first_of = {type(layer): layer for layer in model.layers if layer is not None}
    dropout, parameters = has_dropout(model), trainable(model)
    # grad_checkpoint patches the layer's class for good; leaving the inner replacement takes that back as well.
    with replaced_calls(first_of, _draws_from_key if dropout else _unchanged):
        for layer in first_of.values():
            grad_checkpoint(layer)
        with replaced_calls(first_of, _hands_on_key if dropout else _unchanged):
            try:
                yield
            finally:  # a layer that ran again left its own arrays there, which hold its graph
                put(model, list(parameters), list(parameters.values()))


def _unchanged(call: Call) -> Call:
    return call


def _hands_on_key(call: Call) -> Call:
    """Outside the checkpoint: the random state of the first run goes in as an argument."""
    return lambda layer, *args, **kwargs: call(layer, *args, dropout_key=random_key(), **kwargs)


def _draws_from_key(call: Call) -> Call:
    """Inside the checkpoint: both runs draw from that state; mx.checkpoint alone drops other elements in the second."""

    def seeded(layer: nn.Module, *args: Any, dropout_key: int, **kwargs: Any) -> Any:
        mx.random.seed(dropout_key)
        return call(layer, *args, **kwargs)

    return seeded
