"""Rows one after the other in one row of T tokens, each with attention and positions of its own. No mask is built.

Linear modules, norms, MLPs and experts work on single positions, so they run once over the whole row. While a layer
runs, `mx.fast.rope` and `mx.fast.scaled_dot_product_attention` are replaced by functions that work piece by piece:
mlx-lm's models and `nn.RoPE` look both up when they call. A module that mixes positions in another way (a recurrence,
a convolution, attention in plain operations) is a *mixer*; its class is called once per piece.

Shapes: T tokens of the packed row, D hidden size. x [.., T, ..] is any array with T on one axis.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.node.backward.layer_hooks import Call, replaced_calls
from mlxdist.node.backward.pytree import UnsupportedError


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens [start, end) of a packed row, which attend to `prefix` (a range before them, or none) and themselves.

    The first one has the position that follows the prefix.
    """

    start: int
    end: int
    prefix: tuple[int, int] = (0, 0)

    @property
    def offset(self) -> int:
        """The tokens of the prefix."""
        return self.prefix[1] - self.prefix[0]

    @property
    def total(self) -> int:
        """The tokens of prefix and piece."""
        return self.offset + self.end - self.start

    def own(self, x: mx.array, axis: int) -> mx.array:
        """Its own part of `x` [.., T, ..]."""
        return _cut(x, axis, self.start, self.end)

    def seen(self, x: mx.array, axis: int) -> mx.array:
        """The prefix's part of `x` and its own, [.., total, ..]."""
        own = self.own(x, axis)
        return mx.concatenate([_cut(x, axis, *self.prefix), own], axis) if self.offset else own


@dataclass(frozen=True, slots=True)
class Packing:
    """The pieces of a packed row, in order and without gaps, and the classes of the model's mixers.

    Without pieces the rows of a batch stand side by side, [B, L], as a model takes them by itself.
    """

    pieces: tuple[Piece, ...] = ()
    mixers: tuple[type[nn.Module], ...] = ()


NOT_PACKED = Packing()


@contextmanager
def packed(model: nn.Module, packing: Packing) -> Iterator[None]:
    """Makes the layers of `model` treat their input [1, T, D] as the pieces of `packing`.

    Process-wide while it is open, under the lock of the layer hooks. A layer raises UnsupportedError inside for what
    cannot be cut into pieces.
    """
    if not packing.pieces:
        yield
        return
    by_piece = _ByPiece(packing.pieces)
    layers = {type(layer) for layer in model.layers if layer is not None}
    mixers = [kind for kind in packing.mixers if kind not in layers]
    with replaced_calls(layers, by_piece.layer), replaced_calls(mixers, by_piece.mixer):
        yield


@dataclass(slots=True)
class _ByPiece:
    """The replaced functions of one packed row."""

    pieces: tuple[Piece, ...]
    thread: int = field(default_factory=get_ident)
    inside: bool = False  # of a layer: the functions are replaced
    alone: bool = False  # a mixer works on one piece: they do what mlx's do
    rope: Callable[..., mx.array] = field(default_factory=lambda: mx.fast.rope)
    attention: Callable[..., mx.array] = field(default_factory=lambda: mx.fast.scaled_dot_product_attention)

    @property
    def total(self) -> int:
        """T."""
        return self.pieces[-1].end

    def layer(self, call: Call) -> Call:
        """A layer's call with mlx's two functions replaced."""

        def call_packed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return call(module, *args, **kwargs)
            before = mx.fast.rope, mx.fast.scaled_dot_product_attention
            self.inside = True
            mx.fast.rope = self.rope_by_piece  # type: ignore[assignment]  # its parameters are passed on
            mx.fast.scaled_dot_product_attention = self.attention_by_piece
            try:
                return call(module, *args, **kwargs)
            finally:
                mx.fast.rope, mx.fast.scaled_dot_product_attention = before
                self.inside = False

        return call_packed

    def mixer(self, call: Call) -> Call:
        """A mixer's call, made once per piece with the prefix in front; the prefix's outputs are dropped."""

        def call_each(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.inside or self.alone or not _takes_row(args, kwargs, self.total):
                return call(module, *args, **kwargs)
            outputs = []
            self.alone = True
            try:
                for piece in self.pieces:
                    y = call(
                        module, *(of_piece(a, piece, self.total) for a in args), **_each(kwargs, piece, self.total)
                    )
                    _expect(isinstance(y, mx.array) and y.ndim == 3, "a mixer returns more than hidden states")
                    outputs.append(y[:, piece.offset :])
            finally:
                self.alone = False
            return mx.concatenate(outputs, axis=1)

        return call_each

    def rope_by_piece(self, x: mx.array, *args: Any, offset: Any = 0, **kwargs: Any) -> mx.array:
        """`mx.fast.rope` of x [.., T, D], with positions that begin again in each piece."""
        if self._not_ours():
            return self.rope(x, *args, offset=offset, **kwargs)
        _expect(x.shape[-2] == self.total, "rope over another length")
        turned = [self.rope(piece.own(x, -2), *args, offset=offset + piece.offset, **kwargs) for piece in self.pieces]
        return mx.concatenate(turned, axis=-2)

    def attention_by_piece(self, q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **kwargs: Any) -> mx.array:
        """`mx.fast.scaled_dot_product_attention` of q, k, v [B, H, T, D], each piece with the keys that it sees."""
        if self._not_ours():
            return self.attention(q, k, v, mask=mask, **kwargs)
        _expect(q.shape[-2] == k.shape[-2] == self.total, "attention over another length")
        outputs = [
            self.attention(
                piece.own(q, -2), piece.seen(k, -2), piece.seen(v, -2), mask=_mask(mask, piece, self.total), **kwargs
            )
            for piece in self.pieces
        ]
        return mx.concatenate(outputs, axis=-2)

    def _not_ours(self) -> bool:
        """True where a mixer works on one piece, and for a model that another thread calls meanwhile."""
        return self.alone or get_ident() != self.thread


def of_piece(value: Any, piece: Piece, total: int) -> Any:
    """Returns a mixer's argument for one piece: hidden states [1, T, D] and masks [.., T, T] are cut, the rest stays.

    Raises UnsupportedError for another array with T on an axis.
    """
    if not isinstance(value, mx.array) or total not in value.shape:
        return value
    if value.shape[-2:] == (total, total):  # a row's own mask is the one at its start
        return value[..., : piece.total, : piece.total]
    _expect(value.ndim == 3 and value.shape[1] == total, "a mixer is given more than hidden states and a mask")
    return piece.seen(value, 1)


def _mask(mask: Any, piece: Piece, total: int) -> Any:
    """Returns a piece's mask. "causal" ends at the last key, so it also holds behind a prefix.

    A mask of positions [T, T] is a row's own at its start; any other, such as scores [.., T, T], is cut out.
    """
    if not isinstance(mask, mx.array):
        return mask
    _expect(mask.shape[-1] == total, "a mask of another length")
    if mask.ndim == 2 and mask.dtype == mx.bool_:
        return mask[piece.offset : piece.total, : piece.total]
    return piece.seen(piece.own(mask, -2) if mask.shape[-2] == total else mask, -1)


def _takes_row(args: Any, kwargs: Any, total: int) -> bool:
    """Returns True when a call is given hidden states [B, T, D]."""
    return any(isinstance(a, mx.array) and a.ndim == 3 and a.shape[1] == total for a in (*args, *kwargs.values()))


def _each(kwargs: dict[str, Any], piece: Piece, total: int) -> dict[str, Any]:
    return {name: of_piece(value, piece, total) for name, value in kwargs.items()}


def _cut(x: mx.array, axis: int, start: int, end: int) -> mx.array:
    return x[(slice(None),) * (axis % x.ndim) + (slice(start, end),)]


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise UnsupportedError(otherwise)
