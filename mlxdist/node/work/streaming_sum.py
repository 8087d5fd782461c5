"""The sum over a subtree while the gradient of its last leaf becomes final, from the top layer down.

The leaves left of the last one are summed already. Each prefix of the vector is added up in the tree's order as soon
as the last leaf's part of it is there, so it has the bits that it would have had in the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.vectors import Vector


@dataclass
class StreamingSum:
    """A sum of which the first `ready` elements of `vector` are final.

    `lefts`: the sums over `tree.left_of_last`, in its order.
    """

    manifest: Manifest
    lefts: Sequence[Vector]
    vector: Vector = field(init=False)
    ready: int = 0
    _next: int = 0  # the first tensor of the manifest that has not arrived
    _early: dict[str, Vector] = field(default_factory=dict)  # final parts that stand behind one that has not arrived

    def __post_init__(self) -> None:
        self.vector = np.empty(manifests.size(self.manifest), np.float32)

    def add(self, parts: Mapping[str, Vector]) -> None:
        """Adds parts of the last leaf's gradient, flat and final, by tensor name, and moves `ready`."""
        self._early.update(parts)
        start = stop = self.ready
        while self._next < len(self.manifest) and (name := self.manifest[self._next].name) in self._early:
            part = self._early.pop(name)
            self.vector[stop : stop + len(part)] = part
            stop, self._next = stop + len(part), self._next + 1
        here = self.vector[start:stop]
        for left in reversed(self.lefts):
            np.add(left[start:stop], here, out=here)
        self.ready = stop
