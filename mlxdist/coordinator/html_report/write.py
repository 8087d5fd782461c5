"""The command `mlxdist report`: the file, from a template in which every text is escaped."""

import os
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from mlxdist.coordinator.html_report.gather import gather
from mlxdist.coordinator.html_report.page import Page, page_of
from mlxdist.protocol.errors import UserError


def write_report(folders: Sequence[Path], out: Path, *, force: bool, now: datetime) -> None:
    """Writes the report of some runs into the file `out`; one that exists is replaced with `force` only.

    Raises UserError for a folder without a run, a file that exists, and one that cannot be written.
    """
    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file, as -o report.html")
    if out.exists() and not force:
        raise UserError(f"{out} exists: name another file with -o, or replace it with --force")
    different = dict.fromkeys(folder.absolute() for folder in folders)
    html = rendered(page_of([gather(folder) for folder in different], now))
    aside = out.with_name(f".{out.name}.{os.getpid()}.aside")
    try:
        aside.write_text(html, encoding="utf-8", errors="replace")
        aside.replace(out)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(f"{out} could not be written: {error.strerror or error}") from None


def rendered(page: Page) -> str:
    """Returns the HTML of a page."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = files("mlxdist.coordinator.html_report")
    template = here.joinpath("report.html").read_text(encoding="utf-8")
    css = Markup(here.joinpath("report.css").read_text(encoding="utf-8"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template).render(page=page, css=css)
