"""A report in a real browser: drawn, readable on a phone and in the dark, asking for nothing, on paper too."""

from datetime import datetime
from pathlib import Path

import pytest

from mlxdist.coordinator.html_report.write import write_report
from tests.coordinator.html_report.told_runs import EVIL, told_run
from tests.processes.browser import browser, started

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_a_report_is_drawn_at_any_width_in_both_schemes(tmp_path: Path, width: int, scheme: str) -> None:
    runs = [told_run(tmp_path / EVIL.replace("/", ""), evil=EVIL), told_run(tmp_path / "other")]
    out = tmp_path / "report.html"
    write_report(runs, out, force=False, now=datetime(2026, 5, 2))
    with started() as chromium, browser(chromium, width=width, scheme=scheme) as seen:
        seen.page.goto(out.as_uri())
        figures = seen.page.locator("figure")
        assert figures.count() == 2 + 2 * 6
        drawn = seen.page.evaluate(
            """() => [...document.querySelectorAll("figure")].map((figure) => {
                 const line = figure.querySelector("path:not(.grid):not(.mark)").getBoundingClientRect();
                 const frame = figure.getBoundingClientRect();
                 return [line.width / frame.width, line.right <= frame.right];
               })"""
        )
        assert [inside for _, inside in drawn] == [True] * len(drawn)
        assert min(share for share, _ in drawn) > 0.5
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert seen.page.evaluate(wide) == 0  # a wide table scrolls by itself, the page does not
        assert seen.violations() == []
        seen.page.emulate_media(media="print", color_scheme="dark")
        assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert seen.errors == []
        assert all(each.startswith("file:///") for each in seen.hosts)
