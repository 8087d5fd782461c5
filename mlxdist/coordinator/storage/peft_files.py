"""An adapter in the layout of Hugging Face's peft, written from ours.

    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r]
    adapter_config.json          peft_type LORA, r, lora_alpha = scale * r, rank_pattern, alpha_pattern

Names of modules are mlx-lm's, which keeps transformers' names for most models. For experts see `peft_layout`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlxdist.coordinator.storage.adapter_files import Tensor, write_safetensors
from mlxdist.coordinator.storage.peft_layout import (
    DOWN,
    EXPERTS,
    FILE,
    GATE_UP,
    INNER,
    PREFIX,
    A,
    B,
    Pair,
    joined,
    packed,
)
from mlxdist.coordinator.storage.run_folder import saving, write_aside, write_json
from mlxdist.protocol.errors import UserError


def write_peft(
    folder: Path, tensors: Mapping[str, Tensor], *, scale: float, base_model: str, model_type: str, dropout: float = 0.0
) -> None:
    """Writes an adapter (full names, unpadded) as peft loads it; `model_type` is that of the base's config.json.

    Raises UserError for experts of a model whose layout in transformers is not known, and SaveError.
    """
    modules = sorted({name.rpartition(".")[0] for name in tensors})
    pairs = {module: (tensors[f"{module}.lora_a"], tensors[f"{module}.lora_b"]) for module in modules}
    linear = {module: (a.T, b.T) for module, (a, b) in pairs.items() if a.ndim == 2}
    if len(linear) < len(pairs) and model_type not in EXPERTS:
        raise UserError(
            f"the adapter has experts, and their layout in transformers is known for {', '.join(sorted(EXPERTS))}, "
            f"not for {model_type or 'this model'}: export the fused model (--fuse), or the adapter as it is"
        )
    experts = dict(_experts({module: pair for module, pair in pairs.items() if pair[0].ndim == 3}))
    ranks = {module: a.shape[0] for module, (a, _) in linear.items()}
    ranks |= {name: a.shape[1] for name, (a, _) in experts.items()}
    content: dict[str, Tensor] = {}
    for module, (a, b) in linear.items():
        content |= {f"{PREFIX}{module}{A}": a, f"{PREFIX}{module}{B}": b}
    for name, pair in experts.items():
        place, _, parameter = name.rpartition(".")
        below = f".{INNER}" if parameter == GATE_UP and f"{place}.{DOWN}" in experts else ""
        a, b = packed(pair)
        content |= {f"{PREFIX}{place}{below}{A}": a, f"{PREFIX}{place}{below}{B}": b}
    settings = _settings(ranks, scale)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        **settings,
        "lora_dropout": 0.0 if experts else dropout,  # peft takes none beside experts; it matters for training only
        "target_modules": list(linear),
        **({"target_parameters": list(experts)} if experts else {}),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    with saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "adapter_config.json", config)
    write_aside(folder / FILE, lambda stream: write_safetensors(stream, content))


def _settings(ranks: Mapping[str, int], scale: float) -> dict[str, object]:
    """Returns the usual rank and alpha, and those of the modules with another rank."""
    usual = Counter(ranks.values()).most_common(1)[0][0]
    unusual = {name: rank for name, rank in ranks.items() if rank != usual}
    alphas = {name: _whole(scale * rank) for name, rank in unusual.items()}
    return {"r": usual, "lora_alpha": _whole(scale * usual), "rank_pattern": unusual, "alpha_pattern": alphas}


def _experts(pairs: Mapping[str, Pair]) -> Iterator[tuple[str, Pair]]:
    """Yields the parameters of transformers, by full name, with what adapts them."""
    for switch in sorted({module.rpartition(".")[0] for module in pairs}):
        place = f"{switch.rpartition('.')[0]}.experts".replace(".block_sparse_moe.", ".mlp.")
        gate, up, down = (pairs.get(f"{switch}.{name}") for name in ("gate_proj", "up_proj", "down_proj"))
        if gate is not None or up is not None:
            yield f"{place}.{GATE_UP}", joined(gate, up)
        if down is not None:
            yield f"{place}.{DOWN}", down


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value
