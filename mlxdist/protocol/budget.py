"""The memory that a node may use, and sentences about it. All sizes are bytes; a GB is 10^9 bytes."""

from mlxdist.protocol.leaves import Leaf

GB = 1e9
SMALL_MAC = 36 * 2**30  # up to this size the GPU gets two thirds of a Mac's memory, above it three quarters
WORKER_BYTES = 400 * 10**6  # of a worker beside MLX: the interpreter, its libraries, vectors on their way


def usable_bytes(total: int, system: str) -> int:
    """Returns the bytes of `total` that MLX may hold: the default limit of macOS for the GPU; elsewhere four fifths."""
    if system == "Darwin":
        return total * 2 // 3 if total <= SMALL_MAC else total * 3 // 4
    return total * 4 // 5


def limit_bytes(limit_gb: float, total: int, system: str) -> int:
    """Returns the limit of a node in bytes: `limit_gb`, at most `total`; for 0 what the machine allows."""
    return min(int(limit_gb * GB), total) if limit_gb else usable_bytes(total, system)


def format_bytes(count: float) -> str:
    """Returns '7.9 GB' or '53 MB'."""
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / 1e6:.3g} MB"


def describe_leaf(leaf: Leaf) -> str:
    """Returns 'a row of 900 tokens' or '4 rows of 900 tokens together'."""
    rows = len(leaf.rows)
    return f"a row of {leaf.tokens} tokens" if rows == 1 else f"{rows} rows of {leaf.tokens} tokens together"


def cure(leaf: Leaf, segment_size: int) -> str:
    """Returns what to change so that a leaf needs less memory; `segment_size` 0 is the whole graph."""
    changes = []
    if segment_size != 1:
        changes.append("memory.segment_size = 1")
    if leaf.items > 1:
        changes.append(f"batch.leaf_tokens below {leaf.tokens}")
    changes.append(f"batch.max_length below {max(len(row.ids) for row in leaf.rows)}")
    return f"less is needed with {' or '.join(changes)}, or with fewer programs open on this node"
