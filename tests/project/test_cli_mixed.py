"""--mixed says what becomes of a node of another bit class, in place of the key in hosts.toml."""

from pathlib import Path

import pytest

from mlxdist.commands.options import cluster_of

FILE = "[coordinator]\nmixed = '{mixed}'\n[[nodes]]\nhost = 'localhost'\n"


@pytest.mark.parametrize(
    ("given", "written", "used"),
    [(None, "spare", "spare"), (None, "allow", "allow"), ("allow", "spare", "allow"), ("spare", "allow", "spare")],
)
def test_the_option_stands_before_the_key_of_the_file(tmp_path: Path, given: str, written: str, used: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(FILE.format(mixed=written))
    assert cluster_of(path, None, given).coordinator.mixed == used  # type: ignore[arg-type]


def test_without_a_file_such_a_node_is_a_spare() -> None:
    assert cluster_of(None, 2).coordinator.mixed == "spare"
    assert cluster_of(None, 2, "allow").coordinator.mixed == "allow"
