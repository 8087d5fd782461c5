"""An evaluation as a person reads it, and as JSON."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from mlxdist.coordinator.evaluate.evaluate import BASE, Evaluation
from mlxdist.coordinator.evaluate.judge import Estimate, Judged
from mlxdist.coordinator.methods.method import supervised_tokens
from mlxdist.coordinator.report.format import count
from mlxdist.coordinator.storage.run_folder import finite
from mlxdist.protocol.methods import METHODS

SHOWN = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl")
Column = tuple[str, Callable[[Judged], str]]


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Prints one line for each model, then what is to be said of the rows and of the best one."""
    columns = columns_of(evaluation)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for each in evaluation.judged:
        table.add_row(each.name, *(cell(each) for _, cell in columns))
    console.print(table)
    console.print()
    for sentence in sentences(evaluation):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def columns_of(evaluation: Evaluation) -> list[Column]:
    """Returns the titles of the columns, each with the text of its cell; log-probs stand in the JSON alone."""
    columns: list[Column] = [("loss", lambda each: number(each.loss))]
    if METHODS[evaluation.config.method].weight == "token":
        columns.append(("perplexity", lambda each: number(each.perplexity, ".2f")))
    there = {name for each in evaluation.judged for name in each.metrics}
    columns += [(name.removeprefix("rewards/"), _cell(name)) for name in SHOWN if name in there]
    return [*columns, ("minus base", lambda each: number(each.against_base, "+.4f") if each.against_base else "")]


def _cell(name: str) -> Callable[[Judged], str]:
    return lambda each: f"{each.metrics[name]:.3f}" if name in each.metrics else ""


def number(estimate: Estimate, form: str = ".4f") -> str:
    """'1.2345 ± 0.0210'; the error is left out where there is none."""
    error = estimate.standard_error
    return format(estimate.value, form) + ("" if error is None else f" ± {error:{form.lstrip('+')}}")


def sentences(evaluation: Evaluation) -> list[str]:
    """Returns the size of the evaluation, the notes, and the best model."""
    spec, rows = METHODS[evaluation.config.method], evaluation.rows
    size = f"{count(len(rows.rows), spec.item)} of {rows.name}"
    if spec.weight == "token":
        size += f", {count(supervised_tokens(evaluation.judged[0].scored.leaves), 'token')} scored"
    left_out = f"; {count(len(rows.faults), 'row')} left out" if rows.faults else ""
    error = " ± is one standard error over rows." if evaluation.judged[0].loss.standard_error is not None else ""
    said = [f"{size}{left_out}.{error}", *evaluation.notes]
    best = evaluation.best
    if best.name == BASE:
        said.append("No adapter has a lower loss than the base model on these rows.")
    elif len(evaluation.judged) > 2:
        said.append(f"The lowest loss on these rows: {best.name}.")
    return said


def as_json(evaluation: Evaluation) -> str:
    """Returns the evaluation as one JSON object; numbers that are not finite are null."""
    token = METHODS[evaluation.config.method].weight == "token"
    first = evaluation.judged[0].scored
    result = {
        "data": evaluation.rows.name,
        "method": evaluation.config.method,
        "rows": len(evaluation.rows.rows),
        "tokens": supervised_tokens(first.leaves),
        "left_out": [{"where": fault.where, "reason": fault.reason} for fault in evaluation.rows.faults],
        "models": [_model(each, token) for each in evaluation.judged],
        "best": evaluation.best.name,
        "notes": list(evaluation.notes),
    }
    return json.dumps(finite(result), ensure_ascii=False, indent=2)


def _model(judged: Judged, token: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"name": judged.name, "step": judged.step, **judged.metrics}
    result["loss_standard_error"] = judged.loss.standard_error
    if token:
        perplexity: Mapping[str, Any] = vars(judged.perplexity)
        result |= {"perplexity": perplexity["value"], "perplexity_standard_error": perplexity["standard_error"]}
    if judged.against_base is not None:
        result |= {"minus_base": judged.against_base.value}
        result |= {"minus_base_standard_error": judged.against_base.standard_error}
    return result
