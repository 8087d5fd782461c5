"""Ctrl-C ends a command with exit code 130 and one line at most, also while it is still being imported."""

import subprocess
import sys

import pytest

PLANTED = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
sys.argv = ["mlxdist", "runs"]
from mlxdist.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "said"), [("mlxdist.cli", ""), ("mlxdist.coordinator.overview.show", "mlxdist: interrupted\n")]
)
def test_a_command_that_is_interrupted_shows_no_traceback(module: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLANTED.format(module=module)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)
