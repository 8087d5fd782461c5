"""Prints an inspection: the files, the batches, some rows, notes, faulty rows, and what a run would refuse."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mlxdist.coordinator.data.checks import percent
from mlxdist.coordinator.inspect.facts import FileFacts, Inspection, Sample
from mlxdist.coordinator.report.format import count

BAR = 32  # cells of the longest bar
SHOWN = 480  # characters of a piece of a row; the middle of a longer one is left out
TRAINED = "green"
MARKS = ("⟦", "⟧")  # around what is trained, on a terminal without color


def print_inspection(facts: Inspection, console: Console) -> None:
    """Prints everything; refusals last, where a person looks first."""
    for file in facts.files:
        _show_file(file, facts, console)
    _show_batch(facts, console)
    _show_samples(facts.samples, console)
    if facts.notes:
        console.print("\n[bold]Notes[/bold]")
        for note in facts.notes:
            console.print(Text(f"  {note}"), soft_wrap=True)
    if facts.faults:
        console.print(f"\n[bold]Faulty rows[/bold] ({len(facts.faults)})")
        for fault in facts.faults:
            console.print(Text(f"  {fault['where']}: {_clean(fault['reason'])}"), soft_wrap=True)
    console.print()
    for reason in facts.refused:
        console.print(Text(f"A run would be refused: {reason}", style="red"), soft_wrap=True)
    if not facts.refused:
        console.print("A run with this data would start.")


def _show_file(file: FileFacts, facts: Inspection, console: Console) -> None:
    rows = f"{count(file.rows, 'row')} ({file.shape or 'no known format'})"
    console.print(
        f"\n[bold]{escape(file.name)}[/bold]: {rows}, {file.faulty} faulty, {count(file.duplicates, 'duplicate')}"
    )
    if not file.rows:
        return
    table = Table("", *file.lengths, box=None, pad_edge=False, header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row(facts.unit, *(f"{value:.0f}" for value in file.lengths.values()))
    console.print(table)
    most = max(each.rows for each in file.histogram)
    widest = len(str(file.histogram[-1].high))
    for each in file.histogram:
        bar = "█" * max(round(BAR * each.rows / most), 1 if each.rows else 0)
        console.print(f"  {each.low:>{widest}} to {each.high:>{widest}} {bar:<{BAR}} {each.rows}", highlight=False)
    if facts.unit == "tokens":
        fits = ", ".join(f"{length} fits {share}" for share, length in file.fits.items())
        console.print(f"  cut: {count(file.cut, 'row')}; a max_length of {fits}", highlight=False)
    console.print(f"  trained: {percent(file.trained, file.tokens)} of {file.tokens} {facts.unit}", highlight=False)
    if file.labels is not None:
        _show_labels(file, console)


def _show_labels(file: FileFacts, console: Console) -> None:
    labels = file.labels
    assert labels is not None, "only shown for labeled rows"
    said = f"  labels: {labels.desirable} desirable, {labels.undesirable} undesirable"
    if labels.desirable_weight and labels.undesirable_weight:
        (low, high), (under, over) = labels.desirable_weight, labels.undesirable_weight
        said += f"; balanced by desirable_weight {low} to {high}, or undesirable_weight {under} to {over}"
    console.print(said, highlight=False, soft_wrap=True)


def _show_batch(facts: Inspection, console: Console) -> None:
    batch = facts.batch
    if batch is None:
        return
    console.print(
        f"\n[bold]Batches[/bold] ({facts.method}): "
        f"windows of {count(batch.size, 'row')}, {batch.grad_accum_steps} per step, "
        f"{count(batch.steps_per_epoch, 'step')} per epoch; "
        f"{batch.leaves:.3g} leaves (micro-batches) a step, filled to {batch.fill:.0%} of {batch.leaf_tokens} tokens",
        highlight=False,
        soft_wrap=True,
    )


def _show_samples(samples: list[Sample], console: Console) -> None:
    colored = console.color_system is not None and not console.no_color
    how = f"[{TRAINED}]what is trained[/{TRAINED}]" if colored else f"{MARKS[0]}what is trained{MARKS[1]}"
    if samples:
        console.print(f"\n[bold]Rows as the model reads them[/bold], {how}")
    for sample in samples:
        for name, branch in zip(_names(sample), sample.branches, strict=True):
            text = Text()
            for piece in branch:
                words = _shortened(_clean(piece.text))
                if piece.trained and not colored:
                    words = f"{MARKS[0]}{words}{MARKS[1]}"
                text.append(words, style=TRAINED if piece.trained else "")
            console.print(Text(f"\n{sample.where}{name}", style="dim"))
            console.print(text, soft_wrap=True)


def _names(sample: Sample) -> tuple[str, ...]:
    names = ("",) if len(sample.branches) == 1 else (" chosen", " rejected", " chosen, as text")
    return names[: len(sample.branches)]


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"


def _clean(text: str) -> str:
    """Returns `text` without control characters, which could control the terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
