"""The command `mlxdist evaluate`: an evaluation with a display, and its result on the terminal or in files."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console

from mlxdist.coordinator.config.hosts import Hosts
from mlxdist.coordinator.evaluate.evaluate import Evaluation, Question, evaluate, work_folder
from mlxdist.coordinator.evaluate.row_file import write_rows
from mlxdist.coordinator.evaluate.view import as_json, print_evaluation
from mlxdist.coordinator.report.display import open_display
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.storage.run_folder import RunFolder, saving
from mlxdist.protocol.methods import METHODS

WIDE = 160  # columns for a file or a pipe, which have no width: no number is cut there


@dataclass(frozen=True)
class Output:
    """The forms in which the result is given."""

    rows: Path | None = None  # the file of --rows
    as_json: bool = False


def show_evaluation(
    run: RunFolder, question: Question, hosts: Hosts, output: Output, environ: Mapping[str, str]
) -> Evaluation:
    """Evaluates, tells the stages, and prints the result; with JSON the stages go to the standard error.

    Raises UserError and MlxdistError, as `evaluate`, and SaveError for a file of rows that cannot be written.
    """
    stream = sys.stderr if output.as_json else sys.stdout
    evaluation = evaluated(run, question, hosts, output.rows, stream, environ)
    if output.as_json:
        print(as_json(evaluation))
    else:
        print_evaluation(evaluation, Console(width=None if sys.stdout.isatty() else WIDE))
    return evaluation


def evaluated(
    run: RunFolder,
    question: Question,
    hosts: Hosts,
    rows: Path | None,
    stream: TextIO | None,
    environ: Mapping[str, str],
) -> Evaluation:
    """Evaluates, tells the stages on `stream` (None: the standard output), and writes the file of `rows`."""
    folder = work_folder(run)
    with saving(folder.path):
        for each in (folder.logs, folder.state):
            each.mkdir(parents=True, exist_ok=True)
    with open_display(
        stream or sys.stdout, title=f"evaluate {run.path.name}", report_every=1, environ=environ
    ) as display:
        report = Reporter(folder, display, clock=time.monotonic)
        evaluation = evaluate(run, question, hosts, report)
    if rows is not None:
        spec = METHODS[evaluation.config.method]
        write_rows(rows, evaluation.judged, evaluation.rows.rows, spec, evaluation.rows.faults)
    return evaluation
