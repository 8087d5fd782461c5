"""Fits a run into the memory of its nodes, before anything is launched: resolves "auto", refuses what cannot fit.

The choice goes by the memory that is free now, so that a Mac with a browser open does not swap. A refusal goes by the
memory that the machine may use at all, because programs can be closed.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import psutil

from mlxdist.coordinator.batch.leaf_tokens import auto_leaf_tokens, largest_leaf
from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.config.hosts import NodeSpec, is_local
from mlxdist.coordinator.config.schema import MemoryConfig, RunConfig
from mlxdist.coordinator.memory.measured import MeasuredModel
from mlxdist.coordinator.memory.model_files import ModelFiles, adapter_elements, find_model, read_model
from mlxdist.coordinator.memory.model_tree import ModelTree, UnloadableError, read_tree
from mlxdist.coordinator.memory.node_memory import MemoryNeed, NodeMemory
from mlxdist.coordinator.memory.prediction import (
    ADAPTER_BYTES,
    CHUNKS,
    WHOLE_GRAPH,
    LeafSize,
    MemorySettings,
    choose,
    peak,
)
from mlxdist.coordinator.memory.probes import table_shape
from mlxdist.protocol.budget import GB, WORKER_BYTES, format_bytes, limit_bytes, usable_bytes
from mlxdist.protocol.errors import ConfigError

CHECKPOINT_LIKE = 2  # layers per segment that need as much as mlx-lm's grad_checkpoint (measured: 1.3 to 1.8 layers)
UNPREDICTED_CHUNK = 128  # positions of the LM head at once, for a model whose sizes are not known
UNKNOWN_MAC = 16 * 2**30  # bytes that "auto" assumes for another machine without memory_limit_gb


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory of a machine in bytes, and its system ("Darwin", "Linux")."""

    total: int
    available: int
    system: str


@dataclass(frozen=True)
class Fitted:
    """A configuration without "auto" in [memory], the memory it needs, and notes on that for a person."""

    config: RunConfig
    memory: NodeMemory
    notes: tuple[str, ...]


def this_machine() -> Machine:
    """Returns the machine that this process runs on."""
    memory = psutil.virtual_memory()
    return Machine(memory.total, memory.available, platform.system())


def node_limits(
    nodes: Sequence[NodeSpec], machine: Machine, elsewhere: Mapping[str, Machine] | None = None
) -> dict[str, tuple[int, int]]:
    """Returns, by node, the bytes that it may use and the bytes free now.

    Nodes on one machine share it: those without memory_limit_gb get equal parts. `elsewhere`: the machines of nodes on
    other hosts, by node. Of a node whose machine is not known only its memory_limit_gb is; without one it is left out.
    """
    places = {node.name: "" if is_local(node.host) else node.host for node in nodes}
    known = {}
    for node in nodes:
        place = places[node.name]
        there = (elsewhere or {}).get(node.name) if place else machine
        if there is not None:
            sharing = list(places.values()).count(place)
            shared = usable_bytes(there.total, there.system) // sharing
            limit = limit_bytes(node.memory_limit_gb, there.total, there.system) if node.memory_limit_gb else shared
            known[node.name] = (limit, min(limit, there.available // sharing))
        elif node.memory_limit_gb:
            limit = int(node.memory_limit_gb * GB)
            known[node.name] = (limit, limit)
    return known


def free_bytes(nodes: Sequence[NodeSpec], limits: Mapping[str, tuple[int, int]]) -> int:
    """Returns the bytes free now on the smallest of `nodes`; one that is not in `limits` counts as a usual Mac."""
    free = [now for _, now in limits.values()]
    if len(limits) < len(nodes) or not nodes:
        free.append(usable_bytes(UNKNOWN_MAC, "Darwin"))
    return min(free)


def leaf_size(config: RunConfig, rows: Sequence[Rows], adapter: int) -> LeafSize:
    """Returns the largest leaf that can be made of `rows` (of training and validation)."""
    longest = min(max(int(each.lengths.max()) for each in rows if len(each)), config.batch.max_length)
    tokens, leaf_tokens = leaf_limit(config, rows), resolved_leaf_tokens(config, rows[0]).batch.leaf_tokens
    assert leaf_tokens != "auto"
    several = any(len(each) > 1 for each in rows)
    return LeafSize(longest, tokens, tokens, adapter, leaf_tokens if several else 0)


def leaf_limit(config: RunConfig, rows: Sequence[Rows]) -> int:
    """Returns the most tokens of a leaf of `rows`, of which the first are the training rows."""
    batch = resolved_leaf_tokens(config, rows[0]).batch
    assert batch.leaf_tokens != "auto"
    return max(largest_leaf(each, batch, batch.leaf_tokens) for each in rows if len(each))


def resolved_leaf_tokens(config: RunConfig, data: Rows) -> RunConfig:
    """Returns the configuration with a number for batch.leaf_tokens. `data`: the training rows."""
    batch = config.batch
    if batch.leaf_tokens != "auto":
        return config
    return replace(config, batch=replace(batch, leaf_tokens=auto_leaf_tokens(data, batch, config.method)))


def requested(memory: MemoryConfig) -> tuple[int | None, int | None]:
    """Returns the segment size and the head chunk as `choose` takes them: None for "auto"."""
    chunk = None if memory.head_chunk == "auto" else memory.head_chunk
    if memory.grad_checkpoint:
        return CHECKPOINT_LIKE, chunk
    if isinstance(memory.segment_size, int):
        return memory.segment_size, chunk
    return (WHOLE_GRAPH if memory.segment_size == "off" else None), chunk


def memory_need(
    config: RunConfig,
    files: ModelFiles,
    rows: Sequence[Rows],
    free: float,
    tree: ModelTree | None = None,
    measured: Sequence[MeasuredModel] = (),
) -> MemoryNeed:
    """Returns what a node needs with the fastest settings that fit into `free` bytes, or with the smallest ones.

    `tree`: the model as it will be loaded; without it the names in its files are counted. `measured`: the model on the
    machines of the run; without any, the table is used.

    Raises KeyError for a model whose configuration lacks its sizes.
    """
    elements = adapter_elements(files, config.lora) if tree is None else tree.elements
    half, parameters = (files.half, files.nbytes) if tree is None else (tree.half, tree.nbytes)
    shape = replace(table_shape(config, files), half=half, measured=tuple(measured))
    leaf = leaf_size(config, rows, elements)
    model = parameters + ADAPTER_BYTES * elements
    size, chunk = requested(config.memory)
    settings = choose(shape, leaf, free - model - WORKER_BYTES, segment_size=size, head_chunk=chunk)
    if settings is None:
        size, chunk = 1 if size is None else size, CHUNKS[-1] if chunk is None else chunk
        settings = MemorySettings(size, chunk, peak(shape, leaf, segment_size=size, head_chunk=chunk))
    return MemoryNeed(shape, leaf, settings, model)


def fit(
    config: RunConfig,
    rows: Sequence[Rows],
    nodes: Sequence[NodeSpec],
    machine: Machine,
    elsewhere: Mapping[str, Machine] | None = None,
    measured: Sequence[MeasuredModel] = (),
) -> Fitted:
    """Returns the configuration with "auto" resolved: the leaves by the data, the memory for the smallest node.

    `elsewhere`: as `node_limits` takes it. `measured`: as `memory_need` takes it.

    Raises ConfigError for a node that cannot hold the run.
    """
    config = resolved_leaf_tokens(config, rows[0])
    limits = node_limits(nodes, machine, elsewhere)
    free = free_bytes(nodes, limits)
    try:
        folder = find_model(config.model)
        files = read_model(folder) if folder is not None else None
        if folder is None or files is None or not files.tensors:
            return _unpredicted(config, "the model is not on this machine yet")
        tree = _tree(folder, config)
        need = memory_need(config, files, rows, free, tree, measured)
    except KeyError as error:
        return _unpredicted(config, str(error.args[0]))
    for name, (limit, _) in limits.items():
        if fault := need.refusal(limit):
            raise ConfigError(f"node {name} {fault}")
    notes = [_sentence(config, need), *([each for each in (tree.note, tree.slow) if each] if tree is not None else [])]
    if need.doubt:
        notes.append(need.doubt)
    if need.total > free:
        now = f"{format_bytes(free)} are free now, and {format_bytes(need.total)} are needed"
        notes.append(f"{now}: close other programs, or swapping slows the run down")
    explicit = {node.name: limits[node.name][0] for node in nodes if node.memory_limit_gb}
    return Fitted(with_settings(config, need.settings), NodeMemory(need, explicit), tuple(notes))


def _tree(folder: Path, config: RunConfig) -> ModelTree | None:
    """Returns the model as it will be loaded; None when it cannot be, which a node will say with its own reason."""
    try:
        return read_tree(folder, config.model, config.lora)
    except UnloadableError:
        return None


def with_settings(config: RunConfig, settings: MemorySettings) -> RunConfig:
    """Returns the configuration with `settings` in place of "auto"."""
    memory = config.memory
    size = memory.segment_size if memory.segment_size != "auto" else settings.segment_size or "off"
    chunk = memory.head_chunk if memory.head_chunk != "auto" else settings.head_chunk
    return replace(config, memory=replace(memory, segment_size=cast(Any, size), head_chunk=chunk))


def kept_settings(before: Mapping[str, Any], config: RunConfig) -> RunConfig:
    """Returns `config` with the values that "auto" had when a run began: others would give other bits.

    `before`: the settings of that run by dotted key.
    """
    auto = [key for key in ("segment_size", "head_chunk") if getattr(config.memory, key) == "auto"]
    kept = {key: before[f"memory.{key}"] for key in auto if f"memory.{key}" in before}
    batch = config.batch
    if batch.leaf_tokens == "auto" and "batch.leaf_tokens" in before:
        batch = replace(batch, leaf_tokens=before["batch.leaf_tokens"])
    return replace(config, memory=replace(config.memory, **kept), batch=batch)


def _unpredicted(config: RunConfig, why: str) -> Fitted:
    resolved = with_settings(config, MemorySettings(1, UNPREDICTED_CHUNK, 0))
    note = f"the memory is not predicted, because {why}; memory.segment_size = {resolved.memory.segment_size}"
    return Fitted(resolved, NodeMemory(), (note,))


def _sentence(config: RunConfig, need: MemoryNeed) -> str:
    size, chunk = need.settings.segment_size, need.settings.head_chunk
    how = "all layers at once" if size == WHOLE_GRAPH else f"{size} layer{'s'[: size > 1]} at a time"
    if config.memory.grad_checkpoint:
        how = "mlx-lm's grad_checkpoint"
    return (
        f"a node needs about {format_bytes(need.total)}: {format_bytes(need.model)} for the model, "
        f"{format_bytes(WORKER_BYTES)} for its process, {format_bytes(need.settings.peak)} for {need.rows} "
        f"({how}, {chunk} positions of the LM head at once), {need.source}"
    )
