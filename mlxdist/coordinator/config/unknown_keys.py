"""Sentences about a key that the configuration does not have: its place, its name here, or why it is missing."""

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

# The words of mlx-lm, TRL, transformers and PEFT: (our key, and what is different about it).
OTHER_WORDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "iters": ("train.steps", "mlx-lm counts micro-batches, a step here is one optimizer update"),
        "max_steps": ("train.steps", ""),
        "num_steps": ("train.steps", ""),
        "passes": ("train.epochs", "an epoch is once through the data"),
        "num_epochs": ("train.epochs", "an epoch is once through the data"),
        "num_train_epochs": ("train.epochs", "an epoch is once through the data"),
        "batch_size": ("batch.size", "rows over all nodes together"),
        "per_device_train_batch_size": (
            "batch.size",
            "rows over all nodes; batch.leaf_tokens is what one forward pass holds, in tokens",
        ),
        "train_batch_size": ("batch.size", "rows over all nodes together"),
        "per_device_eval_batch_size": ("batch.leaf_tokens", "tokens, for training and evaluation"),
        "micro_size": ("batch.leaf_tokens", 'tokens, not rows; rows are packed, and "auto" suits most runs'),
        "micro_batch_size": ("batch.leaf_tokens", "tokens, not rows"),
        "gradient_accumulation_steps": ("batch.grad_accum_steps", ""),
        "grad_accumulation_steps": ("batch.grad_accum_steps", ""),
        "max_seq_length": ("batch.max_length", ""),
        "max_seq_len": ("batch.max_length", ""),
        "shuffle": ("batch.order", ""),
        "dataloader_drop_last": ("batch.remainder", ""),
        "data_seed": ("batch.seed", ""),
        "lr": ("train.learning_rate", ""),
        "lr_schedule": ("train.schedule", "a name; train.warmup_steps and train.min_lr_ratio are keys of their own"),
        "lr_scheduler_type": ("train.schedule", ""),
        "warmup": ("train.warmup_steps", ""),
        "warmup_ratio": ("train.warmup_steps", 'steps, not a share of them; "auto" is a tenth'),
        "adam_beta1": ("train.betas", "both in one list"),
        "adam_beta2": ("train.betas", "both in one list"),
        "adam_epsilon": ("train.eps", ""),
        "grad_clip": ("train.max_grad_norm", ""),
        "steps_per_report": ("train.report_every", ""),
        "logging_steps": ("train.report_every", ""),
        "log_with": ("train.report_to", 'a list, as ["tensorboard"]'),
        "webhook": ("train.notify", ""),
        "webhook_url": ("train.notify", ""),
        "steps_per_eval": ("train.eval_every", ""),
        "eval_steps": ("train.eval_every", ""),
        "val_batches": ("train.eval_rows", "rows, not batches"),
        "save_steps": ("train.save_every", "a checkpoint is kept at each evaluation, see train.eval_every"),
        "steps_per_save": ("train.save_every", "a checkpoint is kept at each evaluation, see train.eval_every"),
        "save_total_limit": ("train.keep_checkpoints", ""),
        "metric_for_best_model": ("train.best_by", ""),
        "early_stopping_patience": ("train.early_stop_evals", ""),
        "output_dir": ("output", ""),
        "adapter_path": ("output", "the adapter is saved in the run folder"),
        "model_name_or_path": ("model", ""),
        "base_model": ("model", ""),
        "train_mode": ("method", ""),
        "task": ("method", ""),
        "dataset": ("data.path", ""),
        "dataset_name": ("data.path", ""),
        "train_file": ("data.path", ""),
        "valid": ("data.valid_path", ""),
        "eval_dataset": ("data.valid_path", ""),
        "mask_prompt": ("data.train_on", 'prompts are only trained with "everything"'),
        "assistant_only_loss": ("data.train_on", 'prompts are only trained with "everything"'),
        "completion_only_loss": ("data.train_on", 'prompts are only trained with "everything"'),
        "resume_adapter_file": ("lora.init_adapter", "a folder; --resume continues a run"),
        "resume_from_checkpoint": ("lora.init_adapter", "a folder; --resume continues a run"),
        "lora_rank": ("lora.rank", ""),
        "lora_r": ("lora.rank", ""),
        "r": ("lora.rank", ""),
        "lora_alpha": ("lora.scale", "scale is lora_alpha / rank"),
        "alpha": ("lora.scale", "scale is alpha / rank"),
        "lora_dropout": ("lora.dropout", ""),
        "lora_layers": ("lora.num_layers", ""),
        "lora_target_modules": ("lora.target_modules", ""),
        "keys": ("lora.target_modules", 'names like "q_proj", without the layer'),
        "rank_pattern": ("lora.rank_scaling", ""),
        "gradient_checkpointing": ("memory.grad_checkpoint", ""),
        "loss_type": ("preference.loss", ""),
        "loss_fn": ("preference.loss", ""),
        "dpo_beta": ("preference.beta", ""),
        "reference_model": ("preference.reference", "the base model with the adapter off, no second model"),
        "reference_model_path": ("preference.reference", "the base model with the adapter off, no second model"),
        "ref_model": ("preference.reference", "the base model with the adapter off, no second model"),
    }
)
OTHER_TABLES: Mapping[str, str] = MappingProxyType(
    {"lora_parameters": "lora", "peft": "lora", "training": "train", "trainer": "train", "optimizer_config": "train"}
)

_PLUS = "LoRA+ (two learning rates) is not supported: all LoRA tensors share train.learning_rate"
_EMBEDDING = "a learning rate of its own for the embeddings is not supported: only LoRA tensors are trained"
_NEFTUNE = "NEFTune (noise on the embeddings) is not supported"
_DORA = "DoRA is not supported: only lora_a and lora_b are trained; mlx_lm.lora has it, on one machine"
_RSLORA = "rsLoRA is not supported as a switch: set lora.scale to alpha / sqrt(rank)"
_PACKING = "rows are always packed, each with its own attention; batch.leaf_tokens says how many tokens go together"
_OPTIMIZER = "there is one optimizer, AdamW; its keys are train.betas, eps and weight_decay"
_QUANT = "the model is trained as it was saved: name a folder or hub id that is already quantized"
_DTYPE = "the model is trained in the dtype it was saved in; sums and optimizer are float32"
_MODULES = "training further modules or biases is not supported: only lora_a and lora_b are trained"
_START = "the adapter starts as in the LoRA paper (B is zero); lora.init_adapter starts from an adapter of yours"
_REPORT = 'loggers are chosen with train.report_to = ["tensorboard", "wandb", "trackio"], and read their own variables'
_LIMIT = "the memory of a node is set in hosts.toml, by memory_limit_gb of the node or of [defaults]"
_FULL = "only LoRA is trained: delete the key"

# Features of other trainers that are not supported, by the names of their keys.
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("loraplus", "lora_plus", "loraplus_lr_ratio", "lora_plus_ratio"), _PLUS),
        **dict.fromkeys(("embedding_learning_rate", "embedding_lr", "embed_lr", "lr_embedding"), _EMBEDDING),
        **dict.fromkeys(("neftune", "neftune_alpha", "neftune_noise_alpha", "noise_alpha"), _NEFTUNE),
        **dict.fromkeys(("dora", "use_dora"), _DORA),
        **dict.fromkeys(("rslora", "use_rslora"), _RSLORA),
        **dict.fromkeys(("packing", "sample_packing", "pack"), _PACKING),
        **dict.fromkeys(("optimizer", "optim", "optimizer_name"), _OPTIMIZER),
        **dict.fromkeys(("quantize", "quantization", "load_in_4bit", "load_in_8bit", "q_bits", "qlora"), _QUANT),
        **dict.fromkeys(("dtype", "torch_dtype", "bf16", "fp16", "mixed_precision"), _DTYPE),
        **dict.fromkeys(("modules_to_save", "bias", "train_bias", "train_embeddings"), _MODULES),
        **dict.fromkeys(("init_lora_weights", "pissa", "loftq", "olora"), _START),
        **dict.fromkeys(("wandb", "wandb_project", "swanlab", "tensorboard", "trackio", "project_name"), _REPORT),
        **dict.fromkeys(("memory_limit_gb", "memory_limit"), _LIMIT),
        **dict.fromkeys(("fine_tune_type", "train_type", "full", "use_lora", "peft_type"), _FULL),
    }
)


def nearest(word: str, known: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Returns the word of `known` that is most like `word`, or None when none is near."""
    found = difflib.get_close_matches(_plain(word), known, n=1, cutoff=cutoff)
    return found[0] if found else None


def unknown_key(key: str, tables: Mapping[str, Sequence[str]]) -> str:
    """Returns the sentence after an unknown dotted `key`. `tables` maps each table ("" is the top) to its keys."""
    table, _, name = key.rpartition(".")
    if table not in tables:  # a key inside an unknown table
        return unknown_table(table, tables)
    plain = _plain(name)
    homes = [home for home, keys in tables.items() if plain in keys and home != table]
    if homes:
        return f"is not a key{_of(table)}: {_belongs(plain, homes[0])}"
    if plain in UNSUPPORTED:
        return f"is not a key: {UNSUPPORTED[plain]}"
    if plain in OTHER_WORDS:
        ours, difference = OTHER_WORDS[plain]
        return f"is not a key here: it is called {ours}{f' ({difference})' if difference else ''}"
    here = nearest(plain, tables[table])
    if here is not None:
        return f"is not a key{_of(table)}; the nearest is {_full(table, here)}"
    everywhere = {other: home for home, keys in tables.items() for other in keys}
    there = nearest(plain, list(everywhere), cutoff=0.75)
    if there is not None:
        return f"is not a key{_of(table)}; the nearest is {_full(everywhere[there], there)}"
    return f"is not a key{_of(table)}, which has {', '.join(tables[table])}"


def unknown_table(table: str, tables: Mapping[str, Sequence[str]]) -> str:
    """Returns the sentence after the name of an unknown `table`."""
    plain = _plain(table)
    if plain in UNSUPPORTED:
        return f"is not a table: {UNSUPPORTED[plain]}"
    named = [name for name in tables if name]
    ours = OTHER_TABLES.get(plain) or nearest(plain, named)
    if ours:
        return f"is not a table; the nearest is [{ours}]"
    homes = [home for home, keys in tables.items() if plain in keys]
    if homes:
        return f"is not a table: {_belongs(plain, homes[0])}"
    return f"is not a table; there are {', '.join(f'[{name}]' for name in named)}"


def _belongs(name: str, table: str) -> str:
    return f"{name} belongs in [{table}]" if table else f"{name} belongs at the top, above the first [table]"


def _of(table: str) -> str:
    return f" of [{table}]" if table else ""


def _full(table: str, name: str) -> str:
    return f"{table}.{name}" if table else name


def _plain(word: str) -> str:
    return word.strip().lower().replace("-", "_")
