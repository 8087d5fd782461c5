"""Tool calls as people and libraries write them: texts of JSON, keys that Parquet fills in, ShareGPT's turns."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.encode.tool_calls import without_nulls
from mlxdist.protocol.errors import DataError
from tests.coordinator.data.chat_templates import CHATML, QWEN, SpecialTokenizer, jinja
from tests.coordinator.data.data_toys import toy_read

USER, DONE = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "done"}


def called(arguments: Any, **more: Any) -> list[Any]:
    function = {"name": "f", "arguments": arguments, **more}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}]


def text(folder: Path, row: Any, source: str = CHATML) -> str:
    tokenizer = SpecialTokenizer()
    data = toy_read(folder, [row], tokenizer=tokenizer, template=jinja(source))
    return tokenizer.decode(data.train.rows(0)[0].ids.tolist())


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"city": "Paris"}, '{"city": "Paris"}'),
        ('{"city": "Paris"}', '{"city": "Paris"}'),
        ('{"unit": null}', '{"unit": null}'),
        ({"city": "Paris", "unit": None}, '{"city": "Paris"}'),
        ({"at": {"x": 1, "y": None}, "by": [{"z": None, "v": 0}]}, '{"at": {"x": 1}, "by": [{"v": 0}]}'),
        ({"filled": {"x": None}, "empty": {}}, '{"empty": {}}'),
        ({}, "{}"),
        (None, "{}"),
    ],
)
def test_arguments_reach_the_template_as_an_object(tmp_path: Path, arguments: Any, shown: str) -> None:
    assert f"<tool_call>f {shown}</tool_call>" in text(tmp_path, {"messages": called(arguments)})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("Paris", "is text that is no JSON object"),
        ("", "is text that is no JSON object"),
        ('"Paris"', "is text, not an object"),
        ("[1]", "is a list, not an object"),
        ([1], "is a list, not an object"),
        (7, "is a number (7), not an object"),
    ],
)
def test_arguments_that_are_no_object_are_a_faulty_row_with_their_path(
    tmp_path: Path, arguments: Any, reason: str
) -> None:
    with pytest.raises(DataError) as caught:
        toy_read(tmp_path, [{"messages": called(arguments)}])
    assert f"train.jsonl:1: messages[1].tool_calls[0].function.arguments {reason}" in str(caught.value)


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ({"name": "f"}, "messages[1].tool_calls is an object, not a list of calls"),
        (["f"], "messages[1].tool_calls[0] is text, not a call"),
        ([{"function": "f"}], "messages[1].tool_calls[0].function is text, not an object"),
        ([{"function": {"arguments": {}}}], "messages[1].tool_calls[0].function.name is missing"),
    ],
)
def test_calls_of_another_form_are_faulty_rows_with_their_path(tmp_path: Path, calls: Any, reason: str) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": calls}]}
    with pytest.raises(DataError) as caught:
        toy_read(tmp_path, [row])
    assert f"train.jsonl:1: {reason}" in str(caught.value)


def test_a_call_may_have_its_name_and_arguments_without_function(tmp_path: Path) -> None:
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]}]}
    assert '<tool_call>f {"x": 1}</tool_call>' in text(tmp_path, row)


def test_schemas_lose_the_keys_that_parquet_filled_in(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
    filled = json.loads(json.dumps(schema))
    filled["function"]["description"] = None
    filled["function"]["parameters"]["properties"] |= {"b": None, "c": {"type": None, "enum": None}}
    shown = text(tmp_path, {"messages": [USER, DONE], "tools": [schema]}, QWEN)
    assert json.dumps(schema) in shown
    assert text(tmp_path, {"messages": [USER, DONE], "tools": [filled]}, QWEN) == shown
    assert text(tmp_path, {"messages": [USER, DONE], "tools": json.dumps([schema])}, QWEN) == shown


def test_parts_and_arguments_that_parquet_filled_in_are_not_there(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "h", "image_url": None}, {"type": None, "text": "i", "image_url": None}]
    row = {"messages": [{**USER, "content": parts}, DONE], "chat_template_kwargs": {"preserve_thinking": None}}
    filled = toy_read(tmp_path, [row])
    assert filled.train.digest == toy_read(tmp_path, [{"messages": [USER, DONE]}]).train.digest


def test_parquet_and_jsonl_give_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from mlxdist.coordinator.data.hf_datasets import read_parquet

    rows = [{"messages": called({"city": "Paris"})}, {"messages": [*called({"unit": "C", "at": {"x": 1}}), DONE]}]
    file = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(file)
    read = [record.row for record in read_parquet(file)]
    assert read[0] != rows[0], "the file fills keys in"
    assert [text(tmp_path, row) for row in read] == [text(tmp_path, row) for row in rows]


values = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
)


@given(st.dictionaries(st.text(max_size=2), values, max_size=3), st.data())
def test_what_is_filled_in_with_null_is_taken_out_and_nothing_else(clean: Any, data: Any) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(each) for each in value]
        if not isinstance(value, dict):
            return value
        extra = data.draw(st.sampled_from([{}, {"null!": None}, {"object!": {"of": None}}]))
        return {**{key: filled(each) for key, each in value.items()}, **(extra if value else {})}

    assert without_nulls(filled(clean)) == without_nulls(clean) == clean


def test_sharegpts_function_call_and_observation_are_a_call_and_the_tools_answer(tmp_path: Path) -> None:
    share = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "12"},
        {"from": "gpt", "value": "done"},
    ]
    openai = [*called({"x": 1}), {"role": "tool", "content": "12"}, DONE]
    assert text(tmp_path, {"messages": share}) == text(tmp_path, {"messages": openai})
    several = [share[0], {**share[1], "value": json.dumps([{"name": "f", "arguments": '{"x": 1}'}] * 2)}]
    assert text(tmp_path, {"messages": several}).count('<tool_call>f {"x": 1}</tool_call>') == 2
    for wrong, path in (("f(1)", "value"), ('{"name": "f", "arguments": [1]}', "value.arguments")):
        with pytest.raises(DataError, match=rf"train\.jsonl:1: messages\[1\]\.{path} is "):
            toy_read(tmp_path, [{"messages": [share[0], {**share[1], "value": wrong}]}])


def test_a_call_is_refused_where_it_would_be_trained_and_the_template_shows_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves out turn 2, which would be trained: it does not show tool_calls"):
        toy_read(tmp_path, [{"messages": called({"x": 1})}])
