"""An inspection on a terminal: what is in the data, in the order in which a person asks."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mlxdist.coordinator.data.checks import percent
from mlxdist.coordinator.inspect.facts import FileFacts, Inspection, Sample

BAR = 32  # cells of the longest bar
SHOWN = 480  # characters of a piece of a row; the middle is left out
TRAINED = "green"
MARKS = ("⟦", "⟧")  # around what is trained, where there is no colour


def show(facts: Inspection, console: Console) -> None:
    """Print everything, refusals last, where the eye rests."""
    for file in facts.files:
        _show_file(file, facts, console)
    _show_batch(facts, console)
    _show_samples(facts.samples, console)
    if facts.notes:
        console.print("\n[bold]To be said before the first step[/bold]")
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
        console.print("A run with these data would start.")


def _show_file(file: FileFacts, facts: Inspection, console: Console) -> None:
    console.print(f"\n[bold]{escape(file.name)}[/bold]: {_rows(file.rows)} ({file.shape or 'none that fits'})", end="")
    console.print(f", {file.faulty} faulty, {file.duplicates} duplicate" + ("s" if file.duplicates != 1 else ""))
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
        console.print(f"  cut: {_rows(file.cut)}; a max_length of {fits}", highlight=False)
    console.print(f"  trained: {percent(file.trained, file.tokens)} of {file.tokens} {facts.unit}", highlight=False)
    if file.labels is not None:
        _show_labels(file, console)


def _show_labels(file: FileFacts, console: Console) -> None:
    labels = file.labels
    assert labels is not None, "shown for kto only"
    said = f"  labels: {labels.desirable} desirable, {labels.undesirable} undesirable"
    if labels.desirable_weight and labels.undesirable_weight:
        (low, high), (under, over) = labels.desirable_weight, labels.undesirable_weight
        said += f"; balanced by desirable_weight {low} to {high}, or undesirable_weight {under} to {over}"
    console.print(said, highlight=False, soft_wrap=True)


def _show_batch(facts: Inspection, console: Console) -> None:
    batch = facts.batch
    if batch is None:
        return
    leaf = "1 row" if batch.micro_size == 1 else f"{batch.micro_size} rows"
    console.print(
        f"\n[bold]Batches[/bold] ({facts.method}): windows of {batch.size}, {batch.grad_accum_steps} per step, "
        f"{batch.steps_per_epoch} steps per epoch; leaves of {leaf}, {100 * batch.padding:.1f} % of them padding",
        highlight=False,
        soft_wrap=True,
    )


def _show_samples(samples: list[Sample], console: Console) -> None:
    coloured = console.color_system is not None and not console.no_color
    how = f"[{TRAINED}]what is trained[/{TRAINED}]" if coloured else f"{MARKS[0]}what is trained{MARKS[1]}"
    if samples:
        console.print(f"\n[bold]Rows as the model reads them[/bold], {how}")
    for sample in samples:
        for name, branch in zip(_names(sample), sample.branches, strict=True):
            text = Text()
            for piece in branch:
                words = _shortened(_clean(piece.text))
                if piece.trained and not coloured:
                    words = f"{MARKS[0]}{words}{MARKS[1]}"
                text.append(words, style=TRAINED if piece.trained else "")
            console.print(Text(f"\n{sample.where}{name}", style="dim"))
            console.print(text, soft_wrap=True)


def _names(sample: Sample) -> tuple[str, ...]:
    return ("",) if len(sample.branches) == 1 else (" chosen", " rejected")


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"


def _clean(text: str) -> str:
    """Text without control characters, which could steer the terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


def _rows(count: int) -> str:
    return f"{count} row" + ("" if count == 1 else "s")
