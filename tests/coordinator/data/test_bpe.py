"""With a real tokenizer, read as mlx-lm reads it: seams, special tokens, cut characters, templates of one's own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.data.load import encoding_of
from mlxdist.coordinator.dataset import Dataset, encode_sft_row, read, tokenize_pair
from mlxdist.coordinator.encode.encoding import Encoding
from mlxdist.coordinator.encode.tokenizer import HubTokenizer
from mlxdist.protocol.leaves import Row
from tests.coordinator.data.bpe_tokenizer import save_tokenizer
from tests.coordinator.data.data_toys import toy_config, write_rows

pytestmark = pytest.mark.slow  # transformers and mlx-lm take two seconds to import

USER, YO = {"role": "user", "content": "the horse"}, {"role": "assistant", "content": "🐎 is an answer"}
Read = tuple[Dataset, Encoding]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def model_with_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("bpe-bos"), bos=True)


def read_rows(model: Path, folder: Path, rows: list[Any], method: str = "sft", **values: Any) -> Read:
    config = replace(toy_config(write_rows(folder / "train.jsonl", rows), method, **values), model=str(model))
    return read(config, progress=lambda message, share: None), encoding_of(config)


def parts(row: Row, encoding: Encoding) -> tuple[str, str]:
    """Returns the part that is not trained and the part that is, as text."""
    return tuple(encoding.tokenizer.decode(row.ids[row.targets == side]) for side in (0, 1))  # type: ignore[return-value]


def test_a_conversation_has_its_answer_and_its_end_token_trained(model: Path, tmp_path: Path) -> None:
    data, encoding = read_rows(model, tmp_path, [{"messages": [USER, YO]}])
    (row,) = data.train.rows(0)
    assert parts(row, encoding) == ("<|start|>user\nthe horse<|end|>\n<|start|>assistant\n", "🐎 is an answer<|end|>\n")
    named = encode_sft_row({"messages": [USER, YO]}, encoding.tokenizer, encoding.template)
    assert (row.ids.tolist(), int(row.targets.argmax())) == (named.ids, named.prompt_len)


def test_a_token_that_merges_across_the_seam_is_trained_for_sft_and_parted_for_pairs(
    model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": "the qu", "completion": "ick fox"}]
    data, encoding = read_rows(model, tmp_path, rows)
    assert parts(data.train.rows(0)[0], encoding) == ("the", " quick fox<|end|>")
    pair = [{"prompt": "the qu", "chosen": "ick fox", "rejected": "ack fox"}]
    data, encoding = read_rows(model, tmp_path, pair, "dpo")
    chosen, rejected = data.train.rows(0)
    assert parts(chosen, encoding) == ("the qu", "ick fox<|end|>")
    assert chosen.ids.tolist()[:-1] == tokenize_pair("the qu", "ick fox", encoding.tokenizer, 99)[0]
    assert parts(rejected, encoding)[0] == "the qu"


@pytest.mark.parametrize("text", ["🐎🐎🐎🐎🐎🐎", "שלום עולם שלום עולם", "مرحبا بالعالم"])
def test_emoji_and_right_to_left_text_are_cut_between_tokens_never_re_encoded(
    model: Path, tmp_path: Path, text: str
) -> None:
    encoding = read_rows(model, tmp_path, [{"text": text}])[1]
    whole = [*encoding.tokenizer.encode(text), encoding.tokenizer.eos_id]
    for length in range(2, len(whole) + 1):
        data, _ = read_rows(model, tmp_path, [{"text": text}], max_length=length, max_cut=1.0)
        assert data.train.rows(0)[0].ids.tolist() == whole[:length]
        row = {"prompt": text, "chosen": "a", "rejected": "b"}
        (chosen, _) = read_rows(model, tmp_path, [row], "dpo", max_length=length, max_cut=1.0)[0].train.rows(0)
        assert chosen.ids.tolist() == [*whole[:-1], *encoding.tokenizer.encode("a"), whole[-1]][-length:]


def test_bos_is_the_tokenizers_habit_not_its_vocabulary(model: Path, model_with_bos: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "the", "completion": " fox"}]
    assert parts(read_rows(model, tmp_path, rows)[0].train.rows(0)[0], encoding_for(model))[0] == "the"
    data, encoding = read_rows(model_with_bos, tmp_path, rows)
    assert parts(data.train.rows(0)[0], encoding) == ("<s>the", " fox<|end|>")
    data, encoding = read_rows(model_with_bos, tmp_path, [{"text": "<s>the fox"}])
    assert data.train.rows(0)[0].ids.tolist().count(encoding.tokenizer.bos_id) == 1


def encoding_for(model: Path) -> Encoding:
    return encoding_of(replace(toy_config("x"), model=str(model)))


def test_every_end_token_of_the_model_counts_as_an_end(model: Path, tmp_path: Path) -> None:
    data, encoding = read_rows(model, tmp_path, [{"text": "the fox</s>"}])
    assert encoding.tokenizer.eos_ids == {0, 3}
    assert data.train.rows(0)[0].ids.tolist()[-1] == 3
    assert data.pad_id == 0


@pytest.mark.parametrize("as_file", [False, True])
def test_a_chat_template_of_ones_own_replaces_the_tokenizers(model: Path, tmp_path: Path, as_file: bool) -> None:
    text = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    text += "{{ '[assistant]' if add_generation_prompt }}"
    file = tmp_path / "mine.jinja"
    file.write_text(text)
    given = str(file) if as_file else text
    data, encoding = read_rows(model, tmp_path, [{"messages": [USER, YO]}], chat_template=given)
    assert parts(data.train.rows(0)[0], encoding) == ("[user]the horse</s>[assistant]", "🐎 is an answer</s>")


def test_a_template_that_adds_a_thought_to_the_generation_prompt_trains_the_answer(model: Path, tmp_path: Path) -> None:
    text = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n<think>{{ '' if enable_thinking else '</think>' }}"
        "{% endif %}"
    )
    data, encoding = read_rows(model, tmp_path, [{"messages": [USER, YO]}], chat_template=text)
    assert parts(data.train.rows(0)[0], encoding)[1] == "🐎 is an answer<|end|>"


def test_a_template_error_is_the_rows_fault_in_the_templates_words(model: Path, tmp_path: Path) -> None:
    text = "{% if messages|length > 2 %}{{ raise_exception('only two turns') }}{% endif %}{{ messages[-1].content }}"
    rows = [{"messages": [USER, YO]}, {"messages": [USER, YO, USER, YO]}]
    data, _ = read_rows(model, tmp_path, rows, chat_template=text, on_bad_row="skip")
    assert "train.jsonl:2: the chat template refuses this conversation: only two turns" in data.notes[0]


def test_a_tokenizer_without_a_template_still_takes_texts(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path / "bare", chat_template=None)
    data, encoding = read_rows(model, tmp_path, [{"prompt": "the", "completion": " fox"}])
    assert encoding.template.apply is None
    assert not any("chat template" in note for note in data.notes)


def test_a_tokenizer_file_that_asks_for_truncation_or_padding_is_not_obeyed(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path / "cutting")
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        **{"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "<|end|>"},
    }
    file.write_text(json.dumps(content))
    data, encoding = read_rows(model, tmp_path, [{"text": "the quick brown fox jumps"}, {"text": "the fox"}])
    assert [parts(data.train.rows(index)[0], encoding) for index in (0, 1)] == [
        ("the", " quick brown fox jumps<|end|>"),
        ("the", " fox<|end|>"),
    ]


@pytest.mark.parametrize("text", ["the quick fox", "<|start|>user\n🐎<|end|>", "", "  two  spaces \n\n", "é e\u0301"])
def test_encoding_past_the_wrapper_is_what_the_tokenizer_encodes(model: Path, text: str) -> None:
    tokenizer = encoding_for(model).tokenizer
    assert isinstance(tokenizer, HubTokenizer)
    assert tokenizer.encode(text) == tokenizer.hf.encode(text, add_special_tokens=False)
    assert tokenizer.encode_batch([text, "a"]) == [tokenizer.encode(text), tokenizer.encode("a")]
