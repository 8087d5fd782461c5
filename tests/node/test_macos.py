"""Answers of macOS and Linux about a node's own machine; one that is not understood is unknown."""

import math
import os
import sys
from pathlib import Path

import pytest

from mlxdist.macos import (
    PRESSURES,
    answer,
    chip,
    heat_of,
    idle_seconds,
    linux_chip,
    on_battery,
    strain_on_this_mac,
    terminals_idle,
    use_of_this_mac,
)

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
    assert answer(f"{sys.executable} -c 'print(1); raise SystemExit(3)'") == ""
    assert answer("/nowhere/sysctl") == ""
    assert answer(f"{sys.executable} -c \"print('M4')\"") == "M4\n"


IDLE = """  | +-o IOHIDSystem  <class IOHIDSystem, id 0x1000004a1, registered, matched, active, busy 0, retain 27>
  |   | {
  |   |   "HIDIdleTime" = 301250000000
  |   |   "HIDParameters" = {"HIDClickTime"=500000000,"HIDInitialKeyRepeat"=416666667}
  |   | }
"""
ON_BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=21233763)\t84%; discharging; 9:21 remaining present: true
"""


def test_the_idle_time_is_read_in_seconds() -> None:
    assert idle_seconds(IDLE) == 301.25


def test_the_source_of_power_is_read() -> None:
    assert on_battery(ON_BATTERY) is True
    assert on_battery("Now drawing from 'AC Power'\n") is False


@pytest.mark.parametrize(
    "printed", ["", "HIDIdleTime = x", '"HIDIdleTime" = ' + "9" * 40, "Now drawing from 'Moon Power'"]
)
def test_what_macos_does_not_say_is_unknown(printed: str) -> None:
    assert idle_seconds(printed) is None
    assert on_battery(printed) is None


# As notifyutil prints it on Apple silicon, by what is published about it; not seen on a Mac here.
@pytest.mark.parametrize(
    ("printed", "heat"),
    [
        ("com.apple.system.thermalpressurelevel 0\n", "nominal"),
        ("com.apple.system.thermalpressurelevel 1\n", "moderate"),
        ("com.apple.system.thermalpressurelevel 2\n", "heavy"),
        ("com.apple.system.thermalpressurelevel 4\n", "sleeping"),
        ("com.apple.system.thermalpressurelevel 5\n", ""),
        ("com.apple.system.thermalpressurelevel: Failed with code 1000003\n", ""),
        ("0\n", ""),
        ("", ""),
    ],
)
def test_the_thermal_pressure_is_named_and_any_other_answer_is_unknown(printed: str, heat: str) -> None:
    assert heat_of(printed) == heat


def test_the_strain_on_this_machine_is_known_or_said_to_be_unknown() -> None:
    strain = strain_on_this_mac()
    assert strain.swap_bytes >= -1
    assert strain.heat in ("", *PRESSURES)


def test_a_terminal_is_idle_since_it_was_last_read(tmp_path: Path) -> None:
    for name, read_at in (("tty1", 900.0), ("tty2", 500.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (read_at, 0.0))
    assert terminals_idle([str(tmp_path / "tty1"), str(tmp_path / "tty2"), "/nowhere"], 1000.0) == 100.0
    assert terminals_idle([], 1000.0) == math.inf
    assert use_of_this_mac().on_battery in (True, False, None)
