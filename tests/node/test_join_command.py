"""The code as `mlxdist join` asks for it."""

import io

import pytest

from mlxdist.commands.join import read_code
from mlxdist.protocol.errors import UserError


class Terminal(io.StringIO):
    """The lines that a person types."""

    def isatty(self) -> bool:
        return True


def test_a_person_is_asked_until_a_code_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_code(Terminal("4831\nabcd-efgh\n4831 0927\n")) == "4831-0927"
    said = capsys.readouterr().out
    assert said.count("The code that the other Mac shows: ") == 3
    assert said.count("two groups of four digits") == 2


def test_the_end_of_what_is_typed_ends_the_question() -> None:
    with pytest.raises(UserError, match="two groups of four digits"):
        read_code(Terminal(""))


def test_without_a_terminal_the_code_is_the_first_line_of_standard_input() -> None:
    assert read_code(io.StringIO("4831-0927\nother\n")) == "4831-0927"


@pytest.mark.parametrize("typed", ["", "\n", "  \n"])
def test_without_a_terminal_and_a_code_both_ways_are_told(typed: str) -> None:
    with pytest.raises(UserError, match="no terminal to ask for the code, and none on standard input"):
        read_code(io.StringIO(typed))
