"""mlxdist from Python: train, load a run, evaluate and export. See docs/python.md.

The functions take what the commands take, raise the errors of `mlxdist.protocol.errors`, and may be called again and
again in one process, also where an event loop runs, as in a notebook.
"""

import io
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from mlxdist.protocol.errors import UserError

if TYPE_CHECKING:
    from mlxdist.coordinator.config.hosts import Hosts
    from mlxdist.coordinator.config.schema import RunConfig
    from mlxdist.coordinator.evaluate.evaluate import Evaluation
    from mlxdist.local.export import Exported, Form

Event = Mapping[str, Any]  # as a line of metrics.jsonl
Callback = Callable[[Event], None]
Place = str | os.PathLike[str]

# Arguments of other trainers, and what stands for them here.
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "args": "settings are keys of the run file",
        "callbacks": "give on_step, on_evaluation, on_checkpoint or on_node",
        "compute_metrics": "the metrics of a method are fixed",
        "data_collator": "rows are encoded and cut into leaves by the coordinator, the same for every cluster",
        "eval_dataset": "validation rows are data.valid_path or data.valid_fraction",
        "formatting_func": "columns are named with data.columns",
        "model": "the model is the key model of the run file: a folder or a hub id",
        "optimizers": "the optimizer is AdamW with the keys of [train]",
        "peft_config": "the adapter is described by [lora]",
        "processing_class": "the tokenizer is the model's; data.chat_template replaces its template",
        "ref_model": 'the reference is the base model, or the first adapter with preference.reference = "initial"',
        "tokenizer": "the tokenizer is the model's; data.chat_template replaces its template",
        "train_dataset": "the rows are the key data of the run file",
    }
)


class Stop:
    """A wish that a training stops after the step in work. A training that begins clears it."""

    def __init__(self) -> None:
        self._wanted = threading.Event()

    def request(self) -> None:
        """Asks the training to stop; from a callback, or from any thread."""
        self._wanted.set()

    def requested(self) -> bool:
        """Returns true after a request."""
        return self._wanted.is_set()

    def clear(self) -> None:
        """Takes the request back."""
        self._wanted.clear()


@dataclass(frozen=True)
class RunResult:
    """The result of a training."""

    adapter_path: Path  # loadable by mlx_lm.load(adapter_path=…) when the run is done
    status: Literal["done", "interrupted"]
    steps: int
    applied_ranks: Mapping[str, int]  # by module path
    metrics: Mapping[str, Any]  # the content of metrics.json


@dataclass(frozen=True)
class Trajectory:
    """Events of one kind, one row each, in the order of their steps."""

    rows: tuple[Event, ...]

    def column(self, name: str) -> list[Any]:
        """Returns one value of every row; None where a row lacks it."""
        return [row.get(name) for row in self.rows]

    def to_pandas(self) -> Any:
        """Returns a pandas.DataFrame. Raises UserError where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise UserError("to_pandas needs pandas: pip install pandas; `rows` has the same as plain values") from None
        return pandas.DataFrame(list(self.rows))


@dataclass(frozen=True)
class LoadedRun:
    """A run as its folder tells it; it may still be training."""

    path: Path
    config: "RunConfig"
    state: str  # training, stopped, done, interrupted or failed
    steps: int
    training: Trajectory  # of every step: loss, grad_norm, learning_rate, metrics
    validation: Trajectory  # of every evaluation: step, loss, metrics


def train(
    config: "Place | Mapping[str, Any] | RunConfig",
    *,
    overrides: Sequence[str] = (),
    nodes: int | None = None,
    hosts: Place | None = None,
    resume: bool = False,
    insecure_lan: bool = False,
    progress: bool = True,
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
    on_node: Callback | None = None,
    stop: Stop | None = None,
    **unknown: object,
) -> RunResult:
    """Trains, as `mlxdist launch`, and returns when the run has ended or was stopped.

    Args:
        config: a run file, a mapping with its keys (tables nested, paths from the current directory), or a RunConfig.
        overrides: changed settings as texts, "train.steps=20".
        nodes: nodes on this machine; default 1.
        hosts: a hosts file instead.
        resume: goes on with the run in the output folder.
        insecure_lan: other Macs connect without encryption and keys.
        progress: shows the run on the standard output.
        on_step: called with each event "train" of metrics.jsonl, in this thread.
        on_evaluation: the same with "val".
        on_checkpoint: the same with "checkpoint".
        on_node: the same with "node".
        stop: ends the run after the step in which it was requested, as Ctrl-C does: its state is saved.
        **unknown: arguments of other trainers, which are refused by name.

    Raises:
        TypeError: an argument that does not exist, with what stands for it here.
        UserError: data, settings or files that cannot be; nothing was trained.
        MlxdistError: the run could not go on.
    """
    if unknown:
        raise TypeError(_unknown(next(iter(unknown))))
    from mlxdist.coordinator.config.hosts import is_local
    from mlxdist.coordinator.config.load import configured
    from mlxdist.coordinator.report.follower import Follower
    from mlxdist.coordinator.run import run

    cluster = _cluster(nodes, hosts)
    if not is_local(cluster.coordinator.host):
        raise UserError(
            f"[coordinator] host = {cluster.coordinator.host}: a run on another Mac is started and watched by the "
            "command mlxdist launch"
        )
    resolved = configured(config, overrides)
    stop = stop or Stop()
    stop.clear()
    callbacks = {"train": on_step, "val": on_evaluation, "checkpoint": on_checkpoint, "node": on_node}

    def listen(event: Event) -> None:
        if (callback := callbacks.get(event["event"])) is not None:
            callback(event)

    follower = Follower(listen, stop.requested, _stream(progress))
    code = run(resolved, cluster, resume=resume, environ=os.environ, insecure_lan=insecure_lan, follower=follower)
    return _result(resolved.output, "done" if code == 0 else "interrupted")


def load_run(run: Place) -> LoadedRun:
    """Returns what the folder of a run (or its run file) tells. Raises UserError where there is no run."""
    from mlxdist.coordinator.config.saved import run_at, saved_config
    from mlxdist.coordinator.overview.find import run_in
    from mlxdist.coordinator.report.history import events

    folder = run_at(Path(run))
    found = run_in(folder.path)
    told = [event for _, event in events(folder.metrics_jsonl)]
    return LoadedRun(
        path=folder.path,
        config=saved_config(folder),
        state=found.state if found is not None else "stopped",
        steps=found.steps if found is not None else 0,
        training=Trajectory(tuple(event for event in told if event["event"] == "train")),
        validation=Trajectory(
            tuple({**event, **event["metrics"], "metrics": None} for event in told if event["event"] == "val")
        ),
    )


def evaluate(
    run: Place,
    *,
    checkpoints: Sequence[str | int] = (),
    data: str = "",
    model: str = "",
    nodes: int | None = None,
    hosts: Place | None = None,
    insecure_lan: bool = False,
    rows: Place | None = None,
    progress: bool = False,
) -> "Evaluation":
    """Judges adapters of a run beside its base model, as `mlxdist evaluate`; `rows`: a file for every row's result.

    Raises UserError for a run, rows or a checkpoint that are not there, and MlxdistError where the nodes fail.
    """
    from mlxdist.coordinator.config.saved import run_at
    from mlxdist.coordinator.evaluate.evaluate import Question
    from mlxdist.coordinator.evaluate.show import evaluated

    cluster = _cluster(nodes, hosts)
    question = Question([str(each) for each in checkpoints], data, model, insecure_lan)
    file = None if rows is None else Path(rows)
    return evaluated(run_at(Path(run)), question, cluster, file, _stream(progress), os.environ)


def export(
    run: Place,
    out: Place,
    *,
    form: "Form" = "adapter",
    checkpoint: str | int = "",
    dequantize: bool = False,
    data: str = "",
    model: str = "",
) -> "Exported":
    """Writes an adapter of a run into the new folder `out`, as `mlxdist export`.

    `form`: "adapter", "peft", "fused" or "gguf". Raises UserError for what cannot be, and SaveError.
    """
    from mlxdist.local.export import Wanted
    from mlxdist.local.export import export as write

    return write(Path(run), Path(out), Wanted(form, str(checkpoint), dequantize, data, model))


def _cluster(nodes: int | None, hosts: Place | None) -> "Hosts":
    from mlxdist.commands.options import cluster_of

    return cluster_of(None if hosts is None else Path(hosts), nodes)


def _stream(progress: bool) -> TextIO | None:
    return None if progress else io.StringIO()


def _result(output: Path, status: Literal["done", "interrupted"]) -> RunResult:
    from mlxdist.coordinator.storage.run_folder import RunFolder

    folder = RunFolder(output)
    metrics = json.loads(folder.metrics_json.read_text(encoding="utf-8")) if folder.metrics_json.is_file() else {}
    return RunResult(output, status, metrics.get("steps", 0), metrics.get("applied_ranks", {}), metrics)


def _unknown(name: str) -> str:
    if name in ELSEWHERE:
        return f"train() has no argument {name}: {ELSEWHERE[name]}"
    known = [key for key in train.__kwdefaults__ or {}]
    near = get_close_matches(name, known, n=1)
    cure = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
    return f"train() has no argument {name}; {cure}"
