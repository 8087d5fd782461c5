"""The answers of an adapter and of its base model are those of mlx-lm, asked in the form of the run's rows."""

import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.sample_utils import make_sampler

from mlxdist.coordinator.config.saved import saved_config
from mlxdist.coordinator.data.load import encoding_of, read
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.local.generate import Asked, Sampling, generate
from mlxdist.local.prompts import prompt_of, read_prompts
from mlxdist.protocol.errors import DataError, UserError
from tests.laws.model_folder import TEMPLATE
from tests.local.made_runs import made_run


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return made_run(tmp_path_factory.mktemp("run") / "run", model)


def answers(run: RunFolder, asked: Asked, sampling: Sampling) -> list[dict[str, Any]]:
    stream = io.StringIO()
    generate(run.path, asked, sampling, as_json=True, stream=stream)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def plainly(model: Path, adapter: Path | None, question: str, seed: int = 0, **sampling: Any) -> str:
    """The answer by mlx-lm alone."""
    loaded, tokenizer, *_ = mlx_lm.load(str(model), adapter_path=str(adapter) if adapter else None)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    mx.random.seed(seed)  # the LoRA layers were drawn before
    return mlx_lm.generate(loaded, tokenizer, prompt, max_tokens=12, **sampling)


def test_both_answers_are_those_of_mlx_lm(run: RunFolder, model: Path) -> None:
    questions = ("w5 w6 w7", "w9")
    given = answers(run, Asked(questions, base=True), Sampling(max_tokens=12))
    assert [(each["prompt"], each["model"]) for each in given] == [
        (question, name) for question in questions for name in ("base model", "step 5")
    ]
    wanted = [plainly(model, adapter, question) for question in questions for adapter in (None, run.path)]
    assert [each["text"] for each in given] == wanted
    assert given[0]["text"] != given[1]["text"]


def test_a_seed_repeats_a_draw_and_the_sampling_keys_are_mlx_lms(run: RunFolder, model: Path) -> None:
    sampling = Sampling(12, 0.9, 0.95, 0.01, 40, seed=3)
    one, other = (answers(run, Asked(("w5",)), sampling)[0] for _ in range(2))
    assert one == other
    assert one["text"] == plainly(model, run.path, "w5", seed=3, sampler=make_sampler(0.9, 0.95, 0.01, top_k=40))
    assert answers(run, Asked(("w5",)), Sampling(12, 0.9, seed=4))[0]["text"] != one["text"]


def test_answers_stand_one_under_the_other_and_a_cut_is_said(run: RunFolder) -> None:
    stream = io.StringIO()
    generate(run.path, Asked(("w5 w6",), base=True), Sampling(max_tokens=3), as_json=False, stream=stream)
    question, base, adapter, *_ = stream.getvalue().splitlines()
    assert question == "w5 w6"
    assert base.startswith("  base model  ")
    assert adapter.startswith("  step 5      ")
    assert "cut after 3 tokens" in stream.getvalue()


@pytest.mark.parametrize("way", ["chat", "raw"])
@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "orpo"])
def test_a_prompt_has_the_tokens_that_stand_before_the_answer_in_a_row(
    method: str, way: str, model: Path, tmp_path: Path
) -> None:
    row = {"prompt": "w5 w6", "completion": " w7", "chosen": " w7", "rejected": " w8", "label": True}
    keys = {
        "sft": ("prompt", "completion"),
        "dpo": ("prompt", "chosen", "rejected"),
        "orpo": ("prompt", "chosen", "rejected"),
    }.get(method, ("prompt", "completion", "label"))
    (tmp_path / "train.jsonl").write_text((json.dumps({key: row[key] for key in keys}) + "\n") * 8)
    template = "{% if enable_thinking %}w9 {% endif %}" + TEMPLATE
    made = made_run(
        tmp_path / "run",
        model,
        method=method,
        data__path=str(tmp_path),
        data__plain_text=way,
        data__chat_template=template,
    )
    config = saved_config(made)
    trained = read(config, progress=lambda message, share: None).train.rows(0)[0]
    before = trained.ids[: int(trained.targets.argmax())].tolist()
    encoding = encoding_of(config)
    assert list(prompt_of("w5 w6", encoding).ids) == before
    assert "w7" in encoding.tokenizer.decode(prompt_of("w5 w6", encoding, system="w7 ").ids)


def test_a_file_has_a_prompt_on_each_line_or_rows(tmp_path: Path) -> None:
    text, rows = tmp_path / "questions.txt", tmp_path / "rows.jsonl"
    text.write_text("one\n\n two \n")
    assert list(read_prompts(text)) == ["one", " two "]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    lines = [{"prompt": "p", "completion": "q"}, {"messages": [*turns, {"role": "assistant", "content": "d"}]}]
    rows.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"messages": turns}, "plain"]))
    assert list(read_prompts(rows)) == ["p", turns, turns, "plain"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"prompt": "p"}\n{"text": 1}\n', r"a\.jsonl:2: a text, or an object with messages or prompt"),
        ("a.jsonl", "{\n", r"a\.jsonl:1"),
        ("a.txt", "\n\n", "has no prompt"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "x"}]}\n', "no turn before the answer"),
    ],
)
def test_a_file_without_prompts_is_refused_with_the_line(name: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=said):
        list(read_prompts(tmp_path / name))


def test_nothing_to_ask_and_a_file_that_is_not_there_are_refused(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no prompt"):
        answers(run, Asked(), Sampling())
    with pytest.raises(UserError, match="cannot be read"):
        answers(run, Asked(file=tmp_path / "none.txt"), Sampling())
