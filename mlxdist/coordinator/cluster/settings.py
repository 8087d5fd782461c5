"""The settings of a cluster: the run, and the times and limits of its dealings with nodes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxdist.coordinator.config.schema import TimingConfig
from mlxdist.coordinator.memory.node_memory import NodeMemory
from mlxdist.protocol.messages import RunSpec


@dataclass(frozen=True)
class ClusterSettings:
    """One run as the cluster sees it. `timing` is the section [timing] of the configuration, in seconds."""

    run: str
    incarnation: int
    spec: RunSpec
    versions: Mapping[str, str]
    data_port: int
    timing: TimingConfig = field(default_factory=TimingConfig)
    min_nodes: int = 1
    mixed: str = "spare"  # what becomes of nodes of another bit class: spare | allow
    launched: frozenset[str] = frozenset()  # the nodes that the coordinator itself starts
    packing_is_fixed: bool = False  # by the earlier sessions of the run: the mode of the spec and no other
    memory: NodeMemory = field(default_factory=NodeMemory)
