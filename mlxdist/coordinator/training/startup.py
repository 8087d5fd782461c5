"""Where a run begins: its method, its first state, its reference, and what is said before the first step."""

from collections.abc import Iterator
from pathlib import Path

from safetensors.numpy import load_file, save

from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.config.advice import learning_rate_advice
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.methods.kinds import KINDS
from mlxdist.coordinator.methods.method import Method
from mlxdist.coordinator.plan.estimates import busy_nodes, size_for_all
from mlxdist.coordinator.report.format import count
from mlxdist.coordinator.storage.run_folder import RunFolder, write_bytes
from mlxdist.coordinator.training import initial_adapter as adapters
from mlxdist.coordinator.training.optimizer import optimizer_of
from mlxdist.coordinator.training.state import State
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.errors import UserError
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.methods import METHODS
from mlxdist.protocol.vectors import Vector

REFERENCE_FILE = "reference.safetensors"


def method_of(config: RunConfig, rows: Rows, valid: Rows | None) -> Method:
    """The method of a run."""
    return KINDS[config.method](config, rows, valid)


def first_state(config: RunConfig, manifest: Manifest, method: Method) -> State:
    """Before the first step: with the adapter that the run was given, or a fresh one."""
    if config.lora.init_adapter:
        vector = adapters.start_from(Path(config.lora.init_adapter), manifest)
    else:
        vector = adapters.draw(manifest, config.batch.seed)
    return State(vector, optimizer_of(config.train).init(len(vector)), method.unknown_references())


def reference(config: RunConfig, folder: RunFolder, state: State) -> Vector | None:
    """The reference's adapter for `reference = "initial"`: that of step 0, kept beside the state. None: the base."""
    if not METHODS[config.method].reference or config.preference.reference == "base":
        return None
    path = folder.state / REFERENCE_FILE
    if state.step == 0:
        data = save({"reference": state.adapter})
        write_bytes(path, data)
        return state.adapter
    try:
        vector: Vector = load_file(path)["reference"]
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}), and the run cannot go on without its reference.") from None
    return vector


def plan_sentences(config: RunConfig, manifest: Manifest, rows: int, steps: int | None, ready: int) -> Iterator[str]:
    """The arithmetic of the run, and advice, said before the first step."""
    batch = config.batch
    unit = METHODS[config.method].item
    leaves = -(-batch.size // batch.micro_size) * batch.grad_accum_steps
    elements = manifests.size(manifest)
    length = count(steps, "step") if steps is not None else f"{config.train.max_hours:g} hours"
    yield (
        f"{length} of {count(batch.size * batch.grad_accum_steps, unit)} in {count(leaves, 'leaf', 'leaves')}, on "
        f"{count(ready, 'node')}; {count(rows, unit)} of data; {elements:,} trainable parameters, "
        f"{4 * elements / 1e6:.2g} MB a partial"
    )
    used = busy_nodes(leaves, ready)
    if used < ready:
        yield (
            f"a step has {count(leaves, 'leaf', 'leaves')} for {count(ready, 'node')}, and takes no longer with {used}"
            f": {ready - used} will idle; batch.size = {size_for_all(batch, ready)} would use all"
        )
    if config.train.audit and ready < 2:
        yield f"train.audit = {config.train.audit:g} needs a second node: nothing is audited until one joins"
    if advice := learning_rate_advice(config.method, config.train.learning_rate):
        yield advice


def saved_sentences(state: State) -> Iterator[str]:
    """What keeping the reference log-probs has saved, said at the end."""
    if state.references.saved_forwards:
        saved = count(state.references.saved_forwards, "reference forward")
        yield f"{saved} saved by keeping the log-probs of rows seen before"


def audit_sentences(config: RunConfig, audited: int) -> Iterator[str]:
    """How many leaves were audited, said at the end."""
    if config.train.audit:
        yield f"{count(audited, 'leaf', 'leaves')} audited: computed on a second node too, and compared"
