"""The choice of the mode in which a model's rows are packed: the fastest that gives what each row alone gives.

No list of architectures is kept. The check is made on a tiny batch and at the size of the run's largest leaf, because
a window, a top-k or a scale by position shows only on a packed row longer than its threshold. Each row must also keep
its values when the tokens of its neighbors change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxdist.node.backward.backward import GradientPath, backward, score
from mlxdist.node.backward.comparison import SEED, TOLERANCE, coarsest, distance, in_short, moved, relative
from mlxdist.node.backward.dropout import no_dropout
from mlxdist.node.backward.events import gathered
from mlxdist.node.backward.layer_hooks import Call, replaced_calls
from mlxdist.node.backward.layout import alone, pack
from mlxdist.node.backward.packing import by_piece, packed
from mlxdist.node.backward.supervised import Supervised
from mlxdist.protocol.leaves import Row
from mlxdist.protocol.packing import APART, BY_PIECE, MODES, PACKED

Items = Sequence[Sequence[Row]]

TINY = 48  # tokens of the tiny batch
HEAD_CHUNK = 128
LEAK = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}  # of a log-prob, in nats: no more than rounding


@dataclass(frozen=True, slots=True)
class PackingChoice:
    """The best mode that a model allows, its mixers, and a sentence when it is not the fastest."""

    mode: str = PACKED
    mixers: tuple[type[nn.Module], ...] = ()
    reason: str = ""


def choose_packing(model: nn.Module, path: GradientPath, *, tokens: int, best: str = PACKED) -> PackingChoice:
    """Returns the fastest mode, not before `best`, in which `model` gives what each row alone gives.

    Args:
        model: with its LoRA layers; its parameters are as before when this returns.
        path: of its gradient, from `choose_path`.
        tokens: of the largest leaf of the run.
        best: one of the modes of protocol/packing.py.
    """
    why, mixers = "", tuple[type[nn.Module], ...]()
    with moved(model), no_dropout(model):  # masks differ with the layout
        for mode in MODES[MODES.index(best) : -1]:
            try:
                vocabulary = min(model(mx.array([[1, 2]])).shape[-1], 1000)
                mixers = find_mixers(model, tiny_items(max(tokens, TINY), vocabulary)) if mode == BY_PIECE else ()
                if mode == BY_PIECE and not mixers:
                    continue
                fault = _fault(model, path, mixers, tokens, vocabulary)
            except Exception as error:  # an unknown model may raise anything when it is called in another way
                why = why or in_short(error)
                continue
            if fault == "":
                names = ", ".join(kind.__name__ for kind in mixers)
                return PackingChoice(
                    mode, mixers, f"Rows are packed with {names} called for each row." if names else ""
                )
            why = why or fault
    reason = f"This model's rows cannot be packed ({why}): each row is computed alone." if why else ""
    return PackingChoice(APART, (), reason)


def tiny_items(tokens: int, vocabulary: int) -> list[tuple[Row, ...]]:
    """Returns random rows and pairs that share a prompt, of `tokens` tokens and a few more together, a long one first.

    Every token but the first is a target.
    """
    draw = np.random.default_rng(SEED)

    def ids(count: int) -> list[int]:
        return [int(i) for i in draw.integers(1, vocabulary, count)]

    def row(tokens: list[int]) -> Row:
        return Row(0, np.array(tokens, np.int32), np.array([0] + [1] * (len(tokens) - 1), np.uint8))

    prompt = ids(max(tokens // 6, 3))
    pair = (row(prompt + ids(max(tokens // 8, 4))), row(prompt + ids(3)))
    rest = max(tokens - sum(len(each.ids) for each in pair) - 5, 4)
    return [(row(ids(rest)),), (row(ids(5)),), pair]


def log_probs(model: nn.Module, path: GradientPath, batches: Sequence[Supervised]) -> mx.array:
    """Returns the log-prob of every target of `batches`, one after the other, dropout off."""
    every = [
        replace(batch, counts=(1,) * batch.total, rows=mx.arange(batch.total, dtype=mx.int32)) for batch in batches
    ]
    return mx.concatenate([score(model, batch, head_chunk=HEAD_CHUNK, path=path) for batch in every])


def find_mixers(model: nn.Module, items: Items) -> tuple[type[nn.Module], ...]:
    """Returns the classes of the layers' children whose output for a piece depends on the pieces before it.

    A class that cannot be called on a packed row at all is one of them.
    """
    batch = pack(items)
    children = {id(module): module for layer in model.layers if layer is not None for module in _children(layer)}
    kinds = sorted({type(module) for module in children.values()}, key=lambda kind: kind.__name__)
    return tuple(kind for kind in kinds if _mixes(model, batch, kind, children))


def _children(layer: nn.Module) -> list[nn.Module]:
    found = dict(tree_flatten(layer.children(), is_leaf=lambda value: isinstance(value, nn.Module)))
    return [module for module in found.values() if isinstance(module, nn.Module)]


def _mixes(model: nn.Module, batch: Supervised, kind: type[nn.Module], own: dict[int, nn.Module]) -> bool:
    """Returns True when modules of this class give a piece something else on the packed row than alone."""
    seen: list[tuple[mx.array, mx.array]] = []
    pieces, total = batch.packing.pieces, batch.inputs.shape[1]
    whole = mx.fast.rope, mx.fast.scaled_dot_product_attention

    def watch(call: Call) -> Call:
        def watched(module: nn.Module, *args: object, **kwargs: object) -> object:
            result = call(module, *args, **kwargs)
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, mx.array) and value.ndim == 3]
            if id(module) in own and isinstance(result, mx.array) and any(value.shape[1] == total for value in given):
                replaced = mx.fast.rope, mx.fast.scaled_dot_product_attention
                mx.fast.rope, mx.fast.scaled_dot_product_attention = whole
                try:
                    cut = {name: by_piece(value, pieces)[1] for name, value in kwargs.items()}
                    expected = call(module, *(by_piece(value, pieces)[1] for value in args), **cut)
                finally:
                    mx.fast.rope, mx.fast.scaled_dot_product_attention = replaced
                seen.append((pieces[1].own(result, 1), expected))
            return result

        return watched

    try:
        with packed(model, batch.packing), replaced_calls([kind], watch):
            model(batch.inputs)
        return any(relative([expected], [got]) > TOLERANCE[coarsest(model)] for got, expected in seen)
    except Exception:  # what cannot be called like this is called for each piece
        return True


def _fault(model: nn.Module, path: GradientPath, mixers: tuple[type[nn.Module], ...], tokens: int, size: int) -> str:
    """Returns what is wrong with a mode; "" when nothing is."""
    kind = coarsest(model)
    tiny = tiny_items(TINY, size)
    if (away := distance(_gradient(model, path, tiny, None), _gradient(model, path, tiny, mixers))) > TOLERANCE[kind]:
        return f"its gradient differs from that of each row alone by {away:.1e}"
    for items in (tiny, tiny_items(tokens, size)) if tokens > TINY else (tiny,):
        expected = log_probs(model, path, [alone(row) for item in items for row in item])
        got = log_probs(model, path, [pack(items, mixers)])
        if (away := relative([expected], [got])) > TOLERANCE[kind]:
            count = sum(len(row.ids) for item in items for row in item)
            return f"at {count} tokens log-probs differ from those of each row alone by {away:.1e}"
        first = items[0][0]
        other = [(replace(first, ids=1 + first.ids % (size - 1)),), *items[1:]]
        changed = log_probs(model, path, [pack(other, mixers)]) - got
        leak = float(np.abs(np.array(changed[len(first.ids) - 1 :], np.float32)).max())
        if not leak <= LEAK[kind]:
            return f"a row's log-probs change by {leak:.1e} with the tokens of the row before it"
    return ""


def _gradient(
    model: nn.Module, path: GradientPath, items: Items, mixers: tuple[type[nn.Module], ...] | None
) -> dict[str, mx.array]:
    """Returns row sums and gradient of a small loss; `mixers` None: of each row alone."""
    rows = [row for item in items for row in item]
    batches = [alone(row) for row in rows] if mixers is None else [pack(items, mixers)]

    def loss(sums: list[mx.array]) -> mx.array:
        every = mx.concatenate(sums)
        return (every * mx.arange(1, len(rows) + 1)).sum() / len(rows)

    sums, gradients = gathered(backward(model, batches, loss, head_chunk=HEAD_CHUNK, path=path, dropout_key=None))
    return {"row sums": mx.concatenate(sums), **gradients}
