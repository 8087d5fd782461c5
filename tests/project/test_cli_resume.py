"""--resume and --invite stand alone, or before one of their values; what follows them otherwise is none."""

import pytest

from mlxdist.cli import with_values


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("", ""),
        ("run.toml --resume", "run.toml --resume last"),
        ("--resume run.toml", "--resume last run.toml"),
        ("run.toml --resume --nodes 2", "run.toml --resume last --nodes 2"),
        ("run.toml --resume previous", "run.toml --resume previous"),
        ("--resume previous run.toml", "--resume previous run.toml"),
        ("--resume last", "--resume last"),
        ("run.toml --resume=previous", "run.toml --resume=previous"),
        ("run.toml", "run.toml"),
        ("run.toml --invite", "run.toml --invite 1"),
        ("--invite run.toml", "--invite 1 run.toml"),
        ("run.toml --invite 4 --resume", "run.toml --invite 4 --resume last"),
        ("--invite --resume previous run.toml", "--invite 1 --resume previous run.toml"),
    ],
)
def test_resume_alone_means_the_last_state_and_invite_alone_one_mac(given: str, read: str) -> None:
    assert with_values(given.split()) == read.split()
