"""Answers of macOS and Linux about a node's own machine; one that is not understood is unknown."""

import sys

import pytest

from mlxdist.node.macos import answer, chip, linux_chip

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Processor @ 2.60GHz
stepping\t: 8

processor\t: 1
model name\t: Intel(R) Xeon(R) Processor @ 2.60GHz
"""


def test_the_processor_is_named() -> None:
    assert linux_chip(CPUINFO) == "Intel(R) Xeon(R) Processor @ 2.60GHz"
    assert len(chip()) <= 80


@pytest.mark.parametrize("text", ["", "processor\t: 0\nBogoMIPS\t: 48.00\n", "\0"])
def test_an_unknown_processor_has_no_name(text: str) -> None:
    assert linux_chip(text) == ""


def test_a_command_that_fails_or_is_missing_says_nothing() -> None:
    assert answer((sys.executable, "-c", "print(1); raise SystemExit(3)")) == ""
    assert answer(("/nowhere/sysctl",)) == ""
    assert answer((sys.executable, "-c", "print('M4')")) == "M4\n"
