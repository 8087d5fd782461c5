"""Fields that a template does not show, parts that it removes or inserts, are said with the argument that helps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.encode.chat_template import switches_of
from mlxdist.protocol.errors import DataError
from tests.coordinator.data.chat_templates import (
    CHATML,
    DEEPSEEK,
    DROPS_SYSTEM,
    FAMILIES,
    GLM,
    HARMONY,
    PLAIN_CHATML,
    QWEN,
    SpecialTokenizer,
    jinja,
)
from tests.coordinator.data.data_toys import toy_read

SYSTEM, USER, MORE = ({"role": role, "content": role} for role in ("system", "user", "user"))
DONE = {"role": "assistant", "content": "12 degrees."}
THOUGHT = {**DONE, "reasoning_content": "cold"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "12"}


def said(folder: Path, source: str, *rows: list[Any], method: str = "sft", **values: Any) -> str:
    data = toy_read(
        folder,
        [row if isinstance(row, dict) else {"messages": row} for row in rows],
        method,
        tokenizer=SpecialTokenizer(),
        template=jinja(source),
        remainder="keep",
        **values,
    )
    return "\n".join(note for note in data.notes if "chat template" in note)


@pytest.mark.parametrize(
    ("source", "message", "name"),
    [
        (CHATML, {**DONE, "thinking": "cold, I think, or is it warm"}, "thinking"),
        (CHATML, THOUGHT, "reasoning_content"),
        (CHATML, {**DONE, "name": "bob"}, "name"),
        (CHATML, {**DONE, "function_call": {"name": "f"}}, "function_call"),
        (DEEPSEEK, THOUGHT, "reasoning_content"),
    ],
)
def test_a_field_that_the_template_does_not_use_is_said_with_its_share(
    tmp_path: Path, source: str, message: Any, name: str
) -> None:
    note = said(tmp_path, source, [USER, message], [USER, DONE], [USER, DONE], [USER, DONE])
    assert f"The chat template does not show {name} (1 of 4 rows, 25 %): nothing of that is read or trained." in note


def test_turns_tools_and_calls_that_the_template_does_not_show_are_said(tmp_path: Path) -> None:
    rows = [[SYSTEM, USER, DONE], [SYSTEM, USER, DONE], [USER, DONE]]
    note = said(tmp_path, DROPS_SYSTEM, *rows, {"messages": [USER, DONE], "tools": [{"name": "f"}]})
    assert "does not show system turns (2 of 4 rows, 50 %) and tools (1 of 4 rows, 25 %)" in note
    note = said(tmp_path, PLAIN_CHATML, [USER, {**CALL, "content": "Wait."}, RESULT, DONE])
    assert "does not show tool_calls (1 of 1 rows, 100 %)" in note
    assert said(tmp_path, CHATML, [SYSTEM, USER, CALL, {**RESULT, "tool_call_id": "1"}, DONE]) == ""


def test_reasoning_that_the_template_shows_in_the_last_turn_alone_is_no_unused_field(tmp_path: Path) -> None:
    assert said(tmp_path, QWEN, [USER, THOUGHT]) == ""
    assert "does not show" not in said(tmp_path, QWEN, [USER, THOUGHT, MORE, THOUGHT], train_on="all")
    assert said(tmp_path, QWEN, [USER, THOUGHT, MORE, THOUGHT]) == "", "the turn that lost it is not trained"


def test_what_is_removed_from_trained_turns_is_said_with_the_argument_that_keeps_it(tmp_path: Path) -> None:
    rows = [[USER, THOUGHT, MORE, THOUGHT, MORE, THOUGHT], [USER, THOUGHT]]
    note = said(tmp_path, QWEN, *rows, train_on="all")
    assert (
        "The chat template removes reasoning from 2 trained turns (1 of 2 rows, 50 %; "
        "data.chat_template_kwargs = {preserve_thinking = true} changes that)" in note
    )
    kept = {"chat_template_kwargs": {"preserve_thinking": True}}
    assert said(tmp_path, QWEN, *rows, train_on="all", **kept) == ""
    inline = {**DONE, "content": "<think>cold</think>12"}
    assert "removes reasoning from 1 trained turn " in said(
        tmp_path, QWEN, [USER, inline, MORE, THOUGHT], train_on="all"
    )
    assert "no argument of the template changes that" in said(
        tmp_path, GLM, [USER, THOUGHT, MORE, THOUGHT], train_on="all"
    )


def test_a_thought_that_is_inserted_into_trained_turns_is_said_with_the_argument_that_changes_it(
    tmp_path: Path,
) -> None:
    note = said(tmp_path, QWEN, [USER, DONE], [USER, THOUGHT])
    assert (
        r"The chat template inserts '<think>\n\n</think>' into 1 trained turn (1 of 2 rows, 50 %; "
        "data.chat_template_kwargs = {enable_thinking = false} changes that)" in note
    )
    assert said(tmp_path, QWEN, [USER, DONE], chat_template_kwargs={"enable_thinking": False}) == ""
    assert "inserts '<think></think>' into 2 trained turns" in said(
        tmp_path, GLM, [USER, CALL, RESULT, DONE], train_on="all"
    )


@pytest.mark.parametrize("source", [HARMONY, CHATML], ids=["harmony", "chatml"])
def test_the_way_in_which_a_template_writes_turns_is_no_insertion(tmp_path: Path, source: str) -> None:
    assert said(tmp_path, source, [USER, CALL, RESULT, DONE], train_on="all") == ""


def test_pairs_say_what_the_template_removes_from_their_responses(tmp_path: Path) -> None:
    rejected = [{**DONE, "content": "No."}]
    row = {"prompt": [USER], "chosen": [THOUGHT, MORE, DONE], "rejected": rejected}
    note = said(tmp_path, QWEN, row, row, method="dpo", size=2)
    assert "removes reasoning from 2 trained turns (2 of 2 rows, 100 %; " in note
    row = {"prompt": [USER], "chosen": [DONE], "rejected": rejected}
    assert said(tmp_path, QWEN, row, row, method="dpo", size=2) == ""


@pytest.mark.parametrize(
    ("source", "message", "reason"),
    [
        (CHATML, {**DONE, "content": "", "thinking": "2 and 2"}, "it does not show thinking"),
        (CHATML, {**DONE, "content": " ", "reasoning_content": "2"}, "it does not show reasoning_content"),
        (PLAIN_CHATML, CALL, "it does not show tool_calls"),
        (QWEN, {**DONE, "content": "<think>cold</think>"}, "it does not show content"),
    ],
)
@pytest.mark.parametrize("later", [[MORE, DONE], []], ids=["earlier", "last"])
def test_a_trained_turn_that_renders_blank_is_a_faulty_row(
    tmp_path: Path, source: str, message: Any, reason: str, later: Any
) -> None:
    if source is QWEN and not later:
        assert "does not show" not in said(tmp_path, source, [USER, message], train_on="all")  # the last turn is shown
        return
    with pytest.raises(DataError) as caught:
        said(tmp_path, source, [USER, message, *later], train_on="all")
    assert f"train.jsonl:1: the chat template leaves out turn 2, which would be trained: {reason}" in str(caught.value)


def test_a_blank_turn_that_is_not_trained_is_no_fault(tmp_path: Path) -> None:
    assert "does not show thinking" in said(
        tmp_path, CHATML, [USER, {**DONE, "content": "", "thinking": "2"}, MORE, DONE]
    )


def test_the_switches_of_a_template_are_the_names_that_it_reads_and_is_not_given() -> None:
    source = (
        "{% if keep is not defined %}{% set keep = true %}{% endif %}{% for m in messages %}{% set said = m.content %}"
        "{% generation %}{{ said }}{{ eos_token }}{{ range(3) }}{% endgeneration %}{% endfor %}{{ said }}"
        "{% if enable_thinking and m.said is defined %}{{ tools }}{% endif %}"
    )
    assert switches_of(source) == ("enable_thinking", "keep")
    assert switches_of("{% broken") == switches_of(None) == ("enable_thinking",)


def ends(folder: Path, template: Callable[..., str], row: Any) -> bool:
    tokenizer = SpecialTokenizer()
    data = toy_read(folder, [row], tokenizer=tokenizer, template=template)
    return tokenizer.decode(data.train.rows(0)[0].ids.tolist()).endswith("</s>")


ROWS = {
    "content": [USER, DONE],
    "reasoning": [USER, THOUGHT],
    "reasoning alone": [USER, {**THOUGHT, "content": ""}],
    "a call": [USER, CALL],
    "a call with reasoning": [USER, {**CALL, "reasoning_content": "cold"}],
    "inline reasoning": [USER, {**DONE, "content": "<think>cold</think>12"}],
}


@pytest.mark.parametrize("kind", ROWS)
def test_one_rule_per_template_decides_on_the_end_token(tmp_path: Path, kind: str) -> None:
    for name, family in FAMILIES.items():
        if kind == "reasoning alone" and name not in ("qwen", "glm"):
            continue  # they show nothing of it
        if name not in ("deepseek", "drops system", "r1", "mistral"):  # these write </s> themselves
            assert ends(tmp_path, jinja(family.source), {"messages": ROWS[kind]}) == (name == "glm"), name


def test_no_end_token_is_appended_behind_a_turn_that_is_not_the_assistants(tmp_path: Path) -> None:
    assert not ends(tmp_path, jinja(GLM), {"messages": [USER, CALL, RESULT]})
    assert not ends(tmp_path, jinja(GLM), {"messages": [USER, DONE, MORE]})
