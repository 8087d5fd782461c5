"""Runs that a test disturbs, over real nodes that each have their own link (fault_nodes.py, fault_proxy.py)."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mlxdist.coordinator.config.hosts import CoordinatorHost, Hosts
from mlxdist.coordinator.config.schema import (
    BatchConfig,
    DataConfig,
    LoraConfig,
    PreferenceConfig,
    RunConfig,
    TimingConfig,
    TrainConfig,
)
from mlxdist.coordinator.run import run
from scripts.local_cluster import adapter_sha as sha
from tests.faults.fault_nodes import FaultNodes

SHORT = TimingConfig(  # all times 20 times shorter
    beat_seconds=0.1,
    suspect_seconds=0.3,
    return_seconds=0.25,
    dead_seconds=0.75,
    data_seconds=1.5,  # more than a twentieth: a worker on a loaded machine may take a second for an answer
    progress_seconds=1.5,
    restart_seconds=0.05,
    start_timeout=120.0,
    stop_seconds=0.5,
)
# For tests in which only a killed node may be lost, however loaded the machine is.
CALM = replace(
    SHORT, suspect_seconds=20.0, dead_seconds=30.0, data_seconds=20.0, progress_seconds=60.0, copy_factor=1e9
)


ROWS = 24


def words(random: np.random.Generator, most: int) -> str:
    """A few words of the tiny tokenizer."""
    return " ".join(f"w{i}" for i in random.integers(0, 92, int(random.integers(1, most))))


def data_folder(folder: Path, method: str, rows: int = ROWS) -> Path:
    """Writes rows for a method into a folder."""
    random = np.random.default_rng(11)
    kinds = {"sft": ("completion",), "kto": ("completion",), "dpo": ("chosen", "rejected")}
    lines = []
    for index in range(rows):
        row: dict[str, object] = {"prompt": words(random, 12), **{kind: words(random, 24) for kind in kinds[method]}}
        lines.append(json.dumps(row | ({"label": index % 3 > 0} if method == "kto" else {})) + "\n")
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(lines))
    return folder


def config_of(model: Path, folder: Path, method: str, *, steps: int = 6, timing: TimingConfig = CALM) -> RunConfig:
    """A run of a few steps of eight packed leaves, in `folder`/run; each step has all rows."""
    data = folder.parent / f"data-{method}"
    if not data.exists():
        data_folder(data, method)
    return RunConfig(
        model=str(model),
        output=folder,
        method=method,  # type: ignore[arg-type]
        data=DataConfig(path=str(data)),
        batch=BatchConfig(size=ROWS, order="sorted" if method == "sft" else "shuffled"),
        lora=LoraConfig(rank=4),
        preference=PreferenceConfig(loss="kto" if method == "kto" else "sigmoid"),
        train=TrainConfig(steps=steps, learning_rate=1e-2, eval_every=0, save_every=1),
        timing=timing,
    )


def events(folder: Path, *kinds: str) -> list[dict[str, object]]:
    """The events of these kinds that a run has written so far."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    told = []
    for line in lines:
        with suppress(ValueError):
            told.append(json.loads(line))
    return [event for event in told if event["event"] in kinds]


def told(folder: Path) -> str:
    """Membership changes, one per line (name, state, cause, action), and the messages of the run itself."""
    lines = events(folder, "node", "stage")
    return "\n".join(f"{line.get('name', 'run')} {line.get('state', 'says')} {line['message']}" for line in lines)


def train(config: RunConfig, port: int, min_nodes: int = 1, *, clock: Callable[[], float] = time.monotonic) -> int:
    """Trains one run in this process, at this port, over nodes started by hand."""
    hosts = Hosts(None, CoordinatorHost(port=port, min_nodes=min_nodes), ())
    return run(config, hosts, resume=False, environ={"MLXDIST_PLAIN": "1"}, clock=clock)


@dataclass
class Undisturbed:
    """The SHA-256 of the adapter of an undisturbed run, by method; each is trained once, by one node."""

    nodes: FaultNodes
    model: Path
    folder: Path
    known: dict[str, str] = field(default_factory=dict)

    def __call__(self, method: str) -> str:
        if method not in self.known:
            self.nodes.ready("a")
            assert train(config_of(self.model, self.folder / method, method), self.nodes.port) == 0
            self.known[method] = sha(self.folder / method)
        return self.known[method]


class Script:
    """The actions of a test during a run, in their own thread, each when the run writes a line `words()…`.

    Leaving the block asserts that all were done.
    """

    def __init__(self, folder: Path, *actions: tuple[Callable[[], str], Callable[[], None]]) -> None:
        self.folder, self.actions = folder, actions
        self.errors: list[BaseException] = []
        self.done = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Script":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(30)
        assert not self.errors, self.errors
        assert self.done == len(self.actions), f"only {self.done} of {len(self.actions)}:\n{told(self.folder)}"

    def _run(self) -> None:
        try:
            for words, action in self.actions:
                while not self._told(words()):
                    if self._ended.wait(0.02) and not self._told(words()):
                        return
                action()
                self.done += 1
        except BaseException as error:
            self.errors.append(error)

    def _told(self, words: str) -> bool:
        return f"\n{words}" in f"\n{told(self.folder)}"
