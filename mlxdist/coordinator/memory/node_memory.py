"""What the cluster must know of memory when a node asks to take part."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxdist.coordinator.memory.prediction import Need
from mlxdist.protocol.budget import cure, rows_of, usable_bytes
from mlxdist.protocol.leaves import Leaf

MAY_BE_MEMORY = ("SIGKILL", "SIGABRT", "SIGSEGV")  # how a worker ends when memory runs out, without a last word


@dataclass(frozen=True)
class NodeMemory:
    """What every node must hold, and the limits that hosts.toml gives."""

    need: Need | None = None  # None: not predicted
    limits: Mapping[str, int] = field(default_factory=dict)  # bytes by node

    def refusal(self, name: str, host: Mapping[str, str]) -> str | None:
        """Why the node with these facts (of its Register) cannot hold the run; None where it can, or nobody knows."""
        total, system = host.get("memory_bytes", ""), host.get("system", "").partition(" ")[0]
        limit = self.limits.get(name) or (usable_bytes(int(total), system) if total.isdecimal() else 0)
        fault = self.need.refusal(limit) if self.need is not None and limit else None
        return fault and f"{name} {fault}"


def at_work(cause: str, leaf: Leaf | None, segment_size: int) -> str:
    """What to add to a cause that may be memory: the leaf that the worker was computing, and the cure."""
    if leaf is None or not any(signal in cause for signal in MAY_BE_MEMORY):
        return ""
    return f" at {rows_of(leaf)} (if memory ran out: {cure(leaf, segment_size)})"
