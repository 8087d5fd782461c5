"""How much memory a node may use, and whether a run fits into it. Bytes everywhere; a GB is 10^9."""

from mlxdist.protocol.leaves import Leaf

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
