"""The command `mlxdist init`: looks, chooses, writes, and says in three lines what it chose and what comes next."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.data.checks import percent
from mlxdist.coordinator.memory.fit import this_machine
from mlxdist.coordinator.report.format import count
from mlxdist.coordinator.starter.choose import Choice, choose
from mlxdist.coordinator.starter.survey import Survey, survey
from mlxdist.coordinator.starter.write import toml_text
from mlxdist.coordinator.storage.run_folder import saving
from mlxdist.protocol.errors import UserError
from mlxdist.protocol.methods import METHODS


def write_first_run(data: str, model: str, file: Path, console: Console) -> None:
    """Writes `file` for the rows of `data`. Raises UserError where it exists, or the data cannot be trained on."""
    if file.exists():
        raise UserError(f"{file} exists, and is never overwritten: name another file with --output my-run.toml")
    machine = this_machine()
    with console.status("") as status:

        def progress(message: str, share: float) -> None:
            status.update(f"{message}: {share:.0%}")

        seen = survey(data, model, machine, progress)
        choice = choose(seen, machine)
    text = toml_text(seen, choice, file)
    with saving(file):
        try:
            with file.open("x", encoding="utf-8") as stream:
                stream.write(text)
        except FileExistsError:
            raise UserError(f"{file} exists, and is never overwritten") from None
    if seen.model_given:
        load_config(file)  # a hub id that is only suggested may look like a folder that is not there
    for sentence in sentences(seen, choice, file):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def sentences(seen: Survey, choice: Choice, file: Path) -> Iterator[str]:
    """Yields the three lines: the run, the lengths and the memory, the next commands; and faults, if there are any."""
    config, item = choice.config, METHODS[seen.method].item
    fraction, rows = config.data.valid_fraction, len(seen.rows)
    kept = f", {percent(round(fraction * rows), rows)} of them kept back for validation" if fraction else ""
    run = f"{config.train.epochs:g} epoch{'s'[: config.train.epochs != 1]} of {count(rows, item)}{kept}"
    yield (
        f"{file.name}: {seen.method} (the rows have {seen.shape}) with {Path(seen.model).name}, {run}, "
        f"in {count(choice.steps, 'step')} of {config.batch.size}."
    )
    estimate = "" if seen.model_given else ", estimated from characters until a model is named with --model"
    fits = "all" if not choice.cut else f"all but {choice.cut}"
    reason = ", the most that this machine holds" if choice.limited else ""
    memory = f"; {choice.memory}" if choice.memory else ""
    yield f"max_length = {config.batch.max_length} fits {fits} of the {item}s{estimate}{reason}{memory}."
    if seen.faults:
        first = seen.faults[0]
        faulty = f"{count(len(seen.faults), 'row')} of {seen.n_rows} cannot be trained on"
        yield f"{faulty}, the first: {first.where}: {first.reason}"
    yield f"Next: mlxdist inspect {file}, then mlxdist launch {file}"
