"""Rules between keys: each is one function that yields what is wrong with the values together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlxdist.coordinator.config.field_types import any_of
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.protocol.methods import METHODS, loss_fault, named

ROLES = ("messages", "tools", "text", "system", "prompt", "completion", "chosen", "rejected", "label")
TEXT_ROLES = ("text", "prompt", "completion", "chosen", "rejected")  # that several columns of text may be joined into


@dataclass(frozen=True)
class Broken:
    """A broken rule: the key to name, the sentence after it, and the other keys that the rule looked at."""

    key: str
    text: str
    looked_at: tuple[str, ...] = ()


Given = frozenset[str]  # dotted keys that the file or an override holds
Rule = Callable[[RunConfig, Given], Iterator[Broken]]


def _one_of(keys: tuple[str, ...], given: Given) -> Iterator[Broken]:
    *others, last = [key for key in keys if key in given] or [""]
    if others:
        yield Broken(last, f"and {' and '.join(others)} exclude each other: keep one of them", tuple(others))


def one_length(config: RunConfig, given: Given) -> Iterator[Broken]:
    """The length of a run is given by one key."""
    yield from _one_of(("train.steps", "train.epochs", "train.max_hours"), given)


def one_validation(config: RunConfig, given: Given) -> Iterator[Broken]:
    """Validation rows come from one place."""
    if config.data.valid_path and config.data.valid_fraction:
        yield from _one_of(("data.valid_path", "data.valid_fraction"), given)


def known_columns(config: RunConfig, given: Given) -> Iterator[Broken]:
    """Columns map our names to those of the file, not the other way round."""
    for role, theirs in config.data.columns.items():
        column = theirs if isinstance(theirs, str) else ""
        if role not in ROLES:
            turned = f'; did you mean {column} = "{role}"?' if column in ROLES else ""
            text = f"is not a known name; the left side is one of {', '.join(ROLES)}, the right side a key of the rows"
            yield Broken(f"data.columns.{role}", text + turned)
        elif not theirs or (isinstance(theirs, tuple) and "" in theirs):
            yield Broken(f"data.columns.{role}", "is empty; name the key of the rows that holds it")
        elif isinstance(theirs, tuple) and role not in TEXT_ROLES:
            text = f"joins columns, which only {', '.join(TEXT_ROLES)} can be made of; name one column"
            yield Broken(f"data.columns.{role}", text)


def keys_of_the_method(config: RunConfig, given: Given) -> Iterator[Broken]:
    """A key that the method does not read is refused, not ignored."""
    method, spec = config.method, METHODS[config.method]
    preferences = named(lambda each: each.losses)
    if not spec.losses:
        for key in sorted(key for key in given if key.startswith("preference.")):
            text = f'is for method {preferences}, the method is "{method}": delete it or change the method'
            yield Broken(key, text)
    for key in ("preference.desirable_weight", "preference.undesirable_weight"):
        if spec.losses and not spec.labels and key in given:
            yield Broken(key, f'is for method {named(lambda each: each.labels)}, the method is "{method}": delete it')
    if config.data.unpair and not spec.labels:
        of = named(lambda each: each.labels)
        yield Broken("data.unpair", f'makes rows for method {of}, the method is "{method}": delete it')
    if config.data.train_on != "last" and spec.losses:
        of = named(lambda each: not each.losses)
        yield Broken("data.train_on", f'is for method {of}; "{method}" always trains on the completion: delete it')
    for key, limit in (
        ("data.max_prompt_length", config.data.max_prompt_length),
        ("data.max_completion_length", config.data.max_completion_length),
    ):
        if limit and spec.cut == "right":
            text = f'is for method {preferences}; "{method}" rows are cut as a whole, by batch.max_length'
            yield Broken(key, text)
    if (order := config.batch.order) not in spec.orders:
        of = named(lambda each: order in each.orders)
        yield Broken("batch.order", f'is "{order}", which is for method {of}; "{method}" takes "{spec.orders[0]}"')
    if config.lora.dropout and spec.reference:
        why = "policy and reference would differ by chance"
        yield Broken("lora.dropout", f'is {config.lora.dropout}, and must be 0 for "{method}": {why}')


def loss_of_the_method(config: RunConfig, given: Given) -> Iterator[Broken]:
    """The loss belongs to the method, and label smoothing to the loss."""
    if not METHODS[config.method].losses:
        return
    if fault := loss_fault(config.method, config.preference.loss, config.preference.label_smoothing):
        yield Broken(*fault, ("preference.loss",))


def kto_needs_contrast(config: RunConfig, given: Given) -> Iterator[Broken]:
    """KTO takes its reference point from the other rows of the step, and one class of rows must have a weight."""
    method, spec = config.method, METHODS[config.method]
    if not spec.lone_row and config.batch.size * config.batch.grad_accum_steps == 1:
        text = f"is 1, and {method} takes its reference point from the other rows of the step: at least 2"
        yield Broken("batch.size", text, ("batch.grad_accum_steps",))
    if spec.labels and config.preference.desirable_weight == config.preference.undesirable_weight == 0:
        other = "preference.desirable_weight"
        yield Broken("preference.undesirable_weight", f"and {other} are both 0: nothing to train", (other,))


def room_for_a_target(config: RunConfig, given: Given) -> Iterator[Broken]:
    """A prompt leaves room for a completion."""
    prompt, longest = config.data.max_prompt_length, config.batch.max_length
    if prompt >= longest:
        text = f"is {prompt}, and batch.max_length {longest} leaves no room for a completion: at most {longest - 1}"
        yield Broken("data.max_prompt_length", text, ("batch.max_length",))


def warmup_within_the_run(config: RunConfig, given: Given) -> Iterator[Broken]:
    """The warmup ends before the run does."""
    warmup, steps = config.train.warmup_steps, config.train.steps
    if isinstance(warmup, int) and steps is not None and warmup > steps:
        text = f"is {warmup}, longer than the run of {steps} steps: learning_rate would never be reached"
        yield Broken("train.warmup_steps", text, ("train.steps",))


def best_of_what_is_measured(config: RunConfig, given: Given) -> Iterator[Broken]:
    """The best checkpoint is chosen by a value that the method computes."""
    by, method = config.train.best_by, config.method
    if by not in METHODS[method].best_by:
        allowed = any_of(METHODS[method].best_by)
        yield Broken("train.best_by", f'is "{by}", which "{method}" does not have: must be {allowed}')


def stop_by_evaluations(config: RunConfig, given: Given) -> Iterator[Broken]:
    """Early stopping needs evaluations."""
    if config.train.early_stop_evals and not config.train.eval_every:
        yield Broken("train.early_stop_evals", "needs evaluations, and train.eval_every is 0", ("train.eval_every",))


def one_way_to_save_memory(config: RunConfig, given: Given) -> Iterator[Broken]:
    """mlx-lm's gradient checkpointing and segments would recompute the same layers twice."""
    if config.memory.grad_checkpoint and config.memory.segment_size != "off":
        text = 'and memory.segment_size exclude each other: keep one of them, or set segment_size = "off"'
        yield Broken("memory.grad_checkpoint", text, ("memory.segment_size",))


def distinct_modules(config: RunConfig, given: Given) -> Iterator[Broken]:
    """At least one module is trained, and each is named once."""
    modules = config.lora.target_modules
    if isinstance(modules, str):
        return
    if not modules:
        yield Broken("lora.target_modules", "is empty: name at least one module, for instance q_proj")
    twice = sorted({module for module in modules if modules.count(module) > 1})
    if twice:
        yield Broken("lora.target_modules", f"names {', '.join(twice)} twice")


def order_of_the_clocks(config: RunConfig, given: Given) -> Iterator[Broken]:
    """A node is suspect after a missed heartbeat, and lost some time after that."""
    timing = config.timing
    if timing.suspect_seconds <= timing.beat_seconds:
        text = f"is {timing.suspect_seconds}, and must be more than timing.beat_seconds, {timing.beat_seconds}"
        yield Broken("timing.suspect_seconds", text, ("timing.beat_seconds",))
    if timing.dead_seconds <= timing.suspect_seconds:
        text = f"is {timing.dead_seconds}, and must be more than timing.suspect_seconds, {timing.suspect_seconds}"
        yield Broken("timing.dead_seconds", text, ("timing.suspect_seconds",))


RULES: tuple[Rule, ...] = (
    one_length,
    one_validation,
    known_columns,
    keys_of_the_method,
    loss_of_the_method,
    kto_needs_contrast,
    room_for_a_target,
    warmup_within_the_run,
    best_of_what_is_measured,
    stop_by_evaluations,
    one_way_to_save_memory,
    distinct_modules,
    order_of_the_clocks,
)


def broken_rules(config: RunConfig, given: Given) -> Iterator[Broken]:
    """Yields every broken rule, in the order of RULES."""
    for rule in RULES:
        yield from rule(config, given)
