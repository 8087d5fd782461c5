"""Files as people really have them, each faulty row named by file and line."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.data.hf_datasets import find_splits, splits_of
from mlxdist.coordinator.data.records import Record
from mlxdist.coordinator.data.sources import find, of_file
from mlxdist.protocol.errors import DataError

ROWS = [{"text": "one"}, {"text": "zwei ü 🐎"}, {"text": "three"}]


def records(path: Path, content: bytes | str) -> list[Record]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(of_file(path).records())


def lines_and_rows(path: Path, content: bytes | str) -> list[tuple[int, Any]]:
    return [(record.line, record.row) for record in records(path, content)]


def test_blank_lines_a_byte_order_mark_and_crlf_are_passed_over(tmp_path: Path) -> None:
    text = "\ufeff" + "\r\n".join([json.dumps(ROWS[0]), "", "  ", json.dumps(ROWS[1], ensure_ascii=False), ""])
    assert lines_and_rows(tmp_path / "a.jsonl", text) == [(1, ROWS[0]), (4, ROWS[1])]


def test_a_broken_line_in_the_middle_is_a_fault_and_the_rest_is_read(tmp_path: Path) -> None:
    content = b'{"text": "a"}\n{"text": "b"\n[1]\n"x"\n{"text": "\xff"}\n{"text": "c"}'
    found = lines_and_rows(tmp_path / "a.jsonl", content)
    assert [line for line, _ in found] == [1, 2, 3, 4, 5, 6]
    assert [row for _, row in found] == [
        {"text": "a"},
        "broken JSON (Expecting ',' delimiter, column 13)",
        "a list, not an object",
        "text, not an object",
        "byte 11 is no UTF-8",
        {"text": "c"},
    ]


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "p", "completion": "one", "completion": "two"}',
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "content": "b"}]}',
        '{"tools": [{"function": {"name": "f", "name": "g"}}]}',
    ],
)
def test_a_key_that_stands_twice_at_any_depth_makes_a_row_faulty_and_no_other(tmp_path: Path, row: str) -> None:
    for name, content in (("a.jsonl", f'{row}\n{{"text": "a"}}\n'), ("a.json", f'[{row},\n{{"text": "a"}}]')):
        (one, reason), (two, good) = lines_and_rows(tmp_path / name, content)
        assert (one, two, good) == (1, 2, {"text": "a"})
        assert str(reason).endswith("stands twice in one object; keep one of them")
        assert any(f"the key {key!r}" in reason for key in ("completion", "content", "name"))


def test_a_number_of_too_many_digits_is_a_fault_not_a_failure(tmp_path: Path) -> None:
    number = "9" * 5000
    assert lines_and_rows(tmp_path / "a.jsonl", f'{{"text": {number}}}') == [(1, "a number with too many digits")]
    with pytest.raises(DataError, match=r"a\.json:1: a number with too many digits"):
        records(tmp_path / "a.json", f"[{number}]")


def test_the_share_that_was_read_grows_to_one(tmp_path: Path) -> None:
    for name, content in (
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("a.json", json.dumps(ROWS)),
        ("a.csv", "text\none\ntwo\n"),
    ):
        shares = [record.share for record in records(tmp_path / name, content)]
        assert shares == sorted(shares)
        assert 0.5 < shares[-1] <= 1


def test_a_json_array_is_read_with_the_line_of_each_element(tmp_path: Path) -> None:
    assert lines_and_rows(tmp_path / "a.json", json.dumps(ROWS, indent=1)) == [(2, ROWS[0]), (5, ROWS[1]), (8, ROWS[2])]
    assert lines_and_rows(tmp_path / "a.json", "\ufeff[ ]") == []
    assert lines_and_rows(tmp_path / "a.json", '[{"text": "a"},\n 5]') == [
        (1, {"text": "a"}),
        (2, "a number, not an object"),
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"text": "a"}', "a.json holds no array"),
        ('[{"text": "a"},\n{"text" "b"}]', r"a\.json:2: broken JSON"),
        ('[{"text": "a"}\n{"text": "b"}]', r"a\.json:2: broken JSON \(a comma or \] is missing"),
        ('[{"text": "a"},\n', r"a\.json:2: broken JSON"),
        (b'["\xff"]', "byte 3 is no UTF-8"),
    ],
)
def test_a_broken_array_is_refused_with_its_line(tmp_path: Path, content: bytes | str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        records(tmp_path / "a.json", content)


def test_csv_rows_are_text_with_the_line_where_they_begin(tmp_path: Path) -> None:
    content = '\ufeffprompt,completion,label\r\n"two\nlines","a, b",0\r\n\r\n5,,maybe\r\nshort,row\r\n'
    assert lines_and_rows(tmp_path / "a.csv", content) == [
        (2, {"prompt": "two\nlines", "completion": "a, b", "label": "0"}),
        (5, {"prompt": "5", "completion": "", "label": "maybe"}),
        (6, "2 cells under a header of 3"),
    ]


def test_a_csv_header_that_names_a_column_twice_or_a_broken_quote_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv:1: the header names a column twice"):
        records(tmp_path / "a.csv", "text,text\na,b\n")
    with pytest.raises(DataError, match=r"a\.csv:3: broken CSV"):
        records(tmp_path / "a.csv", 'text\na\n"b" c\n')


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_utf_16_and_an_empty_file_are_refused_by_name(tmp_path: Path, name: str) -> None:
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):  # with a byte-order mark, and without one
        for start in ("[{}]", '{"text": "a"}\n', "größe,text\n", '["字字字 字字"]'):
            with pytest.raises(DataError, match="is UTF-16; save it as UTF-8"):
                records(tmp_path / name, start.encode(encoding))
    with pytest.raises(DataError, match="is empty"):
        records(tmp_path / name, b"")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt", "a"])
def test_a_file_of_an_unknown_kind_names_the_kinds_that_are_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"\.jsonl, \.json, \.csv, \.parquet"):
        records(tmp_path / name, b"x")


def test_a_folder_has_its_splits_and_a_valid_path_stands_above_its_own(tmp_path: Path) -> None:
    (tmp_path / "valid.csv").write_text("text\na\n")
    with pytest.raises(DataError, match=r"has no train\.jsonl .*; it has valid\.csv"):
        find(str(tmp_path))
    (tmp_path / "train.jsonl").write_text('{"text": "a"}')
    (tmp_path / "test.json").write_text("[]")
    splits = find(str(tmp_path))
    assert [source and source.name for source in (splits.train, splits.valid, splits.test)] == [
        *("train.jsonl", "valid.csv", "test.json")
    ]
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "a"}')
    assert (given := find(str(tmp_path), str(other)).valid) is not None
    assert given.name == "other.jsonl"
    (tmp_path / "train.csv").write_text("text\na\n")
    with pytest.raises(DataError, match=r"has both train\.jsonl and train\.csv"):
        find(str(tmp_path))


@pytest.mark.parametrize("split", ["valid", "validation", "val", "dev", "eval", "Validation"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_validation_beside_training_is_found_under_every_usual_name(tmp_path: Path, split: str, suffix: str) -> None:
    for name in ("train.jsonl", f"{split}{suffix}"):
        (tmp_path / name).write_text("{}")
    splits = find(str(tmp_path))
    assert splits.valid is not None
    assert (splits.valid.name, splits.unread) == (f"{split}{suffix}", ())


def test_two_files_that_are_both_validation_are_refused(tmp_path: Path) -> None:
    for name in ("train.jsonl", "valid.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=r"has both valid\.jsonl and dev\.jsonl"):
        find(str(tmp_path))


def test_files_of_the_folder_that_nothing_reads_are_named(tmp_path: Path) -> None:
    named = ("train.jsonl", "train_2.jsonl", "more.csv", "old.jsonl.gz", "README.md", ".hidden.jsonl", "test.jsonl")
    for name in named:
        (tmp_path / name).write_text("{}")
    assert find(str(tmp_path)).unread == ("more.csv", "old.jsonl.gz", "train_2.jsonl")
    assert find(str(tmp_path), str(tmp_path / "more.csv")).unread == ("old.jsonl.gz", "train_2.jsonl")
    (tmp_path / "val.jsonl").write_text("{}")
    assert find(str(tmp_path), str(tmp_path / "more.csv")).unread == ("old.jsonl.gz", "train_2.jsonl", "val.jsonl")
    assert find(str(tmp_path / "train.jsonl")).unread == ("val.jsonl",)
    assert find(str(tmp_path / "more.csv")).unread == ()


def test_a_split_in_shards_is_read_in_their_order_and_rows_keep_their_own_file_and_line(tmp_path: Path) -> None:
    for number in (1, 0, 2):
        (tmp_path / f"train-0000{number}-of-00003.jsonl").write_text(f'\n{{"text": "{number}"}}\n')
    (tmp_path / "validation-00000-of-00001.jsonl").write_text('{"text": "v"}')
    splits = find(str(tmp_path))
    found = list(splits.train.records())
    assert [(record.file, record.line, record.row) for record in found] == [
        (f"train-0000{number}-of-00003.jsonl", 2, {"text": str(number)}) for number in range(3)
    ]
    assert found[-1].share == 1.0
    assert splits.valid is not None
    assert splits.valid.name == "validation-00000-of-00001.jsonl"
    (tmp_path / "train-00001-of-00003.jsonl").unlink()
    with pytest.raises(DataError, match=r"is one of 3 files, and there is no number 00001: copy them all"):
        find(str(tmp_path))


def test_a_copy_of_a_hub_data_set_is_found_in_its_folder_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00000-of-00001.parquet").write_bytes(b"x")
    assert find(str(tmp_path)).train.name == "train-00000-of-00001.parquet"


@pytest.mark.parametrize("path", ["-", "/dev/stdin", "/dev/null"])
def test_a_stream_without_a_length_is_refused_by_name(path: str) -> None:
    with pytest.raises(DataError, match=f"{path} is a stream without a length"):
        find(path)


def test_a_pipe_is_a_stream_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"train\.jsonl is a stream without a length"):
        find(str(tmp_path))


class Rows(list[dict[str, Any]]):
    """As a loaded split of the hub."""


class Streamed:
    """As a split that is streamed: no length."""

    def __iter__(self) -> Any:
        return iter(ROWS)


def test_a_hub_data_set_has_its_splits_by_the_names_that_are_used() -> None:
    splits = splits_of("org/name", {"train": Rows(ROWS), "validation": Rows(ROWS[:1]), "extra": Rows()})
    assert splits.valid is not None
    assert (splits.train.name, splits.valid.name, splits.test) == ("org/name [train]", "org/name [validation]", None)
    assert splits.unread == ("org/name [extra]",)
    assert [(record.line, record.row, record.share) for record in splits.train.records()] == [
        (1, ROWS[0], 1 / 3),
        (2, ROWS[1], 2 / 3),
        (3, ROWS[2], 1.0),
    ]
    with pytest.raises(DataError, match=r"has no split train; it has extra"):
        splits_of("org/name", {"extra": Rows()})


def test_a_streamed_hub_data_set_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"org/name \[train\] is a stream without a length"):
        splits_of("org/name", {"train": Streamed()})


def test_a_name_that_is_neither_here_nor_at_the_hub_is_refused_before_anything_is_loaded() -> None:
    def unknown(name: str) -> None:
        raise ConnectionError(f"no answer about {name}\nand more lines")

    said = r"there is no file or folder 'org/name' here, and the hub gives no .* \(no answer about org/name\)"
    with pytest.raises(DataError, match=said):
        find_splits("org/name", unknown)


def test_parquet_and_hub_need_the_optional_library_and_say_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    with pytest.raises(
        DataError, match=r"org/name is read through the library datasets: pip install 'mlxdist\[data\]'"
    ):
        find_splits("org/name")
    with pytest.raises(DataError, match=r"pip install 'mlxdist\[data\]', or give a \.jsonl file"):
        records(tmp_path / "a.parquet", b"PAR1")


def test_parquet_rows_are_read_by_their_number(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    found = list(of_file(tmp_path / "a.parquet").records())
    assert [(record.line, record.row) for record in found] == list(enumerate(ROWS, start=1))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"b\.parquet cannot be read as parquet"):
        list(of_file(tmp_path / "b.parquet").records())


@pytest.mark.parametrize("name", ["train", "validation"])
def test_one_file_of_a_split_of_several_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "t"}')
    if name == "train":
        (tmp_path / "train.jsonl").unlink()
    (tmp_path / f"{name}-00001-of-00002.jsonl").write_text('{"text": "t"}')
    with pytest.raises(DataError, match=f"{name}-00001-of-00002.jsonl is one of 2 files, and there is no number 00000"):
        find(str(tmp_path))


@pytest.mark.parametrize(("mark", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_csv_with_another_separator_is_refused_with_its_name(tmp_path: Path, mark: str, name: str) -> None:
    (tmp_path / "train.csv").write_text(f"prompt{mark}completion\na{mark}b\n")
    with pytest.raises(DataError, match=rf"train\.csv:1: the cells are separated by {name}; save the file with commas"):
        list(find(str(tmp_path)).train.records())
