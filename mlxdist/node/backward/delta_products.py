"""The products of a chunk's tokens that the chunked gated delta rule is made of, and the inverse of their triangle.

A decay between two tokens is the exponential of the sum of log g over exactly the tokens between them. It is never a
quotient of two longer products, so none is above 1 and none is 0 / 0, for any log g <= 0.

Shapes: C tokens of a chunk, a power of two; D key features; G is 1 for one gate per head, D for one per channel.
"""

import mlx.core as mx

BASE = 8  # matrices of this size are inverted with masks, in a few products over all of them
PAIRWISE = 4  # with a gate per channel, so many neighbors are weighed pair by pair; all others in matrix products
NOTHING = -40.0  # e^-40 times a number is nothing beside it in float32; e^-80, its square, is still no denormal number


def decay(log_g: mx.array) -> mx.array:
    """Returns exp(log_g), and 0 where that is nothing: a CPU is slow at denormal numbers."""
    return mx.where(log_g > NOTHING, mx.exp(log_g), 0.0)


def since_start(log_g: mx.array) -> mx.array:
    """Returns the decay from the start through each token, `log_g` [..., C, G]: the token's own gate included."""
    return decay(mx.cumsum(log_g, axis=-2))


def until_end(log_g: mx.array) -> mx.array:
    """Returns the decay from each token, its own gate excluded, to the end, `log_g` [..., C, G]."""
    return decay(mx.cumsum(log_g, axis=-2, reverse=True, inclusive=False))


def between(log_g: mx.array) -> mx.array:
    """Returns [..., C, C, G]: (i, j) is the product of the gates j + 1 to i, and 1 for j >= i. `log_g` [..., C, G]."""
    later = mx.tri(log_g.shape[-2], k=-1, dtype=mx.bool_)[..., None]
    return decay(mx.cumsum(mx.where(later, log_g[..., :, None, :], 0.0), axis=-3))


def decayed_products(x: mx.array, k: mx.array, log_g: mx.array) -> mx.array:
    """Returns [..., C, C], lower triangular: (i, j) is x_i . (k_j, decayed from j to i).

    `x` and `k` are [..., C, D], `log_g` is [..., C, G].
    """
    if log_g.shape[-1] == 1:
        return mx.tril((x @ k.swapaxes(-1, -2)) * between(log_g)[..., 0])
    return _by_channel(x, k, log_g)


def _by_channel(x: mx.array, k: mx.array, log_g: mx.array) -> mx.array:
    """Each half of the tokens by itself. Between the halves the decays meet at the border: one matrix product."""
    size = k.shape[-2]
    if size <= PAIRWISE:
        weighed = between(log_g) * k[..., None, :, :]  # [..., C, C, D]
        return mx.tril((weighed @ x[..., None]).squeeze(-1))
    x, k, log_g = (each.reshape(*each.shape[:-2], 2, size // 2, each.shape[-1]) for each in (x, k, log_g))
    first, second = _both(_by_channel(x, k, log_g))
    border = _both(x)[1] * since_start(_both(log_g)[1])
    corner = border @ (_both(k)[0] * until_end(_both(log_g)[0])).swapaxes(-1, -2)
    return _joined(first, corner, second)


def _both(halves: mx.array) -> list[mx.array]:
    """The two halves of [..., 2, C, D]. By `split`: the gradient of a plain index would be padded to the full size."""
    return [half.squeeze(-3) for half in mx.split(halves, 2, axis=-3)]


def _joined(first: mx.array, corner: mx.array, second: mx.array) -> mx.array:
    """The matrix [[first, 0], [corner, second]]."""
    top = mx.concatenate([first, mx.zeros_like(corner)], axis=-1)
    return mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)


@mx.custom_function
def unit_lower_inverse(a: mx.array) -> mx.array:
    """Returns (I + a)^-1 for a strictly lower triangular `a` [..., C, C].

    The inverses of two blocks of the diagonal make that of the block around them: [[X, 0], [-Y a21 X, Y]]. This is as
    exact as solving row by row. Doubling, (I - a)(I + a^2)(I + a^4) ..., is not: where a token is repeated, the powers
    of `a` grow like binomial coefficients before they vanish.
    """
    return _inverse(a)


def _inverse(a: mx.array) -> mx.array:
    size = a.shape[-1]
    if size <= BASE:
        return _small_inverse(a)
    half = size // 2
    x, y = _inverse(mx.stack([a[..., :half, :half], a[..., half:, half:]]))
    return _joined(x, -(y @ a[..., half:, :half] @ x), y)


def _small_inverse(a: mx.array) -> mx.array:
    """The same, all blocks of one size at once: a mask leaves of `a` the corners that join two of them."""
    size = a.shape[-1]
    row, column = mx.arange(size)[:, None], mx.arange(size)[None]
    inverse, width = mx.eye(size, dtype=a.dtype), 1
    while width < size:
        corners = (row // (2 * width) == column // (2 * width)) & (row // width != column // width)
        joints = mx.where(corners, a, 0.0)
        inverse = inverse - (joints if width == 1 else inverse @ joints @ inverse)
        width *= 2
    return inverse


@unit_lower_inverse.vjp
def _unit_lower_inverse_vjp(a: mx.array, cotangent: mx.array, inverse: mx.array) -> mx.array:
    """d(X^-1) = -X^-1 dX X^-1, so the inverse that is there already gives the gradient by two products."""
    transposed = inverse.swapaxes(-1, -2)
    return mx.tril(-(transposed @ cotangent @ transposed), -1)
