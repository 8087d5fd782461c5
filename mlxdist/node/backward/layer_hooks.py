"""Hooks on the layer calls of a model, without knowledge of the model; functions of mlx-lm replaced for a while.

Python looks up `layer(x)` on the class, so a hook replaces `__call__` of the classes of `model.layers`. It is
process-wide while it is open: a lock lets one thread in, and leaving restores each class exactly, an inherited
`__call__` included. A function that modules import by name is replaced in each of them, under the same lock.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.nn as nn

Call = Callable[..., Any]
Handler = Callable[[nn.Module, Call, tuple[Any, ...], dict[str, Any]], Any]  # (layer, its own call, args, kwargs)

_ONE_AT_A_TIME = threading.RLock()  # classes belong to the process, and so does the right to replace their calls


@contextmanager
def replaced_calls(classes: Iterable[type], wrap: Callable[[Call], Call]) -> Iterator[None]:
    """Replaces `__call__` of each class by `wrap(its call)`, and restores on leaving exactly what was there."""
    with _ONE_AT_A_TIME:
        # A class that inherits its call has no entry of its own, and has none again afterwards.
        before = {cls: cls.__dict__.get("__call__") for cls in classes}
        wrapped = {cls: wrap(cls.__call__) for cls in before}
        try:
            for cls, call in wrapped.items():
                cls.__call__ = call  # type: ignore[method-assign]
            yield
        finally:
            for cls, own in before.items():
                if own is not None:
                    cls.__call__ = own  # type: ignore[method-assign]
                elif "__call__" in cls.__dict__:
                    del cls.__call__


@contextmanager
def replaced_function(home: ModuleType, name: str, wrap: Callable[[Call], Call]) -> Iterator[None]:
    """Replaces a function of `home` by `wrap(it)`, there and in every module beside it that imports it by name."""
    with _ONE_AT_A_TIME:
        old: Call = getattr(home, name)
        beside = home.__name__.rpartition(".")[0] + "."
        loaded = [module for path, module in list(sys.modules.items()) if path.startswith(beside)]
        users = [module for module in loaded if vars(module).get(name) is old]
        new = wrap(old)
        try:
            for module in users:
                setattr(module, name, new)
            yield
        finally:
            for module in users:
                setattr(module, name, old)


@contextmanager
def hooked(layers: Iterable[nn.Module | None], handler: Handler) -> Iterator[None]:
    """Sends every outermost call of one of `layers` to `handler(layer, call, args, kwargs)`; its answer is the result.

    Calls inside a hooked call (a layer within a layer, `super().__call__`) and other objects of the same classes pass.
    """
    own = {id(layer): layer for layer in layers if layer is not None}
    inside = False

    def wrap(call: Call) -> Call:
        def call_hooked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside or id(module) not in own:
                return call(module, *args, **kwargs)
            inside = True
            try:
                return handler(module, lambda *a, **k: call(module, *a, **k), args, kwargs)
            finally:
                inside = False

        return call_hooked

    with replaced_calls({type(layer) for layer in own.values()}, wrap):
        yield
