"""The other side of scripts/bench_preference.py, in a process of its own: mlx-lm-lora for DPO, a plain loop for KTO.

    python -m scripts.bench_preference_sides FOLDER    # with the run.toml and the rows of a run of mlxdist

The plain loop is what a person would write with mlx alone: one batch of all rows, padded to the longest, the logits of
all positions, and the same model without its adapter as the reference, at every step. It gets the rows, the first
adapter and the optimizer's settings of mlxdist, so its losses are those of mlxdist.

Shapes: B rows, L positions.
"""

import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxdist.coordinator.batch.row_store import PairedRows as Rows
from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.data.load import read
from mlxdist.protocol.leaves import Row


def dpo_of_mlx_lm_lora(config: RunConfig, data: Rows, folder: Path) -> dict[str, Any]:
    """Runs mlx-lm-lora's `train_dpo` over the pairs of a run, with the tokens that mlxdist uses."""
    import mlx.core as mx
    from mlx.optimizers import AdamW
    from mlx_lm import load
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm_lora.trainer.dpo_trainer import DPOTrainingArgs, train_dpo

    if platform.system() != "Darwin":
        mx.set_wired_limit = lambda _: 0  # asks for the working set of a GPU, which a CPU does not have
        info = {**mx.device_info(), "max_recommended_working_set_size": 0}
        mx.device_info = lambda *_: info
    pairs = [_as_theirs(*data.rows(index)) for index in range(len(data))]
    model, reference = load(config.model)[0], load(config.model)[0]
    reference.freeze()
    model.freeze()
    modules, lora = config.lora.target_modules, config.lora
    keys = {name for name, _ in model.layers[0].named_modules() if name.split(".")[-1] in modules}
    about = {"rank": lora.rank, "scale": lora.scale, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, len(model.layers), about)
    seen: dict[str, list[float]] = {"seconds": [], "losses": []}

    class Recorder:
        def on_train_loss_report(self, info: Mapping[str, float]) -> None:
            seen["seconds"].append(1 / info["iterations_per_second"])
            seen["losses"].append(info["train_loss"])

        def on_val_loss_report(self, info: Mapping[str, float]) -> None:
            """Does nothing: there is no validation."""

    steps = config.train.steps or 0
    arguments = DPOTrainingArgs(
        batch_size=len(pairs),
        iters=steps,
        steps_per_report=1,
        steps_per_save=steps + 1,
        adapter_file=str(folder / "theirs.safetensors"),
        max_seq_length=config.batch.max_length,
        beta=config.preference.beta,
    )
    train_dpo(
        model=model,
        ref_model=reference,
        optimizer=AdamW(config.train.learning_rate, bias_correction=True),
        train_dataset=pairs,
        args=arguments,
        training_callback=Recorder(),
    )
    return {**seen, "peak_gb": mx.get_peak_memory() / 1e9}


def _as_theirs(chosen: Any, rejected: Any) -> dict[str, Any]:
    """Returns a pair of rows (ids [T], targets [T]) under the keys that mlx-lm-lora reads."""
    pair: dict[str, Any] = {}
    for name, row in (("chosen", chosen), ("rejected", rejected)):
        pair[name] = row.ids.tolist()
        pair[f"{name}_prompt_length"] = int(row.targets.argmax())
    return pair


def kto_in_a_plain_loop(config: RunConfig, data: Rows, folder: Path) -> dict[str, Any]:
    """Trains KTO (equation 8 of https://arxiv.org/abs/2402.01306) with mlx alone, all rows in one batch."""
    import mlx.core as mx
    import mlx.nn as nn
    import numpy as np
    from mlx.optimizers import AdamW

    from mlxdist.coordinator.batch.batch_order import Step
    from mlxdist.coordinator.batch.micro_batches import kl_rows
    from mlxdist.coordinator.config.run_spec import run_spec
    from mlxdist.coordinator.training import initial_adapter
    from mlxdist.node.work.model import load_with_lora
    from mlxdist.protocol import manifest as manifests
    from scripts.plain_gradient import plain_sums

    loaded = load_with_lora(run_spec(config), lambda _: None)
    first = initial_adapter.draw(loaded.manifest, config.batch.seed)
    tensors = {name: mx.array(part) for name, part in manifests.split(loaded.manifest, first).items()}
    base = {name: mx.zeros_like(part) for name, part in tensors.items()}
    loaded.use(tensors)
    model, beta = loaded.model, config.preference.beta
    order = tuple(range(len(data)))
    rows, mixed = _padded([data.rows(index)[0] for index in order]), _padded(kl_rows(data, Step(0, (order,))))
    sign = mx.array(np.where(np.asarray(data.labels) == 1, 1.0, -1.0).astype(np.float32))

    def loss(logps: mx.array, reference: mx.array, point: mx.array) -> mx.array:
        return (1 - mx.sigmoid(sign * beta * (logps - reference - point))).mean()

    optimizer = AdamW(config.train.learning_rate, weight_decay=config.train.weight_decay, bias_correction=True)
    seconds, losses = [], []
    for _ in range(config.train.steps or 0):
        began = time.perf_counter()
        current = dict(_flat(model))
        loaded.use(base)
        reference, mixed_reference = plain_sums(model, rows), plain_sums(model, mixed)
        mx.eval(reference, mixed_reference)
        loaded.use(current)
        point = mx.maximum((plain_sums(model, mixed) - mixed_reference).mean(), 0)
        mx.eval(point)
        value, gradient = nn.value_and_grad(model, lambda: loss(plain_sums(model, rows), reference, point))()  # noqa: B023
        optimizer.update(model, gradient)
        mx.eval(value, model.trainable_parameters(), optimizer.state)
        seconds.append(time.perf_counter() - began)
        losses.append(value.item())
    return {"seconds": seconds, "losses": losses, "peak_gb": mx.get_peak_memory() / 1e9}


def _flat(model: Any) -> Any:
    from mlx.utils import tree_flatten

    return tree_flatten(model.trainable_parameters())


def _padded(rows: Sequence[Row]) -> Any:
    """Returns rows as one batch [B, L] with zeros on the right."""
    import numpy as np

    from mlxdist.node.backward.backward import MicroBatch

    ids, mask = (np.zeros((len(rows), max(len(row.ids) for row in rows)), np.int32) for _ in range(2))
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)], mask[place, : len(row.ids)] = row.ids, row.targets
    return MicroBatch(ids[:, :-1], ids[:, 1:], mask[:, 1:])


def main(folder: Path) -> None:
    """Trains the run in `folder`, and prints seconds, losses and the peak as JSON."""
    from mlxdist.node.work.blas import use_openblas

    use_openblas()  # before mlx is imported
    config = load_config(folder / "run.toml")
    data = read(config, progress=lambda what, share: None).train
    side = kto_in_a_plain_loop if config.method == "kto" else dpo_of_mlx_lm_lora
    print(json.dumps(side(config, data, folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
