"""`mlxdist sync` on four Macs with a real sshd each: fish, csh with a space in HOME, a shell that talks, no rsync."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.cluster_bed import MBIT
from tests.processes.bed_cluster import MADE, NAMES, BedCluster, files_in

pytestmark = pytest.mark.slow


def copies(cluster: BedCluster, model: Path, name: str) -> dict[str, bytes]:
    folder = cluster.bed.home(name) / "mlxdist" / "models" / model.name
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_host_has_the_model_and_nodes_can_start(cluster: BedCluster, model: Path) -> None:
    here = {
        path.name: path.read_bytes() for path in model.iterdir() if path.suffix in (".json", ".safetensors", ".jinja")
    }
    assert here
    for name in NAMES:
        assert copies(cluster, model, name).items() >= here.items()
    for name in NAMES:
        done = cluster.bed.run("ssh", name, f"exec /bin/sh -c '\"{cluster.python}\" -m mlxdist --version'")
        assert "mlxdist " in done.stdout


def test_nothing_is_written_outside_of_the_work_folder(cluster: BedCluster) -> None:
    new = {name: cluster.files(name) - cluster.before[name] for name in NAMES}
    assert {name: {one for one in new[name] if one.split("/")[0] != "mlxdist"} for name in NAMES} == {
        name: set() for name in NAMES
    }


def test_a_second_sync_needs_no_internet_and_copies_nothing(cluster: BedCluster) -> None:
    done = cluster.mlxdist("sync", "--hosts", str(cluster.all()))
    assert done.returncode == 0
    assert sorted(line for line in done.stdout.splitlines() if "all is there" in line) == [
        f"{name}: all is there" for name in NAMES
    ]


def test_a_file_with_other_bytes_is_copied_again_and_no_other(cluster: BedCluster, model: Path) -> None:
    for name in NAMES:
        path = cluster.bed.home(name) / "mlxdist" / "models" / model.name / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1  # of equal size
        path.write_bytes(data)
    untouched = [cluster.bed.home(name) / "mlxdist" / "models" / model.name / "tokenizer.json" for name in NAMES]
    numbers = [path.stat().st_ino for path in untouched]
    done = cluster.mlxdist("sync", "--hosts", str(cluster.all()))
    assert done.returncode == 0
    for name in NAMES:
        assert copies(cluster, model, name)["model.safetensors"] == (model / "model.safetensors").read_bytes()
    assert [path.stat().st_ino for path in untouched] == numbers


def test_a_full_disk_is_refused_before_the_copy_and_the_others_go_on(cluster: BedCluster, model: Path) -> None:
    small = cluster.small_disk("mini-4", "1m")
    others = {"mini-1": {"python": str(cluster.python), "workdir": "~/other work"}}
    hosts = cluster.hosts("full.toml", {"mini-4": {"workdir": small, "python": str(cluster.python)}, **others})
    done = cluster.mlxdist("sync", "--hosts", str(hosts))
    assert done.returncode == 1
    (refused,) = [line for line in done.stdout.splitlines() if line.startswith("mini-4: ") and "needed" in line]
    assert "free" in refused
    assert small in refused
    assert cluster.bed.inside("mini-4", "ls", small) == ""
    assert (cluster.bed.home("mini-1") / "other work" / "models" / model.name / "config.json").is_file()


def test_a_host_that_is_gone_is_named_with_a_cure_and_the_others_go_on(cluster: BedCluster) -> None:
    nodes = {"mini-1": {"python": str(cluster.python)}, "gone": {"host": "10.77.0.99", "python": "/usr/bin/python3"}}
    done = cluster.mlxdist("sync", "--hosts", str(cluster.hosts("gone.toml", nodes)))
    assert done.returncode == 1
    assert "mini-1: all is there" in done.stdout
    assert "gone: " in done.stdout


def test_a_sync_that_is_interrupted_leaves_no_process_here_or_there(cluster: BedCluster, tmp_path: Path) -> None:
    """mini-3 gets its files through ssh, on a cable that needs minutes for them."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40_000)
    hosts = str(cluster.hosts("slow.toml", {"mini-3": {"python": str(cluster.python)}}))
    words = [sys.executable, "-um", "mlxdist", "sync", "--hosts", hosts, "--set", f"model={tmp_path}"]
    cluster.bed.office.slow("mini-3", 1.0)
    try:
        with subprocess.Popen(
            cluster.bed.here(*words),
            env=cluster.bed.environment,
            cwd=cluster.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert any(line == "mini-3: copying\n" for line in process.stdout)
            part = cluster.bed.home("mini-3") / "mlxdist" / "models" / tmp_path.name / "model.safetensors.part"
            while not part.exists():
                time.sleep(0.05)
            started = psutil.Process(process.pid).children()
            assert started
            process.terminate()
            assert process.wait() == 130
            assert process.stderr.read().endswith("mlxdist: interrupted\n")
        assert psutil.wait_procs(started, timeout=20)[1] == []
        cluster.bed.limit(MBIT)
        there = [psutil.Process(pid) for pid in cluster.bed.processes("mini-3")]
        assert psutil.wait_procs(there, timeout=20)[1] == []
    finally:
        cluster.bed.limit(MBIT)


def test_clean_removes_old_environments_and_keeps_the_newest(cluster: BedCluster) -> None:
    folder = cluster.bed.home(MADE) / "mlxdist"
    newest = (folder / "env" / "current").readlink()
    wheels = files_in(folder / "wheels")
    (folder / "env" / "0.0.1-000000000000" / "bin").mkdir(parents=True)
    (folder / "wheels" / "old-0.1-py3-none-any.whl").touch()
    cluster.bed.give(MADE, folder)
    done = cluster.mlxdist("sync", "--hosts", str(cluster.all()), "--clean")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (folder / "env").iterdir()} == {"current", newest.name}
    assert files_in(folder / "wheels") == wheels
    assert cluster.python.exists()
