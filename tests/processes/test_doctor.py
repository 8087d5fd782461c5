"""`mlxdist doctor` on four Macs with a real sshd each: it finds every fault that is planted, and no other."""

from pathlib import Path

import pytest

from scripts.cluster_bed import HUB
from tests.faults.namespaces import PORT
from tests.processes.bed_cluster import MADE, NAMES, BedCluster

pytestmark = pytest.mark.slow

REACHED = ("ok", "warning")  # levels of a network that is open; a busy machine has a slow one


def with_other_mlx(cluster: BedCluster) -> str:
    """Returns an interpreter that finds another version of mlx installed."""
    folder = cluster.bed.folder / MADE / "other"
    info = folder / "mlx-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx\nVersion: 0.1.0\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{cluster.python}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_a_healthy_cluster_has_no_finding_but_the_shell_that_talks(cluster: BedCluster) -> None:
    code, found = cluster.doctor(cluster.all())
    assert code == 0
    assert list(found) == list(NAMES)
    notes = {
        (name, one["name"], one["level"]) for name, checks in found.items() for one in checks.values() if one["what"]
    }
    notes -= {(name, "network", REACHED[1]) for name in NAMES}
    assert notes == {("mini-3", "shell", "warning")}
    assert {"ssh", "shell", "Python", "versions", "model", "memory", "disk", "clock", "network", "Metal"} <= set(
        found[MADE]
    )


def test_every_planted_fault_is_found_with_its_cure_and_blocks(cluster: BedCluster, model: Path) -> None:
    python = {"python": str(cluster.python)}
    altered = cluster.bed.folder / "mini-1" / "altered"
    altered.mkdir()
    for path in model.iterdir():
        (altered / path.name).write_bytes(path.read_bytes() + (b" " if path.name == "config.json" else b""))
    full = cluster.small_disk("mini-1", "100k")
    nodes = {
        "no python": {"host": "mini-1", "python": "/opt/none/bin/python3"},
        "no mlxdist": {"host": "mini-2", "python": str(cluster.python.resolve())},
        "other mlx": {"host": "mini-3", "python": with_other_mlx(cluster)},
        "no model": {"host": "mini-2", **python, "model": "/models/none"},
        "other model": {"host": "mini-1", **python, "model": str(altered)},
        "full disk": {"host": "mini-1", **python, "workdir": full},
        "no port": {"host": "mini-4", **python},
        "through ssh": {"host": "mini-4", **python, "transport": "ssh"},  # needs no port
        "no ssh": {"host": "10.77.0.99"},
    }
    names = {title.replace(" ", "-"): keys for title, keys in nodes.items()}
    cluster.bed.office.block_data("mini-4")
    try:
        code, found = cluster.doctor(cluster.hosts("faults.toml", names))
    finally:
        cluster.bed.office.unblock_data("mini-4")
    blocked = {
        (name, one["name"], one["value"])
        for name, checks in found.items()
        for one in checks.values()
        if one["level"] == "blocks"
    }
    assert code == 1
    assert blocked == {
        ("full-disk", "model", "missing"),
        ("no-mlxdist", "Python", "mlxdist missing"),
        ("no-python", "Python", "interpreter missing"),
        ("other-mlx", "versions", "other version"),
        ("no-model", "model", "missing"),
        ("other-model", "model", "differs"),
        ("full-disk", "disk", found["full-disk"]["disk"]["value"]),
        ("no-port", "network", "port blocked"),
        ("no-ssh", "ssh", found["no-ssh"]["ssh"]["value"]),
    }
    assert found["through-ssh"]["network"]["level"] in REACHED
    assert "mlx 0.1.0" in found["other-mlx"]["versions"]["what"]
    assert f":{PORT + 1}" in found["no-port"]["network"]["what"]
    assert found["other-mlx"]["shell"]["level"] == "warning"
    assert all(one["cure"] for checks in found.values() for one in checks.values() if one["level"] == "blocks")


def test_a_port_of_the_coordinator_that_is_in_use_is_said(cluster: BedCluster) -> None:
    import socket

    with cluster.bed.office.inside(HUB), socket.create_server(("", PORT + 1)):
        code, found = cluster.doctor(cluster.hosts("used.toml", {MADE: {}}))
    assert code == 1
    assert found["coordinator"]["network"]["value"] == "port in use"
    assert found[MADE]["network"]["level"] in REACHED
