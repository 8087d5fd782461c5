import errno
from pathlib import Path

import pytest

from mlxdist.coordinator.doctor import checks
from mlxdist.coordinator.doctor.checks import Check
from mlxdist.coordinator.doctor.doctor import HostReport
from mlxdist.coordinator.doctor.view import as_json
from mlxdist.coordinator.sync.files import File

GOOD = {"host": "10.0.0.1", "round_trip": 0.0004, "up": 110e6, "down": 112e6, "clock_offset": 0.002}
FILES = [File(name, Path("/m", name), 10, "") for name in ("config.json", "model.safetensors")]


def levels(found: list[Check]) -> dict[str, str]:
    return {check.name: check.level for check in found}


@pytest.mark.parametrize(("free", "level"), [(0, "blocks"), (299e6, "blocks"), (1e9, "warning"), (80e9, "ok")])
def test_a_disk_blocks_where_nothing_can_be_written(free: float, level: str) -> None:
    assert checks.disk(free, "/w").level == level


@pytest.mark.parametrize(
    ("missing", "level", "value"), [([], "ok", "m"), (FILES, "blocks", "missing"), (FILES[1:], "blocks", "differs")]
)
def test_a_model_blocks_where_any_file_differs(missing: list[File], level: str, value: str) -> None:
    check = checks.model("m", missing, FILES, "/w/models/m")
    assert (check.level, check.value) == (level, value)


def test_a_model_that_is_larger_than_the_memory_blocks() -> None:
    assert checks.memory(16 * 10**9, 8 * 10**9, 20 * 10**9, 0.0).level == "blocks"
    assert checks.memory(16 * 10**9, 8 * 10**9, 6 * 10**9, 5.0).level == "blocks"
    assert checks.memory(16 * 10**9, 8 * 10**9, 10 * 10**9, 0.0).level == "warning"
    assert checks.memory(16 * 10**9, 12 * 10**9, 10 * 10**9, 0.0).level == "ok"


def test_a_good_link_and_clock_are_ok() -> None:
    assert levels(list(checks.link(GOOD, "Darwin"))) == {"network": "ok", "clock": "ok"}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"up": 4e6}, "network"),
        ({"down": 4e6}, "network"),
        ({"round_trip": 0.08}, "network"),
        ({"clock_offset": -9.0}, "clock"),
    ],
)
def test_a_slow_link_or_a_wrong_clock_is_a_warning(change: dict[str, float], name: str) -> None:
    found = levels(list(checks.link({**GOOD, **change}, "Darwin")))
    assert [one for one, level in found.items() if level == "warning"] == [name]


@pytest.mark.parametrize("number", [65, errno.EHOSTUNREACH])
def test_no_way_to_the_coordinator_is_local_network_privacy_on_a_mac_alone(number: int) -> None:
    blocked = {"host": "10.0.0.1", "blocked": 5555, "errno": number, "error": "No route to host"}
    (mac,), (linux,) = checks.link(blocked, "Darwin"), checks.link(blocked, "Linux")
    assert (mac.level, mac.value) == ("blocks", "local network")
    assert (linux.level, linux.value) == ("blocks", "port blocked")
    assert "10.0.0.1:5555" in mac.what


def test_a_mac_without_a_metal_device_is_blocked_and_a_linux_is_not() -> None:
    assert checks.metal("no", "Darwin").level == "blocks"
    assert checks.metal("No Metal device", "Darwin").what.endswith("(No Metal device)")
    assert checks.metal("no", "Linux").level == "ok"
    assert checks.metal("yes", "Darwin").level == "ok"


def test_json_says_that_a_run_can_go_on_only_where_no_host_is_blocked() -> None:
    fine = HostReport("a", "mini-1", (Check("ssh", "yes"), Check("clock", "+9 s", "warning", "it is late", "wait")))
    bad = HostReport("b", "mini-2", (Check("ssh", "refused", "blocks", "nothing answers", "turn it on"),))
    assert '"ok": true' in as_json([fine])
    assert '"ok": false' in as_json([fine, bad])
