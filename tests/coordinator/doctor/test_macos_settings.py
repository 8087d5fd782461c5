from itertools import product

import pytest

from mlxdist.coordinator.doctor import checks
from mlxdist.coordinator.launch.quoting import remote_command
from mlxdist.macos import SETTINGS_SCRIPT, MacSettings, read_settings

MINI = """\
[power]
System-wide power settings:
Currently in use:
 standby              0
 Sleep On Power Button 1
 autorestart          0
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                1 (sleep prevented by powerd, sharingd)
 ttyskeepawake        1
 displaysleep         10
 tcpkeepalive         1
 lowpowermode         0
 womp                 1
[source]
Now drawing from 'AC Power'
[filevault]
FileVault is On.
[updates]
1
[firewall]
Firewall is enabled. (State = 1)
[block all]
Firewall has block all state set to disabled.
"""
PARTS = ("power", "source", "filevault", "updates", "firewall")
LAPTOP = """\
[power]
Battery Power:
 Sleep On Power Button 1
 lowpowermode         1
 sleep                0 (sleep prevented by caffeinate)
 womp                 0
[source]
Now drawing from 'Battery Power'
 -InternalBattery-0 (id=12345678)	71%; discharging; 4:12 remaining present: true
[filevault]
FileVault is Off.
[updates]
2026-12-01 10:00:00.000 defaults[512:4096]
The domain/default pair of (com.apple.SoftwareUpdate, AutomaticallyInstallMacOSUpdates) does not exist
[firewall]
Firewall is enabled. (State = 2)
[block all]
Firewall is set to block all non-essential incoming connections. (State = 2)
"""


def test_the_settings_of_a_mini_as_it_comes_out_of_its_box_are_read() -> None:
    assert read_settings(MINI) == MacSettings(
        sleep_minutes=1,
        low_power=False,
        on_battery=False,
        wakes_for_network=True,
        restarts_after_power_loss=False,
        filevault=True,
        updates_itself=True,
        firewall=True,
        firewall_blocks_all=False,
    )


def test_a_key_that_a_mac_does_not_have_is_unknown() -> None:
    assert read_settings(LAPTOP) == MacSettings(
        sleep_minutes=0,
        low_power=True,
        on_battery=True,
        wakes_for_network=False,
        restarts_after_power_loss=None,
        filevault=False,
        updates_itself=None,
        firewall=True,
        firewall_blocks_all=True,
    )


@pytest.mark.parametrize(
    "printed",
    ["", "zsh: command not found: pmset", "[power]\n", "[power]\n sleep never\n[filevault]\nWeather is fine\n"],
)
def test_an_unknown_output_is_unknown(printed: str) -> None:
    assert read_settings(printed) == MacSettings()
    assert checks.settings(read_settings(printed)).level == "unknown"
    assert checks.firewall(read_settings(printed)).level == "unknown"


@pytest.mark.parametrize(("part", "cut"), list(product(PARTS, range(3))))
def test_a_part_that_is_cut_or_missing_does_not_change_the_others(part: str, cut: int) -> None:
    whole = {name: read_settings(MINI).__dict__[name] for name in read_settings(MINI).__dict__}
    before, _, after = MINI.partition(f"[{part}]\n")
    body, bracket, rest = after.partition("\n[")
    left = read_settings(f"{before}[{part}]\n{body[: cut * 3]}{bracket}{rest}").__dict__
    changed = [name for name in whole if left[name] != whole[name]]
    assert all(left[name] is None for name in changed)
    assert len(changed) <= 4  # the settings of that part alone


def test_every_setting_that_stops_a_run_at_night_has_a_sentence_and_a_cure() -> None:
    check = checks.settings(read_settings(MINI))
    assert check.level == "warning"
    for words in ("sleeps after 1 min", "restart", "FileVault", "power failure"):
        assert words in check.what
    assert check.cure.count("System Settings") >= 3
    assert "Low Power Mode" in checks.settings(read_settings(LAPTOP)).what


def test_a_firewall_blocks_when_it_blocks_all_connections() -> None:
    assert checks.firewall(read_settings(MINI)).level == "ok"
    assert checks.firewall(read_settings(LAPTOP)).level == "blocks"


def test_all_settings_are_asked_in_one_command_that_csh_takes() -> None:
    assert remote_command(SETTINGS_SCRIPT, "m" * 32)
