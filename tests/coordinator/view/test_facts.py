"""The facts of a run as the page shows them, from files that the real reporter wrote."""

import itertools
import json
from pathlib import Path

import pytest

from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.view.facts import facts_of, names_of, timeline_of
from mlxdist.coordinator.view.watched_run import WatchedRun, watched
from tests.coordinator.view.written_runs import WrittenRun


def read(path: Path) -> WatchedRun:
    run = watched(path)
    run.refresh()
    return run


def test_a_loss_is_told_with_its_step_its_cause_and_what_it_cost(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path).take(4).take(lost="mini-2").take(3)
    facts = facts_of(read(written.path))
    (trouble,) = facts["troubles"]
    assert (trouble["node"], trouble["step"], trouble["cause"]) == ("mini-2", 5, "the worker was killed")
    assert trouble["lost_seconds"] == pytest.approx(4.0)  # six seconds, where the steps around it took two
    assert (trouble["leaves_recomputed"], trouble["away_seconds"]) == (2, 3.0)
    assert facts["lost"]["seconds_lost"] == pytest.approx(4.0)


def test_nodes_that_join_at_the_start_are_no_losses(tmp_path: Path) -> None:
    assert facts_of(read(WrittenRun(tmp_path).take(2).path))["troubles"] == []


def test_a_loss_in_an_evaluation_and_one_that_is_not_over_say_so(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path).take(2)
    written.news("mini-1", "dead", "not heard for 15 s")
    written.evaluate()
    written.news("mini-3", "left", "it was asked to leave")
    now, before = facts_of(read(written.path))["troubles"]
    assert (before["node"], before["step"], before["evaluation"]) == ("mini-1", 2, True)
    assert (now["node"], now["step"], now["lost_seconds"], now["away_seconds"]) == ("mini-3", None, None, None)


def test_a_pause_is_shown_until_enough_nodes_are_back(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path).take(2)
    run = read(written.path)
    seen = []
    for state, seconds in (("paused", 0.0), ("training", 7.0)):
        written.report.paused(NodeNews("", state, "0 of at least 1 nodes can work", seconds=seconds))
        run.refresh()
        seen.append(run.told.paused)
    assert seen == [True, False]


def test_one_loss_that_is_told_in_two_lines_is_one(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path).take(2)
    written.news("mini-1", "suspect", "not heard for 6 s")
    written.news("mini-1", "dead", "not heard for 15 s")
    written.take()
    (trouble,) = facts_of(read(written.path))["troubles"]
    assert (trouble["state"], trouble["cause"]) == ("dead", "not heard for 6 s; not heard for 15 s")


def test_the_timeline_of_a_step_has_a_lane_for_each_node_with_what_was_lost_in_it(tmp_path: Path) -> None:
    run = read(WrittenRun(tmp_path).take(4).take(lost="mini-2").take(3).path)
    step = timeline_of(run, 5)
    assert [lane["node"] for lane in step["lanes"]] == ["mini-1", "mini-2", "mini-3"]
    assert [lane["losses"] for lane in step["lanes"]] == [0, 1, 0]
    assert step["lanes"][1]["computing"] == pytest.approx(1.64)
    assert step["lost_seconds"] == pytest.approx(4.0)
    (trouble,) = step["troubles"]
    assert (trouble["node"], trouble["at"], trouble["back_at"]) == ("mini-2", 1.0, 4.0)
    assert (step["before"], step["after"]) == (4, 6)


def test_the_timeline_is_that_of_the_last_step_or_of_the_nearest_that_has_one(tmp_path: Path) -> None:
    run = read(WrittenRun(tmp_path).take(4).path)
    assert timeline_of(run, None)["step"] == timeline_of(run, 999)["step"] == 4
    assert timeline_of(read(tmp_path / "nothing"), 3) == {"step": None}


def test_leaves_of_one_node_never_overlap_whatever_the_messages_took(tmp_path: Path) -> None:
    for lane in timeline_of(read(WrittenRun(tmp_path).take(1).path), 1)["lanes"]:
        leaves = [row for row in lane["rows"] if row[0] == "leaf"]
        assert all(before[2] <= after[1] for before, after in itertools.pairwise(leaves))


def test_a_checkpoint_that_was_removed_is_no_longer_offered(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path).take(2).evaluate().take(2).evaluate()
    facts = facts_of(read(written.path))
    assert [(one["step"], one["best"]) for one in facts["checkpoints"]] == [(4, True), (2, False)]
    assert f"mlxdist evaluate {written.path} --checkpoint 4" in facts["checkpoints"][0]["commands"].values()
    (written.path / facts["checkpoints"][0]["path"]).rmdir()
    assert [one["step"] for one in facts_of(read(written.path))["checkpoints"]] == [2]


def test_facts_are_json_also_when_numbers_are_not_finite(tmp_path: Path) -> None:
    run = read(WrittenRun(tmp_path).take(2, loss=float("nan"), metrics=False).path)
    text = json.dumps([facts_of(run), timeline_of(run, None)], allow_nan=False)
    assert json.loads(text)[0]["last"]["loss"] is None


def test_a_run_that_was_resumed_is_read_again_from_its_start(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path).take(6)
    run = read(written.path)
    again = WrittenRun(tmp_path)
    again.report.resume_after(3)
    again.step, again.now = 3, written.now
    again.take(1, loss=0.25, metrics=False)
    run.refresh()
    assert run.told.curves["loss"].steps.tolist() == [1, 2, 3, 4]
    assert run.told.curves["loss"].last == 0.25
    assert run.told.redone.steps == 3


def test_a_folder_without_a_run_has_not_begun_and_a_killed_one_has_stopped(tmp_path: Path) -> None:
    assert facts_of(read(tmp_path / "coming"))["state"] == "waiting"
    written = WrittenRun(tmp_path / "run").take(2)
    assert facts_of(read(written.path))["state"] == "stopped"
    written.report.done("all 2 steps are done", "done")
    assert facts_of(read(written.path))["state"] == "done"


def test_a_run_whose_coordinator_is_on_another_mac_is_neither_training_nor_stopped(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path).take(2)
    (written.path / "state" / "lock").write_text("1 another-mac\n")
    assert facts_of(read(written.path))["state"] == "elsewhere"


def test_lines_of_another_version_change_nothing(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path).take(2)
    strange = ['{"event": "work", "step": 3, "nodes": 7}', '{"event": "train"}', '{"event": "val", "step": "x"}', "7"]
    with (written.path / "metrics.jsonl").open("a") as stream:
        stream.write("\n".join(strange) + "\n")
    written.take(1)
    assert facts_of(read(written.path))["step"] == 3


def test_names_are_as_short_as_they_can_be_and_differ() -> None:
    assert names_of([Path("/a/one"), Path("/a/two")]) == ["one", "two"]
    assert names_of([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
