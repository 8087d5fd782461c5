"""The program accepts what README tells a newcomer to write."""

import json
import re
import textwrap
from pathlib import Path

from mlxdist.coordinator.config.hosts import load_hosts
from mlxdist.coordinator.config.load import load_config

README = Path(__file__).resolve().parents[2] / "README.md"


def block(first_words: str) -> str:
    """Returns the indented block of README that begins with these words, without its indentation."""
    lines = README.read_text(encoding="utf-8").splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if line.startswith("    " + first_words))
    end = next(i for i, line in enumerate(lines[start:], start) if line.strip() and not line.startswith("    "))
    return textwrap.dedent("".join(lines[start:end]))


def test_the_run_and_the_hosts_of_the_readme_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(block('{"prompt"'), encoding="utf-8")
    (tmp_path / "run.toml").write_text(block("model ="), encoding="utf-8")
    (tmp_path / "hosts.toml").write_text(block("run ="), encoding="utf-8")
    config = load_config(tmp_path / "run.toml")
    assert (config.method, config.batch.size, config.train.epochs) == ("sft", 6, 4)
    hosts = load_hosts(tmp_path / "hosts.toml")
    assert hosts.run == tmp_path / "run.toml"
    assert [node.name for node in hosts.nodes] == ["mini-1", "here"]


def test_the_rows_of_the_readme_are_json() -> None:
    assert [sorted(json.loads(line)) for line in block('{"prompt"').split("\n") if line] == [
        ["completion", "prompt"],
        ["messages"],
        ["text"],
    ]


def test_the_readme_names_two_commands_that_exist() -> None:
    commands = re.findall(r"^    (scripts/\w+)", block("scripts/quickstart").replace("scripts", "    scripts"), re.M)
    assert commands == ["scripts/quickstart", "scripts/test"]
    assert all((README.parent / command).exists() for command in commands)
