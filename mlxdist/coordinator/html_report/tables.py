"""The tables of a report: rows of texts, and how their columns are shown."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mlxdist.coordinator.html_report.gather import RunFacts, Trouble
from mlxdist.coordinator.report.format import clock_phrase, count, duration_phrase, lost_time_phrase

MOST_ROWS = 200  # of a table; of more the first and the last ones are shown
COLUMNS = (
    *("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"),
    *("kl", "nll_loss", "log_odds_ratio"),
)


@dataclass(frozen=True)
class Title:
    """The head of a column. `number`: at the right; `code`, `pill`: the form of its cells; `wide`: they may wrap."""

    text: str
    number: bool = False
    code: bool = False
    pill: bool = False
    wide: bool = False

    @property
    def kind(self) -> str:
        """The class of its cells."""
        return "n" if self.number else "wide" if self.wide else ""


@dataclass(frozen=True)
class Row:
    """One row; each cell with the head of its column."""

    cells: Sequence[tuple[str, Title]]
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table with its title, and a sentence above it."""

    title: str
    titles: Sequence[Title]
    rows: Sequence[Row]
    note: str = ""


def table(
    title: str, titles: Sequence[Title], rows: Sequence[Sequence[str]], *, best: int = -1, note: str = ""
) -> Table:
    """Returns a table of texts; `best`: the row that stands out."""
    made = [Row(tuple(zip_longest(row, titles, fillvalue="")), at == best) for at, row in enumerate(rows)]  # type: ignore[arg-type]
    if len(made) > MOST_ROWS:
        left_out = Row(
            tuple((f"… {len(made) - MOST_ROWS + 1:,} rows" if not at else "", t) for at, t in enumerate(titles))
        )
        made = [*made[: MOST_ROWS // 2], left_out, *made[-MOST_ROWS // 2 + 1 :]]
    return Table(title, titles, made, note)


def tables_of(run: RunFacts) -> Iterator[Table]:
    """Yields the tables of a run; those without a row are left out."""
    yield from (
        made
        for made in (evaluations(run), checkpoints(run), nodes(run), troubles(run.troubles), events_table(run))
        if made.rows
    )


def evaluations(run: RunFacts) -> Table:
    """Returns the evaluations, with the metrics of the method."""
    best = run.found.history.best
    names = [name for name in COLUMNS if name in run.vals]
    by_name = {name: dict(run.vals[name]) for name in names}
    steps = sorted({step for values in by_name.values() for step in values})
    rows = [
        [f"{step:,.0f}", *(f"{by_name[name][step]:.4f}" if step in by_name[name] else "" for name in names)]
        for step in steps
    ]
    at = next((at for at, step in enumerate(steps) if best is not None and step == best.step), -1)
    titles = [Title("after step", number=True), *(Title(name, number=True) for name in names)]
    return table("Validation", titles, rows, best=at)


def checkpoints(run: RunFacts) -> Table:
    """Returns the saved adapters, each with the command that asks it."""
    losses = dict(run.vals.get("loss", ()))
    rows = []
    for each in run.adapters:
        loss = losses.get(each.step or 0)
        folder = "." if each.folder == run.found.path else each.folder.relative_to(run.found.path).as_posix()
        name = "last" if each.step is None else str(each.step)
        command = f'mlxdist generate {shlex.quote(run.name)} --checkpoint {name} "…"'
        rows.append([f"{each.step:,}" if each.step else "", "" if loss is None else f"{loss:.4f}", folder, command])
    titles = [Title("step", number=True), Title("validation loss", number=True), Title("folder", code=True)]
    best = next((at for at, each in enumerate(run.adapters) if each.best), -1)
    note = "The commands are typed in the folder that holds the run; evaluate and export take the same --checkpoint."
    return table("Checkpoints", [*titles, Title("command", code=True)], rows, best=best, note=note)


def nodes(run: RunFacts) -> Table:
    """Returns the nodes with their losses and what these cost."""
    titles = [Title("node"), Title("state"), Title("times lost", number=True), Title("leaves moved away", number=True)]
    titles += [Title("time lost", number=True)]
    shares = any(node.share is not None for node in run.nodes)
    if shares:
        titles[2:2] = [Title("tokens/s", number=True), Title("share of the leaves", number=True)]
    rows = []
    for node in run.nodes:
        cost = duration_phrase(node.seconds_lost) if node.seconds_lost else "—"
        row = [node.name, node.state, f"{node.losses or '—'}", f"{node.leaves_moved or '—'}", cost]
        if shares:
            rate = f"{sum(node.rates) / len(node.rates):,.0f}" if node.rates else ""
            row[2:2] = [rate, "" if node.share is None else f"{100 * node.share:.0f} %"]
        rows.append(row)
    return table("Nodes", titles, rows, note=f"{lost_time_phrase(run.lost)}.")


def troubles(found: Sequence[Trouble]) -> Table:
    """Returns the steps that nodes disturbed, with their cost."""
    titles = [Title("step", number=True), Title("nodes", wide=True), Title("leaves recomputed", number=True)]
    rows = [
        [
            f"{each.step:,}",
            ", ".join(each.nodes) or "—",
            f"{each.leaves_recomputed or '—'}",
            duration_phrase(each.seconds_lost),
        ]
        for each in found
    ]
    note = "A node was lost, silent or slow in them. Time lost is measured against the undisturbed steps around each."
    return table("Disturbed steps", [*titles, Title("time lost", number=True)], rows, note=note)


def events_table(run: RunFacts) -> Table:
    """Returns the events that matter."""
    rows = [[clock_phrase(each.wall_seconds), each.kind, each.text] for each in run.told]
    titles = [Title("time", number=True), Title("", pill=True), Title("event", wide=True)]
    note = f"{count(len(rows), 'event')}; the time counts from the start of the run."
    return table("Events", titles, rows, note=note)
