"""The part of a configuration that the workers need: the RunSpec of every Welcome, and its numerics_id."""

from dataclasses import asdict

import msgspec

from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.protocol import messages as m
from mlxdist.protocol import numerics
from mlxdist.protocol.methods import METHODS
from mlxdist.protocol.packing import PACKED

HEAD_CHUNK = 256  # positions of the LM head at a time, where "auto" was not resolved (memory/fit.py)


def run_spec(config: RunConfig, *, packing: str = PACKED, largest_leaf: int = 0) -> m.RunSpec:
    """Returns what the workers must know, with the numerics_id of it.

    `packing`: the best mode that nodes may use. `largest_leaf`: its tokens, at which they check it.
    """
    targets = config.lora.target_modules
    preferences, memory = METHODS[config.method].losses, config.memory
    spec = m.RunSpec(
        model=config.model,
        method=config.method,
        seed=config.batch.seed,
        max_length=config.batch.max_length,
        lora_rank=config.lora.rank,
        lora_scale=config.lora.scale,
        lora_dropout=config.lora.dropout,
        rank_scaling=config.lora.rank_scaling,
        target_modules=(targets,) if isinstance(targets, str) else targets,
        num_layers=config.lora.num_layers,
        segment_size=0 if isinstance(memory.segment_size, str) else memory.segment_size,
        head_chunk=HEAD_CHUNK if memory.head_chunk == "auto" else memory.head_chunk,
        grad_checkpoint=memory.grad_checkpoint,
        packing=packing,
        largest_leaf=largest_leaf,
        chunked=memory.gated_delta == "chunked",
        fixed={
            "batch": config.batch.size,
            "grad_accum_steps": config.batch.grad_accum_steps,
            "leaf_tokens": config.batch.leaf_tokens,
            "order": config.batch.order,
            "remainder": config.batch.remainder,
            "betas": str(config.train.betas),
            "eps": config.train.eps,
            "weight_decay": config.train.weight_decay,
            "max_grad_norm": config.train.max_grad_norm,
            **({f"preference.{key}": value for key, value in asdict(config.preference).items()} if preferences else {}),
            **_preference(config),
        },
    )
    return msgspec.structs.replace(spec, numerics_id=numerics.numerics_id(spec))


def _preference(config: RunConfig) -> dict[str, str]:
    """Returns what kept reference log-probs depend on: the parameters they come from, and the loss that reads them."""
    if not METHODS[config.method].losses:
        return {}
    return {"loss": config.preference.loss, "reference": config.preference.reference}
