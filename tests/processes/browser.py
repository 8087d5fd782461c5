"""A real headless Chromium for tests of the page, and what it may not do: errors, requests elsewhere."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
PATIENCE_MILLISECONDS = 120_000  # for what a loaded machine does slowly
SERIOUS = ("serious", "critical")


@dataclass
class Browser:
    """One page, and all that it has asked for and complained about."""

    page: Page
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def open(self, url: str) -> None:
        """Opens the page and waits until it is drawn."""
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready]")

    def violations(self) -> list[str]:
        """The serious findings of axe about the page as it is now."""
        found: Any = Axe().run(self.page).response["violations"]
        return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found if one["impact"] in SERIOUS]

    def painted(self) -> dict[str, int]:
        """The number of colors on the canvas of each chart, by its title."""
        return dict(
            self.page.evaluate(
                """() => [...document.querySelectorAll("figure")].map((figure) => {
                     const canvas = figure.querySelector("canvas");
                     const dots = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                     return [figure.querySelector("h3").textContent, new Set(new Uint32Array(dots.buffer)).size];
                   })"""
            )
        )


def executable() -> str:
    """The Chromium of this machine. Skips the test where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), str(MAC) if MAC.exists() else "")
    if not found:
        pytest.skip("needs Chromium: apt install chromium, or Google Chrome on a Mac")
    return found


@contextmanager
def started() -> Iterator[Chromium]:
    """A running Chromium. Skips the test where there is none."""
    path = executable()
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE_MILLISECONDS)
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


@contextmanager
def browser(chromium: Chromium, *, width: int = 1280, scheme: Any = "light") -> Iterator[Browser]:
    """An empty page, which shares nothing with others."""
    with chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:
        made = Browser(context.new_page())
        made.page.set_default_timeout(PATIENCE_MILLISECONDS)
        made.page.on("console", lambda message: made.errors.append(message.text) if message.type == "error" else None)
        made.page.on("pageerror", lambda error: made.errors.append(str(error)))
        made.page.on("request", lambda request: made.hosts.add(urlsplit(request.url).hostname or request.url[:40]))
        yield made
