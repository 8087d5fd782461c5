"""The TRL half of scripts/compare_trl.py, for an interpreter that has torch, trl, peft and transformers 4.

    python scripts/compare_trl_side.py job.json

The job names the model, the adapter, the rows in training order, the settings, and the file for the answer, a list with
the metrics of every step. TRL runs in one process on the CPU, in float32, with the global batch as its batch.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, ORPOConfig, ORPOTrainer

Job = dict[str, Any]
IGNORED = -100


def load_model(job: Job) -> torch.nn.Module:
    """Loads the base model with the first adapter on the same modules, from mlx-lm's file of tensors."""
    base = AutoModelForCausalLM.from_pretrained(job["model"], torch_dtype=torch.float32, attn_implementation="eager")
    saved = json.loads((Path(job["adapter"]) / "adapter_config.json").read_text())["lora_parameters"]
    modules = sorted({key.split(".")[-1] for key in saved["keys"]})
    rank, alpha = saved["rank"], saved["scale"] * saved["rank"]
    model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=modules))
    parameters = dict(model.named_parameters())
    for name, tensor in load_file(Path(job["adapter"]) / "adapters.safetensors").items():
        module, part = name.rsplit(".", 1)
        target = parameters[
            f"base_model.model.{module}.{part.replace('lora_a', 'lora_A').replace('lora_b', 'lora_B')}.default.weight"
        ]
        with torch.no_grad():
            target.copy_(tensor.T)
    return model


def plant_mask(rows: Dataset, method: str) -> Dataset:
    """Plants the bug that the comparison must detect: a mask that is one token early at both ends.

    The last token of the prompt alone would not show in DPO: both branches have it, and it cancels.
    """

    def dpo(row: dict[str, Any]) -> dict[str, Any]:
        last = row["prompt_input_ids"][-1:]
        moved = {f"{branch}_input_ids": last + row[f"{branch}_input_ids"][:-1] for branch in ("chosen", "rejected")}
        return {"prompt_input_ids": row["prompt_input_ids"][:-1], **moved}

    def kto(row: dict[str, Any]) -> dict[str, Any]:
        labels = list(row["completion_labels"])
        first = next(i for i, label in enumerate(labels) if label != IGNORED)
        labels[first - 1], labels[-1] = row["completion_input_ids"][first - 1], IGNORED
        return {"completion_labels": labels}

    def orpo(row: dict[str, Any]) -> dict[str, Any]:
        moved = {}
        for branch in ("chosen", "rejected"):
            labels = list(row[f"{branch}_labels"])
            first = next(i for i, label in enumerate(labels) if label != IGNORED)
            labels[first - 1], labels[-1] = row[f"{branch}_input_ids"][first - 1], IGNORED
            moved[f"{branch}_labels"] = labels
        return moved

    return rows.map({"dpo": dpo, "kto": kto, "orpo": orpo}[method])


def train(job: Job) -> list[dict[str, float]]:
    """Trains, and returns the unrounded loss and the metrics of every step under TRL's names."""
    method, settings = job["method"], job["settings"]
    trainer_class, config_class = {
        "dpo": (DPOTrainer, DPOConfig),
        "kto": (KTOTrainer, KTOConfig),
        "orpo": (ORPOTrainer, ORPOConfig),
    }[method]

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        steps: list[dict[str, float]] = []  # noqa: RUF012

        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.steps.append({"loss": loss.item()})
            return loss

        def log(self, logs: dict[str, float], *args: Any) -> None:
            super().log(logs, *args)
            if "grad_norm" in logs:
                self.steps[-1] |= {name: value for name, value in logs.items() if name != "loss"}

    arguments = config_class(
        output_dir=job["scratch"],
        per_device_train_batch_size=settings["batch_size"],
        max_steps=settings["steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type=settings["schedule"],
        warmup_steps=0,
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        optim="adamw_torch",
        beta=settings["beta"],
        **({} if method == "orpo" else {"loss_type": settings["loss"]}),
        max_length=512,
        max_prompt_length=256,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_drop_last=True,
    )
    trainer = Recorder(
        model=load_model(job),
        args=arguments,
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    )
    if job["plant_mask"]:
        trainer.train_dataset = plant_mask(trainer.train_dataset, method)
    trainer.train()
    return trainer.steps


def main() -> None:
    """Reads the job, trains, and writes the answer."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    versions = {name: version(name) for name in ("trl", "torch", "transformers", "peft")}
    Path(job["answer"]).write_text(json.dumps({"versions": versions, "steps": train(job)}))


if __name__ == "__main__":
    main()
