"""The seam of prompt and response lies between two tokens of the whole render, for every method; none is ever cut."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.coordinator.batch.row_store import unpack
from mlxdist.coordinator.encode.preference import draft_pair
from mlxdist.coordinator.encode.sft import draft_sft
from mlxdist.coordinator.encode.starts import StartIds
from mlxdist.coordinator.encode.turn_tokens import token_span, with_end_token
from tests.coordinator.data.chat_templates import CHATML, FAMILIES, QWEN, SpecialTokenizer, jinja
from tests.coordinator.data.data_toys import all_shown, toy_config, toy_encoding, toy_read

TOKENIZER = SpecialTokenizer()
USER = {"role": "user", "content": "W?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
RESULT, DONE = {"role": "tool", "content": "12"}, {"role": "assistant", "content": "12."}
NO = {"role": "assistant", "content": "No idea."}
CALLED = [TOKENIZER.encode(text)[0] for text in ("<tool_call>", "</tool_call>")]


def branches(row: Any, method: str, source: str, shape: str) -> list[tuple[list[int], list[int]]]:
    """The tokens that are read and those that are trained, of each branch."""
    encoding = toy_encoding(toy_config("rows", method, max_length=9999), TOKENIZER, jinja(source))
    draft = (draft_sft if method == "sft" else draft_pair)(shape, row, encoding)
    found = []
    for made in draft.finish(TOKENIZER.encode_batch(draft.texts)):
        rows = [unpack(0, words) for words in made.parts]
        if method == "kto":  # prompt and completion are stored apart, and a first token has nothing before it
            found.append((rows[0].ids.tolist(), rows[1].ids.tolist()))
        else:
            start = [int(row.targets.argmax()) for row in rows]
            found += [(row.ids.tolist()[:at], row.ids.tolist()[at:]) for row, at in zip(rows, start, strict=True)]
    return found


def test_a_call_beside_a_text_keeps_its_token_whole() -> None:
    row = {"prompt": [USER], "chosen": [CALL, RESULT, DONE], "rejected": [NO]}
    chosen, rejected = branches(row, "dpo", QWEN, "prompt, chosen, rejected")
    assert chosen[1][0] == CALLED[0]
    assert chosen[1].count(CALLED[1]) == 1
    assert TOKENIZER.decode(rejected[1]) == "No idea.<|im_end|>\n"
    kto = {"prompt": [USER], "completion": [CALL], "label": True}
    ((_, completion),) = branches(kto, "kto", QWEN, "prompt, completion, label")
    assert completion[0] != TOKENIZER.encode("<")[0]
    assert CALLED[0] in completion
    ((_, completion),) = branches({"prompt": [USER], "completion": [CALL]}, "sft", QWEN, "prompt, completion")
    assert CALLED[0] in completion


words = st.sampled_from(["12", "ab c", " c", "\n", "\nab", "<", "< t", "</", "x\n\ny", "f(x).\n", "Ж"])
answers = st.one_of(
    st.builds(lambda text: {"role": "assistant", "content": f"a{text}b"}, words),
    st.builds(lambda text: {**CALL, "content": text}, st.one_of(st.just(""), words)),
    st.builds(lambda text: {**DONE, "reasoning_content": f"{text}."}, words),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), words, answers, answers)
def test_prompt_and_response_are_the_tokens_of_the_whole_render(name: str, asked: str, good: Any, bad: Any) -> None:
    if good == bad:
        return
    source = FAMILIES[name].source
    prompt = [{"role": "user", "content": f"{asked}?"}]
    encoding = toy_encoding(toy_config("rows", "dpo"), TOKENIZER, jinja(source))
    renders = [
        encoding.template.render([*prompt, answer], add_generation_prompt=False, enable_thinking=False)
        for answer in (good, bad)
    ]
    if renders[0] == renders[1]:
        return
    end = [] if encoding.template.closes(prompt) else TOKENIZER.encode("</s>")
    expected = [TOKENIZER.encode(render) + end for render in renders]
    pair = {"prompt": prompt, "chosen": [good], "rejected": [bad]}
    assert [a + b for a, b in branches(pair, "dpo", source, "prompt, chosen, rejected")] == expected
    for answer, ids in zip((good, bad), expected, strict=True):
        kto = {"prompt": prompt, "completion": [answer], "label": False}
        assert [a + b for a, b in branches(kto, "kto", source, "prompt, completion, label")] == [ids]


@pytest.mark.parametrize(
    ("content", "trained"),
    [("\nab", "\n\nab<|im_end|>\n"), ("ab c", "ab c<|im_end|>\n"), (" c", " c<|im_end|>\n")],
)
def test_a_token_that_merges_across_the_start_is_trained(tmp_path: Path, content: str, trained: str) -> None:
    ((_, response),) = branches({"messages": [USER, {**DONE, "content": content}]}, "sft", CHATML, "messages")
    assert TOKENIZER.decode(response) == trained


def test_a_token_that_merges_across_the_end_is_trained_and_no_turn_is_left_without_tokens(tmp_path: Path) -> None:
    """A template without special tokens, where a turn's last character and the line break are one token."""

    def plain(messages: Any, *, add_generation_prompt: bool, **options: Any) -> str:
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join([*lines, "assistant: "] if add_generation_prompt else lines)

    short = {"role": "assistant", "content": "."}
    row = {"messages": [USER, short, USER, {**short, "content": "ok."}]}
    data = toy_read(tmp_path, [row], tokenizer=SpecialTokenizer(), template=plain, train_on="all")
    read = data.train.rows(0)[0]
    pieces = [TOKENIZER.decode([token]) for token, hit in zip(read.ids, read.targets, strict=True) if hit]
    assert pieces == [".\n", "o", "k", ".", "</s>"]
    assert "[" in all_shown(data)[0]


def test_a_wanted_turn_without_tokens_is_an_error_of_the_program() -> None:
    encoding = toy_encoding(toy_config("rows"), TOKENIZER)
    with pytest.raises(AssertionError, match="has no tokens"):
        token_span([5, 6, 7], StartIds(0, [5, 6]), StartIds(0, [5, 6]), encoding)


def test_the_token_that_begins_the_next_turn_ends_one_that_nothing_closes() -> None:
    encoding = toy_encoding(toy_config("rows"), SpecialTokenizer(ends=("</s>", "<|user|>")))
    user, other = TOKENIZER.encode("<|user|>")[0], TOKENIZER.encode("<|tool|>")[0]
    assert with_end_token([1, 2, user, 3], (0, 2), encoding) == (0, 3)
    assert with_end_token([1, 2, other, 3], (0, 2), encoding) == (0, 2)
    assert with_end_token([1, 2], (0, None), encoding) == (0, None)
