"""Paths that do not exist, and keys that exclude each other, are refused."""

from pathlib import Path

import pytest

from mlxdist.coordinator.config.load import load_config
from tests.coordinator.config.run_files import refusal, run_file

# --- paths


@pytest.mark.parametrize("model", ["./gone", "../gone", "/gone/model", "~/gone", "a/b/c", "two words", "org/"])
def test_a_model_that_is_no_folder_and_no_hub_id_is_refused(tmp_path: Path, model: str) -> None:
    said = refusal(run_file(tmp_path, f'model = "{model}"\ndata = "rows"'))
    assert said.startswith(f'run.toml:1: model = "{model}" leads to ')
    assert "a hub id looks like" in said


@pytest.mark.parametrize("model", ["org/name", "name", "mlx-community/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-0.5B"])
def test_a_hub_id_is_passed_through(tmp_path: Path, model: str) -> None:
    assert load_config(run_file(tmp_path, f'model = "{model}"\ndata = "rows"')).model == model


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('model = "run.toml"\ndata = "rows"', 'model = "run.toml" is a file; the model is a folder'),
        ('model = "m"\ndata = "./row"', 'data.path = "./row" leads to '),
        ('model = "m"\ndata = "gone/train.jsonl"', 'data.path = "gone/train.jsonl" leads to '),
        ('model = "m"\ndata.path = "rows"\ndata.valid_path = "val"', 'data.valid_path = "val" leads to '),
        ('model = "m"\ndata = "rows"\noutput = "run.toml"', 'output = "run.toml" is a file; the output is a folder'),
        (
            'model = "m"\ndata = "rows"\nlora.init_adapter = "rows"',
            'lora.init_adapter = "rows" is not an adapter folder: there is no ',
        ),
        ('model = "m"\ndata.path = "rows"\ndata.chat_template = "chat.jinja"', "no text file can be read at "),
    ],
)
def test_a_path_that_does_not_exist_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(run_file(tmp_path, text))


@pytest.mark.parametrize("key", ["model", "output", "data.path", "data.valid_path", "lora.init_adapter"])
@pytest.mark.parametrize("value", ["./" + "x" * 5000, r"./\u0000"])
def test_what_the_system_does_not_take_as_a_path_is_refused_too(tmp_path: Path, key: str, value: str) -> None:
    said = refusal(run_file(tmp_path, ""), f'{key}="{value}"')
    assert said.startswith(f'--set {key} = "./')


def test_a_template_is_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}")
    path = run_file(tmp_path, 'model = "m"\n[data]\npath = "rows"\nchat_template = "chat.jinja"')
    assert load_config(path).data.chat_template == "{% for message in messages %}"
    assert load_config(path, ["data.chat_template={{ messages }}"]).data.chat_template == "{{ messages }}"


# --- rules between keys


@pytest.mark.parametrize(
    ("method", "sets", "said"),
    [
        (
            "sft",
            ["train.steps=5", "train.epochs=1"],
            "train.epochs and train.steps exclude each other: keep one of them",
        ),
        ("sft", ["train.epochs=1", "train.max_hours=1"], "train.max_hours and train.epochs exclude each other"),
        (
            "sft",
            ["data.valid_path=rows", "data.valid_fraction=0.1"],
            "data.valid_fraction and data.valid_path exclude each other",
        ),
        ("dpo", ["lora.dropout=0.1"], 'lora.dropout is 0.1, and must be 0 for "dpo"'),
        ("kto", ["lora.dropout=0.1"], 'lora.dropout is 0.1, and must be 0 for "kto"'),
        (
            "sft",
            ["memory.grad_checkpoint=true", "memory.segment_size=2"],
            "memory.grad_checkpoint and memory.segment_size exclude",
        ),
        (
            "sft",
            ["memory.grad_checkpoint=true", "memory.segment_size=auto"],
            "memory.grad_checkpoint and memory.segment_size exclude",
        ),
        ("sft", ["preference.beta=0.2"], 'preference.beta is for method "dpo", "kto" and "orpo", the method is "sft"'),
        ("dpo", ["preference.desirable_weight=2"], 'preference.desirable_weight is for method "kto"'),
        ("dpo", ["preference.loss=kto"], 'preference.loss is "kto", which is for method "kto"'),
        ("dpo", ["preference.loss=sigmoit"], 'did you mean "sigmoid"?'),
        (
            "kto",
            ["preference.loss=sigmoid"],
            'which is for method "dpo"; "kto" takes one of "kto", "apo_zero_unpaired"',
        ),
        ("dpo", ["preference.loss=aot"], "it sorts the log-ratios of the whole batch"),
        ("dpo", ["preference.loss=bco_pair"], "by a running mean over the steps before"),
        (
            "dpo",
            ["preference.loss=hinge", "preference.label_smoothing=0.1"],
            "preference.label_smoothing is for the losses",
        ),
        ("kto", ["preference.label_smoothing=0.1"], "preference.label_smoothing is for the losses"),
        ("kto", ["preference.desirable_weight=0", "preference.undesirable_weight=0"], "are both 0: nothing to train"),
        ("kto", ["batch.size=1"], "batch.size is 1, and kto takes its reference point from the other rows"),
        (
            "sft",
            ["data.max_prompt_length=9"],
            'data.max_prompt_length is for method "dpo", "kto" and "orpo"; "sft" rows are cut as a whole, by '
            "batch.max_length",
        ),
        ("sft", ["data.unpair=true"], 'data.unpair makes rows for method "kto", the method is "sft"'),
        ("dpo", ["data.train_on=all"], 'data.train_on is for method "sft"'),
        ("dpo", ["batch.order=sorted"], 'batch.order is "sorted", which is for method "sft"'),
        (
            "sft",
            ["train.best_by=rewards/margins"],
            'train.best_by is "rewards/margins", which "sft" does not have: must be "loss"',
        ),
        ("kto", ["train.best_by=rewards/accuracies"], 'must be "loss" or "rewards/margins"'),
        ("sft", ["train.warmup_steps=101"], "train.warmup_steps is 101, longer than the run of 100 steps"),
        ("sft", ["train.early_stop_evals=3", "train.eval_every=0"], "train.early_stop_evals needs evaluations"),
        (
            "dpo",
            ["data.max_prompt_length=1024"],
            "data.max_prompt_length is 1024, and batch.max_length 1024 leaves no room",
        ),
        ("sft", ["lora.target_modules=[]"], "lora.target_modules is empty"),
        ("sft", ['lora.target_modules=["a", "b", "a"]'], "lora.target_modules names a twice"),
        ("sft", ['data.columns={instruction = "prompt"}'], 'did you mean prompt = "instruction"?'),
        ("sft", ['data.columns={prompt = ""}'], "data.columns.prompt is empty"),
        (
            "sft",
            ["timing.beat_seconds=6"],
            "timing.suspect_seconds is 6.0, and must be more than timing.beat_seconds, 6.0",
        ),
        (
            "sft",
            ["timing.dead_seconds=6"],
            "timing.dead_seconds is 6.0, and must be more than timing.suspect_seconds, 6.0",
        ),
    ],
)
def test_a_broken_rule_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, sets: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    told = refusal(run_file(tmp_path, ""), f"method={method}", *sets)
    assert said in told
    assert "\n" not in told, "one mistake, one message"


@pytest.mark.parametrize(
    ("method", "sets"),
    [
        ("sft", ["lora.dropout=0.1"]),
        ("sft", ["memory.grad_checkpoint=true"]),
        ("sft", ["memory.grad_checkpoint=true", "memory.segment_size=off"]),
        ("sft", ["train.warmup_steps=100"]),
        ("sft", ["train.warmup_steps=101", "train.epochs=1"]),
        ("sft", ["batch.order=shuffled", "data.train_on=everything"]),
        ("sft", ["data.columns={prompt = 'instruction', completion = 'output'}"]),
        ("dpo", ["preference.loss=robust", "preference.label_smoothing=0.1", "train.best_by=rewards/accuracies"]),
        ("kto", ["batch.size=1", "batch.grad_accum_steps=2", "data.unpair=true", "train.best_by=rewards/margins"]),
        ("kto", ["preference.desirable_weight=0"]),
    ],
)
def test_what_the_rules_allow_is_taken(tmp_path: Path, method: str, sets: list[str]) -> None:
    load_config(run_file(tmp_path, ""), [f"method={method}", *sets])


def test_grad_checkpoint_alone_switches_segments_off(tmp_path: Path) -> None:
    assert load_config(run_file(tmp_path, "[memory]\ngrad_checkpoint = true")).memory.segment_size == "off"


def test_a_faulty_value_breaks_no_rule_besides(tmp_path: Path) -> None:
    assert "\n" not in refusal(run_file(tmp_path, "[timing]\nbeat_seconds = 60\nsuspect_seconds = -1"))


def test_defaults_may_be_written_out(tmp_path: Path) -> None:
    load_config(
        run_file(
            tmp_path,
            'model = "m"\nmethod = "sft"\n[data]\npath = "rows"\ntrain_on = "last"\n[memory]\nsegment_size = "auto"',
        )
    )
