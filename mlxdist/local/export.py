"""`mlxdist export`: one adapter of a run for other programs, as an adapter, in peft's layout, fused, or as GGUF."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.saved import run_at, saved_config
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.data.load import encoding_of
from mlxdist.coordinator.encode.tokenizer import HubTokenizer
from mlxdist.coordinator.evaluate.evaluate import TestRows, read_rows, same_base
from mlxdist.coordinator.memory.model_files import find_model
from mlxdist.coordinator.storage.adapter_files import load_adapter
from mlxdist.coordinator.storage.peft_files import write_peft
from mlxdist.coordinator.storage.run_folder import RunFolder, read_json, saving, sync_folder, write_json
from mlxdist.coordinator.storage.saved_adapters import SavedAdapter, choose_adapter
from mlxdist.coordinator.training.initial_adapter import start_from
from mlxdist.coordinator.training.resume import saved_reference
from mlxdist.local.gguf import FILE, refuse_unknown, write_gguf
from mlxdist.protocol.errors import UserError

Form = Literal["adapter", "peft", "fused", "gguf"]


@dataclass(frozen=True)
class Wanted:
    """The adapter, the form, and the rows by which a fused model is judged."""

    form: Form = "adapter"
    checkpoint: str = ""  # best, last or a step; "": the best
    dequantize: bool = False
    data: str = ""  # "": the run's own validation rows
    model: str = ""  # where the base model has moved


@dataclass(frozen=True)
class Exported:
    """The result: the folder, the adapter in it, and what a person should know."""

    folder: Path
    adapter: SavedAdapter
    sentences: tuple[str, ...]


def export(run: Path, out: Path, wanted: Wanted, told: Callable[[str], None] = lambda stage: None) -> Exported:
    """Writes one adapter of a run into the new folder `out`; nothing is there until all of it is.

    `told` is called with what comes next. Raises UserError for a run, a checkpoint or a form that cannot be, and
    SaveError.
    """
    folder = run_at(run)
    config = saved_config(folder, model=wanted.model)
    adapter = choose_adapter(folder, wanted.checkpoint)
    with new_folder(out) as target:
        if wanted.form in ("adapter", "peft"):
            sentences = write_adapter_folder(folder, config, adapter, wanted, target)
        else:
            sentences = write_fused(folder, config, adapter, wanted, target, told)
        write_json(target / "manifest.json", manifest(folder, config, adapter, wanted.form))
    return Exported(out, adapter, tuple(sentences))


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Gives a folder that becomes `out` when the block ends well. Raises UserError where `out` has content."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty: name a new folder, or move it away")
    aside = out.absolute().with_name(f".{out.absolute().name}.aside")
    with saving(out):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    try:
        yield aside
        with saving(out):
            aside.replace(out.absolute())
            sync_folder(out.absolute().parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def manifest(run: RunFolder, config: RunConfig, adapter: SavedAdapter, form: Form) -> dict[str, object]:
    """Returns the origin of an export, for its manifest.json."""
    return {
        "version": 1,
        "form": form,
        "base_model": config.model,
        "method": config.method,
        "run": str(run.path),
        "step": adapter.step,
        "exported_at": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def write_adapter_folder(
    run: RunFolder, config: RunConfig, adapter: SavedAdapter, wanted: Wanted, target: Path
) -> list[str]:
    """Writes mlx-lm's adapter as it was saved, or peft's. Returns what to do with it."""
    tensors, settings = load_adapter(adapter.folder)
    if wanted.form == "adapter":
        source = RunFolder(adapter.folder)
        with saving(target):
            for file in (source.adapters, source.adapter_config):
                shutil.copyfile(file, target / file.name)
        return [f"Use it: mlx_lm.generate --model {config.model} --adapter-path OUT"]
    parameters = cast(dict[str, Any], settings["lora_parameters"])
    model_type = str(base_config(config.model).get("model_type", ""))
    scale, dropout = float(parameters["scale"]), float(parameters.get("dropout", 0.0))
    write_peft(target, tensors, scale=scale, base_model=config.model, model_type=model_type, dropout=dropout)
    return ["Use it: peft.PeftModel.from_pretrained(base, OUT), where base is the model as transformers loads it"]


def write_fused(
    run: RunFolder,
    config: RunConfig,
    adapter: SavedAdapter,
    wanted: Wanted,
    target: Path,
    told: Callable[[str], None],
) -> list[str]:
    """Writes the fused model, or its GGUF. Returns the losses and what to do with it."""
    from mlx_lm.utils import load_config

    from mlxdist.local.fuse import fuse, save_fused
    from mlxdist.node.work.compute import Computer
    from mlxdist.node.work.model import load_with_lora

    gguf, dequantize = wanted.form == "gguf", wanted.dequantize or wanted.form == "gguf"
    base = find_model(config.model)
    if gguf:
        tokenizer_file = (base or Path()) / "tokenizer.json"
        refuse_unknown(base_config(config.model), read_json(tokenizer_file) if base else {}, run.path)
    rows, notes = rows_to_judge(run, config, wanted.data, told)
    spec = run_spec(config)
    loaded = load_with_lora(spec, told)
    same_base(run, loaded.model_hash)
    vector = start_from(adapter.folder, loaded.manifest, config.lora.scale)
    computer = Computer(loaded, spec, reference=saved_reference(config, run))
    losses = fuse(computer, vector, config, rows.rows if rows is not None else None, dequantize=dequantize, told=told)
    told("writing the model")
    tokenizer = cast(HubTokenizer, encoding_of(config).tokenizer).hf
    base = find_model(config.model)
    assert base is not None, "it was loaded"
    if gguf:
        from mlx_lm.utils import dequantize_model

        write_gguf(dequantize_model(loaded.model), load_config(base), base, target / FILE)
        use = f"Use it: llama.cpp, Ollama or LM Studio with OUT/{FILE}"
    else:
        save_fused(loaded.model, tokenizer, base, target, dequantize=dequantize)
        use = "Use it: mlx_lm.generate --model OUT"
    return [*notes, *([losses.sentence()] if losses is not None else []), use]


def rows_to_judge(
    run: RunFolder, config: RunConfig, data: str, told: Callable[[str], None]
) -> tuple[TestRows | None, list[str]]:
    """Returns the rows by which a fused model is judged; without any, None and a sentence."""
    try:
        rows = read_rows(run, config, data, lambda message, share: told(message))
    except UserError as error:
        if data:
            raise
        return None, [f"the fused model is not judged: {error}"]
    return rows, list(rows.notes)


def base_config(model: str) -> dict[str, Any]:
    """Returns the base model's config.json; empty where it is not on this machine."""
    folder = find_model(model)
    if folder is None:
        return {}
    document: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return document
