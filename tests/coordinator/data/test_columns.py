"""Columns under the names of other people and tools: joined, recognized, decoded, and never silently unread."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.data.load import read_splits
from mlxdist.coordinator.data.sources import find
from tests.coordinator.data.data_toys import all_shown, refusal, toy_config, toy_encoding, toy_read, write_rows

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SHOWN = ["<user>hi</><assistant>[yo</>]"]


def read_csv(folder: Path, row: dict[str, Any], method: str = "sft", **values: Any) -> list[str]:
    """The rows of a CSV file that holds `row`: as text where they are texts, other values as JSON."""
    out = io.StringIO()
    rows = csv.DictWriter(out, row.keys())
    rows.writeheader()
    rows.writerow({key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()})
    (folder / "train.csv").write_text(out.getvalue())
    config = toy_config(folder / "train.csv", method, **values)
    splits = find(config.data.path)
    return all_shown(read_splits(splits, toy_encoding(config), progress=lambda message, share: None))


def test_columns_that_are_joined_make_paragraphs_and_blank_ones_are_left_out(tmp_path: Path) -> None:
    columns = {"prompt": ("instruction", "input"), "completion": "output"}
    inputs = [{"input": "b"}, {"input": " "}, {"input": ""}, {"input": None}, {}]
    rows = [{"instruction": "a", **given, "output": "c"} for given in inputs]
    data = toy_read(tmp_path, rows, columns=columns, template=None)
    assert all_shown(data) == ["a\n\nb[c</s>]", *["a[c</s>]"] * 4]


def test_joined_columns_that_no_row_has_and_values_that_are_no_text_are_refused(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "output": "c"}]
    said = refusal(tmp_path, rows, columns={"prompt": ("instruction", "inputt"), "completion": "output"})
    assert said == "train.jsonl: no row has 'inputt', which data.columns joins into prompt"
    said = refusal(tmp_path, rows, columns={"prompt": ("a", "b"), "completion": "output"})
    assert "there is none of 'a', 'b', which data.columns joins into prompt" in said
    rows = [{"instruction": "a", "input": 5, "output": "c"}]
    said = refusal(tmp_path, rows, columns={"prompt": ("instruction", "input"), "completion": "output"})
    assert "input is no text, and data.columns joins the texts of instruction, input into prompt" in said


def test_text_that_nothing_reads_is_named_once_with_its_share_of_the_rows(tmp_path: Path) -> None:
    row = {"instruction": "a", "output": "c", "history": [["q", "r"]], "id": 7, "url": " ", "kinds": []}
    rows = [row, {**row, "input": "b"}, {**row, "history": []}, row]
    data = toy_read(tmp_path, rows, columns={"prompt": "instruction", "completion": "output"}, template=None)
    (said,) = [note for note in data.notes if "nothing reads" in note]
    assert said == (
        "train.jsonl has text that nothing reads, in history (75 % of the rows), input (25 % of the rows); "
        'data.columns = {prompt = ["instruction", "input"], completion = "output"} would join it to the prompt.'
    )


def test_columns_that_are_read_are_not_named(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        ({"messages": TALK, "tools": [{"name": "f"}], "chat_template_kwargs": {"a": "b"}}, "sft", {}),
        ({"prompt": "p", "completion": "c", "label": "true"}, "kto", {"size": 2}),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "dpo", {}),
        ({"a": "p", "b": "q", "c": "r"}, "sft", {"columns": {"prompt": ("a", "b"), "completion": "c"}}),
    ]
    for row, method, values in rows:
        assert not [note for note in toy_read(tmp_path, [row, row], method, **values).notes if "nothing reads" in note]


def test_a_column_that_a_mapped_name_hides_is_named(tmp_path: Path) -> None:
    row = {"prompt": "p", "question": "q", "completion": "c"}
    data = toy_read(tmp_path, [row], columns={"prompt": "question"}, template=None)
    assert all_shown(data) == ["q[c</s>]"]
    assert any("nothing reads, in prompt (100 % of the rows)" in note for note in data.notes)


@pytest.mark.parametrize(
    ("row", "method", "shown", "columns"),
    [
        (
            *({"instruction": "a", "input": "b", "output": "c"}, "sft", "a\n\nb[c</s>]"),
            'alpaca files are, and read with data.columns = {prompt = ["instruction", "input"], completion = "output"}',
        ),
        (
            *({"instruction": "a", "output": "c"}, "sft", "a[c</s>]"),
            'alpaca files are, and read with data.columns = {prompt = "instruction", completion = "output"}',
        ),
        (
            *({"instruction": "a", "input": "", "chosen": "c", "rejected": "d"}, "dpo", "a[c</s>] / a[d</s>]"),
            'alpaca files are, and read with data.columns = {prompt = ["instruction", "input"]}',
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
            *("sft", SHOWN[0], 'ShareGPT files are, and read with data.columns = {messages = "conversations"}'),
        ),
        (
            {
                "conversations": [{"from": "human", "value": "hi"}],
                "chosen": {"from": "gpt", "value": "yo"},
                "rejected": {"from": "gpt", "value": "no"},
            },
            *("dpo", f"{SHOWN[0]} / <user>hi</><assistant>[no</>]"),
            'ShareGPT files are, and read with data.columns = {prompt = "conversations"}',
        ),
    ],
)
def test_files_of_other_tools_are_recognized_by_their_keys_and_that_is_said(
    tmp_path: Path, row: dict[str, Any], method: str, shown: str, columns: str
) -> None:
    template = {} if "conversations" in row else {"template": None}
    data = toy_read(tmp_path, [row], method, **template)
    assert all_shown(data) == [shown]
    assert f"train.jsonl is written as {columns}." in data.notes


def test_our_own_names_and_data_columns_stand_above_what_is_recognized(tmp_path: Path) -> None:
    row = {"messages": TALK, "conversations": [{"from": "human", "value": "x"}]}
    data = toy_read(tmp_path, [row])
    assert all_shown(data) == SHOWN
    assert not [note for note in data.notes if "ShareGPT" in note]
    assert "there is no 'body'" in refusal(tmp_path, [{"instruction": "a", "output": "c"}], columns={"text": "body"})


@pytest.mark.parametrize("name", ["messages", "dialog"])
def test_messages_that_are_json_text_are_decoded_in_named_and_mapped_columns_of_every_kind_of_file(
    tmp_path: Path, name: str
) -> None:
    columns = {} if name == "messages" else {"messages": name}
    for cell in (json.dumps(TALK), f" {json.dumps(TALK, indent=1)}\n"):
        assert read_csv(tmp_path, {name: cell}, columns=columns) == SHOWN
        assert all_shown(toy_read(tmp_path, [{name: cell}], columns=columns)) == SHOWN


def test_a_message_that_stands_alone_is_a_conversation_of_one_as_json_text_too(tmp_path: Path) -> None:
    user, assistant = TALK
    rows: list[dict[str, Any]] = [
        {"prompt": user, "completion": assistant},
        {"prompt": [user], "completion": assistant},
    ]
    for row in rows:
        assert all_shown(toy_read(tmp_path, [row])) == SHOWN
        assert read_csv(tmp_path, row) == SHOWN
    pair = {"prompt": user, "chosen": assistant, "rejected": {**assistant, "content": "no"}}
    assert read_csv(tmp_path, pair, "dpo") == [f"{SHOWN[0]} / <user>hi</><assistant>[no</>]"]


def test_json_that_is_no_message_stays_text(tmp_path: Path) -> None:
    for text in ('[{"name": "a"}]', '{"a": 1}', "[{not JSON", '["a", "b"]', "{'a': 1}", "(a)"):
        row = {"prompt": "p", "completion": text}
        assert all_shown(toy_read(tmp_path, [row], template=None)) == [f"p[{text}</s>]"]


@pytest.mark.parametrize(
    "cell",
    [
        str(TALK),
        str(TALK[1]),
        str(tuple(TALK)),
        str(TALK).replace("}, {", "}\n {"),  # as numpy shows an array of objects
        json.dumps(TALK)[:-1],
    ],
)
@pytest.mark.parametrize("field", ["completion", "messages", "answer"])
def test_messages_in_another_writing_than_json_are_refused_with_the_cure(tmp_path: Path, cell: str, field: str) -> None:
    row = {field: cell} if field == "messages" else {"prompt": "p", field: cell}
    columns = {"completion": "answer"} if field == "answer" else {}
    said = refusal(tmp_path, [row], columns=columns)
    ours = "completion" if field == "answer" else field
    assert f"train.jsonl:1: {ours} is text that shows messages but is no JSON" in said
    assert "df.to_json('train.jsonl', orient='records', lines=True)" in said


@pytest.mark.parametrize("value", ["nan", "NaN", " <NA> ", float("nan")])
def test_a_cell_without_a_value_as_pandas_writes_it_is_refused_with_the_cure(tmp_path: Path, value: Any) -> None:
    assert "df.fillna('')" in refusal(tmp_path, [{"prompt": "p", "completion": value}])
    joined = {"prompt": ("instruction", "input"), "completion": "output"}
    said = refusal(tmp_path, [{"instruction": "a", "input": value, "output": "c"}], columns=joined)
    assert "train.jsonl:1: input is" in said


def test_a_conversation_in_a_column_of_text_is_refused_with_the_columns_that_read_it(tmp_path: Path) -> None:
    said = refusal(tmp_path, [{"text": json.dumps(TALK)}])
    assert 'text is text that holds messages: read them with data.columns = {messages = "text"}' in said
    assert all_shown(toy_read(tmp_path, [{"text": json.dumps(TALK)}], columns={"messages": "text"})) == SHOWN


def test_a_key_that_stands_twice_in_decoded_messages_is_a_fault(tmp_path: Path) -> None:
    cell = '[{"role": "user", "content": "a", "content": "b"}]'
    assert "the key 'content' stands twice" in refusal(tmp_path, [{"messages": cell}])


def test_files_and_shards_are_named_where_a_run_says_what_it_reads(tmp_path: Path) -> None:
    for number in range(2):
        write_rows(tmp_path / f"train-0000{number}-of-00002.jsonl", [{"text": "a"}, {"text": "b"}])
    write_rows(tmp_path / "other.jsonl", [{"text": "c"}])
    config = toy_config(tmp_path)
    data = read_splits(find(config.data.path), toy_encoding(config), progress=lambda message, share: None)
    assert [data.train.where(index) for index in range(4)] == [
        f"train-0000{number}-of-00002.jsonl:{line}" for number in range(2) for line in (1, 2)
    ]
    said = "Beside the training rows, nothing reads other.jsonl (data.valid_path names a validation file)."
    assert said in data.notes


def test_a_column_without_a_name_is_said_to_have_none(tmp_path: Path) -> None:
    """pandas writes its index into a CSV file so."""
    said = toy_read(tmp_path, [{"": "0", "prompt": "a", "completion": "b"}], template=None).notes
    assert "train.jsonl has text that nothing reads, in a column without a name (100 % of the rows)." in said
