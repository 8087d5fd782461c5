"""The history of what a run promised about its bits: written when it changes, continued by a resumed run."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.storage.run_folder import RunFolder, read_json, write_json
from mlxdist.coordinator.training.nodes import tell
from mlxdist.coordinator.training.promises import PromiseFile, earlier_promises, promise_keys
from mlxdist.protocol.errors import SaveError
from mlxdist.protocol.numerics import SAME_BITS, TOLERANCE, Promise

KEPT = Promise(SAME_BITS, "all alike", 1, "abc")
ENDED = Promise(TOLERANCE, "b computes since then", 7)


class Told:
    """Stands in for Reporter."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    write_json(run.config, {"method": "sft", **promise_keys([KEPT])})
    return run


def test_a_promise_that_changes_is_told_once_and_stands_in_config_json_with_step_and_reason(folder: RunFolder) -> None:
    told = Told()
    promises = PromiseFile(folder, told)  # type: ignore[arg-type]
    tell(NodeNews("", "promise", ENDED.sentence, promise=ENDED), told, folder, promises)  # type: ignore[arg-type]
    config = read_json(folder.config)
    assert [config[key] for key in ("method", "promise", "promise_from_step", "promise_reason")] == [
        "sft",
        "tolerance",
        7,
        "b computes since then",
    ]
    assert [each["from_step"] for each in config["promises"]] == [1, 7]
    assert [call for call in told.calls if call[0] == "promise"] == [("promise", ENDED)]


def test_a_resumed_run_goes_on_with_the_promises_of_the_steps_that_were_saved(folder: RunFolder) -> None:
    write_json(folder.config, promise_keys([KEPT, ENDED]))
    assert earlier_promises(folder, 0) == ()
    assert earlier_promises(folder, 6) == (KEPT,)
    assert earlier_promises(folder, 7) == (KEPT, ENDED)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"promises": 3}', '{"promises": [{"kind": 1}]}', '{"promises": []}'])
def test_where_config_json_does_not_say_it_nothing_is_promised_of_the_steps_before(
    folder: RunFolder, text: str
) -> None:
    folder.config.write_text(text)
    (promise,) = earlier_promises(folder, 3)
    assert (promise.kind, promise.from_step) == (TOLERANCE, 1)
    folder.config.unlink()
    assert earlier_promises(folder, 3) == (promise,)


def test_a_promise_that_cannot_be_written_is_written_with_the_next_news(folder: RunFolder) -> None:
    told = Told()
    promises = PromiseFile(folder, told)  # type: ignore[arg-type]
    aside = folder.config.with_name(f".{folder.config.name}.aside")
    aside.mkdir()  # the write goes there first
    promises.add(ENDED)
    assert [type(call[-1]) for call in told.calls if call[0] == "could_not_save"] == [SaveError]
    assert read_json(folder.config)["promise"] == "same bits"
    aside.rmdir()
    promises.flush()
    assert read_json(folder.config)["promise"] == "tolerance"
    assert ("saved", "config") in told.calls


def test_a_config_json_that_was_damaged_meanwhile_is_said_and_left_alone(folder: RunFolder) -> None:
    told = Told()
    folder.config.write_text(json.dumps({"promises": "none"}))
    PromiseFile(folder, told).add(ENDED)  # type: ignore[arg-type]
    assert any("does not have the promise" in str(call) for call in told.calls)
    assert read_json(folder.config) == {"promises": "none"}
