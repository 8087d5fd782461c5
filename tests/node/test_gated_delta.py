"""The gated delta rule in chunks equals the rule token by token, in float64 numpy, with its gradients."""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.node.backward.delta_products import between, decayed_products, unit_lower_inverse
from mlxdist.node.backward.gated_delta import BLOCK, CHUNK, gated_delta

Array = npt.NDArray[np.float64]
NAMES = ("y", "state", "dq", "dk", "dv", "dlog_g", "dbeta", "dstate")
EXACT, EQUAL_KEYS = 1e-6, 1e-5  # relative distances, 2-norm


@dataclass(frozen=True)
class Case:
    """Arguments of the rule and the cotangents of its results; H / Hk value heads for each key head."""

    q: Array  # [B, T, Hk, Dk]
    k: Array
    v: Array  # [B, T, H, Dv]
    log_g: Array  # [B, T, H] or [B, T, H, Dk]
    beta: Array  # [B, T, H]
    state: Array  # [B, H, Dv, Dk]
    dy: Array
    dstate: Array

    @property
    def inputs(self) -> list[Array]:
        return [self.q, self.k, self.v, self.log_g, self.beta, self.state]


def drawn(
    tokens: int,
    *,
    rows: int = 1,
    key_heads: int = 1,
    heads: int = 2,
    dk: int = 8,
    dv: int = 6,
    by_channel: bool = False,
    seed: int = 0,
) -> Case:
    """Keys and queries of length 1, gates of many sizes."""
    random = np.random.default_rng(seed)
    q, k = (random.standard_normal((rows, tokens, key_heads, dk)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    gates = (rows, tokens, heads, *((dk,) if by_channel else ()))
    case = Case(
        q=q * dk**-0.5,
        k=k,
        v=random.standard_normal((rows, tokens, heads, dv)),
        log_g=-0.3 * np.exp(random.standard_normal(gates)),
        beta=1 / (1 + np.exp(random.standard_normal((rows, tokens, heads)))),
        state=random.standard_normal((rows, heads, dv, dk)),
        dy=random.standard_normal((rows, tokens, heads, dv)),
        dstate=random.standard_normal((rows, heads, dv, dk)),
    )
    return Case(*(np.asarray(x, np.float32).astype(np.float64) for x in vars_of(case)))  # both sides get the same


def vars_of(case: Case) -> list[Array]:
    return [*case.inputs, case.dy, case.dstate]


def token_by_token(case: Case) -> dict[str, Array]:
    """The recurrence and its derivative as they are written down, one token at a time."""
    per_key = case.v.shape[2] // case.q.shape[2]
    q, k = (np.repeat(x, per_key, axis=2) for x in (case.q, case.k))
    gates = np.exp(case.log_g if case.log_g.ndim == 4 else case.log_g[..., None])
    state, before, faded, news, ys = case.state, [], [], [], []
    for t in range(q.shape[1]):
        before.append(state)
        faded.append(state * gates[:, t, :, None, :])
        errors = case.v[:, t] - np.einsum("bhvk,bhk->bhv", faded[t], k[:, t])
        news.append(case.beta[:, t, :, None] * errors)
        state = faded[t] + np.einsum("bhv,bhk->bhvk", news[t], k[:, t])
        ys.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
    dq, dk, dv, dbeta = (np.zeros_like(x) for x in (q, k, case.v, case.beta))
    dg = np.zeros_like(gates if case.log_g.ndim == 4 else np.broadcast_to(gates, q.shape))
    ds, after = case.dstate, state
    for t in reversed(range(q.shape[1])):
        dq[:, t] = np.einsum("bhvk,bhv->bhk", after, case.dy[:, t])
        ds = ds + np.einsum("bhv,bhk->bhvk", case.dy[:, t], q[:, t])
        dnew = np.einsum("bhvk,bhk->bhv", ds, k[:, t])
        dv[:, t] = case.beta[:, t, :, None] * dnew
        dbeta[:, t] = (dnew * (case.v[:, t] - np.einsum("bhvk,bhk->bhv", faded[t], k[:, t]))).sum(-1)
        dk[:, t] = np.einsum("bhvk,bhv->bhk", ds, news[t]) - np.einsum("bhvk,bhv->bhk", faded[t], dv[:, t])
        dfaded = ds - np.einsum("bhv,bhk->bhvk", dv[:, t], k[:, t])
        dg[:, t] = (dfaded * before[t]).sum(-2)
        ds, after = dfaded * gates[:, t, :, None, :], before[t]
    dlog_g = dg * gates
    folded = (*q.shape[:2], -1, per_key, q.shape[-1])
    gradients = [dq.reshape(folded).sum(3), dk.reshape(folded).sum(3), dv]
    gradients += [dlog_g if case.log_g.ndim == 4 else dlog_g.sum(-1), dbeta, ds]
    return dict(zip(NAMES, [np.stack(ys, 1), state, *gradients], strict=True))


def chunked(case: Case, mask: Any = None, dtype: mx.Dtype = mx.float32) -> dict[str, Array]:
    values = [mx.array(x.astype(np.float32)) for x in case.inputs]
    values = [x.astype(dtype) if place in (0, 1, 2, 4) else x for place, x in enumerate(values)]
    cotangents = [mx.array(case.dy.astype(np.float32)).astype(dtype), mx.array(case.dstate.astype(np.float32))]
    outputs, gradients = mx.vjp(lambda *x: list(gated_delta(*x, mask)), values, cotangents)
    return {
        name: np.array(x.astype(mx.float32)).astype(np.float64)
        for name, x in zip(NAMES, outputs + gradients, strict=True)
    }


def distances(got: dict[str, Array], expected: dict[str, Array]) -> dict[str, float]:
    """Relative, but absolute below 1e-30: a state that fades through e^-150 has a gradient that float32 calls 0."""
    return {
        name: float(np.linalg.norm(got[name] - expected[name]) / max(float(np.linalg.norm(expected[name])), 1e-30))
        for name in NAMES
    }


def agrees(case: Case, tolerance: float = EXACT) -> None:
    found = distances(chunked(case), token_by_token(case))
    assert all(distance < tolerance for distance in found.values()), found  # NaN is not


both = pytest.mark.parametrize("by_channel", [False, True], ids=["a gate per head", "a gate per channel"])


@both
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 16, 63, CHUNK, CHUNK + 1, 130, BLOCK, BLOCK + 1, 2 * BLOCK + 70])
def test_any_number_of_tokens_gives_the_rule(by_channel: bool, tokens: int) -> None:
    agrees(drawn(tokens, by_channel=by_channel))


@both
@given(data=st.data())
def test_rows_grouped_heads_and_sizes_of_any_kind_give_the_rule(by_channel: bool, data: st.DataObject) -> None:
    key_heads, per_key = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    case = drawn(
        data.draw(st.integers(1, 150), "tokens"),
        rows=data.draw(st.integers(1, 3), "rows"),
        key_heads=key_heads,
        heads=key_heads * per_key,
        dk=data.draw(st.integers(1, 9), "dk"),
        dv=data.draw(st.integers(1, 9), "dv"),
        by_channel=by_channel,
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    got, expected = (np.concatenate([x[name].ravel() for name in NAMES]) for x in (chunked(case), token_by_token(case)))
    # Of all results at once, as one that is a single number may cancel out. Keys of one feature are all equal.
    assert np.linalg.norm(got - expected) < EQUAL_KEYS * np.linalg.norm(expected)


@both
@pytest.mark.parametrize("log_g", [0.0, -1e-6, -30.0, -150.0])
def test_gates_of_one_and_of_nothing_give_the_rule(by_channel: bool, log_g: float) -> None:
    case = drawn(150, by_channel=by_channel, dk=32)
    rounding = abs(log_g) * 2.0**-24  # exp's argument is rounded, in mlx-lm's form too
    agrees(replace(case, log_g=np.full_like(case.log_g, log_g)), max(EXACT, rounding))


@both
def test_a_gate_that_forgets_everything_may_stand_anywhere(by_channel: bool) -> None:
    case = drawn(300, by_channel=by_channel)
    forgets = np.random.default_rng(1).random(case.log_g.shape) < 0.3
    agrees(replace(case, log_g=np.where(forgets, -150.0, case.log_g)))


@both
@pytest.mark.parametrize(("beta", "tolerance"), [(1.0, EQUAL_KEYS), (1.9, 3 * EQUAL_KEYS)])
def test_a_token_repeated_without_end_gives_the_rule(by_channel: bool, beta: float, tolerance: float) -> None:
    """With beta near 2 each token turns what the one before it wrote around, so the terms cancel out."""
    case = drawn(200, by_channel=by_channel, dk=16)
    case = replace(case, k=np.broadcast_to(case.k[:, :1], case.k.shape), log_g=case.log_g * 1e-3)
    agrees(replace(case, beta=np.full_like(case.beta, np.float32(beta))), tolerance)


@both
def test_betas_up_to_two_give_the_rule(by_channel: bool) -> None:
    case = drawn(200, by_channel=by_channel, dk=16)
    agrees(replace(case, beta=(case.beta * 2).astype(np.float32).astype(np.float64)), EQUAL_KEYS)


@both
def test_a_rule_that_goes_on_from_its_state_is_the_rule_over_all_tokens(by_channel: bool) -> None:
    case = drawn(170, by_channel=by_channel)
    inputs = [mx.array(x.astype(np.float32)) for x in case.inputs]
    whole, last = gated_delta(*inputs)
    state: mx.array | None = inputs[-1]
    parts = []
    for start, stop in ((0, 1), (1, 70), (70, 170)):
        y, state = gated_delta(*(x[:, start:stop] for x in inputs[:-1]), state)
        parts.append(y)
    assert mx.allclose(mx.concatenate(parts, axis=1), whole, atol=1e-5).item()
    assert mx.allclose(state, last, atol=1e-5).item()


@both
def test_without_a_state_the_rule_starts_from_zeros(by_channel: bool) -> None:
    inputs = [mx.array(x.astype(np.float32)) for x in drawn(70, by_channel=by_channel).inputs]
    with_zeros = gated_delta(*inputs[:-1], mx.zeros_like(inputs[-1]))
    assert all(mx.array_equal(x, y).item() for x, y in zip(gated_delta(*inputs[:-1]), with_zeros, strict=True))


@both
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_and_gives_zero(by_channel: bool, side: str) -> None:
    """A row of 90 tokens in a batch of 140: what stands in the padding, NaN aside, does not matter."""
    case = drawn(140, rows=2, by_channel=by_channel)
    real = slice(50, 140) if side == "left" else slice(0, 90)
    mask = np.ones((2, 140), bool)
    mask[1] = False
    mask[1, real] = True
    case = replace(case, dy=case.dy * mask[..., None, None])
    got = chunked(case, mx.array(mask))
    first, second = (Case(*(x[row : row + 1] for x in vars_of(case))) for row in (0, 1))
    per_token = {"q", "k", "v", "log_g", "beta", "dy"}
    second = replace(second, **{name: getattr(second, name)[:, real] for name in per_token})
    for row, alone, tokens in ((0, first, slice(None)), (1, second, real)):
        expected = token_by_token(alone)
        for name in NAMES:
            x = got[name][row : row + 1]
            inside = x if "state" in name else x[:, tokens]
            assert np.linalg.norm(inside - expected[name]) < EXACT * np.linalg.norm(expected[name]), name
    outside = {name: got[name][1][~mask[1]] for name in NAMES if "state" not in name}
    assert all((x == 0).all() for x in outside.values())


@both
def test_a_row_does_not_depend_on_the_other_rows(by_channel: bool) -> None:
    case = drawn(100, rows=2, by_channel=by_channel)
    alone = chunked(Case(*(x[:1] for x in vars_of(case))))
    assert all(np.allclose(chunked(case)[name][:1], alone[name], atol=1e-5) for name in NAMES)


@both
def test_bfloat16_is_off_by_the_rounding_of_inputs_and_results_only(by_channel: bool) -> None:
    case = drawn(70, dk=4, dv=4, by_channel=by_channel)
    rounded = [np.array(mx.array(x.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32)) for x in vars_of(case)]
    kept = {3: case.log_g, 5: case.state, 7: case.dstate}
    exact = Case(*(kept.get(place, x.astype(np.float64)) for place, x in enumerate(rounded)))
    found = distances(chunked(exact, dtype=mx.bfloat16), token_by_token(exact))
    assert max(found.values()) < 4e-3, found
    assert found["state"] < EXACT  # it stays in float32


def test_a_checkpoint_around_the_rule_gives_the_same_gradient() -> None:
    case = drawn(300)
    values = [mx.array(x.astype(np.float32)) for x in case.inputs]
    cotangents = [mx.array(case.dy.astype(np.float32)), mx.array(case.dstate.astype(np.float32))]
    plain, kept = (mx.vjp(f, values, cotangents)[1] for f in (_listed, mx.checkpoint(_listed)))
    assert all(mx.array_equal(x, y).item() for x, y in zip(plain, kept, strict=True))


def _listed(*values: mx.array) -> list[mx.array]:
    return list(gated_delta(*values))


def test_memory_grows_by_the_inputs_and_not_by_the_states_of_all_tokens() -> None:
    """Token by token, 2,048 tokens would keep 2,048 states of 16 kB and more; here they keep 8, and one block."""

    def peak(tokens: int) -> int:
        case = drawn(tokens, heads=1, dk=64, dv=64)
        values = [mx.array(x.astype(np.float32)) for x in case.inputs]
        cotangents = [mx.array(case.dy.astype(np.float32)), mx.array(case.dstate.astype(np.float32))]
        mx.eval(values, cotangents)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(mx.vjp(_listed, values, cotangents)[1])
        return mx.get_peak_memory() - before

    inputs_of_a_token = 4 * 3 * 64  # bytes; their gradients and copies of them take some more
    assert peak(2048) - peak(512) < 1536 * 8 * inputs_of_a_token < 1536 * 4 * 64 * 64


@pytest.mark.parametrize("size", [1, 2, 8, 16, 64])
def test_the_inverse_is_exact_where_its_powers_explode(size: int) -> None:
    """All ones below the diagonal: doubling would need numbers of 10^17 at 64."""
    a = mx.tril(mx.full((size, size), 1.9), -1)
    exact = np.linalg.inv(np.eye(size) + np.tril(np.full((size, size), np.float64(np.float32(1.9))), -1))
    assert np.linalg.norm(np.array(unit_lower_inverse(a)) - exact) < 1e-4 * np.linalg.norm(exact)


@both
def test_a_decay_takes_the_gates_between_two_tokens_and_no_other(by_channel: bool) -> None:
    width = 5 if by_channel else 1
    log_g = -np.random.default_rng(2).random((16, width)).astype(np.float32)
    log_g[3] = -1e4  # a quotient of products over all tokens would be 0 / 0 after this one
    decays = np.array(between(mx.array(log_g)))
    for i in range(16):
        for j in range(i + 1):
            assert np.allclose(decays[i, j], np.exp(log_g[j + 1 : i + 1].astype(np.float64).sum(0)), rtol=1e-5)
    x, k = (np.random.default_rng(seed).standard_normal((16, 5)).astype(np.float32) for seed in (3, 4))
    expected = np.tril(np.einsum("id,jd,ijd->ij", x, k, np.broadcast_to(decays, (16, 16, 5))))
    got = np.array(decayed_products(mx.array(x), mx.array(k), mx.array(log_g)))
    assert np.allclose(got, expected, atol=1e-5)
