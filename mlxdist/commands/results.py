"""The commands for what a run has made: each parses its arguments, imports what it needs, and calls one function."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mlxdist.commands.open_files import more_open_files
from mlxdist.commands.options import AsJson, BaseModel, HostsFile, InsecureLan, NodeCount, RunPath, cluster_of
from mlxdist.protocol.errors import UserError


def evaluate(
    run: RunPath,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="best|last|all|STEP", help="May be given several times, or with commas. Default: best and last."
        ),
    ] = None,
    data: Annotated[
        str, typer.Option(help="Rows of the run's form: a file, or a folder with test.jsonl. Default: validation rows.")
    ] = "",
    hosts: HostsFile = None,
    nodes: NodeCount = None,
    rows: Annotated[Path | None, typer.Option(metavar="OUT.JSONL", help="Write every row's result here.")] = None,
    model: BaseModel = "",
    insecure_lan: InsecureLan = False,
    json: AsJson = False,
) -> None:
    """Judge the checkpoints of a run beside its base model, over all validation rows or over test rows."""
    from mlxdist.interrupts import interruptible

    with interruptible():
        from mlxdist.coordinator.config.saved import run_at

        more_open_files()
        cluster = cluster_of(hosts, nodes)
        folder = run_at(run)

        from mlxdist.coordinator.evaluate.evaluate import Question
        from mlxdist.coordinator.evaluate.show import Output, show_evaluation

        question = Question(checkpoint or (), data, model, insecure_lan)
        show_evaluation(folder, question, cluster, Output(rows, json), os.environ)


def runs(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER] | compare A B", help="Default: the runs below this folder."),
    ] = None,
    json: AsJson = False,
) -> None:
    """List the runs below a folder with their best validation and state, or compare two runs side by side.

    `mlxdist runs compare A B` shows the settings that differ and the last values of both curves.
    """
    from mlxdist.coordinator.overview.show import show_comparison, show_runs

    match what or ["."]:
        case ["compare", one, other]:
            show_comparison(Path(one), Path(other), json=json)
        case [folder] if folder != "compare":
            show_runs(Path(folder), json=json)
        case _:
            raise UserError("give one folder, or: mlxdist runs compare RUN RUN")


def report(
    run: Annotated[list[Path], typer.Argument(metavar="RUN", help="Output folders of runs, or their run.toml.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT.HTML", help="The file to write.")] = Path(
        "report.html"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a run as one self-contained HTML file to send to somebody: curves, checkpoints, nodes, events, settings.

    It holds no secret, no absolute path and no script, and loads nothing. Several runs are also shown over each other.
    """
    from datetime import datetime

    from mlxdist.coordinator.config.saved import run_at
    from mlxdist.coordinator.html_report.write import write_report

    write_report([run_at(each).path for each in run], out, force=force, now=datetime.now())
    typer.echo(f"The report is in {out}.")


def generate(
    run: RunPath,
    prompt: Annotated[list[str] | None, typer.Argument(help="One or more questions.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Questions of a file: one on each line, or the prompts of a .jsonl file."),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(metavar="best|last|STEP", help="The adapter that answers. Default: the best.")
    ] = "",
    base: Annotated[bool, typer.Option("--base", help="Show the base model's answer beside the adapter's.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 100,
    temp: Annotated[float, typer.Option(min=0, help="Temperature; 0 takes the most likely token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Share of the probability that is drawn from.")] = 1.0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="Least probability, as a share of the highest.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Tokens that are drawn from; 0 for all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws.")] = None,
    system_prompt: Annotated[str, typer.Option(help="A system turn in front of every question.")] = "",
    model: BaseModel = "",
    json: AsJson = False,
) -> None:
    """Ask a trained adapter, and with --base its base model too; the sampling options are those of mlx-lm."""
    from mlxdist.interrupts import interruptible

    with interruptible():
        _prepare_mlx()
        from mlxdist.local.generate import Asked, Sampling
        from mlxdist.local.generate import generate as answer

        asked = Asked(prompt or (), prompts, checkpoint, base, model, system_prompt)
        answer(run, asked, Sampling(max_tokens, temp, top_p, min_p, top_k, seed), as_json=json)


def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    checkpoint: Annotated[
        str, typer.Option(metavar="best|last|STEP", help="The adapter to export. Default: the best.")
    ] = "",
    fuse: Annotated[bool, typer.Option("--fuse", help="The whole model, with the adapter in its parameters.")] = False,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="With --fuse: leave the model without quantization.")
    ] = False,
    peft: Annotated[bool, typer.Option("--peft", help="The adapter as Hugging Face's peft loads it.")] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="The whole model as one GGUF file.")] = False,
    data: Annotated[
        str, typer.Option(help="With --fuse: rows that judge the fused model. Default: the run's validation rows.")
    ] = "",
    model: BaseModel = "",
) -> None:
    """Write an adapter of a run for other programs: as it is, for PEFT, fused into its base model, or as GGUF."""
    from rich.console import Console

    from mlxdist.interrupts import interruptible

    if fuse + peft + gguf > 1:
        raise UserError("--fuse, --peft and --gguf are different forms: give one of them, and another OUT for each")
    if dequantize and not fuse:
        raise UserError("--dequantize is for --fuse (a GGUF is never quantized here)")
    with interruptible():
        _prepare_mlx()
        from mlxdist.local.export import Form, Wanted
        from mlxdist.local.export import export as write

        form: Form = "fused" if fuse else "peft" if peft else "gguf" if gguf else "adapter"
        console = Console()
        with console.status("") as status:
            made = write(
                run, out, Wanted(form, checkpoint, dequantize, data, model), lambda stage: status.update(stage)
            )
        for sentence in (f"{made.adapter.name} is in {out} (form: {form}).", *made.sentences):
            console.print(sentence.replace("OUT", str(out)), soft_wrap=True, markup=False, highlight=False)


def _prepare_mlx() -> None:
    """Prepares this process for mlx and mlx-lm, before either is imported."""
    from mlxdist.node.work.blas import use_openblas

    more_open_files()
    use_openblas()
