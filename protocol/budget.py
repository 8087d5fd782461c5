"""How much memory a node may use, and whether a run fits into it. Bytes everywhere; a GB is 10^9."""

from dataclasses import dataclass

from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.memory import LeafSize, ModelShape, Settings, largest_length

GB = 1e9
SMALL_MAC = 36 * 2**30  # up to here the GPU gets two thirds of a Mac's memory, above three quarters
WORKER_BYTES = 400 * 10**6  # the interpreter, its libraries and the vectors on their way


def usable_bytes(total: int, system: str) -> int:
    """What a machine with `total` bytes of memory lets mlx hold: macOS's default for the GPU, elsewhere four fifths."""
    if system == "Darwin":
        return total * 2 // 3 if total <= SMALL_MAC else total * 3 // 4
    return total * 4 // 5


def limit_bytes(limit_gb: float, total: int, system: str) -> int:
    """A node's limit: `memory_limit_gb` but no more than the machine has, or what the machine allows where it is 0."""
    return min(int(limit_gb * GB), total) if limit_gb else usable_bytes(total, system)


@dataclass(frozen=True, slots=True)
class Need:
    """What a node must hold for a run with settings that are fixed."""

    shape: ModelShape
    leaf: LeafSize  # the largest of the run
    settings: Settings
    model: int  # bytes of parameters and adapter

    @property
    def total(self) -> int:
        """Bytes of the model and of the largest leaf's backward."""
        return self.model + self.settings.peak + WORKER_BYTES

    @property
    def rows(self) -> str:
        """What a leaf holds: 'a row', '4 pairs'."""
        unit = "pair" if self.leaf.batches == 2 else "row"
        return f"a {unit}" if self.leaf.rows == 1 else f"{self.leaf.rows} {unit}s"

    @property
    def doubt(self) -> str | None:
        """What to say where the prediction rests on nothing measured."""
        if not self.shape.unmeasured:
            return None
        return (
            f"the memory of a {self.shape.unmeasured} is predicted as a llama's of the same sizes, since none was "
            "measured: train.report_memory = true shows what a step takes"
        )

    def longest(self, limit: int) -> int:
        """The largest `batch.max_length` in tokens whose leaf fits under `limit`, whatever the settings; 0 for none."""
        positions = largest_length(self.shape, self.leaf, limit - self.model - WORKER_BYTES)
        return positions + 1 if positions else 0

    def refusal(self, limit: int) -> str | None:
        """Why a node that may use `limit` bytes cannot take part, and what would help; None where it fits."""
        if self.total <= limit:
            return None
        return (
            f"may use {said_bytes(limit)}, and the run needs {said_bytes(self.total)}: {said_bytes(self.model)} for "
            f"the model, {said_bytes(WORKER_BYTES)} for its process, {said_bytes(self.settings.peak)} for "
            f"{self.rows} of {self.leaf.length + 1} tokens. {self._cure(limit)}"
        )

    def _cure(self, limit: int) -> str:
        longest = self.longest(limit)
        if not longest:
            return "The model does not fit: take a smaller one, or one with fewer bits."
        cures = []
        if longest > self.leaf.length:
            cures.append('memory.segment_size = "auto" and memory.head_chunk = "auto" would make it fit')
        else:
            cures.append(f"batch.max_length = {longest} would fit")
        if self.leaf.rows > 1:
            cures.append("a smaller batch.micro_size needs less")
        return "; ".join(cures) + "."


def said_bytes(count: float) -> str:
    """'7.9 GB', '53 MB'."""
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / 1e6:.3g} MB"


def rows_of(leaf: Leaf) -> str:
    """'a row of 900 tokens', '4 rows of 900 tokens'."""
    rows, width = len(leaf.rows), max(leaf.widths)
    return f"a row of {width} tokens" if rows == 1 else f"{rows} rows of {width} tokens"


def cure(leaf: Leaf, segment_size: int) -> str:
    """What to change so that a leaf needs less memory; `segment_size` 0 is the whole graph."""
    changes = []
    if segment_size != 1:
        changes.append("memory.segment_size = 1")
    if len(leaf.rows) > len(leaf.widths):
        changes.append("batch.micro_size = 1")
    changes.append(f"batch.max_length below {max(leaf.widths)}")
    return f"less is needed with {' or '.join(changes)}, or with fewer programs open on this node"
