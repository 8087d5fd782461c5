"""The roster and the lines of nodes, as they are shown."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.report.printed_lines import MOST_LINES, PERIOD_SECONDS, PrintedLines
from mlxdist.coordinator.report.roster_view import RosterLine, bit_classes, roster_lines

MINI = RosterLine("mini-1", "mini-1", "Apple M4", "17.2 GB", "macOS 15.3", "0.1.0", "0.32.4", "0.32.2", "A")


def test_the_roster_has_a_line_for_each_node_in_columns() -> None:
    longer = replace(MINI, name="a-longer-name", bits="B")
    titles, first, second = roster_lines([MINI, longer])
    assert titles.split() == ["node", "host", "chip", "memory", "system", "mlxdist", "mlx", "mlx-lm", "bits"]
    assert titles.index("chip") == first.index("Apple M4") == second.index("Apple M4")
    assert first.endswith("  A")
    assert second.endswith("  B")


def test_a_column_in_which_nothing_is_known_is_left_out() -> None:
    titles = roster_lines([replace(MINI, chip="", mlx="")])[0]
    assert "chip" not in titles
    assert titles.split().count("mlx") == 0


def test_nodes_with_equal_bits_have_the_same_letter_and_an_unsteady_one_has_none() -> None:
    assert bit_classes([("x",) * 3, ("y",) * 3, ("x",) * 3, ("x", "x", "y")]) == ["A", "B", "A", "-"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 5)), max_size=200))
def test_every_line_of_a_node_is_shown_or_counted_and_few_are_shown(steps: list[tuple[str, float]]) -> None:
    printed, now = PrintedLines(), 0.0
    shown: list[str] = []
    for number, (name, wait) in enumerate(steps):
        now += wait
        shown += printed.shown(name, f"line {number}", now)
    for name in "ab":
        told = [line for line in shown if line.startswith(f"{name} | line")]
        counted = [int(line.split()[3]) for line in shown if line.startswith(f"{name} | …")]
        given_lines = [number for number, (each, _) in enumerate(steps) if each == name]
        assert len(told) + sum(counted) + printed._hidden.get(name, 0) == len(given_lines)
        assert len(told) <= MOST_LINES * (1 + now // PERIOD_SECONDS)
        assert [int(line.rsplit(" ", 1)[1]) for line in told] == sorted(int(line.rsplit(" ", 1)[1]) for line in told)


def test_the_lines_of_one_node_hide_none_of_another() -> None:
    printed = PrintedLines()
    for number in range(1000):
        printed.shown("loud", f"line {number}", 0.0)
    assert printed.shown("quiet", "hello", 0.0) == ["quiet | hello"]
    assert printed.shown("loud", "later", PERIOD_SECONDS) == [
        f"loud | … {1000 - MOST_LINES:,} more lines in logs/loud.log",
        "loud | later",
    ]
