"""`mlxdist evaluate` with real nodes: the loss that the run reported, to the bit, for any number of nodes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlxdist.coordinator.config.saved import run_at
from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, LoraConfig, RunConfig, TrainConfig
from mlxdist.coordinator.evaluate.evaluate import Evaluation, Question
from mlxdist.coordinator.evaluate.show import Output, show_evaluation
from mlxdist.coordinator.run import run
from mlxdist.protocol.errors import DataError, UserError
from tests.processes.node_pools import Pools
from tests.processes.test_preference_processes import configured as preferences
from tests.processes.test_preference_processes import write_rows

pytestmark = pytest.mark.slow


def trained(method: str, model: Path, folder: Path, pools: Pools) -> RunConfig:
    """A run of 5 steps, evaluated after 3 and 5."""
    if method == "sft":
        data = folder / "data"
        data.mkdir()
        for name, count in (("train", 12), ("valid", 5)):
            rows = [{"prompt": "w1 w2 w3" + " w4" * n, "completion": " w5 w6" + " w7" * (n % 4)} for n in range(count)]
            (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = RunConfig(
            model=str(model),
            output=folder / "run",
            data=DataConfig(path=str(data)),
            batch=BatchConfig(size=4, leaf_tokens=60, max_length=48),
            lora=LoraConfig(rank=4),
            train=TrainConfig(steps=5, learning_rate=1e-2, eval_every=3),
        )
    else:
        config = preferences(method, model, write_rows(folder / "data", method), folder / "run", reference="initial")
    config = replace(config, train=replace(config.train, eval_rows="all"))
    assert run(config, pools.hosts(2), resume=False, environ={}) == 0
    return config


def evaluated(folder: Path, pools: Pools, nodes: int, question: Question, rows: Path | None = None) -> Evaluation:
    output = Output(rows, as_json=True)
    return show_evaluation(run_at(folder), question, pools.hosts(nodes), output, environ={})


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "orpo"])
def test_the_loss_is_that_of_the_runs_own_validation_to_the_bit(
    method: str, pools: Pools, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = trained(method, model, tmp_path, pools)
    before = {path: path.read_bytes() for path in config.output.rglob("*") if path.is_file()}
    capsys.readouterr()
    one = evaluated(config.output, pools, 1, Question(("all",)), tmp_path / "one.jsonl")
    result = json.loads(capsys.readouterr().out)
    told = json.loads((config.output / "metrics.json").read_text())["val_trajectory"]
    assert [dict(each.metrics, step=each.step) for each in one.judged[1:]] == told
    assert [(each["step"], each["loss"]) for each in result["models"][1:]] == [(v["step"], v["loss"]) for v in told]

    base, adapter = one.judged[0], one.judged[1]
    assert adapter.against_base is not None
    assert adapter.against_base.value == pytest.approx(adapter.loss.value - base.loss.value, abs=1e-6)

    assert not [note for note in one.notes if "changed" in note or "scored" in note or "rules" in note]

    three = evaluated(config.output, pools, 3, Question(("all",)), tmp_path / "three.jsonl")
    assert capsys.readouterr().out == json.dumps(result, ensure_ascii=False, indent=2) + "\n"
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "three.jsonl").read_bytes()
    assert [each.loss for each in one.judged] == [each.loss for each in three.judged]
    rows = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * len(one.rows.rows)
    # the run's own files are only read
    assert {path: path.read_bytes() for path in before} == before


def test_rows_without_targets_are_counted_and_never_averaged_in(
    pools: Pools, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = trained("sft", model, tmp_path, pools)
    whole = [json.loads(line) for line in (tmp_path / "data/valid.jsonl").read_text().splitlines()]
    too_long = {"prompt": "w1 " * 60, "completion": "w2"}  # its completion is beyond batch.max_length
    test = tmp_path / "mine.jsonl"
    test.write_text("".join(json.dumps(row) + "\n" for row in [whole[0], too_long, *whole[1:]]))
    own = evaluated(config.output, pools, 1, Question())
    mine = evaluated(config.output, pools, 1, Question(data=str(test)), tmp_path / "rows.jsonl")
    assert [each.metrics for each in mine.judged] == [each.metrics for each in own.judged]
    assert [fault.where for fault in mine.rows.faults] == ["mine.jsonl:2"]
    assert "1 of 6 rows is faulty and left out (mine.jsonl:2" in mine.notes[0]
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert "batch.max_length" in lines[-1]["left_out"]
    assert [line["where"] for line in lines[:5]] == [f"mine.jsonl:{number}" for number in (1, 3, 4, 5, 6)]

    test.write_text(json.dumps(too_long) + "\n")
    with pytest.raises(DataError, match=r"has no row that can be scored: mine\.jsonl:1"):
        evaluated(config.output, pools, 1, Question(data=str(test)))
    (tmp_path / "data/valid.jsonl").unlink()
    with pytest.raises(UserError, match="no validation rows: name rows of the same form with --data"):
        evaluated(config.output, pools, 1, Question())


def test_rows_that_were_kept_back_are_the_same_rows_and_another_model_is_refused(
    pools: Pools, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.laws.model_folder import llama_folder

    config = trained("sft", model, tmp_path, pools)
    (tmp_path / "data/valid.jsonl").unlink()
    kept = replace(config, output=tmp_path / "kept", data=replace(config.data, valid_fraction=0.25))
    assert run(kept, pools.hosts(2), resume=False, environ={}) == 0
    told = json.loads((kept.output / "metrics.json").read_text())["final_val_loss"]
    found = evaluated(kept.output, pools, 1, Question(("last",)))
    few = replace(config, output=tmp_path / "few", data=kept.data, train=replace(config.train, eval_rows=2))
    assert run(few, pools.hosts(2), resume=False, environ={}) == 0
    assert "scored the first 2 of these rows" in evaluated(few.output, pools, 1, Question()).notes[-1]
    assert found.judged[-1].loss.value == told
    assert len(found.rows.rows) == 3
    other = llama_folder(tmp_path / "other", seed=4)
    with pytest.raises(UserError, match="trained on another base model"):
        evaluated(kept.output, pools, 1, Question(model=str(other)))
