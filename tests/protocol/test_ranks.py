"""The rank of every LoRA layer: constant, by the layer's bits, or by its measured sensitivity."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.protocol.ranks import Module, rank_by_bits, ranks


def modules(**bits: int) -> list[Module]:
    return [Module(f"model.layers.0.{name}", name, count) for name, count in bits.items()]


def layer_map(**kl: float) -> dict[str, float]:
    return {f"model.layers.0.{name}": value for name, value in kl.items()}


def by_name(found: dict[str, int]) -> dict[str, int]:
    return {path.rsplit(".", 1)[1]: rank for path, rank in found.items()}


LAYER = modules(q=4, k=8, v=2, o=0, up=3, down=6)


@pytest.mark.parametrize("scaling", ["constant", "by_bits", "by_kl"])
def test_every_module_gets_a_rank_in_the_order_given(scaling: str) -> None:
    assert list(ranks(LAYER, 8, scaling, layer_map(q=1.0))) == [module.path for module in LAYER]
    assert ranks([], 8, scaling, {}) == {}


def test_constant_ranks_do_not_look_at_bits_or_sensitivity() -> None:
    assert set(ranks(LAYER, 1, "constant", layer_map(q=9.0)).values()) == {1}


def test_ranks_by_bits_grow_with_the_bits_and_an_unquantized_layer_gets_the_rank_itself() -> None:
    assert by_name(ranks(LAYER, 8, "by_bits", {})) == {"q": 8, "k": 16, "v": 4, "o": 8, "up": 6, "down": 12}
    assert by_name(ranks(LAYER, 8, "by_bits", layer_map(q=100.0, k=0.1))) == by_name(ranks(LAYER, 8, "by_bits", {}))


@pytest.mark.parametrize(
    ("lora_rank", "bits", "rank"),
    [(8, 4, 8), (8, 3, 6), (5, 3, 4), (3, 5, 4), (1, 4, 2), (1, 2, 2), (2, 2, 2), (1, 0, 1), (7, 0, 7), (6, 16, 24)],
)
def test_a_fraction_is_rounded_up_and_a_quantized_layer_has_at_least_two(lora_rank: int, bits: int, rank: int) -> None:
    assert rank_by_bits(lora_rank, bits) == rank


@given(st.integers(1, 512), st.sampled_from([2, 3, 4, 5, 6, 8, 16]))
def test_ranks_by_bits_are_exact_for_every_size(lora_rank: int, bits: int) -> None:
    assert rank_by_bits(lora_rank, bits) == max(2, math.ceil(Fraction(lora_rank * bits, 4)))


def test_ranks_by_sensitivity_are_clipped_to_half_and_double_around_the_median() -> None:
    kl = layer_map(q=1.0, k=0.1, v=0.75, o=1.5, up=9.0)  # sorted 0.1 0.75 1.0 1.5 9.0
    found = by_name(ranks(modules(q=4, k=4, v=4, o=4, up=4), 8, "by_kl", kl))
    assert found == {"q": 8, "k": 4, "v": 6, "o": 12, "up": 16}


def test_the_median_of_an_even_number_is_the_upper_one() -> None:
    # Of 1, 2, 4, 8 the upper median is 4; the mean of the middle, 3, would give 3, 6, 11, 16.
    found = by_name(ranks(modules(q=4, k=4, v=4, o=4), 8, "by_kl", layer_map(q=1.0, k=2.0, v=4.0, o=8.0)))
    assert found == {"q": 4, "k": 4, "v": 8, "o": 16}


def test_the_median_is_of_the_whole_map_also_of_layers_that_get_no_lora() -> None:
    kl = {**layer_map(q=1.0), "lm_head": 2.0, "model.layers.9.mlp.gate_proj": 2.0}
    assert by_name(ranks(modules(q=4), 8, "by_kl", kl)) == {"q": 4}
    assert by_name(ranks(modules(q=4), 8, "by_kl", layer_map(q=1.0))) == {"q": 8}


def test_a_layer_that_the_map_lacks_is_ranked_by_its_bits() -> None:
    found = by_name(ranks(modules(q=8, k=8, v=0), 8, "by_kl", layer_map(q=1.0)))
    assert found == {"q": 8, "k": 16, "v": 8}


def test_without_a_map_or_with_one_that_measured_nothing_ranks_go_by_bits() -> None:
    expected = ranks(LAYER, 8, "by_bits", {})
    assert ranks(LAYER, 8, "by_kl", {}) == expected
    assert ranks(LAYER, 8, "by_kl", layer_map(q=0.0, k=0.0, v=0.0)) == expected


def test_a_sensitive_layer_among_insensitive_ones_has_at_least_two() -> None:
    assert by_name(ranks(modules(q=4, k=4), 1, "by_kl", layer_map(q=0.0, k=3.0))) == {"q": 2, "k": 2}


@given(
    st.integers(1, 64),
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9),
)
def test_any_rank_by_sensitivity_is_between_half_and_double(lora_rank: int, values: list[float]) -> None:
    layer = modules(**{f"m{index}": 4 for index in range(len(values))})
    found = ranks(layer, lora_rank, "by_kl", {module.path: kl for module, kl in zip(layer, values, strict=True)})
    assert all(max(2, math.ceil(lora_rank / 2)) <= rank <= max(2, 2 * lora_rank) for rank in found.values())
    most, least = max(zip(values, found.values(), strict=True)), min(zip(values, found.values(), strict=True))
    assert least[1] <= most[1]
