"""mlx-lm's gated-delta layers, computed in chunks while a model trains.

mlx-lm trains these layers token by token: one step of Python and one kept state for each token. Every module that uses
its function imports it by name, so the name is replaced in all of them, for as long as a context is open. Nothing
changes for a model that generates.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.node.backward.gated_delta import CHUNK, gated_delta
from mlxdist.node.backward.layer_hooks import replaced_function

HOME, NAME = "mlx_lm.models.gated_delta", "gated_delta_update"
LEAST_TOKENS = 4  # with fewer, mlx-lm's form is as fast

Update = Callable[..., tuple[mx.array, mx.array]]  # mlx-lm's function, or one that stands in for it


@contextmanager
def chunked_layers(on: bool = True) -> Iterator[None]:
    """Computes the gated-delta layers of all models in chunks while they train; does nothing unless `on`."""
    with replaced_function(import_module(HOME), NAME, _in_chunks) if on else nullcontext():
        yield


def has_gated_delta(model: nn.Module) -> bool:
    """Returns True when the modules of `model` use mlx-lm's gated delta rule."""
    sources = {type(module).__module__ for module in model.modules()}
    return any(
        getattr(value, "__module__", "") == HOME for source in sources for value in vars(sys.modules[source]).values()
    )


def unknown_form() -> str:
    """Returns why this mlx-lm's function cannot be replaced, as a clause; "" when it can be."""
    update = vars(import_module(HOME)).get(NAME)
    if update is None:
        return f"{HOME} has no {NAME}"
    found = signature(update).parameters.values()
    ours = signature(_in_chunks(update)).parameters.values()
    if [_sort(each) for each in found] != [_sort(each) for each in ours]:
        return f"{NAME}({', '.join(each.name for each in found)}) of this mlx-lm takes other arguments"
    return ""


def disagreement(tolerance: float) -> str:
    """Compares both forms on this device, values and gradients, on a tiny input of two chunks with padding.

    Returns the way in which they differ, as a clause; "" when they agree. `tolerance`: of the relative distance.
    """
    update = vars(import_module(HOME))[NAME]
    distances: list[float] = []
    for by_channel in (False, True):
        values, cotangents = _tiny_input(by_channel)
        slow, chunked = (_values_and_gradients(each, values, cotangents) for each in (update, _in_chunks(update)))
        distances += [_distance(x, y) for x, y in zip(chunked, slow, strict=True)]
    if all(distance <= tolerance for distance in distances):  # NaN is not
        return ""
    return f"on this device their form in chunks differs from mlx-lm's own by {max(distances):.1e}"


def _sort(parameter: Parameter) -> tuple[str, Any, Any]:
    return parameter.name, parameter.kind, parameter.default


def _in_chunks(update: Update) -> Update:
    """Returns the function that takes the place of mlx-lm's `update` and its arguments.

    Those arguments: q and k [B, T, Hk, Dk], v [B, T, H, Dv], the raw gate `a` [B, T, H] or [B, T, H, Dk], the raw beta
    `b` [B, T, H], `A_log` and `dt_bias` that broadcast against `a`.
    """

    def gated_delta_update(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        A_log: mx.array,  # noqa: N803 - by name, as mlx-lm has it
        dt_bias: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        *,
        use_kernel: bool = True,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
    ) -> tuple[mx.array, mx.array]:
        if use_kernel or q.shape[1] < LEAST_TOKENS:  # a model that trains takes no kernel, as kernels have no gradient
            options = {"use_kernel": use_kernel, "lower_bound": lower_bound, "allow_neg_eigval": allow_neg_eigval}
            return update(q, k, v, a, b, A_log, dt_bias, state, mask, **options)
        beta = mx.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0)
        rate = mx.exp(A_log.astype(mx.float32))
        if lower_bound is None:
            log_g = -rate * nn.softplus(a + dt_bias)
        else:
            log_g = lower_bound * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))
        return gated_delta(q, k, v, log_g, beta, state, mask)

    return gated_delta_update


def _tiny_input(by_channel: bool) -> tuple[list[mx.array], list[mx.array]]:
    """Returns arguments up to `state`, two value heads for each key head, and cotangents of y and of the state."""
    rows, tokens, key_heads, heads, dk, dv = 2, CHUNK + 7, 1, 2, 8, 4
    gate, one = ((dk,), (1,)) if by_channel else ((), ())
    shapes: list[tuple[int, ...]] = [(rows, tokens, key_heads, dk)] * 2
    shapes += [(rows, tokens, heads, dv), (rows, tokens, heads, *gate), (rows, tokens, heads), (heads, *one)]
    shapes += [(heads, *gate), (rows, heads, dv, dk), (rows, tokens, heads, dv), (rows, heads, dv, dk)]
    keys = mx.random.split(mx.random.key(0), len(shapes))
    drawn = [mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)]
    drawn[:2] = [each / mx.linalg.norm(each, axis=-1, keepdims=True) for each in drawn[:2]]
    return drawn[:-2], drawn[-2:]


def _values_and_gradients(update: Update, values: list[mx.array], cotangents: list[mx.array]) -> list[mx.array]:
    outputs, gradients = mx.vjp(lambda *x: list(update(*x, use_kernel=False)), values, cotangents)
    return outputs + gradients


def _distance(got: mx.array, expected: mx.array) -> float:
    away: Any = (mx.linalg.norm(got - expected) / mx.linalg.norm(expected)).item()
    return float(away)
