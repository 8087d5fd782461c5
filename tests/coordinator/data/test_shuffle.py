"""The data order's random numbers are those of mulberry32 in JavaScript, bit by bit."""

import pytest

from mlxdist.coordinator.batch.shuffle import fisher_yates, mulberry32

# Computed once by node, with Math.imul and >>>.
WORDS = {
    0: [2693262067, 11749833, 2265367787, 4213581821, 4159151403],
    1: [2693262067, 11749833, 2265367787, 4213581821, 4159151403],
    7: [50271532, 266108690, 4195786334, 3002305430, 2239590375],
    12345: [4207900869, 1317490944, 2079646450, 3513001552, 2187978186],
    4294967295: [3850105811, 813802916, 3073704848, 4054706436, 3630262831],
}


@pytest.mark.parametrize("seed", WORDS)
def test_mulberry32_gives_the_words_of_its_javascript(seed: int) -> None:
    draw = mulberry32(seed)
    assert [int(draw() * 2**32) for _ in range(5)] == WORDS[seed]


def test_a_seed_counts_modulo_two_to_the_32nd_and_nought_is_one() -> None:
    assert mulberry32(2**32)() == mulberry32(0)() == mulberry32(1)()
    assert mulberry32(-1)() == mulberry32(2**32 - 1)()


def test_fisher_yates_goes_from_the_last_down() -> None:
    items = list(range(10))
    fisher_yates(items, mulberry32(5))
    assert items == [5, 3, 7, 8, 2, 0, 4, 1, 9, 6]  # computed by node


def test_nothing_and_one_thing_are_shuffled_without_a_draw() -> None:
    draw = mulberry32(9)
    for items in ([], [1]):
        fisher_yates(items, draw)
    assert draw() == mulberry32(9)()
