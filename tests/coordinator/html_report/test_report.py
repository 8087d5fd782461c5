"""A report can be sent to somebody: it is whole, true, harmless, and tells nothing that concerns its owner alone."""

import json
import re
import shlex
from collections.abc import Iterator
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mlxdist.coordinator.html_report.gather import gather
from mlxdist.coordinator.html_report.page import names_of
from mlxdist.coordinator.html_report.write import write_report
from mlxdist.protocol.errors import UserError
from tests.coordinator.html_report.told_runs import EVIL, told_run

NOON = datetime(2026, 5, 2, 12, 0)
VOID = {"meta", "path", "br", "img", "link", "hr", "input"}


class Parsed(HTMLParser):
    """The elements of a page, its texts, and the cells of its tables; an element that is closed wrongly raises."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open or not data.strip():
            return
        self.texts.append(data.strip())
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data.strip()


def written(tmp_path: Path, *folders: Path) -> str:
    out = tmp_path / "report.html"
    write_report(folders, out, force=True, now=NOON)
    return out.read_text(encoding="utf-8")


def addresses(page: Parsed, html: str) -> Iterator[str]:
    """Yields all that a browser could ask for."""
    for _, attributes in page.tags:
        yield from (
            f"{name}={value}" for name, value in attributes.items() if name in ("src", "href", "srcset", "data")
        )
        yield from re.findall(r"url\([^)]*\)", attributes.get("style") or "")
    yield from re.findall(r"url\([^)]*\)|@import[^;]*", html)


def test_a_report_has_the_facts_of_the_run(tmp_path: Path) -> None:
    page = Parsed(written(tmp_path, told_run(tmp_path / "night")))
    text = " | ".join(page.texts)
    assert "DPO of tiny on 2 nodes: finished, 6 of 8 steps in 1 min 15 s." in text
    assert "started 2026-05-01 12:00 UTC" in text
    assert "Best validation | 0.1250 | after step 6" in text
    assert "Goodput | 80 % | 15 s lost" in text
    assert ["after step", "loss", "rewards/accuracies", "rewards/margins"] in page.rows
    assert ["4", "0.1875", "0.5000", "0.1000"] in page.rows
    assert ["6", "0.1250", "checkpoints/step-00006-val0.1250", 'mlxdist generate night --checkpoint 6 "…"'] in page.rows
    assert ["b", "ready", "1", "3", "15 s"] in page.rows
    assert ["a", "ready", "—", "—", "—"] in page.rows
    assert ["4", "b", "3", "15 s"] in page.rows
    assert ["01:15", "end", "over ; the adapter is in night"] in page.rows
    charts = [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]
    assert charts[0] is not None
    assert charts[0].startswith(
        "Loss: training from 0.7 at step 1 to 0.1167 at step 6; validation from 0.375 at step 2"
    )
    assert [str(label).partition(":")[0] for label in charts] == [
        *("Loss", "Rewards", "Accuracy of rewards", "Learning rate", "Gradient norm", "Speed")
    ]
    changed = [attributes for tag, attributes in page.tags if tag == "dt" and attributes.get("class") == "changed"]
    assert len(changed) == 2  # learning_rate and steps


def test_a_report_asks_for_nothing_and_runs_nothing(tmp_path: Path) -> None:
    html = written(tmp_path, told_run(tmp_path / "night"), told_run(tmp_path / "day"))
    page = Parsed(html)
    assert list(addresses(page, html)) == []
    assert {tag for tag, _ in page.tags} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
    } == set()
    assert [name for _, attributes in page.tags for name in attributes if name.startswith("on")] == []
    policies = [attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert "//" not in re.sub(r"/\*.*?\*/", "", html).replace("<!DOCTYPE", "")


def test_names_and_texts_of_a_run_are_never_markup(tmp_path: Path) -> None:
    name = EVIL.replace("/", "")
    html = written(tmp_path, told_run(tmp_path / name, evil=EVIL), told_run(tmp_path / "other"))
    page = Parsed(html)
    assert {tag for tag, _ in page.tags} & {"script", "img"} == set()
    assert [key for _, attributes in page.tags for key in attributes if key.startswith("on")] == []
    assert name in page.texts
    assert any(f"mlxdist generate {shlex.quote(name)} --checkpoint 2" in cell for row in page.rows for cell in row)
    assert any(EVIL.partition("/")[0] in cell for row in page.rows for cell in row)


def test_a_report_holds_no_secret_no_absolute_path_and_no_address(tmp_path: Path) -> None:
    html = written(tmp_path, told_run(tmp_path / "Jane Doe's runs" / "night"))
    assert "T0KEN" not in html
    assert "notify" not in html
    assert "192.168" not in html
    assert "Jane" not in html
    assert "Doe" not in html
    assert tmp_path.name not in html
    assert not re.search(r"(?<![\w.<-])/(?:[\w.-]+/)+", "\n".join(Parsed(html).texts))
    assert "my rows" in html  # the last part of a path stays
    assert "see night/logs/b.log" in html


@pytest.mark.parametrize(
    ("ending", "words"), [(None, "still training"), ("failed", "failed"), ("interrupted", "inter")]
)
def test_a_run_in_any_state_has_a_report(tmp_path: Path, ending: str | None, words: str) -> None:
    """The run of this test's own process counts as training."""
    page = Parsed(written(tmp_path, told_run(tmp_path / "night", ending=ending, steps=3)))  # type: ignore[arg-type]
    assert any(words in text for text in page.texts)


def test_a_run_without_a_step_has_a_report(tmp_path: Path) -> None:
    page = Parsed(written(tmp_path, told_run(tmp_path / "night", ending=None, steps=0)))
    assert [tag for tag, _ in page.tags if tag == "svg"] == []
    assert "DPO of tiny on 2 nodes: still training, 0 of 8 steps in 0.00 s." in page.texts


def test_several_runs_are_shown_over_each_other_with_the_settings_that_differ(tmp_path: Path) -> None:
    one, other = told_run(tmp_path / "a" / "run"), told_run(tmp_path / "b" / "run", rate=2e-3, steps=4)
    page = Parsed(written(tmp_path, one, other))
    assert next(text for text in page.texts if text in ("2 runs compared", "a/run", "b/run")) == "2 runs compared"
    assert ["train.learning_rate", "0.001", "0.002"] in page.rows
    assert ["b/run", "dpo", "finished", "4", "0.1875", "0.1750", "55 s"] in page.rows
    charts = [str(attributes["aria-label"]) for tag, attributes in page.tags if tag == "svg"]
    assert [label.partition(":")[0] for label in charts[:2]] == ["Training loss", "Validation loss"]
    assert "a/run from 0.7 at step 1" in charts[0]
    assert "b/run from 0.7 at step 1 to 0.175 at step 4" in charts[0]


def test_runs_are_named_with_as_much_of_their_paths_as_makes_them_differ() -> None:
    paths = [Path(text) for text in ("/x/a/run", "/x/b/run", "/x/night", "/y/b/run")]
    assert names_of(paths) == ["a/run", "x/b/run", "night", "y/b/run"]
    assert names_of([Path("/run"), Path("/x/run")]) == ["run", "x/run"]


def test_a_run_that_is_named_twice_is_shown_once(tmp_path: Path) -> None:
    run = told_run(tmp_path / "night")
    assert "compared" not in " ".join(Parsed(written(tmp_path, run, run)).texts)


def test_a_file_that_exists_is_kept_unless_it_may_be_replaced(tmp_path: Path) -> None:
    run, out = told_run(tmp_path / "night"), tmp_path / "report.html"
    out.write_text("mine")
    with pytest.raises(UserError, match=r"exists: name another file with -o, or replace it with --force"):
        write_report([run], out, force=False, now=NOON)
    assert out.read_text() == "mine"
    write_report([run], out, force=True, now=NOON)
    assert out.read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(UserError, match="is a folder"):
        write_report([run], tmp_path, force=True, now=NOON)
    with pytest.raises(UserError, match="could not be written"):
        write_report([run], tmp_path / "nowhere" / "report.html", force=False, now=NOON)
    with pytest.raises(UserError, match="holds no run"):
        write_report([tmp_path], tmp_path / "other.html", force=False, now=NOON)
    assert [path.name for path in tmp_path.iterdir() if "aside" in path.name] == []


def test_nodes_have_their_share_of_the_leaves_where_their_work_was_told(tmp_path: Path) -> None:
    run = told_run(tmp_path / "night")
    rows = {
        "a": [["leaf", 0.0, 9.0, 0, 5], ["up", 9.0, 9.5, 0, 5], ["copy", 9.0, 9.9, 5, 6]],
        "b": [["leaf", 0, 9, 6, 8]],
    }
    work = {name: {"tokens_per_second": 1200.0, "peak_gb": 1.0, "state": "busy", "rows": rows[name]} for name in rows}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "work", "step": 6, "nodes": work}) + "\n")
    page = Parsed(written(tmp_path, run))
    assert ["a", "ready", "1,200", "75 %", "—", "—", "—"] in page.rows
    assert ["b", "ready", "1,200", "25 %", "1", "3", "15 s"] in page.rows


def test_the_cost_of_a_loss_is_that_of_its_step_against_the_steps_around_it(tmp_path: Path) -> None:
    (trouble,) = gather(told_run(tmp_path / "night")).troubles
    assert (trouble.step, trouble.nodes, trouble.seconds_lost, trouble.leaves_recomputed) == (4, ("b",), 15.0, 3)
