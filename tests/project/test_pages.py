"""The example on the page of how it works prints what the page says; a method's page shows the run of its example."""

import io
import re
import textwrap
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_worked_example_prints_what_the_page_says() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.+?)```\n\nprints\n\n((?:    .+\n)+)", page, re.DOTALL)
    assert found is not None
    out = io.StringIO()
    with redirect_stdout(out):
        exec(found[1], {})
    assert out.getvalue() == textwrap.dedent(found[2])
    trees, others = zip(*(re.findall(r"-?\d+\.\d+", line) for line in out.getvalue().splitlines()), strict=True)
    assert (len(set(trees)), len(set(others))) == (1, 3)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_the_run_file_on_the_page_of_a_method_is_that_of_its_example(method: str) -> None:
    page = (ROOT / "docs" / f"{method}.md").read_text(encoding="utf-8")
    shown = re.search(r"((?:    method = .+\n)(?:    .*\n|\n)+?)    mlxdist launch", page)
    assert shown is not None
    given = tomllib.loads(textwrap.dedent(shown[1]))
    example = tomllib.loads((ROOT / "examples" / method / "run.toml").read_text(encoding="utf-8"))
    for table, keys in given.items():
        values = example[table]
        assert keys == values if not isinstance(keys, dict) else keys.items() <= values.items(), table
