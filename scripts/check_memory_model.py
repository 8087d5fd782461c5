"""Compares the memory that `plan` predicts with the memory that models of many architectures take.

    python -m scripts.check_memory_model               all, a process each (20 minutes): the table of docs/memory.md
    python -m scripts.check_memory_model llama phi3    these

Random float32 models: hidden size 256, four layers of 4 heads, vocabulary 1536, LoRA on every linear module; one row of
256 and of 1024 tokens, the whole graph and segments of one layer. Prints measured / predicted as Markdown, the largest
of an architecture last.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from typing import Any

LENGTHS = (256, 1024)
SEGMENTS = (0, 1)
CHUNK = 64
RANK = 8
SECONDS = 150  # limit of one architecture
WIDER = {8: 64, 16: 128, 32: 256, 48: 768, 96: 1536}  # the tiny sizes, and those used here


def wider(value: Any) -> Any:
    """Returns a tiny configuration with sizes at which activations outweigh everything else; counts stay."""
    if isinstance(value, dict):
        return {key: wider(item) for key, item in value.items()}
    if isinstance(value, list):
        return [wider(item) for item in value]
    return WIDER.get(value, value) if type(value) is int else value


def known(architecture: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that the architecture reads, as its config.json would have them."""
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    arguments = module.ModelArgs
    if "text_config" in inspect.signature(arguments).parameters:
        values = values.get("text_config", values)
        own = [getattr(module, name, None) for name in ("TextConfig", "TextArgs", "TextModelArgs")]
        arguments = next((each for each in own if each is not None), arguments)
        if importlib.util.find_spec(f"mlx_lm.models.{values['model_type']}") and not any(own):
            arguments = importlib.import_module(f"mlx_lm.models.{values['model_type']}").ModelArgs
    return {key: values[key] for key in inspect.signature(arguments).parameters if key in values}


def measure(architecture: str) -> dict[str, Any]:
    """Returns measured over predicted memory of each cell, in this process."""
    from mlxdist.node.work.blas import use_openblas

    use_openblas()
    import mlx.core as mx

    from mlxdist.coordinator.memory.prediction import LeafSize, model_shape, peak
    from mlxdist.node.backward.backward import GradientPath, backward
    from mlxdist.node.backward.choose_path import choose_path
    from mlxdist.node.backward.chunked_layers import has_gated_delta
    from mlxdist.node.backward.events import gathered
    from mlxdist.node.backward.parameters import trainable
    from scripts.plain_gradient import padded_rows
    from scripts.tiny_architectures import add_lora, model_of, tiny_config

    values = wider(tiny_config(architecture))
    config = {**known(architecture, values), "dtype": "float32"}
    shape = model_shape(config)
    model = model_of(architecture, values)
    add_lora(model, rank=RANK)
    adapter = sum(value.size for value in trainable(model).values())
    ratios = {}
    for segment in SEGMENTS:
        if choose_path(model, segment_size=segment).segment_size != segment:
            continue
        for length in LENGTHS:
            rows = padded_rows(1, [length + 1], [length], shape.vocabulary)
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            path = GradientPath(segment_size=segment, chunked=has_gated_delta(model))
            gathered(backward(model, [rows], lambda sums: -sums[0].sum(), head_chunk=CHUNK, path=path))
            taken = mx.get_peak_memory() - before
            predicted = peak(shape, LeafSize(length, length, length, adapter), segment_size=segment, head_chunk=CHUNK)
            ratios[f"{segment or 'off'} {length}"] = round(taken / predicted, 2)
    return {"architecture": architecture, "heavier": "?" if shape.unmeasured else shape.heavier, "ratios": ratios}


def measure_apart(architecture: str) -> dict[str, Any]:
    """Measures in a process of its own, which may crash, hang or need too much memory."""
    command = [sys.executable, "-m", "scripts.check_memory_model", "--here", architecture]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return {"architecture": architecture, "heavier": 1.0, "ratios": {}}
    return found


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="all of mlx-lm when none is given")
    parser.add_argument("--here", metavar="ARCHITECTURE", help="one, in this process")
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(measure(asked.here)))
        return
    from scripts.tiny_architectures import architectures

    cells = [f"{segment or 'off'} {length}" for segment in SEGMENTS for length in LENGTHS]
    print(f"| architecture | factor | {' | '.join(cells)} | largest |")
    print(f"|---|---:|{'---:|' * (len(cells) + 1)}")
    for name in asked.architectures or architectures():
        found = measure_apart(name)
        if found["ratios"]:
            shown = " | ".join(str(found["ratios"].get(cell, "")) for cell in cells)
            print(f"| {name} | {found['heavier']} | {shown} | {max(found['ratios'].values())} |", flush=True)
        else:
            print(f"{name}: not measured", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
