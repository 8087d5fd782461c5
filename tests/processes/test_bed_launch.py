"""`mlxdist launch --hosts` on four Macs with a real sshd each gives the bits of one machine."""

import json
from pathlib import Path

import pytest

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
micro_size = 1
order = "shuffled"
max_length = 48
[lora]
rank = 4
[train]
steps = 3
eval_every = 0
"""


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_four_macs_give_the_bits_of_one_machine(cluster: BedCluster, model: Path, method: str) -> None:
    rows = cluster.folder / method
    if method == "sft":
        rows.mkdir()
        lines = (json.dumps({"prompt": "w1 w2", "completion": " w3" * place}) + "\n" for place in range(1, 9))
        (rows / "train.jsonl").write_text("".join(lines))
    else:
        write_rows(rows, method)
    (cluster.folder / f"{method}.toml").write_text(RUN.format(model=model, method=method))
    hosts = str(cluster.all())
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
