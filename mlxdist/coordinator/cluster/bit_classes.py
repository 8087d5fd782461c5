"""The promise of a run about the bits of its adapter, and the nodes that would break it.

At the start the canaries of all nodes say what is promised. In a run of the same bits, a node whose canary gives other
bits is a spare from then on: it is used when too few other nodes are left, or when `coordinator.mixed` allows it. Its
first leaf ends the promise, which does not come back: the adapter has its bits from that step on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mlxdist.coordinator.cluster.events import Event, NodeNews, news_of
from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.protocol.numerics import SAME_BITS, TOLERANCE, Promise, promise

OTHER_BITS = "it computes a test batch with other last bits than the nodes of this run"


@dataclass
class BitClasses:
    """The promise that holds now; None before the start."""

    settings: ClusterSettings
    promise: Promise | None = None
    _short_since: float | None = None  # since when too few nodes of the run's class can work

    def begin(self, nodes: Mapping[str, Node], from_step: int, earlier: Promise | None) -> Promise:
        """Promises what the canaries of the nodes allow. `earlier`: the promise of the sessions before this one.

        One that was a tolerance stays so. One of the same bits is kept where a node of that class is here.
        """
        here = [node for node in nodes.values() if node.canary and not node.gone]
        if earlier is None:
            self.promise = promise({node.name: node.canary for node in here}, from_step)
        elif earlier.kind == SAME_BITS and not any(_is_of(node, earlier) for node in here):
            names = ", ".join(node.name for node in here)
            what = f"the run was resumed on {names}, with other last bits than those of the nodes before"
            self.promise = Promise(TOLERANCE, what, from_step)
        else:
            self.promise = earlier
        for node in here:
            node.held_back = self._is_spare(node)
        return self.promise

    def joined(self, node: Node) -> list[Event]:
        """Looks at the canary of a node that is ready now."""
        node.held_back = self._is_spare(node)
        if not self._is_other(node):
            return [news_of(node, "ready")]
        if not node.held_back:
            return [news_of(node, "ready", f'{OTHER_BITS}, and is used, as coordinator.mixed = "allow" says')]
        return [
            news_of(
                node,
                "ready",
                f'{OTHER_BITS}: it waits as a spare until no other node is left (coordinator.mixed = "allow" uses it)',
            )
        ]

    def given(self, node: Node, request: Request, nodes: Mapping[str, Node]) -> list[Event]:
        """Ends the promise where a node of another class is given a leaf. The answers of an audit are only compared."""
        if request.only is not None or not self._is_other(node):
            return []
        if self.settings.mixed == "allow":
            why = f'{OTHER_BITS}, and coordinator.mixed = "allow" uses it'
        else:
            why = f"{OTHER_BITS}, and was used because too few of these were left"
        return self.end(f"{node.name} computes since then: {why}", request.adapter_version + 1, nodes)

    def end(self, reason: str, from_step: int, nodes: Mapping[str, Node]) -> list[Event]:
        """Takes the promise of the same bits back, from a step on; no node is a spare for its bits any more."""
        if self.promise is None or self.promise.kind != SAME_BITS:
            return []
        self.promise = Promise(TOLERANCE, reason, max(from_step, self.promise.from_step))
        for node in nodes.values():
            node.held_back = False
        return [NodeNews("", "promise", self.promise.sentence, promise=self.promise)]

    def release(self, nodes: Mapping[str, Node], absent: int, now: float, *, pending: bool) -> list[Event]:
        """Lets the spares work while too few other nodes are left for the run to go on. `pending`: leaves wait for one.

        Left is a node that takes part, or may soon: it loads, its worker is restarted, or it is one of the `absent`,
        whose supervisor is started again. They are waited for, `timing.start_timeout` seconds at most.
        """
        odd = [node for node in nodes.values() if node.canary and not node.gone and self._is_spare(node)]
        others = [node for node in nodes.values() if not node.gone and node not in odd]
        spares = [node for node in odd if node.connected]
        there, needed = sum(node.there for node in others), self.settings.min_nodes
        if there >= needed:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        enough = there >= needed or len(others) + absent >= needed
        waits = self._short_since is None or now - self._short_since <= self.settings.timing.start_timeout
        used = spares if there + len(spares) >= needed and not (enough and waits) else []
        used = [node for node in used if pending or not node.held_back]
        new = [node for node in used if node.held_back]
        for node in odd:
            node.held_back = node not in used  # again, where it was not needed after all
        return [news_of(node, "was a spare", "it is used, as too few other nodes are left") for node in new]

    def _is_spare(self, node: Node) -> bool:
        return self._is_other(node) and self.settings.mixed != "allow"

    def _is_other(self, node: Node) -> bool:
        return self.promise is not None and self.promise.kind == SAME_BITS and not _is_of(node, self.promise)


def _is_of(node: Node, promised: Promise) -> bool:
    return set(node.canary) == {promised.bit_class}
