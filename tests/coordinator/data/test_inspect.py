"""`mlxdist inspect` shows what a run would train, cut, leave out and refuse; its numbers are the run's own."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mlxdist.coordinator.data.sources import find
from mlxdist.coordinator.inspect.facts import Bin, Inspection, histogram
from mlxdist.coordinator.inspect.inspect import InspectOptions, examine, guess_method, show_inspection
from mlxdist.coordinator.inspect.view import print_inspection
from mlxdist.protocol.errors import ConfigError
from tests.coordinator.data.data_toys import texts, toy_config, toy_encoding, write_rows

USER, YO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def facts_of(folder: Path, rows: list[Any], method: str = "sft", **values: Any) -> Inspection:
    config = toy_config(write_rows(folder / "train.jsonl", rows), method, **values)
    splits = find(config.data.path)
    return examine(splits, toy_encoding(config), unit="tokens", progress=lambda message, share: None)


def seen(facts: Inspection, *, color: bool = False) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=color, color_system="standard" if color else None)
    print_inspection(facts, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rows_duplicates_lengths_cut_and_trained_tokens_are_counted(tmp_path: Path) -> None:
    (file,) = facts_of(tmp_path, texts(5, 6, 6, 20), max_length=10, max_cut=1.0).files
    assert (file.rows, file.faulty, file.duplicates, file.cut, file.shape) == (4, 0, 1, 1, "text")
    assert file.lengths == {"min": 5, "p10": 5, "p50": 6, "p90": 20, "p99": 20, "max": 20, "mean": 9.25}
    assert (file.tokens, file.trained) == (5 + 6 + 6 + 10, 4 + 5 + 5 + 9)
    assert file.fits == {"90%": 20, "99%": 20, "100%": 20}


def test_the_histogram_holds_every_row_once_in_bins_without_gaps() -> None:
    lengths = [1] * 5 + list(range(1, 101)) * 10 + [5000]
    bins = histogram(lengths)
    assert sum(each.rows for each in bins) == len(lengths)
    assert [each.high + 1 for each in bins[:-1]] == [each.low for each in bins[1:]]
    assert (bins[0].low, bins[-1]) == (1, Bin(bins[-1].low, 5000, 1))
    assert histogram([7, 7]) == [Bin(7, 7, 2)]


def test_leaves_and_their_fill_are_those_that_a_step_is_cut_into(tmp_path: Path) -> None:
    auto = facts_of(tmp_path, texts(10, 20, 30, 40), size=4).batch
    given = facts_of(tmp_path, texts(10, 20, 30, 40), size=4, leaf_tokens=60).batch
    assert auto is not None
    assert given is not None
    assert (auto.leaf_tokens, auto.leaves) == (13, 4)
    assert (given.leaf_tokens, given.leaves, given.fill) == (60, 2, pytest.approx(100 / 120))
    assert (given.steps_per_epoch, given.size) == (1, 4)


def test_every_faulty_row_is_listed_not_only_ten(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, [*texts(5), *({"text": place} for place in range(15))])
    assert [fault["where"] for fault in facts.faults] == [f"train.jsonl:{line}" for line in range(2, 17)]
    assert facts.refused == ['15 rows are faulty (data.on_bad_row = "skip" trains without them)']
    assert "train.jsonl:16: text is a number (14), not text" in seen(facts)


def test_all_reasons_for_a_refusal_are_shown_at_once(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, [*texts(50, 50, 5), {"text": 1}], max_length=10, size=8)
    assert len(facts.refused) == 3
    shown = seen(facts)
    assert "would be cut" in shown
    assert "fill no window of batch.size = 8" in shown
    assert "A run with this data would start" not in shown


def test_kto_shows_the_classes_and_the_weights_that_balance_them(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": f"c{place}", "label": place < 2} for place in range(8)]
    labels = facts_of(tmp_path, rows, "kto", size=2).files[0].labels
    assert labels is not None
    assert (labels.desirable, labels.undesirable, labels.desirable_weight) == (2, 6, (3.0, 3.99))
    assert "2 desirable, 6 undesirable; balanced by desirable_weight 3.0 to 3.99" in seen(
        facts_of(tmp_path, rows, "kto", size=2)
    )


def test_three_rows_are_rendered_with_the_trained_part_colored_or_marked(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, [{"messages": [USER, {**YO, "content": f"yo{place}"}]} for place in range(5)])
    assert [sample.where for sample in facts.samples] == ["train.jsonl:1", "train.jsonl:3", "train.jsonl:5"]
    assert "<user>hi</><assistant>⟦yo2</>⟧" in seen(facts)
    assert "<user>hi</><assistant>\x1b[32myo2</>\x1b[0m" in seen(facts, color=True)


def test_a_pair_shows_both_branches(tmp_path: Path) -> None:
    shown = seen(facts_of(tmp_path, [{"prompt": "p", "chosen": "yes", "rejected": "no"}], "dpo"))
    assert "train.jsonl:1 chosen\np⟦yes</s>⟧" in shown
    assert "train.jsonl:1 rejected\np⟦no</s>⟧" in shown


def test_orpo_shows_the_chosen_answer_as_text_too(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, [{"prompt": "p", "chosen": "yes", "rejected": "no"}] * 9, "orpo")
    *_, text = facts.samples[0].branches
    assert [piece.trained for piece in text][-1]
    assert "chosen, as text" in seen(facts)


def test_rows_can_neither_steer_the_terminal_nor_style_it(tmp_path: Path) -> None:
    shown = seen(facts_of(tmp_path, [{"prompt": "\x1b[31m", "completion": "[bold]c[/bold]"}]))
    assert "\x1b" not in shown
    assert "\ufffd[31m⟦[bold]c[/bold]</s>⟧" in shown


def command(path: Path, **options: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=100)
    code = show_inspection(str(path), "", InspectOptions(**options), console)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def test_without_a_model_lengths_are_characters_and_nothing_is_called_cut(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [USER, {**YO, "content": "y" * 5000}]}] * 8)
    code, shown = command(path)
    assert code == 0
    assert "characters" in shown
    assert "cut" not in shown


def test_the_exit_code_is_2_where_a_run_would_be_refused(tmp_path: Path) -> None:
    assert command(write_rows(tmp_path / "a.jsonl", texts(*[5] * 8)))[0] == 0
    assert command(write_rows(tmp_path / "a.jsonl", [*texts(*[5] * 8), {"text": 1}]))[0] == 2


def test_json_is_the_same_facts(tmp_path: Path) -> None:
    code, shown = command(write_rows(tmp_path / "a.jsonl", [*texts(5, 5, 9), {"text": ""}]), as_json=True, batch_size=2)
    facts = json.loads(shown)
    assert code == 2
    assert (facts["method"], facts["unit"], facts["batch"]["size"]) == ("sft", "characters", 2)
    assert (facts["files"][0]["rows"], facts["files"][0]["duplicates"]) == (3, 1)
    assert facts["faults"] == [{"where": "a.jsonl:4", "reason": "text is empty"}]


@pytest.mark.parametrize(
    ("row", "method"),
    [
        ({"text": "t"}, "sft"),
        ({"messages": []}, "sft"),
        ({"prompt": "p", "completion": "c"}, "sft"),
        ({"prompt": "p", "completion": "c", "label": 0}, "kto"),
        ({"chosen": "a", "rejected": "b"}, "dpo"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "messages": []}, "dpo"),
        ({"x": 1}, "sft"),
    ],
)
def test_the_method_is_guessed_by_the_first_row_that_has_a_shape(tmp_path: Path, row: Any, method: str) -> None:
    assert guess_method(find(str(write_rows(tmp_path / "a.jsonl", [5, row]))).train) == method


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "ppo"}, '--method ppo: must be "sft", "dpo", "kto" or "orpo"'),
        ({"train_on": "first"}, '--train-on first: must be "last", "all" or "everything"'),
        ({"overrides": ["batch.size=3"]}, "--set changes the keys of a run.toml"),
    ],
)
def test_an_option_that_cannot_hold_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        command(write_rows(tmp_path / "a.jsonl", texts(5)), **options)


def test_without_a_model_no_template_is_spoken_of(tmp_path: Path) -> None:
    assert "template" not in command(write_rows(tmp_path / "a.jsonl", [{"prompt": "p", "completion": "c"}] * 8))[1]


def test_a_run_file_is_inspected_with_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "train.jsonl", texts(*[5] * 6))
    run = tmp_path / "run.toml"
    run.write_text('model = "org/toy"\ndata = "train.jsonl"\n[batch]\nsize = 3\n')
    monkeypatch.setattr("mlxdist.coordinator.inspect.inspect.encoding_of", toy_encoding)
    console = Console(file=io.StringIO(), width=100)
    assert show_inspection(str(run), "", InspectOptions(overrides=["batch.leaf_tokens=20"], as_json=True), console) == 0
    assert isinstance(console.file, io.StringIO)
    facts = json.loads(console.file.getvalue())
    assert (facts["unit"], facts["model"], facts["batch"]["size"], facts["batch"]["leaf_tokens"]) == (
        *("tokens", "org/toy", 3, 20),
    )
