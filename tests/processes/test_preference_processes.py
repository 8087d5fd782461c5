"""The laws of preference training with real processes and sockets: supervisors, workers, ports, files."""

import hashlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlxdist.coordinator.config.schema import (
    BatchConfig,
    DataConfig,
    LoraConfig,
    PreferenceConfig,
    RunConfig,
    TrainConfig,
)
from mlxdist.coordinator.run import run
from mlxdist.protocol.methods import METHODS
from tests.laws.model_folder import WORDS
from tests.processes.node_pools import Pools

pytestmark = pytest.mark.slow


def write_rows(folder: Path, method: str) -> Path:
    """Writes 13 rows of very different lengths and 4 validation rows; for KTO of both classes."""
    random = np.random.default_rng(8)

    def words(most: int) -> str:
        return " ".join(random.choice(WORDS[4:], int(random.integers(1, most))))

    def row(place: int) -> dict[str, object]:
        if method == "kto":
            return {"prompt": words(20), "completion": " " + words(15), "label": place % 3 == 0}
        return {"prompt": words(20), "chosen": " " + words(15), "rejected": " " + words(15)}

    folder.mkdir()
    for name, count in (("train", 13), ("valid", 4)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(place)) + "\n" for place in range(count)))
    return folder


def configured(method: str, model: Path, data: Path, output: Path, **preference: object) -> RunConfig:
    """Steps of 5 and of 3 pairs, or of 5 and 4 rows, in leaves of two."""
    loss = METHODS[method].defaults.get("preference.loss", "sigmoid")
    return RunConfig(
        model=str(model),
        method=method,  # type: ignore[arg-type]
        output=output,
        data=DataConfig(path=str(data)),
        batch=BatchConfig(size=5, leaf_tokens=60, order="shuffled", remainder="keep", max_length=48),
        lora=LoraConfig(rank=4),
        train=TrainConfig(steps=5, learning_rate=1e-2, schedule="cosine", warmup_steps=1, eval_every=3),
        preference=PreferenceConfig(loss=loss, **preference),  # type: ignore[arg-type]
    )


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def events(output: Path, kind: str) -> list[dict[str, object]]:
    """The events of a kind, without the fields that differ from one run to the next."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "second", "message", "peak", "disturbed", "recomputed")
    return [
        {key: value for key, value in line.items() if not any(word in key for word in timed)}
        for line in lines
        if line["event"] == kind
    ]


@pytest.mark.parametrize(("method", "reference"), [("dpo", "base"), ("kto", "base"), ("dpo", "initial")])
def test_saved_adapters_are_byte_identical_for_1_2_3_and_5_nodes(
    method: str, reference: str, pools: Pools, model: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "data", method)
    shas, told, tables = set(), [], []
    for nodes in (1, 2, 3, 5):
        output = tmp_path / str(nodes)
        config = configured(method, model, data, output, reference=reference)
        assert run(config, pools.hosts(nodes), resume=False, environ={}) == 0
        shas.add(sha(output / "adapters.safetensors"))
        told.append((events(output, "train"), events(output, "val")))
        tables.append(load_file(output / "state" / "resume.safetensors"))
        assert json.loads((output / "config.json").read_text())["promise"] == "same bits"
    assert len(shas) == 1
    assert all(one == told[0] for one in told[1:])
    for name in ("references", "valid_references"):
        assert not np.isnan(tables[0][name]).all()
        assert all(np.array_equal(table[name], tables[0][name], equal_nan=True) for table in tables)


RUN = """
model = "{model}"
method = "{method}"
data = "{data}"
output = "{output}"
[batch]
size = 5
leaf_tokens = 60
remainder = "keep"
max_length = 48
[lora]
rank = 4
[train]
steps = 40
eval_every = 10
save_every = 1
report_every = 1
[preference]
reference = "initial"
"""


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_an_interrupted_run_resumes_with_the_bits_and_references_of_an_uninterrupted_one(
    method: str, model: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "data", method)
    for name in ("whole", "broken"):
        text = RUN.format(model=model, method=method, data=data, output=tmp_path / name)
        (tmp_path / f"{name}.toml").write_text(text)
    launch = [sys.executable, "-m", "mlxdist", "launch"]
    whole = [*launch, str(tmp_path / "whole.toml")]
    said = subprocess.run(whole, capture_output=True, text=True, timeout=200, check=True).stdout
    assert re.search(r"\d+ reference forwards saved by keeping the log-probs of rows seen before", said)
    broken = [*launch, str(tmp_path / "broken.toml")]
    with subprocess.Popen([*broken, "--nodes", "2"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("step 6 of" in line for line in process.stdout)  # within the third epoch
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
    assert process.returncode == 130
    subprocess.run([*broken, "--resume"], capture_output=True, timeout=200, check=True)
    assert sha(tmp_path / "broken" / "adapters.safetensors") == sha(tmp_path / "whole" / "adapters.safetensors")
    assert events(tmp_path / "broken", "train") == events(tmp_path / "whole", "train")
    assert events(tmp_path / "broken", "val") == events(tmp_path / "whole", "val")
    tables = [load_file(tmp_path / name / "state" / "resume.safetensors") for name in ("broken", "whole")]
    for name in ("references", "valid_references", "first_moment", "second_moment"):
        assert np.array_equal(tables[0][name], tables[1][name])
