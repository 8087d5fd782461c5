"""The start of a run on its nodes: its method, its first or continued state, and what is said before the first step."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlxdist.coordinator.batch.leaf_tokens import window_tokens
from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.config.advice import learning_rate_advice
from mlxdist.coordinator.config.hosts import Hosts
from mlxdist.coordinator.config.schema import RunConfig, TrainConfig, as_json
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.launch.looking import Seen
from mlxdist.coordinator.launch.roster import Roster
from mlxdist.coordinator.methods.kinds import KINDS
from mlxdist.coordinator.methods.method import Method
from mlxdist.coordinator.plan.estimates import busy_nodes, usual_leaves, values_for_all
from mlxdist.coordinator.report.format import count, duration_phrase, hours_phrase
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.report.roster_view import RosterLine, bit_classes, roster_lines
from mlxdist.coordinator.storage.run_folder import RunFolder, read_json, write_bytes, write_json
from mlxdist.coordinator.storage.sealed import seal
from mlxdist.coordinator.training import initial_adapter as adapters
from mlxdist.coordinator.training.optimizer import optimizer_of
from mlxdist.coordinator.training.prepare import Prepared
from mlxdist.coordinator.training.promises import earlier_promises, promise_keys
from mlxdist.coordinator.training.resume import (
    REFERENCE,
    REFERENCE_FILE,
    continued,
    facts_of,
    keeps_reference,
    saved_reference,
    validation_changed,
)
from mlxdist.coordinator.training.schedule import schedule_phrase
from mlxdist.coordinator.training.state import State, identity_of
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.budget import format_bytes
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.methods import METHODS
from mlxdist.protocol.numerics import Promise
from mlxdist.protocol.packing import APART, BY_PIECE, PACKED
from mlxdist.protocol.untrusted import quoted
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.versions import PACKAGES

PACKING: Mapping[str, str] = MappingProxyType(
    {
        PACKED: "the rows of a leaf are packed into one, each with its own attention",
        BY_PIECE: "the rows of a leaf are packed into one; this model's recurrent or other special layers work on each",
        APART: "this model's rows cannot be packed: each is computed alone, and short ones are slower",
    }
)


@dataclass(frozen=True)
class Start:
    """A run before its next step, on nodes that are ready."""

    method: Method
    state: State
    manifest: Manifest
    identity: dict[str, Any]  # what the state belongs to, see `identity_of` and `facts_of`
    ready: int  # nodes
    promises: tuple[Promise, ...]  # the last one holds
    packing: str  # the mode of all nodes


def start(prepared: Prepared, hosts: Hosts, roster: Roster, folder: RunFolder, fleet: Fleet, report: Reporter) -> Start:
    """Waits for the model, sends the nodes the adapter of the first or continued state, and waits until they are ready.

    Raises UserError where the saved state does not belong to this model, and NodeError where too few nodes get ready.
    """
    config, dataset, earlier = prepared.config, prepared.dataset, prepared.earlier
    introduction = fleet.wait_for_model()
    manifest = introduction.manifest
    method = method_of(config, dataset.train, dataset.valid)
    identity = identity_of(prepared.spec.numerics_id, manifest, introduction.model_hash, dataset.valid_digest)
    facts = facts_of(config, dataset.digest)
    if earlier is None:
        state = first_state(config, manifest, method)
    else:
        state = continued(earlier, folder, identity, method.unknown_references())
        if dataset.valid is not None and validation_changed(earlier, identity):
            report.note("the validation rows have changed: the search for the best evaluation starts again")
    if (vector := reference(config, folder, state)) is not None:
        fleet.send_reference(vector)
    fleet.send_adapter(state.step, state.adapter)
    needed = hosts.coordinator.min_nodes
    ready = fleet.wait_for_nodes(max(len(roster.ready), needed), needed, config.timing.start_timeout)
    for line in roster_lines(shown_nodes(fleet.hosts_and_canaries(), roster)) if roster.seen else ():
        report.note(line)
    before = earlier_promises(folder, state.step)
    promise = fleet.begin_promise(state.step + 1, before[-1] if before else None)
    promises = before if promise in before else (*before, promise)
    packing = fleet.packing()
    return Start(method, state, manifest, identity | facts | {"packing": packing}, ready, promises, packing)


def shown_nodes(nodes: Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]], roster: Roster) -> list[RosterLine]:
    """Returns the nodes of a run as the roster shows them, by what each said of its host, and its canary's digests."""
    order = list(roster.seen)
    nodes = dict(sorted(nodes.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    classes = bit_classes([canary for _, canary in nodes.values()])
    lines = []
    for (name, (host, _)), bits in zip(nodes.items(), classes, strict=True):
        seen = roster.seen.get(name, Seen())
        memory = host.get("memory_bytes", "")
        amount = format_bytes(int(memory)) if memory.isdigit() and len(memory) < 19 else ""
        system = quoted(host.get("system", ""), 40) if seen.system != "Darwin" else f"macOS {quoted(seen.release, 20)}"
        mlxdist, mlx, mlx_lm = (quoted(seen.versions.get(each, ""), 20) for each in ("mlxdist", *PACKAGES))
        where = quoted(host.get("host", ""), 40)
        lines.append(RosterLine(name, where, quoted(seen.chip, 40), amount, system, mlxdist, mlx, mlx_lm, bits))
    return lines


def announce(prepared: Prepared, start: Start, folder: RunFolder, report: Reporter) -> None:
    """Writes config.json, and tells the person what the run will do."""
    config, rows, promise = prepared.config, len(prepared.dataset.train), start.promises[-1]
    write_json(
        folder.config,
        {
            **as_json(config),
            "data_digest": prepared.dataset.digest,
            "numerics_id": prepared.spec.numerics_id,
            **promise_keys(start.promises),
            "schedules": schedules(folder, start.state.step, schedule_phrase(config.train, prepared.total_steps)),
        },
    )
    tokens = window_tokens(prepared.dataset.train, config.batch, config.method)
    plan = plan_sentences(config, start.manifest, rows, tokens, prepared.total_steps, start.ready)
    hours = hours_sentences(config.train, start.state.elapsed_seconds)
    for sentence in (*prepared.data_notes, *plan, PACKING[start.packing], *hours, *prepared.memory_notes):
        report.note(sentence)
    if promise.from_step > start.state.step:
        report.promise(promise)
    else:
        report.note(promise.sentence)
    report.stage("training")


def schedules(folder: RunFolder, steps_done: int, schedule: str) -> list[dict[str, object]]:
    """Returns the schedules of the learning rate, each with its first step: those that were followed, then this one.

    More than one where a run was resumed with another length.
    """
    followed: list[dict[str, object]] = []
    with suppress(OSError, ValueError, KeyError, TypeError):  # the first session, or a file that was changed by hand
        followed = [each for each in read_json(folder.config)["schedules"] if each["from_step"] <= steps_done]
    if followed and followed[-1]["schedule"] == schedule:
        return followed
    return [*followed, {"from_step": steps_done + 1, "schedule": schedule}]


def method_of(config: RunConfig, rows: Rows, valid: Rows | None) -> Method:
    """Returns the method of a run."""
    return KINDS[config.method](config, rows, valid)


def first_state(config: RunConfig, manifest: Manifest, method: Method) -> State:
    """Returns the state before the first step: with the adapter that the run was given, or a fresh one."""
    if config.lora.init_adapter:
        vector = adapters.start_from(Path(config.lora.init_adapter), manifest, config.lora.scale)
    else:
        vector = adapters.draw(manifest, config.batch.seed)
    return State(vector, optimizer_of(config.train).init(len(vector)), method.unknown_references())


def reference(config: RunConfig, folder: RunFolder, state: State) -> Vector | None:
    """Returns the reference's adapter: None for the base model, else that of step 0, kept beside the state.

    Raises UserError where a resumed run lacks that file, or it is damaged.
    """
    if state.step or not keeps_reference(config):
        return saved_reference(config, folder)
    data = seal({REFERENCE: state.adapter}, facts_of(config, ""))
    write_bytes(folder.state / REFERENCE_FILE, data)
    return state.adapter


def plan_sentences(
    config: RunConfig, manifest: Manifest, rows: int, tokens: int, steps: int | None, ready: int
) -> Iterator[str]:
    """Yields the arithmetic of the run, and advice, for the person to read before the first step.

    `tokens`: of a usual window.
    """
    batch = config.batch
    unit = METHODS[config.method].item
    items = batch.size * batch.grad_accum_steps
    leaves = usual_leaves(batch, tokens)
    elements = manifests.size(manifest)
    length = count(steps, "step") if steps is not None else hours_phrase(config.train.max_hours or 0)
    yield (
        f"{length} of {count(items, unit)} in about {count(leaves, 'leaf', 'leaves')} of {batch.leaf_tokens} tokens, "
        f"on {count(ready, 'node')}; {count(rows, unit)} of data; {elements:,} trainable parameters, "
        f"a gradient of {4 * elements / 1e6:.2g} MB"
    )
    used = busy_nodes(leaves, ready)
    if used < ready:
        yield (
            f"a step has {count(leaves, 'leaf', 'leaves')} for {count(ready, 'node')}, and takes no longer with {used}"
            f": {ready - used} will idle; {values_for_all(batch, tokens, ready)} would use all"
        )
    if config.train.audit and ready < 2:
        yield f"train.audit = {config.train.audit:g} needs a second node: nothing is audited until one joins"
    if advice := learning_rate_advice(config.method, config.train.learning_rate):
        yield advice


def hours_sentences(train: TrainConfig, elapsed_seconds: float) -> Iterator[str]:
    """Yields, for a run limited by time, the hours used by earlier sessions, and how the learning rate follows them."""
    if train.max_hours is None:
        return
    if elapsed_seconds:
        yield f"{duration_phrase(elapsed_seconds)} of {hours_phrase(train.max_hours)} were used by earlier sessions"
    if train.schedule != "constant" or train.warmup_steps:
        yield f"the learning rate follows the hours used: {schedule_phrase(train, None)}"


def closing_sentences(config: RunConfig, state: State, audited: int) -> Iterator[str]:
    """Yields what the reference log-probs have saved and what was audited, for the person to read at the end."""
    if state.references.saved_forwards:
        saved = count(state.references.saved_forwards, "reference forward")
        yield f"{saved} saved by keeping the log-probs of rows seen before"
    if config.train.audit:
        yield f"{count(audited, 'leaf', 'leaves')} audited: computed on a second node too, and compared"
