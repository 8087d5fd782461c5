"""Cases of a test, of which the quick part of the tests runs only some."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns the cases, with the mark `slow` on all that are not in `quick`."""
    return [pytest.param(case, marks=[] if case in quick else pytest.mark.slow) for case in cases]
