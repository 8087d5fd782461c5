"""The keys of run.toml: each with its type, range, default, unit and meaning.

Every default is here; those of a method that differ are in protocol/methods.py. A field's type holds the values that it
takes (see field_types.py), its comment the meaning and the unit. A new key is a line here and one in run.example.toml.
A resumed run may change it only when it is among the FREE ones. `load.load_config` makes these from a file; they do not
change afterwards.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from mlxdist.coordinator.config.field_types import Text
from mlxdist.protocol.methods import MethodName

Count = Annotated[int, Meta(ge=1)]
CountOrOff = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]  # 0 and 1 included
Part = Annotated[float, Meta(ge=0, lt=1)]  # 1 excluded
LoggerName = Literal["tensorboard", "wandb", "trackio"]

WARMUP_SHARE = 0.1  # of the run, for warmup_steps = "auto"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """[data]: the rows, and which part of them is trained."""

    path: Text  # folder with train.jsonl (valid.jsonl, test.jsonl), a file, or a hub id; absolute once loaded
    valid_path: str = ""  # validation rows, a file or folder; "" = valid.jsonl of the folder, where there is one
    valid_fraction: Part = 0.0  # share of the training rows set apart for validation; 0 = none
    columns: Mapping[str, str | tuple[str, ...]] = field(
        default_factory=dict
    )  # our name = the file's; a list is joined
    train_on: Literal["last", "all", "everything"] = "last"  # messages: last or all assistant turns, or every token
    plain_text: Literal["auto", "chat", "raw"] = "auto"  # prompts and responses of text; chat: as turns of the template
    append_eos: bool = True  # one end token after completions and preference responses
    unpair: bool = False  # kto: each pair becomes a desirable and an undesirable row
    on_bad_row: Literal["error", "skip"] = "error"  # skip: faulty rows are left out, counted and reported
    chat_template: str = ""  # a Jinja template (its text, once loaded); "" = the tokenizer's own
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)  # given to the template at each render
    max_prompt_length: CountOrOff = 0  # tokens; longer prompts are cut on the left; 0 = off
    max_completion_length: CountOrOff = 0  # tokens; longer completions are cut on the right; 0 = off


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """[batch]: how rows become steps and micro-batches (leaves)."""

    size: Count = 8  # rows (pairs for dpo) per window, over all nodes
    grad_accum_steps: Count = 1  # windows per step
    leaf_tokens: Count | Literal["auto"] = "auto"  # per leaf: what one forward and backward holds; auto = up to 512
    max_length: Annotated[int, Meta(ge=2)] = 1024  # tokens; longer rows are cut
    max_cut: Share = 0.1  # the run does not start when a greater share of the rows would be cut
    order: Literal["sorted", "shuffled"] = (
        "sorted"  # dpo, kto, orpo: shuffled. sorted = windows of like length, shuffled
    )
    remainder: Literal["drop", "keep"] = "drop"  # the rows of an epoch that fill no window
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0  # of the order, the initial adapter and dropout


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """[lora]: what is trained."""

    rank: Count = 8  # r, before rank_scaling
    scale: Positive = 1.0  # factor on the adapter's output (PEFT's lora_alpha / r)
    dropout: Part = 0.0  # on the adapter's input; must be 0 for dpo and kto
    rank_scaling: Literal["constant", "by_bits", "by_kl"] = "by_bits"  # rank per layer, from its bits or measured loss
    target_modules: tuple[Text, ...] | Literal["all-linear"] = (  # all-linear = every linear module of the layers
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    num_layers: Count | Literal[-1] = -1  # the last N layers; -1 = all
    init_adapter: str = ""  # adapter folder to start from, ours, mlx-lm's or peft's; "" = a fresh one


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """[train]: length of the run, optimizer, reports, evaluation, checkpoints. Everything counts in steps."""

    steps: Count | None = 100  # optimizer updates; None when epochs or max_hours says it
    epochs: Positive | None = None  # times through the data, instead of steps
    max_hours: Positive | None = None  # hours of training in all sessions, instead of steps; the schedule follows them
    learning_rate: Annotated[float, Meta(gt=0, le=1)] = 2e-4  # peak; dpo, kto, orpo: 5e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warmup; dpo, kto, orpo: cosine
    warmup_steps: CountOrOff | Literal["auto"] = (
        0  # linear, from the first step on; "auto" = a tenth, as for dpo, kto, orpo
    )
    min_lr_ratio: Share = 0.1  # linear, cosine: the last rate, as a share of learning_rate
    betas: tuple[Part, Part] = (0.9, 0.999)  # AdamW's decay of the two moments, bias-corrected
    eps: Positive = 1e-8  # AdamW's term in the denominator
    weight_decay: NotNegative = 0.01  # AdamW's, decoupled
    max_grad_norm: NotNegative = 1.0  # the gradient's norm is clipped to this; 0 = off
    report_every: Count = 10  # steps between lines on the terminal; metrics.jsonl has every step
    eval_every: CountOrOff = 50  # steps between evaluations (and checkpoints); 0 = never
    eval_rows: Count | Literal["auto", "all"] = "auto"  # validation rows; auto = as many as take 5 % of the time
    save_every: Count | Literal["auto"] = "auto"  # steps between resume states; auto = at most 1 % of the time
    keep_checkpoints: Count | Literal["all"] = "all"  # the newest N, and the best one
    best_by: Literal["loss", "rewards/accuracies", "rewards/margins"] = "loss"  # value that picks the best
    early_stop_evals: CountOrOff = 0  # stop after N evaluations without a better one; 0 = off
    report_memory: bool = False  # peak memory of every node in each report
    report_to: tuple[LoggerName, ...] = ()  # services that get the metrics, see loggers/
    notify: str = field(default="", repr=False)  # address that is told of the end and of troubles; "" = none. A secret
    audit: Share = 0.0  # share of the leaves computed on a second node too, and compared; 0 = none


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """[memory]: how much a node holds at once. These keys change memory and time, not the meaning of a step."""

    segment_size: Count | Literal["auto", "off"] = "auto"  # layers whose backward runs together; off = whole graph
    head_chunk: Count | Literal["auto"] = "auto"  # positions of the LM head at once
    grad_checkpoint: bool = False  # mlx-lm's own; an error together with segments
    gated_delta: Literal["chunked", "recurrent"] = "chunked"  # how hybrid models' linear attention is trained


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """[preference]: for dpo and kto only."""

    loss: Text = "sigmoid"  # see protocol/losses.py; kto: "kto"
    beta: Positive = 0.1  # how strongly the reference holds the policy
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0  # dpo: chance that a pair's labels are swapped
    desirable_weight: NotNegative = 1.0  # kto: factor on the loss of desirable rows
    undesirable_weight: NotNegative = 1.0  # kto: factor on the loss of undesirable rows
    reference: Literal["base", "initial"] = "base"  # base: adapter off; initial: the adapter at step 0


@dataclass(frozen=True, kw_only=True)
class TimingConfig:
    """[timing]: when a node counts as slow, lost or stuck. The defaults suit an office network."""

    beat_seconds: Positive = 2.0  # between a supervisor's heartbeats
    suspect_seconds: Positive = 6.0  # without a heartbeat: the node is suspect
    return_seconds: Positive = 5.0  # after a closed connection: time to come back
    dead_seconds: Positive = 15.0  # without a heartbeat: the node is lost, its work is reassigned
    data_seconds: Positive = 10.0  # without an answer on a data connection: it is made again
    progress_seconds: Positive = 30.0  # least time that a busy worker may show no progress, …
    progress_factor: Positive = 10.0  # … and this many times the usual time of its leaf; then it is restarted
    copy_factor: Positive = 2.0  # times the expected time of an assignment; then an idle node computes it as well
    restart_seconds: Positive = (
        1.0  # before an ended worker is started again; doubled each time, up to 60 times as long
    )
    away_seconds: Positive = 300.0  # without a word from the coordinator; then a launched node leaves
    start_timeout: Positive = 600.0  # seconds for all nodes to be ready; then min_nodes are enough
    stop_seconds: Positive = 10.0  # between asking a process to end and killing it


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run with all defaults filled in. Only "auto" values are still open."""

    model: Text  # folder or hub id, what mlx_lm.load takes; absolute once loaded when it is a folder
    output: Path  # run folder; default: runs/ and the name of the file without .toml, beside the file
    data: DataConfig
    method: MethodName = "sft"
    batch: BatchConfig = field(default_factory=BatchConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    timing: TimingConfig = field(default_factory=TimingConfig)


# Keys that a resumed run may change: how long it is, what it says and what it keeps, but not what a step means.
# The data and the model are compared by what was read from them, so that they may have moved.
FREE = ("model", "output", "data.", "timing.")
LENGTHS = ("steps", "epochs", "max_hours")
FREE_OF_TRAIN = (
    *(*LENGTHS, "report_every", "eval_every", "eval_rows", "save_every", "keep_checkpoints"),
    *("best_by", "early_stop_evals", "report_memory", "report_to", "notify", "audit"),
)
SECRET = ("train.notify",)  # keys whose values are written and shown nowhere


def warmup_steps(train: TrainConfig, total_steps: int) -> int:
    """Returns the warmup of a run of `total_steps`: for "auto" a tenth of them, rounded up as Hugging Face does.

    A run limited by time warms up over `WARMUP_SHARE` of its hours instead, see `schedule.learning_rate_by_time`.
    """
    return -(-total_steps // 10) if train.warmup_steps == "auto" else train.warmup_steps


def as_json(config: RunConfig) -> dict[str, Any]:
    """Returns the resolved configuration for config.json: nested as the file's tables, nulls kept, paths as text.

    Keys that hold a secret are left out.
    """
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    for key in SECRET:
        table, _, name = key.partition(".")
        del plain[table][name]
    return plain
