import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxdist.node.backward.grad_checkpoint import checkpointed
from mlxdist.node.backward.layer_hooks import Call, hooked
from mlxdist.node.backward.pytree import Slot, UnsupportedError, arrays_in, put_together, take_apart


class Doubles(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        return x * 2


class Inherits(Doubles):
    """Has no call of its own."""


class CallsSuper(Doubles):
    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) + 1


def plus_ten(layer: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> mx.array:
    result: mx.array = call(*args, **kwargs)
    return result + 10


@pytest.mark.parametrize("kind", [Doubles, Inherits, CallsSuper])
def test_a_hook_is_seen_while_open_and_leaves_the_class_as_it_was(kind: type[Doubles]) -> None:
    before = [dict(vars(cls)) for cls in (Doubles, Inherits, CallsSuper)]
    layer, other = kind(), kind()
    plain = layer(mx.array(3)).item()
    with hooked([layer, None], plus_ten):
        assert layer(mx.array(3)).item() == plain + 10
        assert other(mx.array(3)).item() == plain
    assert layer(mx.array(3)).item() == plain
    assert [dict(vars(cls)) for cls in (Doubles, Inherits, CallsSuper)] == before


def test_all_kinds_of_layers_are_hooked_at_once_and_each_call_once() -> None:
    layers = [Doubles(), Inherits(), CallsSuper()]
    with hooked(layers, plus_ten):
        assert [layer(mx.array(3)).item() for layer in layers] == [16, 16, 17]


def test_a_layer_inside_a_layer_is_not_hooked() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Doubles()

        def __call__(self, x: mx.array) -> mx.array:
            return self.inner(x)

    outer = Outer()
    with hooked([outer, outer.inner], plus_ten):
        assert outer(mx.array(3)).item() == 16


def test_an_exception_leaves_the_class_as_it_was() -> None:
    before = dict(vars(Inherits))
    with pytest.raises(ZeroDivisionError), hooked([Inherits()], plus_ten):
        raise ZeroDivisionError
    assert dict(vars(Inherits)) == before


def test_hooks_of_two_threads_follow_one_another() -> None:
    """Classes belong to the process: without the lock the second to open would put the first one's hook back."""
    before, layer, results = dict(vars(Doubles)), Doubles(), []

    def work() -> None:
        for _ in range(50):
            with hooked([layer], plus_ten):
                results.append(layer(mx.array(3)).item())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [16] * 150
    assert dict(vars(Doubles)) == before


def test_mlx_lms_checkpoint_is_undone() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [Doubles(), Inherits()]

    before = [dict(vars(cls)) for cls in (Doubles, Inherits)]
    with checkpointed(Model()):
        assert [dict(vars(cls)) for cls in (Doubles, Inherits)] != before
    assert [dict(vars(cls)) for cls in (Doubles, Inherits)] == before


def test_what_is_taken_apart_can_be_put_together() -> None:
    a, b, c = mx.array(1), mx.array(2), mx.array(3)
    value = (a, [None, {"mask": "causal", "states": (b, 4)}], c)
    arrays: list[mx.array] = []
    shape = take_apart(value, arrays)
    assert shape == (Slot(0), [None, {"mask": "causal", "states": (Slot(1), 4)}], Slot(2))
    assert [id(x) for x in arrays] == [id(a), id(b), id(c)] == [id(x) for x in arrays_in(value)]
    assert put_together(shape, arrays) == value


def test_an_opaque_result_is_refused_by_its_type() -> None:
    class Residuals:
        pass

    with pytest.raises(UnsupportedError, match="Residuals"):
        take_apart((mx.array(1), Residuals()), [])
