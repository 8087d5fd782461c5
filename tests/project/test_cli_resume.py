"""--resume stands alone, or before `previous`; what follows it otherwise is not its value."""

import pytest

from mlxdist.cli import resume_with_value


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("run.toml --resume", "run.toml --resume last"),
        ("--resume run.toml", "--resume last run.toml"),
        ("run.toml --resume --nodes 2", "run.toml --resume last --nodes 2"),
        ("run.toml --resume previous", "run.toml --resume previous"),
        ("--resume previous run.toml", "--resume previous run.toml"),
        ("--resume last", "--resume last"),
        ("run.toml --resume=previous", "run.toml --resume=previous"),
        ("run.toml", "run.toml"),
    ],
)
def test_resume_alone_means_the_last_state(given: str, read: str) -> None:
    assert resume_with_value(given.split()) == read.split()
