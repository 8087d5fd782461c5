"""The pages agree with the code: the reference is the one that the code gives, and every command line parses."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from mlxdist.cli import app
from mlxdist.coordinator.config.keys import hints
from scripts.reference import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_reference_is_what_the_code_gives() -> None:
    """To write it again: python -m scripts.reference > docs/reference.md"""
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == reference()


def test_every_setting_and_every_option_has_a_meaning() -> None:
    rows = re.findall(r"^\| `(.+?)` \|.*\| (.*?) \|$", reference(), re.MULTILINE)
    assert [name for name, meaning in rows if not meaning.strip()] == []
    assert set(hints()) <= {name for name, _ in rows}


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Yields each command line of the pages with its place; the part behind a # is a comment."""
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if re.match(r"    mlxdist [a-z]", line) and "--help" not in line and page.name != "reference.md":
                yield f"{page.name}:{number}", shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize(("place", "words"), [pytest.param(*each, id=each[0]) for each in command_lines()])
def test_every_command_line_of_a_page_is_one_that_the_command_takes(place: str, words: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    name, *rest = words
    assert name in group.commands, f"{place}: there is no command {name}"
    command = group.commands[name]
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    command.make_context(name, rest)  # raises for an option that is not there and for a missing argument


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(page for page in pages if f"({page})" not in index) == []
