"""The charts of one run, and of several runs over each other."""

from collections.abc import Iterator, Sequence

from mlxdist.coordinator.html_report.chart import Chart, Point, Series, chart
from mlxdist.coordinator.html_report.gather import RunFacts

# Title, unit, and the lines: name in the events, name shown, color.
OF_STEPS: tuple[tuple[str, str, tuple[tuple[str, str, int], ...]], ...] = (
    (
        "Rewards",
        "",
        (("rewards/margins", "margin", 0), ("rewards/chosen", "chosen", 2), ("rewards/rejected", "rejected", 1)),
    ),
    ("Accuracy of rewards", "", (("rewards/accuracies", "accuracy", 0),)),
    ("KL from the reference", "nats", (("kl", "kl", 0),)),
    ("Learning rate", "", (("learning_rate", "learning rate", 0),)),
    ("Gradient norm", "before clipping", (("grad_norm", "gradient norm", 0),)),
    ("Speed", "tokens per second", (("all_tokens_per_second", "all tokens", 0),)),
)


def charts_of(run: RunFacts) -> Iterator[Chart]:
    """Yields the charts of a run, its loss first; those without a value are left out."""
    best = run.found.history.best
    vals = run.vals.get("loss", ())
    point = next((point for point in vals if best is not None and point[0] == best.step), None)
    losses = [
        Series("training", run.series.get("loss", ()), 0),
        Series("validation", vals, 1, dots=True, best=point),
    ]
    marks: list[Point] = [(trouble.step, 0.0) for trouble in run.troubles if trouble.nodes]
    unit = "nats per token" if run.found.method == "sft" else ""
    if (loss := chart("Loss", losses, unit=unit)) is not None:
        yield loss
    for title, unit, lines in OF_STEPS:
        exact = title == "Learning rate"
        series = [Series(shown, run.series.get(name, ()), color, exact=exact) for name, shown, color in lines]
        series += [
            Series(f"{shown}, validation", run.vals.get(name, ()), color, dots=True, dashed=True)
            for name, shown, color in lines
            if title.startswith("Acc") or name == "rewards/margins"
        ]
        made = chart(title, series, unit=unit, marks=marks if title == "Speed" else ())
        if made is not None:
            yield made


def charts_of_all(runs: Sequence[RunFacts], names: Sequence[str]) -> Iterator[Chart]:
    """Yields the losses of several runs over each other."""
    for title, of_run in (("Training loss", "series"), ("Validation loss", "vals")):
        series = [
            Series(name, getattr(run, of_run).get("loss", ()), at, dots=of_run == "vals")
            for at, (run, name) in enumerate(zip(runs, names, strict=True))
        ]
        if (made := chart(title, series)) is not None:
            yield made
