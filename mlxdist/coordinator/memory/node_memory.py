"""The memory that a node needs, and the refusal of a node that does not have it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxdist.coordinator.memory.prediction import LeafSize, MemorySettings, ModelShape, largest_length
from mlxdist.protocol.budget import WORKER_BYTES, cure, describe_leaf, format_bytes, usable_bytes
from mlxdist.protocol.leaves import Leaf

MEMORY = re.compile("[0-9]{1,18}")  # bytes, as a host reports them
MAY_BE_MEMORY = ("SIGKILL", "SIGABRT", "SIGSEGV")  # signals that end a worker when memory runs out


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that every node needs for a run whose settings are fixed."""

    shape: ModelShape
    leaf: LeafSize  # the largest of the run
    settings: MemorySettings
    model: int  # bytes of parameters and adapter

    @property
    def total(self) -> int:
        """The bytes of the model, of the largest leaf's backward pass and of the process."""
        return self.model + self.settings.peak + WORKER_BYTES

    @property
    def rows(self) -> str:
        """The largest leaf in words."""
        row = f"rows of up to {self.leaf.length} tokens"
        return f"a leaf of up to {self.leaf.tokens} tokens, with {row}"

    @property
    def source(self) -> str:
        """The origin of the prediction, as the end of a sentence."""
        if self.shape.measured:
            return "by a measurement of its layers on such a machine"
        return "by the table of coefficients, as its layers were not measured on such a machine"

    @property
    def doubt(self) -> str | None:
        """A sentence for a person when the architecture of the model was never measured."""
        if not self.shape.unmeasured or self.shape.measured:
            return None
        return (
            f"no {self.shape.unmeasured} was measured, so its memory is predicted as a llama's of the same sizes: "
            "train.report_memory = true shows what a step really takes"
        )

    def longest(self, limit: int) -> int:
        """Returns the largest `batch.max_length` (tokens) that fits into `limit` bytes under "auto"; 0 for none."""
        return largest_length(self.shape, self.leaf, limit - self.model - WORKER_BYTES)

    def refusal(self, limit: int) -> str | None:
        """Returns why a node that may use `limit` bytes cannot take part, and what helps; None when the run fits."""
        if self.total <= limit:
            return None
        return (
            f"may use {format_bytes(limit)}, and the run needs {format_bytes(self.total)}: "
            f"{format_bytes(self.model)} for the model, {format_bytes(WORKER_BYTES)} for its process, "
            f"{format_bytes(self.settings.peak)} for {self.rows}. {self._cure(limit)}"
        )

    def _cure(self, limit: int) -> str:
        longest = self.longest(limit)
        if not longest:
            return "The model does not fit: take a smaller one, or one with fewer bits."
        cures = []
        if longest >= self.leaf.length:
            cures.append('memory.segment_size = "auto" and memory.head_chunk = "auto" make it fit')
        else:
            cures.append(f"batch.max_length = {longest} would fit")
        if self.leaf.tokens > self.leaf.length:
            cures.append("a smaller batch.leaf_tokens needs less")
        return "; ".join(cures) + "."


@dataclass(frozen=True)
class NodeMemory:
    """The memory that every node needs, and the limits that hosts.toml sets."""

    need: MemoryNeed | None = None  # None: not predicted
    limits: Mapping[str, int] = field(default_factory=dict)  # bytes by node

    def refusal(self, name: str, host: Mapping[str, str]) -> str | None:
        """Returns why the node `name` cannot hold the run, by the facts `host` of its Register message.

        None when it can, or when its memory or the need is not known.
        """
        total, system = host.get("memory_bytes", ""), host.get("system", "").partition(" ")[0]
        limit = self.limits.get(name) or (usable_bytes(int(total), system) if MEMORY.fullmatch(total) else 0)
        fault = self.need.refusal(limit) if self.need is not None and limit else None
        return fault and f"{name} {fault}"


def at_work(cause: str, leaf: Leaf | None, segment_size: int) -> str:
    """Returns what to add to the `cause` of a worker's end that may be lack of memory: its leaf, and the cure."""
    if leaf is None or not any(signal in cause for signal in MAY_BE_MEMORY):
        return ""
    return f" at {describe_leaf(leaf)} (if memory ran out: {cure(leaf, segment_size)})"
