"""The page in a real browser: on a run that trains, loses a node and ends, and on runs of every shape."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import expect

from scripts.local_cluster import Events, local_cluster
from tests.coordinator.view.written_runs import WrittenRun
from tests.processes.browser import Browser, Chromium, browser, started

pytestmark = pytest.mark.slow
# Only the killed node may be lost, however loaded the machine is.
TIMING = {
    "copy_factor": 1e9,
    "suspect_seconds": 60,
    "dead_seconds": 90,
    "data_seconds": 90,
    "progress_seconds": 120,
}
SETTINGS = {"train.steps": 100_000, "train.eval_every": 0, "train.save_every": 1000}


MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"


@contextmanager
def served(*runs: Path) -> Iterator[str]:
    """The address of `mlxdist view` for these runs."""
    command = [sys.executable, "-m", "mlxdist", "view", *map(str, runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) in (0, 130)


def address_in(log: Path, run: "subprocess.Popen[bytes]") -> str:
    """The address that `launch --view` prints."""
    while run.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("the page of this run: "):
                return line.split()[-1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    """One browser for all tests."""
    with started() as chromium:
        yield chromium


def steps_shown(seen: Browser) -> int:
    """The number of steps that the page shows."""
    return int((seen.page.locator("#step-done").text_content() or "").replace(",", ""))


def another_step(seen: Browser) -> None:
    """Waits until the page shows another step than now."""
    expect(seen.page.locator("#step-done")).not_to_have_text(seen.page.locator("#step-done").text_content() or "")


def test_a_person_sees_a_run_train_lose_a_node_and_end(tmp_path: Path, chromium: Chromium) -> None:
    with (
        local_cluster(tmp_path, method="dpo", leaves=12, timing=TIMING, min_nodes=3) as cluster,
        browser(chromium) as seen,
    ):
        for name in ("mini-1", "mini-2", "mini-3"):
            cluster.start_node(name)
        run = cluster.launch("run", SETTINGS, options=["--view"])
        url = address_in(tmp_path / "run.txt", run)
        seen.open(url)  # before the first step
        page = seen.page
        page.wait_for_selector("#state.training")
        another_step(seen)
        page.wait_for_selector(".lane svg [data-kind=leaf]")
        assert {"Loss", "Rewards and margins", "Learning rate", "Gradient norm"} <= seen.painted().keys()
        assert min(seen.painted().values()) > 10
        assert page.locator(".lane .who b").all_text_contents() == ["mini-1", "mini-2", "mini-3"]
        another_step(seen)  # live

        worker = cluster.worker("mini-2")
        assert worker is not None
        worker.kill()
        row = page.locator("#losses tbody tr", has_text="mini-2").first
        row.locator(".link").click()
        page.wait_for_selector(".lane [data-kind=cross]")
        lane = page.locator(".lane", has=page.locator("[data-kind=cross]"))
        assert lane.locator(".who b").text_content() == "mini-2"
        sentence = page.locator("#step-sentence").text_content() or ""
        assert "mini-2 was lost" in sentence
        assert "killed" in sentence
        assert re.search(r"This cost [\d.]+ m?s|It cost no time", sentence)
        assert (row.locator("td").last.text_content() or "").endswith("s")  # its cost in seconds
        page.locator("#step-last").click()
        another_step(seen)  # the run goes on, and so does the page
        assert seen.violations() == []
        assert seen.errors == []
        assert seen.hosts == {"127.0.0.1"}

        told = Events(tmp_path / "run" / "metrics.jsonl")
        told.news()
        run.send_signal(signal.SIGINT)
        assert run.wait(120) == 130
        expect(page.locator("#state")).to_contain_text("not connected")  # its server ends with the run's command
    with browser(chromium) as later, served(tmp_path / "run") as url:
        later.open(url)
        later.page.wait_for_selector("#state.interrupted")
        assert steps_shown(later) >= told.steps
        assert later.errors == []


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs with validation, checkpoints and a loss."""
    folder = tmp_path_factory.mktemp("shapes")
    one = WrittenRun(folder / "one").take(9).evaluate().take(4).take(lost="mini-2").take(6).evaluate()
    other = WrittenRun(folder / "other", rate=2e-3).take(10).evaluate().take(3, loss=float("nan")).take(7)
    one.report.note(MARKUP)
    one.report.done("all 20 steps are done", "done")
    return one.path, other.path


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_the_page_fits_is_readable_by_all_and_asks_no_one_else(
    shapes: tuple[Path, Path], width: int, scheme: str, chromium: Chromium
) -> None:
    with served(*shapes) as url, browser(chromium, width=width, scheme=scheme) as seen:
        seen.open(url)
        page = seen.page
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert min(seen.painted().values()) > 10
        for summary in page.locator("summary").all():
            if not summary.evaluate("summary => summary.parentElement.open"):
                summary.click()
        page.fill("#step-input", "14")
        page.press("#step-input", "Enter")
        page.wait_for_selector(".lane [data-kind=cross]")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        for canvas in page.locator("canvas").all():
            assert canvas.get_attribute("role") == "img"
            assert "at step" in (canvas.get_attribute("aria-label") or "")
        assert MARKUP in (page.locator("#said").text_content() or "")  # a text, and no element
        assert seen.violations() == []
        assert (seen.errors, seen.hosts) == ([], {"127.0.0.1"})


def test_two_runs_are_laid_over_each_other_and_each_can_be_chosen(
    shapes: tuple[Path, Path], chromium: Chromium
) -> None:
    with served(*shapes) as url, browser(chromium) as seen:
        seen.open(url)
        page = seen.page
        labels = page.locator("figure").first.locator(".u-legend .u-label").all_text_contents()
        assert {"one training", "one validation", "other training", "one best checkpoint"} <= set(labels)
        marked = page.locator("#config tr.differs")
        assert marked.count() == 1
        assert "train.learning_rate" in (marked.text_content() or "")
        assert "No node was lost" not in (page.locator("#losses-sentence").text_content() or "")
        page.locator("#runs button", has_text="other").click()
        expect(page.locator("h1")).to_have_text("other")
        assert "No node was lost" in (page.locator("#losses-sentence").text_content() or "")


def test_everything_can_be_done_by_keyboard(shapes: tuple[Path, Path], chromium: Chromium) -> None:
    with served(shapes[0]) as url, browser(chromium) as seen:
        seen.open(url)
        page = seen.page
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        plot = page.locator("figure .plot").first
        plot.focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert plot.locator(".u-legend .u-value").first.text_content() == "19"
        page.keyboard.press("+")
        page.wait_for_selector("#zoom-out:not([hidden])")
        page.keyboard.press("0")
        page.wait_for_selector("#zoom-out", state="hidden")
        page.locator("#step-before").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#step-input")).to_have_value("19")


def test_a_hundred_thousand_steps_are_drawn_from_a_few_points(tmp_path: Path, chromium: Chromium) -> None:
    written = WrittenRun(tmp_path / "long", total=100_000).take(2)
    lines = (written.path / "metrics.jsonl").read_text().splitlines()
    train = next(line for line in lines if '"event": "train"' in line)
    with (written.path / "metrics.jsonl").open("a") as stream:
        for step in range(3, 100_001):
            peak = train.replace('"loss": 0.6', '"loss": 9.6') if step == 77_777 else train
            stream.write(peak.replace('"step": 1,', f'"step": {step},') + "\n")
    with served(written.path) as url, browser(chromium) as seen:
        seen.open(url)
        assert steps_shown(seen) == 100_000
        points, greatest = seen.page.evaluate(
            """async () => {
                 const [steps, values] = (await (await fetch("curves?name=loss&pixels=1280")).json()).loss;
                 return [steps.length, steps[values.indexOf(Math.max(...values))]];
               }"""
        )
        assert points <= 3 * 1280 + 2
        assert greatest == 77_777
        assert seen.errors == []
