"""The gated delta rule over whole chunks of tokens: what a hybrid model's linear attention computes, for training.

Token by token, for each value head, with a state S [Dv, Dk] and the gate g_t (a number, or one for each of Dk):

    S_t = S_{t-1} diag(g_t) + u_t k_t^T      u_t = beta_t (v_t - S_{t-1} diag(g_t) k_t)      y_t = S_t q_t

Within a chunk that starts with the state S, the u_t of all its tokens solve one triangular system. With D_ij the
product of the gates j + 1 to i, b_i that of the gates 1 to i, and c_i that of the gates i + 1 to the chunk's end:

    (I + A) U = diag(beta) (V - (b . K) S^T)     A_ij = beta_i k_i^T diag(D_ij) k_j for j < i
    Y = (b . Q) S^T + P U                        P_ij = q_i^T diag(D_ij) k_j for j <= i
    S' = S diag(b_C) + U^T (c . K)

So a chunk is a few matrix products and only the state goes from chunk to chunk (the WY representation with decays of
arXiv 2412.06464; with gates per channel, arXiv 2510.26692). The backward keeps the inputs and the state at the start of
each block of chunks, and computes the inside of a block again when its turn comes.

Shapes: B rows, T tokens, Hk key heads, H value heads (R for each key head), Dk and Dv their features, N chunks of C
tokens; G is 1 for one gate per head, Dk for one per channel. Everything inside is float32.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxdist.node.backward.delta_products import decayed_products, since_start, unit_lower_inverse, until_end

CHUNK = 64  # tokens that are one triangular system
BLOCK = 256  # tokens whose inside the backward holds at a time


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Returns y [B, T, H, Dv] in the type of `q`, and the state after T tokens [B, H, Dv, Dk] in float32.

    Args:
        q: [B, T, Hk, Dk].
        k: [B, T, Hk, Dk].
        v: [B, T, H, Dv].
        log_g: the logarithm of the gates, at most 0; [B, T, H], or [B, T, H, Dk] for a gate per channel.
        beta: [B, T, H].
        state: [B, H, Dv, Dk]; None for zeros.
        mask: [B, T]; where it is False the state stays as it is and y is 0.
    """
    log_g = log_g[..., None] if log_g.ndim == 3 else log_g
    kept = None if mask is None else mask.astype(mx.bool_)[..., None, None]
    if kept is not None:
        log_g, beta = mx.where(kept, log_g, 0.0), mx.where(kept[..., 0], beta, 0.0)
    if state is None:
        state = mx.zeros((v.shape[0], *v.shape[2:], k.shape[-1]))
    state = state.astype(mx.float32)
    outputs: list[mx.array] = []
    for parts in zip(*(_cut(each, BLOCK, axis=1) for each in (q, k, v, log_g, beta)), strict=True):
        done: Any = _one_block(*parts, state)  # the stubs call it an object
        outputs.append(done[0])
        state = done[1]
    y = mx.concatenate(outputs, axis=1)
    return y if kept is None else mx.where(kept, y, 0.0), state


def _cut(array: mx.array, size: int, axis: int) -> list[mx.array]:
    """By `split`: the gradient of every plain slice would be an array of the full size."""
    return list(mx.split(array, list(range(size, array.shape[axis], size)), axis=axis))


@mx.custom_function
def _one_block(*arrays: mx.array) -> list[mx.array]:
    """Returns `_block`, its state the last argument, whose backward keeps the arguments and nothing else.

    `depends` holds mlx to one block at a time. Without it some products of all blocks come before the first block ends,
    forward and backward, and the inside of all blocks is held at once.
    """
    *parts, state = arrays
    return _block(mx.depends(parts, [state]), state)


@_one_block.vjp
def _one_block_vjp(arrays: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: object) -> list[mx.array]:
    again = mx.depends(list(arrays), list(cotangents))
    gradients: list[mx.array] = mx.vjp(lambda *values: _block(values[:-1], values[-1]), again, list(cotangents))[1]
    return list(mx.depends(gradients, gradients))


def _block(parts: Sequence[mx.array], state: mx.array) -> list[mx.array]:
    """Returns y and the state after one block: `gated_delta` of q, k, v, log_g [B, T, H, G] and beta."""
    q, k, v, log_g, beta = parts
    rows, tokens, key_heads, dk = q.shape
    heads, dv = v.shape[-2:]
    chunk = min(CHUNK, 1 << (tokens - 1).bit_length())
    added = -tokens % chunk

    def chunks(x: mx.array, of: int) -> mx.array:
        """[B, T, of, X] -> [B, Hk, of / Hk, N, C, X]. The tokens added at the end have log g = beta = 0: no effect."""
        x = mx.pad(x.astype(mx.float32), [(0, 0), (0, added), (0, 0), (0, 0)])
        x = x.reshape(rows, -1, chunk, key_heads, of // key_heads, x.shape[-1])
        return mx.contiguous(x.transpose(0, 3, 4, 1, 2, 5))

    y, state = _chunks(
        chunks(q, key_heads),
        chunks(k, key_heads),
        chunks(v, heads),
        chunks(log_g, heads),
        chunks(beta[..., None], heads),
        state.reshape(rows, key_heads, heads // key_heads, dv, dk),
    )
    y = y.transpose(0, 3, 4, 1, 2, 5).reshape(rows, tokens + added, heads, dv)[:, :tokens]
    return [y.astype(q.dtype), state.reshape(rows, heads, dv, dk)]


def _chunks(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Returns y [B, Hk, R, N, C, Dv] and the state after the chunks [B, Hk, R, Dv, Dk].

    q and k are [B, Hk, 1, N, C, Dk], v, log_g and beta [B, Hk, R, N, C, Dv, G or 1].
    """
    start = since_start(log_g)
    to_q, to_k = (x.squeeze(0) for x in _cut(decayed_products(mx.stack([q, k]), k, log_g), 1, axis=0))
    inverse: Any = unit_lower_inverse(mx.tril(beta * to_k, -1))  # the stubs call it an object
    solved = inverse * beta.swapaxes(-1, -2)
    u_alone, u_per_state = solved @ v, solved @ (k * start)  # U = u_alone - u_per_state S^T
    states: list[mx.array] = []
    news: list[mx.array] = []
    each = (u_alone, u_per_state, k * until_end(log_g), start[..., -1:, :])
    for u, w, k_out, whole in zip(*([x.squeeze(3) for x in _cut(array, 1, axis=3)] for array in each), strict=True):
        states.append(state)
        news.append(mx.addmm(u, w, state.swapaxes(-1, -2), alpha=-1.0))
        state = mx.addmm(state * whole, news[-1].swapaxes(-1, -2), k_out)
    return (q * start) @ mx.stack(states, axis=3).swapaxes(-1, -2) + to_q @ mx.stack(news, axis=3), state
