"""Measures the effect of a fault on `mlx.launch` with mlx-lm's trainer: a hang, the exit status, the saved files."""

import json
import random
import signal
import string
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from scripts.local_cluster import free_ports, send

RANKS = 3
STEPS_BEFORE = 5  # finished before the fault
START_SECONDS = 300.0  # for the ranks to finish them
KILLED_RANK = 1


def peer_faults(folder: Path, model: Path, watch_seconds: float) -> dict[str, Any]:
    """Causes each fault in its own run, which is watched for so many seconds afterwards."""
    (folder / "data").mkdir(parents=True)
    draw = random.Random(0)
    for name in ("train", "valid"):
        rows = [json.dumps({"text": "".join(draw.choices(string.ascii_lowercase, k=60))}) for _ in range(60)]
        (folder / "data" / f"{name}.jsonl").write_text("\n".join(rows))
    faults = {
        "a rank killed": (KILLED_RANK, signal.SIGKILL),
        "a rank stopped": (KILLED_RANK, signal.SIGSTOP),
        "the launcher killed": (None, signal.SIGKILL),
    }
    found = {name: one_fault(folder, model, name, *fault, watch_seconds) for name, fault in faults.items()}
    return {"ranks": RANKS, "watched_seconds": watch_seconds, "saves_every_steps": 1, **found}


def one_fault(
    folder: Path, model: Path, name: str, rank: int | None, number: signal.Signals, watch_seconds: float
) -> dict[str, Any]:
    """Causes one fault in one run; `rank` None is the launcher."""
    print(f"mlx.launch: {name}", file=sys.stderr, flush=True)
    out = folder / name.replace(" ", "-")
    with (folder / f"{out.name}.log").open("wb") as log:
        launcher = subprocess.Popen(
            command(model, folder / "data", out),
            stdin=subprocess.PIPE,  # with a closed one it loops
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    ranks: list[psutil.Process] = []
    try:
        if not starts(lambda: saved(out) >= STEPS_BEFORE, launcher):
            return {"did_not_start_within_seconds": START_SECONDS, "launcher": f"exit status {launcher.poll()}"}
        ranks = ranks_of(launcher)
        at = time.monotonic()
        send(psutil.Process(launcher.pid) if rank is None else ranks[rank], number)
        while time.monotonic() - at < watch_seconds and (launcher.poll() is None or any(map(running, ranks))):
            time.sleep(0.05)
        ended = launcher.poll() is not None
        seconds = time.monotonic() - at
        before = saved(out)
        time.sleep(2.0)
        return {
            "launcher": f"exit status {launcher.poll()}" if ended else "runs on",
            "ranks_running_at_the_end": sum(map(running, ranks)),
            "seconds_until_all_had_ended": round(seconds, 1) if not any(map(running, ranks)) and ended else None,
            "still_training": saved(out) > before,
            "last_step_saved": saved(out),
            "adapter_of_the_last_step": (out / "adapters.safetensors").exists(),
        }
    finally:
        for process in [*ranks, *ranks_of(launcher)]:
            send(process, signal.SIGCONT)
            send(process, signal.SIGKILL)
        launcher.kill()
        launcher.wait()


def command(model: Path, data: Path, out: Path) -> list[str]:
    """The command for `mlx_lm lora` in so many ranks over the ring backend."""
    launcher = Path(sys.executable).with_name("mlx.launch")
    variables = ("OPENBLAS_NUM_THREADS=1", "HF_HUB_OFFLINE=1", "MLX_DISABLE_COMPILE=1")
    return [
        *(str(launcher), "-n", str(RANKS), "--backend", "ring", "--starting-port", str(free_ports())),
        *(word for variable in variables for word in ("--env", variable)),
        *("--", sys.executable, "-m", "mlx_lm", "lora", "--train", "--model", str(model), "--data", str(data)),
        *("--iters", "100000", "--batch-size", str(RANKS), "--num-layers", "2", "--max-seq-length", "128"),
        *("--steps-per-report", "1", "--steps-per-eval", "1000000", "--val-batches", "1", "--save-every", "1"),
        *("--adapter-path", str(out)),
    ]


def ranks_of(launcher: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The training processes, by rank."""
    with suppress(psutil.Error):
        children = psutil.Process(launcher.pid).children(recursive=True)
        found = [child for child in children if running(child) and "lora" in child.cmdline()]
        return sorted(found, key=lambda child: int(child.environ().get("MLX_RANK", "0")))
    return []


def running(process: psutil.Process) -> bool:
    """True when the process exists, stopped or not."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def saved(out: Path) -> int:
    """The last step whose adapter rank 0 has saved."""
    return max((int(path.name.split("_")[0]) for path in out.glob("0*_adapters.safetensors")), default=0)


def starts(found: Callable[[], bool], launcher: "subprocess.Popen[bytes]") -> bool:
    """Waits; returns true if it happened."""
    deadline = time.monotonic() + START_SECONDS
    while not found():
        if launcher.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
