"""mlxdist from Python: the run of the command, told by callbacks, stopped, loaded, judged and exported."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlxdist
from mlxdist import api
from mlxdist.coordinator.config.load import configured
from mlxdist.protocol.errors import ConfigError, UserError


def settings(model: Path, folder: Path, **train: Any) -> dict[str, Any]:
    """A run of 4 steps over 12 rows, as the tables of a run file."""
    data = folder / "data"
    if not data.exists():
        data.mkdir()
        for name, count in (("train", 12), ("valid", 4)):
            rows = [{"prompt": "w1 w2" + " w3" * n, "completion": " w5 w6"} for n in range(count)]
            (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": str(model),
        "output": str(folder / "run"),
        "data": str(data),
        "batch": {"size": 4, "max_length": 48},
        "lora": {"rank": 2},
        "train": {"steps": 4, "learning_rate": 1e-2, "eval_every": 2, "eval_rows": "all", **train},
    }


@pytest.fixture(autouse=True)
def without_compile() -> Iterator[None]:
    """The nodes of these runs are started by them: compiling kernels for a tiny model takes longer than to train it."""
    before = os.environ.get("MLX_DISABLE_COMPILE")
    os.environ["MLX_DISABLE_COMPILE"] = "1"
    yield
    os.environ.pop("MLX_DISABLE_COMPILE") if before is None else os.environ.update(MLX_DISABLE_COMPILE=before)


@pytest.mark.slow
def test_a_run_is_trained_told_stopped_continued_loaded_judged_and_exported(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[str, Any]] = []
    stop = mlxdist.Stop()
    stop.request()  # of an earlier run: cleared by the start of this one

    def on_step(event: api.Event) -> None:
        told.append(("step", event["step"]))
        if event["step"] == 3:
            stop.request()

    def train(**options: Any) -> mlxdist.RunResult:
        return mlxdist.train(
            settings(model, tmp_path),
            progress=False,
            on_step=on_step,
            on_evaluation=lambda event: told.append(("evaluation", event["loss"])),
            on_checkpoint=lambda event: told.append(("checkpoint", event["path"])),
            on_node=lambda event: told.append(("node", event["state"])),
            **options,
        )

    async def in_a_notebook() -> mlxdist.RunResult:
        return train(stop=stop)

    stopped = asyncio.run(in_a_notebook())
    assert (stopped.status, stopped.steps) == ("interrupted", 3)
    assert [value for kind, value in told if kind == "step"] == [1, 2, 3]
    assert ("node", "ready") in told
    assert len([kind for kind, _ in told if kind in ("evaluation", "checkpoint")]) == 2
    assert capsys.readouterr().out == ""

    told.clear()
    done = train(resume=True, stop=mlxdist.Stop())  # the second one in this process
    assert (done.status, done.steps, done.adapter_path) == ("done", 4, tmp_path / "run")
    assert [value for kind, value in told if kind == "step"] == [4]
    assert set(done.applied_ranks.values()) == {2}

    loaded = mlxdist.load_run(tmp_path / "run")
    assert (loaded.state, loaded.steps, loaded.config.batch.size) == ("done", 4, 4)
    assert loaded.training.column("step") == [1, 2, 3, 4]
    assert loaded.validation.column("loss") == [val["loss"] for val in done.metrics["val_trajectory"]]

    judged = mlxdist.evaluate(tmp_path / "run", checkpoints=[4])
    assert judged.judged[1].loss.value == done.metrics["final_val_loss"]
    exported = mlxdist.export(tmp_path / "run", tmp_path / "peft", form="peft", checkpoint=4)
    assert (exported.folder / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_the_example_of_the_page_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny model, two steps and one node."""
    pytest.importorskip("pandas")
    root = Path(__file__).resolve().parents[2]
    (block,) = re.findall(r"```python\n(.*?)```", (root / "docs" / "python.md").read_text(), re.DOTALL)
    smaller = {
        "models/SmolLM2-135M-Instruct": str(model),
        '"steps": 20': '"steps": 2',
        '"eval_every": 10': '"eval_every": 1',
    }
    for old, new in {**smaller, "nodes=2": "nodes=1"}.items():
        assert old in block
        block = block.replace(old, new)
    (tmp_path / "examples").symlink_to(root / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block, names)
    assert list(names["frame"]["step"]) == [1, 2]
    assert "done 2" in capsys.readouterr().out
    assert (tmp_path / "out" / "peft" / "adapter_model.safetensors").is_file()


def test_the_front_door_imports_nothing_before_it_is_used() -> None:
    ours = "sorted(name for name in sys.modules if name.startswith('mlx'))"
    code = f"import sys, mlxdist; print(mlxdist.__version__, *{ours})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ["mlxdist", "mlxdist.protocol", "mlxdist.protocol.version"]
    assert done.stdout.split() == [mlxdist.__version__, *loaded]
    assert set(mlxdist.__all__) <= {*dir(mlxdist), *vars(api), "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        mlxdist.trian  # noqa: B018


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ref_model", r"the reference is the base model, or the first adapter with preference\.reference"),
        ("data_collator", "cut into leaves by the coordinator"),
        ("node", "did you mean nodes"),
        ("zzz", "it has overrides, nodes, hosts"),
    ],
)
def test_an_argument_that_is_not_there_is_refused_with_what_stands_for_it(name: str, said: str) -> None:
    with pytest.raises(TypeError, match=f"train\\(\\) has no argument {name}.*{said}"):
        mlxdist.train("run.toml", **{name: None})


def test_a_mapping_is_checked_as_a_file_is(model: Path, tmp_path: Path) -> None:
    wrong = settings(model, tmp_path) | {"batch": {"sizes": 4}}
    with pytest.raises(ConfigError, match=r"batch\.sizes"):
        mlxdist.train(wrong)
    config = configured(settings(model, tmp_path), ["train.steps=2"])
    assert (config.train.steps, config.output) == (2, tmp_path / "run")
    with pytest.raises(ConfigError, match="a RunConfig is finished"):
        configured(config, ["train.steps=2"])
    with pytest.raises(UserError, match="not a run"):
        mlxdist.load_run(tmp_path)


def test_a_trajectory_is_a_table_with_and_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    table = api.Trajectory(({"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "kl": 0.5}))
    assert table.column("kl") == [None, 0.5]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        table.to_pandas()
    monkeypatch.undo()
    frame = pytest.importorskip("pandas") and table.to_pandas()
    assert list(frame["loss"]) == [2.0, 1.0]
