"""`mlxdist launch --hosts` on four Macs with a real sshd each gives the bits of one machine."""

import json
from pathlib import Path

import pytest

from mlxdist.coordinator.config.hosts import load_hosts
from scripts.cluster_bed import HUB
from scripts.local_cluster import adapter_sha
from tests.processes.bed_cluster import NAMES, BedCluster
from tests.processes.test_preference_processes import write_rows

pytestmark = pytest.mark.slow

RUN = """\
model = "{model}"
data = "{method}"
method = "{method}"
[batch]
size = 8
leaf_tokens = 16
order = "shuffled"
max_length = 48
[lora]
rank = 4
[train]
steps = 3
eval_every = 0
"""


def write_run(cluster: BedCluster, model: Path, method: str) -> None:
    """Writes a run of three steps and its data, unless they are there."""
    rows = cluster.folder / method
    if rows.exists():
        return
    if method == "sft":
        rows.mkdir()
        lines = (json.dumps({"prompt": "w1 w2", "completion": " w3" * place}) + "\n" for place in range(1, 9))
        (rows / "train.jsonl").write_text("".join(lines))
    else:
        write_rows(rows, method)
    (cluster.folder / f"{method}.toml").write_text(RUN.format(model=model, method=method))


def test_hosts_init_writes_every_mac_and_a_key_for_each(cluster: BedCluster) -> None:
    done = cluster.mlxdist("hosts", "init", *NAMES, "--output", "first.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [node.host for node in load_hosts(cluster.folder / "first.toml").nodes] == list(NAMES)
    keys = sorted((cluster.bed.folder / HUB / ".mlxdist" / "nodes").iterdir())
    assert [(key.name, oct(key.stat().st_mode & 0o777)) for key in keys] == [(name, "0o600") for name in NAMES]


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_four_macs_give_the_bits_of_one_machine(cluster: BedCluster, model: Path, method: str) -> None:
    write_run(cluster, model, method)
    hosts = str(cluster.all())
    before = {name: cluster.files(name) for name in NAMES}
    far = cluster.mlxdist("launch", f"{method}.toml", "--hosts", hosts, "--set", f'output="{method}-far"')
    assert far.returncode == 0, far.stdout + far.stderr
    here = cluster.mlxdist("launch", f"{method}.toml", "--set", f'output="{method}-here"')
    assert here.returncode == 0, here.stdout + here.stderr
    assert adapter_sha(cluster.folder / f"{method}-far") == adapter_sha(cluster.folder / f"{method}-here")
    events = [
        json.loads(line) for line in (cluster.folder / f"{method}-far" / "metrics.jsonl").read_text().splitlines()
    ]
    assert {event["name"] for event in events if event["event"] == "node" and event.get("state") == "ready"} == set(
        NAMES
    )
    assert cluster.left() == {name: [] for name in NAMES}, "a process of the run is left"
    new = {name: cluster.files(name) - before[name] for name in NAMES}
    assert [path for each in new.values() for path in each if path.split("/")[0] != "mlxdist"] == []


def test_launch_says_that_a_sync_is_needed_and_does_it_when_it_is_asked_to(cluster: BedCluster, model: Path) -> None:
    write_run(cluster, model, "sft")
    workdir = cluster.bed.folder / "mini-3" / "new work"
    workdir.mkdir()
    cluster.bed.give("mini-3", workdir)
    hosts = str(cluster.hosts("new.toml", {"mini-3": {"workdir": str(workdir), "python": str(cluster.python)}}))
    refused = cluster.mlxdist("launch", "sft.toml", "--hosts", hosts, "--set", 'output="new"')
    assert refused.returncode == 1
    assert "it does not have the model" in refused.stderr
    assert "--sync" in refused.stderr
    done = cluster.mlxdist("launch", "sft.toml", "--hosts", hosts, "--sync", "--set", 'output="new"')
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mini-3: " in done.stdout
