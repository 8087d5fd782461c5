"""Runs with real nodes that a test hurts on the way, and the undisturbed run that they must equal bit by bit."""

import hashlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from mlxdist.coordinator.config import (
    BatchConfig,
    DataConfig,
    LoraConfig,
    PreferenceConfig,
    RunConfig,
    TimingConfig,
    TrainConfig,
)
from mlxdist.coordinator.hosts import CoordinatorHost, Hosts
from mlxdist.coordinator.run import run
from tests.fault_proxy import HOST, Proxy
from tests.model_folder import WORDS
from tests.node_pools import free_ports, start_node

SHORT = TimingConfig(
    beat_seconds=0.1,
    suspect_seconds=0.4,
    return_seconds=0.25,
    dead_seconds=1.0,
    progress_seconds=1.5,
    restart_seconds=0.05,
    start_timeout=60.0,
    stop_seconds=0.5,
)


def words(random: np.random.Generator, most: int) -> str:
    """A few words that the tiny tokenizer knows."""
    return " ".join(random.choice(WORDS[4:], int(random.integers(1, most))))


def data_folder(folder: Path, method: str, rows: int = 24) -> Path:
    """Rows for a method, in a folder."""
    random = np.random.default_rng(11)
    kinds = {"sft": ("completion",), "kto": ("completion",), "dpo": ("chosen", "rejected")}
    lines = []
    for index in range(rows):
        row: dict[str, object] = {"prompt": words(random, 12), **{kind: words(random, 24) for kind in kinds[method]}}
        lines.append(json.dumps(row | ({"label": index % 3 > 0} if method == "kto" else {})) + "\n")
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(lines))
    return folder


def config_of(model: Path, folder: Path, method: str, *, steps: int = 12, timing: TimingConfig = SHORT) -> RunConfig:
    """A run of a few steps of eight leaves, in `folder`/run."""
    data = folder.parent / f"data-{method}"
    if not data.exists():
        data_folder(data, method)
    return RunConfig(
        model=str(model),
        output=folder,
        method=method,  # type: ignore[arg-type]
        data=DataConfig(path=str(data)),
        batch=BatchConfig(size=8, order="sorted" if method == "sft" else "shuffled"),
        lora=LoraConfig(rank=4),
        preference=PreferenceConfig(loss="kto" if method == "kto" else "sigmoid"),
        train=TrainConfig(steps=steps, learning_rate=1e-2, eval_every=0, save_every=1),
        timing=timing,
    )


def sha(folder: Path) -> str:
    """Of the adapter that a run has saved."""
    return hashlib.sha256((folder / "adapters.safetensors").read_bytes()).hexdigest()


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    """The events of one kind that a run has told so far."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    told = []
    for line in lines:
        with suppress(ValueError):
            told.append(json.loads(line))
    return [event for event in told if event["event"] == kind]


@dataclass
class Nodes:
    """Nodes started by hand, one behind a proxy each or all behind none."""

    logs: Path
    port: int
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, name: str, *, host: str = "127.0.0.1", environment: dict[str, str] | None = None) -> None:
        """A node of this name."""
        self.processes[name] = start_node(self.port, name, self.logs, host=host, environment=environment)

    def supervisor(self, name: str) -> psutil.Process:
        """Its supervisor."""
        return psutil.Process(self.processes[name].pid)

    def worker(self, name: str) -> psutil.Process:
        """Its worker, once it has one."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for child in self.supervisor(name).children():
                with suppress(psutil.Error):
                    if "mlxdist.node.worker" in child.cmdline():
                        return child
            time.sleep(0.02)
        raise AssertionError(f"{name} has no worker")

    def stop(self) -> None:
        """End them all, stopped ones too."""
        for process in self.processes.values():
            with suppress(psutil.Error):
                for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                    with suppress(psutil.Error):
                        one.send_signal(signal.SIGCONT)
                        one.kill()
            process.kill()
            process.wait()


@contextmanager
def nodes_by_hand(logs: Path, *names: str) -> Iterator[Nodes]:
    """Nodes at a port of their own, which end with the block."""
    logs.mkdir(parents=True, exist_ok=True)
    nodes = Nodes(logs, free_ports())
    try:
        for name in names:
            nodes.start(name)
        yield nodes
    finally:
        nodes.stop()


@contextmanager
def proxied(nodes: Nodes, *names: str) -> Iterator[Proxy]:
    """These nodes behind one proxy."""
    proxy = Proxy((nodes.port, nodes.port + 1)).start()
    try:
        for name in names:
            nodes.start(name, host=HOST)
        yield proxy
    finally:
        proxy.close()


def train(config: RunConfig, nodes: Nodes, min_nodes: int, *, expected: int | None = None, resume: bool = False) -> int:
    """One run in this process, over nodes that are started by hand."""
    hosts = Hosts(None, CoordinatorHost(port=nodes.port, min_nodes=min_nodes), ())
    del expected
    return run(config, hosts, resume=resume, environ={"MLXDIST_PLAIN": "1"})


class Script:
    """What a test does to a run while it goes on: actions at steps, in a thread of their own."""

    def __init__(self, folder: Path, *actions: tuple[int, Callable[[], None]]) -> None:
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
        assert self.done == len(self.actions), f"only {self.done} of {len(self.actions)} actions were taken"

    def _run(self) -> None:
        try:
            for step, action in self.actions:
                while len(events(self.folder, "train")) < step:
                    if self._ended.wait(0.01) and len(events(self.folder, "train")) < step:
                        return
                action()
                self.done += 1
        except BaseException as error:
            self.errors.append(error)


def clean_environment() -> dict[str, str]:
    """For a coordinator of its own."""
    return {**os.environ, "MLX_DISABLE_COMPILE": "1"}
