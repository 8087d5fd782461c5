"""The run folder: whatever goes wrong while writing, the old file is there or the new one."""

import errno
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import pytest

from mlxdist.coordinator.storage.open_run import open_run
from mlxdist.coordinator.storage.run_folder import RunFolder, saving, write_aside, write_json
from mlxdist.protocol.errors import SaveError, UserError

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


class CrashError(Exception):
    """Stands for the end of the process in the middle of a write."""


def half_then(error: BaseException) -> Callable[[BinaryIO], None]:
    def write(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise error

    return write


def putting(data: bytes) -> Callable[[BinaryIO], None]:
    def write(stream: BinaryIO) -> None:
        stream.write(data)

    return write


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_crash_between_aside_and_rename_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "adapters.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(CrashError):
        write_aside(path, half_then(CrashError()))
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {path.name}


def test_a_full_disk_is_said_with_what_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "state.bin"
    with pytest.raises(SaveError, match=r"state\.bin: the disk is full\. Nothing was written\. Free some space"):
        write_aside(path, half_then(OSError(errno.ENOSPC, "full")))
    path.write_bytes(b"old")
    with pytest.raises(SaveError, match=r"The one from before is kept"):
        write_aside(path, half_then(OSError(errno.ENOSPC, "full")))
    assert path.read_bytes() == b"old"


def test_a_forbidden_folder_is_said_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match=r"may not write there.*permissions"), saving(tmp_path / "x"):
        raise PermissionError(errno.EACCES, "no")


def test_a_new_file_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for data in (b"first", b"second, longer", b"3"):
        write_aside(path, putting(data))
        assert path.read_bytes() == data
    assert names(tmp_path) == {"a"}


def test_numbers_that_json_does_not_have_are_written_as_null(tmp_path: Path) -> None:
    write_json(tmp_path / "m.json", {"a": [float("nan"), 1.5], "b": {"c": float("inf")}})
    assert json.loads((tmp_path / "m.json").read_text()) == {"a": [None, 1.5], "b": {"c": None}}


def opened(path: Path, *, resume: bool = False) -> RunFolder:
    with open_run(path, resume=resume, base_model="some/model", method="sft", created_at=NOON) as run:
        return run


def test_a_new_run_has_its_folders_and_its_manifest(tmp_path: Path) -> None:
    run = opened(tmp_path / "runs" / "one")
    assert {"checkpoints", "state", "logs", "manifest.json"} == names(run.path)
    assert json.loads(run.manifest.read_text()) == {
        "version": 1,
        "base_model": "some/model",
        "adapter_path": str(run.path.resolve()),
        "method": "sft",
        "created_at": "2026-03-01T12:00:00+00:00",
    }


@pytest.mark.parametrize("trace", ["adapters.safetensors", "checkpoints/step-00010", "metrics.jsonl"])
def test_a_folder_that_holds_a_run_is_refused_unless_resuming(tmp_path: Path, trace: str) -> None:
    run = opened(tmp_path)
    if trace.startswith("checkpoints"):
        (tmp_path / trace).mkdir()
    else:
        (tmp_path / trace).write_text('{"event": "train", "step": 1}\n')
    with pytest.raises(UserError, match=r"already holds a run.*--resume"):
        opened(tmp_path)
    assert (tmp_path / trace).exists()
    assert opened(tmp_path, resume=True) == run


def test_a_run_that_never_finished_a_step_is_begun_again_without_asking(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.metrics_jsonl.write_text('{"event": "stage", "message": "loading"}\n')
    run.config.write_text("{}")
    opened(tmp_path)
    assert not run.metrics_jsonl.exists()


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"config\.json that is not from a run"):
        opened(tmp_path)
    assert names(tmp_path) == {"config.json"}


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        opened(tmp_path / "out")


def test_resuming_where_there_is_no_run_is_refused_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run to resume"):
        opened(tmp_path / "missing", resume=True)
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "it is empty"),
        ("[]", "in place of a JSON object"),
        ("{}", "it lacks version and created_at"),
        ("\0", "JSON"),
    ],
)
def test_a_damaged_manifest_is_refused_in_one_sentence_and_the_run_can_do_without(
    content: str, reason: str, tmp_path: Path
) -> None:
    run = opened(tmp_path)
    (run.state / "resume.safetensors").write_bytes(b"a state")
    run.manifest.write_text(content)
    with pytest.raises(
        UserError, match=rf"manifest\.json cannot be used: .*{reason}.*delete it and add --resume again"
    ):
        opened(tmp_path, resume=True)
    assert run.manifest.read_text() == content
    run.manifest.unlink()
    opened(tmp_path, resume=True)
    assert json.loads(run.manifest.read_text())["created_at"] == NOON.isoformat()


def test_a_resumed_run_keeps_its_date_and_finds_its_new_place(tmp_path: Path) -> None:
    opened(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    with open_run(
        tmp_path / "new", resume=True, base_model="m", method="sft", created_at=NOON.replace(year=2027)
    ) as run:
        manifest = json.loads(run.manifest.read_text())
    assert manifest["created_at"] == "2026-03-01T12:00:00+00:00"
    assert manifest["adapter_path"] == str((tmp_path / "new").resolve())


def test_a_second_coordinator_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with (
        open_run(tmp_path, resume=False, base_model="m", method="sft", created_at=NOON),
        pytest.raises(UserError, match=f"process {os.getpid()}"),
    ):
        opened(tmp_path, resume=True)
    opened(tmp_path, resume=True)


def test_what_a_crash_left_aside_is_cleared_when_the_run_is_opened(tmp_path: Path) -> None:
    run = opened(tmp_path)
    (run.path / ".adapters.safetensors.aside").write_bytes(b"half")
    (run.state / ".optimizer.aside").write_bytes(b"half")
    (run.checkpoints / ".step-00050.aside").mkdir()
    (run.checkpoints / ".step-00050.aside" / "adapters.safetensors").write_bytes(b"half")
    (run.checkpoints / ".best.aside").symlink_to("step-00050")
    opened(tmp_path, resume=True)
    assert not [path for path in run.path.rglob(".*.aside")]


def test_a_line_that_a_crash_tore_is_ended_so_that_the_next_event_stands_alone(tmp_path: Path) -> None:
    run = opened(tmp_path)
    for told, ended in [("", ""), ('{"a": 1}\n', '{"a": 1}\n'), ('{"a": 1}\n{"b', '{"a": 1}\n{"b\n')]:
        run.metrics_jsonl.write_text(told)
        opened(tmp_path, resume=True)
        assert run.metrics_jsonl.read_text() == ended
