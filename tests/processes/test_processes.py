"""The laws of training with real processes and sockets: supervisors, workers, ports, signals."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import mlx_lm
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, LoraConfig, RunConfig, TrainConfig
from mlxdist.coordinator.run import run
from mlxdist.protocol.errors import UserError
from tests.laws.model_folder import WORDS, llama_folder
from tests.laws.plain_loops import Recipe, Trainer, log_probs
from tests.laws.plain_model import PlainRow
from tests.processes.node_pools import Pools

pytestmark = pytest.mark.slow

GONE_SECONDS = 15.0


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 conversations of very different lengths, and 6 validation rows."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(5)

    def words(most: int) -> str:
        return " ".join(random.choice(WORDS[4:], int(random.integers(1, most))))

    def rows(count: int) -> str:
        turns = [[("user", words(25)), ("assistant", words(20))] for _ in range(count)]
        chats = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns]
        return "".join(json.dumps(chat) + "\n" for chat in chats)

    (folder / "train.jsonl").write_text(rows(30))
    (folder / "valid.jsonl").write_text(rows(6))
    return folder


def configured(model: Path, data: Path, output: Path, batch: BatchConfig, steps: int = 5) -> RunConfig:
    return RunConfig(
        model=str(model),
        output=output,
        data=DataConfig(path=str(data)),
        batch=batch,
        lora=LoraConfig(rank=4),
        train=TrainConfig(steps=steps, learning_rate=1e-2, eval_every=3),
    )


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "batch",
    [
        BatchConfig(size=8, leaf_tokens=16),
        # 3 windows per epoch: steps of 2 and of 1 window
        BatchConfig(size=8, leaf_tokens=90, grad_accum_steps=2),
        BatchConfig(size=2, leaf_tokens=16),
    ],
    ids=["a row a leaf", "accumulated, short last step", "more nodes than leaves"],
)
def test_saved_adapters_are_byte_identical_for_1_2_3_and_5_nodes(
    batch: BatchConfig, pools: Pools, model: Path, data: Path, tmp_path: Path
) -> None:
    shas, vals = set(), set()
    for nodes in (1, 2, 3, 5):
        output = tmp_path / str(nodes)
        assert run(configured(model, data, output, batch), pools.hosts(nodes), resume=False, environ={}) == 0
        shas.add(sha(output / "adapters.safetensors"))
        metrics = json.loads((output / "metrics.json").read_text())
        vals.add(tuple(metrics["train_losses"]) + tuple(val["loss"] for val in metrics["val_trajectory"]))
        assert json.loads((output / "config.json").read_text())["promise"] == "same bits"
    assert len(shas) == 1
    assert len(vals) == 1


def test_mlx_lm_loads_the_trained_adapter_and_finds_the_same_validation_loss(
    pools: Pools, data: Path, tmp_path: Path
) -> None:
    """The model has mixed 4 and 8 bits; its adapter has ranks by bits and is saved padded with zeros."""
    model = llama_folder(tmp_path / "mixed", mixed=True)
    config = configured(model, data, tmp_path / "run", BatchConfig(size=8, leaf_tokens=60))
    assert run(config, pools.hosts(2), resume=False, environ={}) == 0
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    assert {name.rpartition(".")[2]: rank for name, rank in metrics["applied_ranks"].items()} == {
        "down_proj": 8,
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"), 4),
    }
    loaded, tokenizer, *_ = mlx_lm.load(str(model), adapter_path=str(tmp_path / "run"))
    rows = []
    for line in (data / "valid.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        rows.append(PlainRow(tuple(ids), tuple(int(i >= len(prompt)) for i in range(len(ids)))))
    sums = log_probs(Trainer(loaded, Recipe()), rows)
    loss = -sums.sum().item() / sum(sum(row.targets) for row in rows)
    assert loss == pytest.approx(metrics["final_val_loss"], rel=1e-5)


# ---- the command itself


RUN = """
model = "{model}"
data = "{data}"
output = "run"
[lora]
rank = 4
[train]
steps = {steps}
eval_every = 0
report_every = 1
"""


def start(folder: Path, *, model: Path, data: Path, nodes: int, steps: int = 100_000) -> "subprocess.Popen[str]":
    (folder / "run.toml").write_text(RUN.format(model=model, data=data, steps=steps))
    return subprocess.Popen(
        [sys.executable, "-m", "mlxdist", "launch", "--nodes", str(nodes)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "MLX_DISABLE_COMPILE": "1"},
    )


def read_until(process: "subprocess.Popen[str]", words: str) -> str:
    """Reads the output up to the first line with these words."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(words, line):
            return "".join(lines)
    raise AssertionError(f"{words!r} never came:\n{''.join(lines)}")


def family(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The coordinator, its supervisors and their workers."""
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Waits for the end of the processes and returns those that still run."""
    return psutil.wait_procs(processes, timeout=GONE_SECONDS)[1]


def test_an_interrupt_saves_the_last_step_stops_every_node_and_exits_130(
    model: Path, data: Path, tmp_path: Path
) -> None:
    process = start(tmp_path, model=model, data=data, nodes=2)
    read_until(process, r"step 3 of")
    everyone = family(process)
    assert len(everyone) == 5
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130, rest
    assert "interrupted after step" in rest
    assert (tmp_path / "run/state/resume.safetensors").exists()
    assert json.loads((tmp_path / "run/metrics.json").read_text())["status"] == "interrupted"
    assert gone(everyone) == []


def test_many_interrupts_end_like_the_first_one(model: Path, data: Path, tmp_path: Path) -> None:
    process = start(tmp_path, model=model, data=data, nodes=2)
    read_until(process, r"step 3 of")
    everyone = family(process)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130, rest
    assert len(re.findall(r"interrupted after step \d+, saved in .*add --resume", rest)) == 1, rest
    assert "Traceback" not in rest
    assert "ignored" not in rest
    assert json.loads((tmp_path / "run/metrics.json").read_text())["status"] == "interrupted"
    assert gone(everyone) == []


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(model: Path, data: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    unbroken = start(whole, model=model, data=data, nodes=1, steps=12)
    unbroken.communicate(timeout=120)
    assert unbroken.returncode == 0
    process = start(broken, model=model, data=data, nodes=2, steps=12)
    read_until(process, r"step 4 of")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    again = [sys.executable, "-m", "mlxdist", "launch", "--nodes", "1", "--resume"]
    result = subprocess.run(again, cwd=broken, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sha(broken / "run/adapters.safetensors") == sha(whole / "run/adapters.safetensors")
    losses = [json.loads((folder / "run/metrics.json").read_text())["train_losses"] for folder in (whole, broken)]
    assert losses[0] == losses[1]


def test_a_run_is_not_resumed_under_settings_with_another_meaning(
    pools: Pools, model: Path, data: Path, tmp_path: Path
) -> None:
    config = configured(model, data, tmp_path / "run", BatchConfig(size=8))
    assert run(config, pools.hosts(1), resume=False, environ={}) == 0
    faster = replace(config, train=replace(config.train, learning_rate=2e-2))
    with pytest.raises(UserError, match=r"train\.learning_rate was 0\.01, is 0\.02"):
        run(faster, pools.hosts(1), resume=True, environ={})
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.jsonl").write_text((data / "train.jsonl").read_text().replace("w1 ", "w2 "))
    with pytest.raises(UserError, match="the training rows"):
        run(replace(config, data=DataConfig(path=str(other))), pools.hosts(1), resume=True, environ={})
    longer = replace(config, train=replace(config.train, steps=7))
    assert run(longer, pools.hosts(2), resume=True, environ={}) == 0
    assert len(json.loads((tmp_path / "run/metrics.json").read_text())["train_losses"]) == 7


def test_no_process_outlives_a_killed_coordinator(model: Path, data: Path, tmp_path: Path) -> None:
    process = start(tmp_path, model=model, data=data, nodes=2)
    read_until(process, r"step 2 of")
    everyone = family(process)
    process.kill()
    process.communicate(timeout=60)
    assert gone(everyone) == []


@pytest.mark.parametrize("victim", ["supervisor", "worker"])
def test_a_killed_process_of_a_launched_node_is_restarted_and_the_run_continues(
    victim: str, model: Path, data: Path, tmp_path: Path
) -> None:
    process = start(tmp_path, model=model, data=data, nodes=2)
    read_until(process, r"step 2 of")
    everyone = family(process)
    workers = [one for one in everyone if "mlxdist.node.worker" in one.cmdline()]
    supervisors = [one for one in everyone if "node" in one.cmdline()]
    (workers if victim == "worker" else supervisors)[0].kill()
    told = read_until(process, r"localhost(-2)?: ready")
    assert re.search(r"localhost(-2)?: .*(SIGKILL|its supervisor ended|connection stayed closed)", told), told
    assert "step " in read_until(process, r"step \d+ of")
    everyone += family(process)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130, rest
    assert "Traceback" not in told + rest
    assert gone(everyone) == []


def test_a_torn_model_file_is_refused_before_a_node_is_started(data: Path, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model")
    parameters = folder / "model.safetensors"
    parameters.write_bytes(parameters.read_bytes()[:5000])
    process = start(tmp_path, model=folder, data=data, nodes=1)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 2, rest
    assert f"{parameters}: cannot be read" in rest
    assert "starting" not in rest


def test_a_model_that_cannot_be_loaded_is_reported_with_the_node_and_what_it_printed(
    data: Path, tmp_path: Path
) -> None:
    folder = llama_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    process = start(tmp_path, model=folder, data=data, nodes=1)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode in (1, 2), rest
    assert "mlxdist: localhost: " in rest
    assert "model.norm.weight" in rest


def test_wrong_configuration_exits_2_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model = "."\ndata = "."\n[train]\nstepz = 3\n')
    command = [sys.executable, "-m", "mlxdist", "launch"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "stepz" in result.stderr
    assert "steps" in result.stderr
    assert not (tmp_path / "runs").exists()
