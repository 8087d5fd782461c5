"""Rows one after the other in one row of T tokens, each with attention and positions of its own. No mask is built.

Linear modules, norms, MLPs and experts work on single positions, so they run once over the whole row. While a layer
runs, `mx.fast.rope` and `mx.fast.scaled_dot_product_attention` are replaced by functions that work piece by piece:
mlx-lm's models and `nn.RoPE` look both up when they call. A module that mixes positions in another way (a recurrence,
a convolution, attention in plain operations) is a *mixer*; its class is called once per piece.

Shapes: T tokens of the packed row, D hidden size. x [.., T, ..] is any array with T on one axis.
"""

from collections.abc import Callable, Iterator, Sequence
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
    """The tokens [start, end) of a packed row, which attend to `prefix` and themselves.

    The prefix is none, or the beginning of a piece before it. The first token has the position that follows it.
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
FAN = 8  # parts of one split


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
            cut_args = [by_piece(value, self.pieces) for value in args]
            cut_kwargs = {name: by_piece(value, self.pieces) for name, value in kwargs.items()}
            self.alone = True
            try:
                for place, piece in enumerate(self.pieces):
                    y = call(
                        module,
                        *(each[place] for each in cut_args),
                        **{name: each[place] for name, each in cut_kwargs.items()},
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
        turned = [
            self.rope(part, *args, offset=offset + piece.offset, **kwargs)
            for piece, part in zip(self.pieces, _own(x, self.pieces, -2), strict=True)
        ]
        return mx.concatenate(turned, axis=-2)

    def attention_by_piece(self, q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **kwargs: Any) -> mx.array:
        """`mx.fast.scaled_dot_product_attention` of q, k, v [B, H, T, D], each piece with the keys that it sees."""
        if self._not_ours():
            return self.attention(q, k, v, mask=mask, **kwargs)
        _expect(q.shape[-2] == k.shape[-2] == self.total, "attention over another length")
        cut = zip(_own(q, self.pieces, -2), *(_seen(each, self.pieces, -2) for each in (k, v)), strict=True)
        outputs = [
            self.attention(*parts, mask=_mask(mask, piece, self.total), **kwargs)
            for piece, parts in zip(self.pieces, cut, strict=True)
        ]
        return mx.concatenate(outputs, axis=-2)

    def _not_ours(self) -> bool:
        """True where a mixer works on one piece, and for a model that another thread calls meanwhile."""
        return self.alone or get_ident() != self.thread


def by_piece(value: Any, pieces: Sequence[Piece]) -> Sequence[Any]:
    """Returns a mixer's argument for each piece: hidden states [1, T, D] and masks [.., T, T] are cut, the rest stays.

    Raises UnsupportedError for another array with T on an axis.
    """
    total = pieces[-1].end
    if not isinstance(value, mx.array) or total not in value.shape:
        return [value] * len(pieces)
    hidden = value.ndim == 3 and value.dtype != mx.bool_  # T may be D
    if not hidden and value.shape[-2:] == (total, total):  # a row's own mask is the one at its start
        return [value[..., : piece.total, : piece.total] for piece in pieces]
    _expect(hidden and value.shape[1] == total, "a mixer is given more than hidden states and a mask")
    return _seen(value, pieces, 1)


def _own(x: mx.array, pieces: Sequence[Piece], axis: int) -> Sequence[mx.array]:
    """Returns each piece's own part of `x` [.., T, ..].

    Not by slices: the gradient of each would be as long as the row, and that of all would grow with its square.
    """
    return _split(x, 0, [piece.end for piece in pieces], axis)


def _split(x: mx.array, start: int, ends: Sequence[int], axis: int) -> Sequence[mx.array]:
    """Returns the parts of `x` up to each of `ends`, places in a row of which `x` begins at `start`.

    In groups of groups: mlx's work for one operation grows with the square of its outputs.
    """
    if len(ends) == 1:
        return [x]
    size = 1
    while size * FAN < len(ends):
        size *= FAN
    groups = [ends[place : place + size] for place in range(0, len(ends), size)]
    starts = [start, *(group[-1] for group in groups[:-1])]
    parts: Any = mx.split(x, [end - start for end in starts[1:]], axis)  # a list, which mlx's types call an array
    return [
        piece
        for part, first, group in zip(parts, starts, groups, strict=True)
        for piece in _split(part, first, group, axis)
    ]


def _seen(x: mx.array, pieces: Sequence[Piece], axis: int) -> Sequence[mx.array]:
    """Returns the prefix's part of `x` [.., T, ..] and the own one for each piece, [.., total, ..]."""
    own = _own(x, pieces, axis)
    begin = {piece.start: part for piece, part in zip(pieces, own, strict=True)}
    return [
        mx.concatenate([_cut(begin[piece.prefix[0]], axis, 0, piece.offset), part], axis) if piece.offset else part
        for piece, part in zip(pieces, own, strict=True)
    ]


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


def _cut(x: mx.array, axis: int, start: int, end: int) -> mx.array:
    return x[(slice(None),) * (axis % x.ndim) + (slice(start, end),)]


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise UnsupportedError(otherwise)
