"""One check each: from an answer or a number to a cell of the table, and a sentence with a cure where one is needed."""

import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxdist.coordinator.launch.fault_patterns import LOCAL_NETWORK
from mlxdist.coordinator.launch.findings import Finding
from mlxdist.coordinator.sync.files import File
from mlxdist.macos import MacSettings
from mlxdist.protocol.budget import format_bytes

Level = Literal["ok", "unknown", "warning", "blocks"]

LEAST_FREE, FEW_FREE = 300e6, 5e9  # bytes of a disk: below the first nothing can be written, below the second little
CLOCK_SECONDS = 2.0
SLOW_BYTES = 12.5e6  # 100 Mbit/s
FAR_SECONDS = 0.02
NO_WAY = {errno.EHOSTUNREACH, errno.ENETUNREACH, 65}  # 65: EHOSTUNREACH of macOS
ENERGY = "System Settings, Energy"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at on one host."""

    name: str  # the column
    value: str  # the cell: short
    level: Level = "ok"
    what: str = ""  # a clause about the host, without its name
    cure: str = ""  # what to do, with the command to type


def of_finding(name: str, found: Finding, level: Level = "blocks") -> Check:
    """Returns the check of a finding."""
    return Check(name, found.kind, level, found.what, found.cure)


def disk(free: float, workdir: str) -> Check:
    """Checks the free bytes of the disk that holds the work folder."""
    value, cure = f"{format_bytes(free)} free", "Free some space; mlxdist sync --clean removes old environments"
    if free < LEAST_FREE:
        return Check("disk", value, "blocks", f"its disk is full: {format_bytes(free)} are free for {workdir}", cure)
    if free < FEW_FREE:
        return Check("disk", value, "warning", f"only {format_bytes(free)} are free for {workdir}", cure)
    return Check("disk", value)


def model(name: str, missing: Sequence[File], files: Sequence[File], folder: str) -> Check:
    """Checks the model's files on a host, of which `missing` are not there or have other bytes."""
    if not missing:
        return Check("model", name)
    cure = "Type mlxdist sync --hosts hosts.toml run.toml, or set model for it in hosts.toml"
    if len(missing) == len(files):
        return Check("model", "missing", "blocks", f"it does not have the model in {folder}", cure)
    names = ", ".join(file.path.name for file in missing[:3])
    return Check("model", "differs", "blocks", f"its model in {folder} differs from this machine's in {names}", cure)


def memory(total: int, available: int, model_bytes: int, limit_gb: float) -> Check:
    """Checks that a model of `model_bytes` can be loaded at all; `mlxdist plan` knows what training needs."""
    value = f"{format_bytes(total)}, {format_bytes(available)} free"
    usable = min(total, limit_gb * 1e9 or total)
    if model_bytes > usable:
        what = f"the model has {format_bytes(model_bytes)}, and it may use {format_bytes(usable)} of memory"
        return Check("memory", value, "blocks", what, "Take a smaller or quantized model, or leave this Mac out")
    if model_bytes > available:
        what = f"the model has {format_bytes(model_bytes)}, and only {format_bytes(available)} of memory are free now"
        return Check("memory", value, "warning", what, "Close programs there; mlxdist plan says what training needs")
    return Check("memory", value)


def metal(said: str, system: str) -> Check:
    """Checks that mlx has a GPU, on a Mac."""
    if said == "yes":
        return Check("Metal", "yes")
    if system != "Darwin":
        return Check("Metal", "none", "ok")
    what = "there is no Metal device in this session" + (f" ({said})" if said != "no" else "")
    return Check("Metal", "no", "blocks", what, "Log in to that Mac once at its screen, or leave it out")


def link(measured: Mapping[str, Any], system: str) -> Iterator[Check]:
    """Checks ports, bandwidth, round trip and clock, as the node has measured them."""
    if "blocked" in measured:
        yield _blocked(measured, system)
        return
    trip, up, down = measured["round_trip"], measured["up"], measured["down"]
    value = f"{_mbit(up)} up, {_mbit(down)} down, {trip * 1000:.1f} ms"
    if min(up, down) < SLOW_BYTES or trip > FAR_SECONDS:
        what = f"its link is slow: {value}"
        yield Check("network", value, "warning", what, "Use Ethernet or Thunderbolt; on Wi-Fi most Macs wait")
    else:
        yield Check("network", value)
    offset = measured["clock_offset"]
    what = f"its clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} this machine's"
    wrong = abs(offset) > CLOCK_SECONDS
    cure = "Turn on System Settings, General, Date & Time, Set time automatically, so that logs can be compared"
    shown = "right" if abs(offset) < 0.05 else f"{offset:+.1f} s"
    yield Check("clock", shown, "warning", what, cure) if wrong else Check("clock", shown)


def _blocked(measured: Mapping[str, Any], system: str) -> Check:
    place = f"{measured['host']}:{measured['blocked']}"
    number = f"errno {measured['errno']}" if measured["errno"] else "no answer"
    if system == "Darwin" and measured["errno"] in NO_WAY:
        what = f"macOS keeps mlxdist from the local network: {place} cannot be reached, while ssh works ({number})"
        cure = f'Set transport = "ssh" for it in hosts.toml, or allow its Python in {LOCAL_NETWORK}'
        return Check("network", "local network", "blocks", what, cure)
    what = f"it does not reach the coordinator at {place} ({measured['error']})"
    cure = 'Allow incoming connections for Python on the coordinator, or set transport = "ssh" for it in hosts.toml'
    return Check("network", "port blocked", "blocks", what, cure)


def settings(found: MacSettings) -> Check:
    """Checks the settings of a Mac that stop a run at night: the first that does is said, the others follow it."""
    notes, cures = [], []
    for wrong, what, cure in (
        (found.low_power, "Low Power Mode is on and slows it", f"{ENERGY}: Low Power Mode, Never"),
        (found.on_battery, "it runs on its battery", "Connect its power adapter"),
        (
            found.sleep_minutes,
            f"it sleeps after {found.sleep_minutes} min when no run keeps it awake, and ssh cannot reach it then",
            f"{ENERGY}: Prevent automatic sleeping (or: sudo pmset -a sleep 0)",
        ),
        (found.wakes_for_network is False, "it does not wake for the network", f"{ENERGY}: Wake for network access"),
        (
            found.updates_itself,
            "macOS may install updates and restart it at night",
            "System Settings, General, Software Update, Automatic Updates: Install macOS updates, off",
        ),
        (
            found.filevault and found.updates_itself,
            "FileVault then waits for a password, and ssh cannot reach it before",
            "Turn off automatic updates, or unlock it after each restart",
        ),
        (
            found.restarts_after_power_loss is False,
            "it stays off after a power failure",
            f"{ENERGY}: Start up automatically after a power failure (or: sudo pmset -a autorestart 1)",
        ),
    ):
        if wrong:
            notes.append(what)
            cures.append(cure)
    unknown = [name for name, value in vars(found).items() if value is None]
    if notes:
        return Check("settings", f"{len(notes)} to change", "warning", "; ".join(notes), "; ".join(cures))
    if unknown:
        return Check("settings", f"{len(unknown)} unknown", "unknown")
    return Check("settings", "good")


def firewall(found: MacSettings) -> Check:
    """Checks the firewall of the coordinator's Mac: nodes dial in. Nodes themselves only dial out."""
    if found.firewall is None:
        return Check("firewall", "unknown", "unknown")
    if found.firewall and found.firewall_blocks_all:
        what = "its firewall blocks all incoming connections, so that no node reaches the coordinator"
        cure = "System Settings, Network, Firewall, Options: Block all incoming connections, off"
        return Check("firewall", "blocks all", "blocks", what, cure)
    return Check("firewall", "on" if found.firewall else "off")


def _mbit(bytes_per_second: float) -> str:
    mbit = bytes_per_second * 8e-6
    return f"{mbit / 1000:.1f} Gbit/s" if mbit >= 1000 else f"{mbit:.0f} Mbit/s"
