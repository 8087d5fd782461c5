"""What a run needs of every node's memory: "auto" resolved once, before anything is launched, and refusals.

The choice goes by what is free now, so that a Mac with a browser open does not swap; a refusal goes by what the machine
may use at all, because programs can be closed.
"""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import psutil

from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.config.hosts import NodeSpec, is_local
from mlxdist.coordinator.config.schema import MemoryConfig, RunConfig
from mlxdist.coordinator.memory.model_files import ModelFiles, adapter_elements, find_model, read_model
from mlxdist.coordinator.memory.node_memory import NodeMemory
from mlxdist.coordinator.memory.prediction import (
    Need,
    ADAPTER_BYTES,
    CHUNKS,
    WHOLE_GRAPH,
    LeafSize,
    Settings,
    choose,
    peak,
    shape_of,
)
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.protocol.budget import GB, WORKER_BYTES, limit_bytes, said_bytes, usable_bytes
from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.leaves import leaf_width
from mlxdist.protocol.methods import METHODS

CHECKPOINT_LIKE = 2  # layers per segment that take as much as mlx-lm's grad_checkpoint (measured: 1.3 to 1.8 of one)
UNPREDICTED_CHUNK = 128  # positions of the head where the sizes of the model are not known
UNKNOWN_MAC = 16 * 2**30  # what "auto" takes a node elsewhere to have, where hosts.toml does not say


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine's memory in bytes, and its system ("Darwin", "Linux")."""

    total: int
    available: int
    system: str


@dataclass(frozen=True)
class Fitted:
    """A configuration without "auto" in [memory], what it needs, and what a person should know of that."""

    config: RunConfig
    memory: NodeMemory
    notes: tuple[str, ...]


def this_machine() -> Machine:
    """The machine that this runs on."""
    memory = psutil.virtual_memory()
    return Machine(memory.total, memory.available, platform.system())


def node_limits(nodes: Sequence[NodeSpec], machine: Machine) -> dict[str, tuple[int, int]]:
    """Per node the bytes that it may use and those free now; a node elsewhere is known by its memory_limit_gb alone.

    The nodes on this machine share it: those without a limit get equal parts.
    """
    here = [node for node in nodes if is_local(node.host)]
    known = {}
    for node in nodes:
        own = limit_bytes(node.memory_limit_gb, machine.total, machine.system) if node.memory_limit_gb else 0
        if node in here:
            limit = own or usable_bytes(machine.total, machine.system) // len(here)
            known[node.name] = (limit, min(limit, machine.available // len(here)))
        elif node.memory_limit_gb:
            limit = int(node.memory_limit_gb * GB)
            known[node.name] = (limit, limit)
    return known


def leaf_size(config: RunConfig, rows: Sequence[Rows], adapter: int) -> LeafSize:
    """The largest leaf that `rows` (of training and validation) can make."""
    longest = min(max(int(each.lengths.max()) for each in rows if len(each)), config.batch.max_length)
    count = min(config.batch.micro_size, config.batch.size)
    positions = max(leaf_width([longest] * count, config.batch.max_length) - 1, 1)
    return LeafSize(positions, count * positions, count, METHODS[config.method].branches, adapter)


def asked(memory: MemoryConfig) -> tuple[int | None, int | None]:
    """(segment size, head chunk) as `choose` takes them: None for "auto"."""
    chunk = None if memory.head_chunk == "auto" else memory.head_chunk
    if memory.grad_checkpoint:
        return CHECKPOINT_LIKE, chunk
    return {"auto": None, "off": WHOLE_GRAPH}.get(str(memory.segment_size), cast(int, memory.segment_size)), chunk


def needed(config: RunConfig, files: ModelFiles, rows: Sequence[Rows], free: float) -> Need:
    """What a node must hold, with the fastest settings that fit into `free` bytes, or the smallest there are.

    Raises KeyError for a model whose configuration lacks its sizes.
    """
    elements = adapter_elements(files, config.lora)
    shape, leaf = replace(shape_of(files.config), half=files.half), leaf_size(config, rows, elements)
    model = files.nbytes + ADAPTER_BYTES * elements
    size, chunk = asked(config.memory)
    settings = choose(shape, leaf, free - model - WORKER_BYTES, segment_size=size, head_chunk=chunk)
    if settings is None:
        size, chunk = 1 if size is None else size, CHUNKS[-1] if chunk is None else chunk
        settings = Settings(size, chunk, peak(shape, leaf, segment_size=size, head_chunk=chunk))
    return Need(shape, leaf, settings, model)


def fit(config: RunConfig, rows: Sequence[Rows], nodes: Sequence[NodeSpec], machine: Machine) -> Fitted:
    """The configuration with "auto" resolved for the smallest node.

    Raises ConfigError, before anything is launched, for a node that cannot hold the run.
    """
    limits = node_limits(nodes, machine)
    free = min(now for _, now in limits.values()) if limits else usable_bytes(UNKNOWN_MAC, "Darwin")
    if len(limits) < len(nodes):
        free = min(free, usable_bytes(UNKNOWN_MAC, "Darwin"))
    try:
        folder = find_model(config.model)
        files = read_model(folder) if folder is not None else None
        if files is None or not files.tensors:
            return _unpredicted(config, "the model's parameters are not on this machine yet")
        need = needed(config, files, rows, free)
    except KeyError as error:
        return _unpredicted(config, str(error.args[0]))
    for name, (limit, _) in limits.items():
        if fault := need.refusal(limit):
            raise ConfigError(f"node {name} {fault}")
    said = [_sentence(config, need)]
    if need.doubt:
        said.append(need.doubt)
    if need.total > free:
        now = f"{said_bytes(free)} are free now, and {said_bytes(need.total)} are needed"
        said.append(f"{now}: close other programs, or the run will be slowed by swapping")
    explicit = {node.name: limits[node.name][0] for node in nodes if node.memory_limit_gb}
    return Fitted(with_settings(config, need.settings), NodeMemory(need, explicit), tuple(said))


def with_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """The configuration with "auto" replaced by what it stands for."""
    memory = config.memory
    size = memory.segment_size if memory.segment_size != "auto" else settings.segment_size or "off"
    chunk = memory.head_chunk if memory.head_chunk != "auto" else settings.head_chunk
    return replace(config, memory=replace(memory, segment_size=cast(Any, size), head_chunk=chunk))


def kept_settings(folder: RunFolder, config: RunConfig) -> RunConfig:
    """For a resumed run: "auto" means what it meant at the start, as another value would give other bits."""
    try:
        before = json.loads(folder.config.read_text(encoding="utf-8"))["memory"]
    except (OSError, ValueError, KeyError, TypeError):
        return config  # resuming will say what is wrong with the file
    auto = {key: before[key] for key in ("segment_size", "head_chunk") if getattr(config.memory, key) == "auto"}
    return replace(config, memory=replace(config.memory, **auto))


def _unpredicted(config: RunConfig, why: str) -> Fitted:
    resolved = with_settings(config, Settings(1, UNPREDICTED_CHUNK, 0))
    note = f"memory is not predicted ({why}); memory.segment_size = {resolved.memory.segment_size}"
    return Fitted(resolved, NodeMemory(), (note,))


def _sentence(config: RunConfig, need: Need) -> str:
    size, chunk = need.settings.segment_size, need.settings.head_chunk
    how = "every layer's activations kept" if size == WHOLE_GRAPH else f"{size} layer{'s'[: size > 1]} at a time"
    if config.memory.grad_checkpoint:
        how = "mlx-lm's grad_checkpoint"
    return (
        f"a node needs about {said_bytes(need.total)}: {said_bytes(need.model)} for the model, "
        f"{said_bytes(WORKER_BYTES)} for its process, {said_bytes(need.settings.peak)} for {need.rows} of up to "
        f"{need.leaf.length + 1} tokens "
        f"({how}, {chunk} positions of the head at once)"
    )
