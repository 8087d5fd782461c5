"""Measures the chunked form of gated-delta layers against mlx-lm: the operation alone, and a training step.

    python -m scripts.bench_hybrid                                        # both, at 128 and 512 tokens
    python -m scripts.bench_hybrid --lengths 2048 --layers 4 --no-compile # all eight layers, compiled, need 26 GB
    python -m scripts.bench_hybrid --tiny                                 # only tests the script

The operation is one forward and backward pass with 4 value heads, 2 key heads and features of 128; gates per head
(Qwen3-Next, Qwen3.5, OLMo hybrid) and per channel (Kimi Linear). The step is that of `mlx_lm.tuner.train` and that of a
node, on one random row of every length, with a random hybrid model in float32: hidden size 512, 8 layers of which every
fourth has full attention, heads of 128, LoRA of rank 8 on all linear layers. The sides take turns in one process; the
first round, in which mlx-lm compiles, does not count. Memory is MLX's peak above what is held before. Prints JSON.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from mlxdist.node.work.blas import use_openblas
from scripts.machine import this_machine, versions

THREADS = "1"  # as in a node on Linux
HEAD_CHUNK = 256
CONFIG = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": True,
    "num_experts": 0,
}
TINY = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}

Run = Callable[[], None]


def main() -> None:
    """Measures, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["operation", "step", "both"], default="both")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], help="tokens of the row")
    parser.add_argument("--rounds", type=int, default=3, help="of each side that count")
    parser.add_argument("--segment-size", type=int, default=0, help="layers per segment of our step; 0: whole graph")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="of the model of the step")
    parser.add_argument("--no-compile", action="store_true", help="mlx-lm's step without mx.compile: it needs less")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, short rows")
    given = parser.parse_args()
    # OpenBLAS reads this when it is loaded, which must be before mlx is imported.
    os.environ.update(OPENBLAS_NUM_THREADS=THREADS, OMP_NUM_THREADS=THREADS, MLX_ENABLE_TF32="0")
    openblas = use_openblas()
    lengths = [12, 70] if given.tiny else given.lengths
    result: dict[str, Any] = {}
    if given.part != "step":
        features = 8 if given.tiny else 128
        result["operation"] = [operation(n, each, features, given.rounds) for each in (False, True) for n in lengths]
    if given.part != "operation":
        import mlx.core as mx

        (mx.disable_compile if given.no_compile else mx.enable_compile)()
        sizes = {**CONFIG, **(TINY if given.tiny else {}), "num_hidden_layers": given.layers}
        result["settings"] = {"layers": given.layers, "compiled": not given.no_compile}
        result["step"] = [step(n, sizes, given.rounds, given.segment_size) for n in lengths]
    result["machine"] = {**this_machine(THREADS, openblas), "load": os.getloadavg()}
    result["versions"] = versions()
    print(json.dumps(result, indent=2))


def operation(tokens: int, by_channel: bool, features: int, rounds: int) -> dict[str, Any]:
    """Compares the two forms of the operation on one row: seconds and peak MB of forward and backward."""
    import mlx.core as mx
    from mlx_lm.models.gated_delta import gated_delta_ops

    from mlxdist.node.backward.gated_delta import gated_delta

    keys = mx.random.split(mx.random.key(tokens), 7)
    shapes = [(1, tokens, 2, features), (1, tokens, 2, features), (1, tokens, 4, features)]
    q, k, v = (mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=False))
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    gates = (1, tokens, 4, features) if by_channel else (1, tokens, 4)
    log_g = -0.3 * mx.exp(mx.random.normal(gates, key=keys[3]))
    beta = mx.sigmoid(mx.random.normal((1, tokens, 4), key=keys[4]))
    state = mx.zeros((1, 4, features, features))
    values = [q, k, v, log_g, beta, state]
    cotangents = [mx.random.normal(x.shape, key=key) for x, key in zip((v, state), keys[5:], strict=True)]
    mx.eval(values, cotangents)

    def slow(*x: mx.array) -> list[mx.array]:
        return list(gated_delta_ops(*x[:3], mx.exp(x[3]), *x[4:]))

    def chunked(*x: mx.array) -> list[mx.array]:
        return list(gated_delta(*x))

    def backward(form: Callable[..., list[mx.array]]) -> None:
        mx.eval(mx.vjp(form, values, cotangents)[1])

    found = in_turns({"mlx_lm": partial(backward, slow), "chunked": partial(backward, chunked)}, rounds)
    return {"tokens": tokens, "gates": "per channel" if by_channel else "per head", **found}


def step(tokens: int, sizes: Mapping[str, Any], rounds: int, segment_size: int) -> dict[str, Any]:
    """Compares a step of mlx-lm's trainer with a node's gradient and the same optimizer's update."""
    import mlx.core as mx
    import numpy as np
    from mlx.optimizers import AdamW
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.trainer import TrainingArgs, train

    from mlxdist.node.backward.backward import MicroBatch, backward
    from mlxdist.node.backward.choose_path import choose_path
    from mlxdist.node.backward.events import gathered

    theirs, ours = (hybrid(sizes) for _ in range(2))
    path = choose_path(ours, segment_size=segment_size, chunked=True)
    assert path.chunked, path.reason
    ids = np.random.default_rng(tokens).integers(0, sizes["vocab_size"], (1, tokens + 1)).astype(np.int32)
    batch = MicroBatch(ids[:, :-1], ids[:, 1:], np.ones((1, tokens), np.float32))
    optimizer = AdamW(1e-5)
    losses: dict[str, list[float]] = {"mlx_lm": [], "mlxdist": []}

    def node_step() -> None:
        events = backward(ours, [batch], lambda sums: -sums[0].sum(), head_chunk=HEAD_CHUNK, path=path)
        sums, gradients = gathered(events)
        optimizer.update(ours, tree_unflatten([(name, value / tokens) for name, value in gradients.items()]))
        mx.eval(ours.trainable_parameters(), optimizer.state)
        losses["mlxdist"].append(-float(np.array(sums[0])[0]) / tokens)

    measured: dict[str, list[tuple[float, float, float]]] = {"mlx_lm": [], "mlxdist": []}

    def batches(**_: Any) -> Iterator[tuple[mx.array, mx.array]]:
        """Feeds mlx-lm's trainer; what it does between two requests for a batch is its step."""
        while True:
            before = started()
            yield mx.array(ids), mx.array([[0, tokens]])
            measured["mlx_lm"].append(since(before))
            before = started()
            node_step()
            measured["mlxdist"].append(since(before))

    class Told:
        def on_train_loss_report(self, info: Mapping[str, Any]) -> None:
            losses["mlx_lm"].append(float(info["train_loss"]))

        def on_val_loss_report(self, info: Mapping[str, Any]) -> None:
            pass

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        arguments = TrainingArgs(batch_size=1, iters=rounds + 1, steps_per_report=1, max_seq_length=tokens + 1)
        arguments.adapter_file = str(Path(folder) / "adapters.safetensors")
        source = batches()
        train(theirs, AdamW(1e-5), None, args=arguments, iterate_batches=lambda **_: source, training_callback=Told())
        next(source)  # a step is measured when the next batch is requested
    compared = {name: counted(each[1 : rounds + 1]) for name, each in measured.items()}
    return {"tokens": tokens, "segment_size": segment_size, "losses": losses, **with_ratios(compared)}


def hybrid(sizes: Mapping[str, Any]) -> Any:
    """Makes a random qwen3_5 with LoRA layers, in training mode."""
    import mlx.core as mx
    from mlx_lm.models import qwen3_5
    from mlx_lm.tuner.utils import linear_to_lora_layers

    mx.random.seed(0)
    arguments = qwen3_5.ModelArgs(model_type="qwen3_5", text_config={"model_type": "qwen3_5_text", **sizes})
    model = qwen3_5.Model(arguments)
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": 8, "scale": 10.0, "dropout": 0.0})
    model.train()
    mx.eval(model.parameters())
    return model


def in_turns(runs: Mapping[str, Run], rounds: int) -> dict[str, Any]:
    """Measures each run so many times in turns, after a first one that does not count."""
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            before = started()
            run()
            measured[name].append(since(before))
    return with_ratios({name: counted(each[1:]) for name, each in measured.items()})


def started() -> tuple[float, float, int]:
    """Returns the clocks and the bytes held, with the peak set back."""
    import mlx.core as mx

    mx.clear_cache()
    mx.reset_peak_memory()
    return time.perf_counter(), time.process_time(), mx.get_active_memory()


def since(before: tuple[float, float, int]) -> tuple[float, float, float]:
    """Returns seconds, seconds of processor time and peak MB since `started`."""
    import mlx.core as mx

    seconds, processor = time.perf_counter() - before[0], time.process_time() - before[1]
    return seconds, processor, (mx.get_peak_memory() - before[2]) / 1e6


def counted(measured: list[tuple[float, float, float]]) -> dict[str, Any]:
    """Returns the medians; processor time too, because other programs make a clock run on."""
    seconds, processor, peak = ([round(each[place], 4) for each in measured] for place in range(3))
    medians = {"seconds": median(seconds), "processor_seconds": median(processor), "peak_mb": max(peak)}
    return {**medians, "seconds_by_round": seconds, "processor_seconds_by_round": processor}


def with_ratios(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sides, with the speed and memory of the second relative to the first, mlx-lm."""
    theirs, ours = sides.values()
    ratios = {
        "times_as_fast": round(theirs["seconds"] / ours["seconds"], 2),
        "times_as_fast_in_processor_time": round(theirs["processor_seconds"] / ours["processor_seconds"], 2),
        "share_of_memory": round(ours["peak_mb"] / theirs["peak_mb"], 3),
    }
    return {**sides, **ratios}


if __name__ == "__main__":
    main()
