"""The rules that fix the bits of a step, the canary that compares nodes, and the promise that follows from it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import numpy as np

from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.leaves import Leaf, Row
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.messages import RunSpec
from mlxdist.protocol.vectors import BLOCK_ELEMENTS, Vector

# Raised with every change that gives other bits for the same run; the changes of each version, as clauses.
SEMANTICS_VERSION = 2
CHANGES: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        2: (
            "the gated-delta layers of hybrid models are computed in chunks of tokens",
            "the rows of a leaf are packed into one and counted by tokens",
            "a pair computes its prompt once",
        )
    }
)

# Set in a worker's environment before it imports mlx. One thread: OpenBLAS gives other bits for another thread count.
# TF32: an M5 would compute float32 matmuls with 10 bits of mantissa.
WORKER_ENVIRONMENT = {"MLX_ENABLE_TF32": "0", "OPENBLAS_NUM_THREADS": "1"}

CANARY_TOKENS = 80  # more than a chunk of a gated-delta layer, so that a state is handed on
CANARY_TIMES = 3

SAME_BITS, TOLERANCE = "same bits", "tolerance"  # what a run promises


def numerics_id(spec: RunSpec) -> str:
    """Returns a SHA-256 over all that fixes the bits: the spec with its `fixed` values, and the rules of this version.

    All but the packing, on which the nodes agree later.

    Both sides compute it, each from its own constants. A worker whose result differs cannot take part in the run.
    """
    rules = {
        "semantics": SEMANTICS_VERSION,
        "tree": "largest power of two below",
        "wire": "float32 little-endian",
        "block_elements": BLOCK_ELEMENTS,
        "leaves": "ceil(total / leaf_tokens), longest item into the least filled",
        "dropout_key": "sha256(seed:step:leaf)[:8]",
        "row_reduction": "math.fsum in row order",
        "optimizer": "adamw bias-corrected",
        "environment": WORKER_ENVIRONMENT,
    }
    spec = msgspec.structs.replace(spec, numerics_id="", model="", packing="", largest_leaf=0)
    document = {"rules": rules, "spec": msgspec.to_builtins(spec)}
    return hashlib.sha256(msgspec.json.encode(document, order="deterministic")).hexdigest()


def dropout_key(seed: int, step: int, leaf: int) -> int:
    """Returns the seed of the dropout masks of a leaf: the first 8 bytes of SHA-256 of "seed:step:leaf"."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{leaf}".encode()).digest()[:8], "big")


def canary_leaf(vocab_size: int, max_length: int) -> Leaf:
    """Returns two rows of random tokens, the second one shorter."""
    random = np.random.Generator(np.random.PCG64(8))
    length = min(CANARY_TOKENS, max_length)
    rows = []
    for row_id, tokens in enumerate((length, max(length // 2, 2))):
        ids = random.integers(0, vocab_size, tokens, dtype=np.int32)
        targets = np.ones(tokens, np.uint8)
        targets[0] = 0
        rows.append(Row(row_id, ids, targets))
    return Leaf(0, tuple(rows))


def canary_adapter(manifest: Manifest) -> Vector:
    """Returns a small adapter, the same on every machine, not zero, so that the gradient reaches both A and B."""
    random = np.random.Generator(np.random.PCG64(9))
    return (random.random(manifests.size(manifest), dtype=np.float32) - np.float32(0.5)) * np.float32(0.02)


@dataclass(frozen=True, slots=True)
class Promise:
    """The promise about the bits of the adapter, from a step on: "same bits" or "tolerance", and the reason.

    `bit_class`: the digest of the canary on the nodes of a run of the same bits; else empty.
    """

    kind: str
    reason: str
    from_step: int = 1
    bit_class: str = ""

    @property
    def sentence(self) -> str:
        """The promise for a person."""
        since = f", from step {self.from_step:,} on" if self.from_step > 1 else ""
        return f"{self.kind}{since}: {self.reason}"


def promise(canaries: Mapping[str, tuple[str, ...]], from_step: int = 1) -> Promise:
    """Returns the promise, from the digests of the canary answers by node, in the order of getting ready."""
    unsteady = [name for name, digests in canaries.items() if len(set(digests)) != 1]
    if unsteady:
        return Promise(
            TOLERANCE,
            f"{', '.join(unsteady)} computed a test batch three times, and not always with the same last bits",
            from_step,
        )
    classes: dict[str, list[str]] = {}
    for name, digests in canaries.items():
        classes.setdefault(digests[0], []).append(name)
    groups = " | ".join(", ".join(names) for names in classes.values())
    if len(classes) > 1:
        what = f"the nodes computed a test batch with different last bits ({groups})"
        return Promise(TOLERANCE, f"{what}, so the adapter's depend on which of them computes which rows", from_step)
    what = f"{groups or 'no node'} computed a test batch with the same bits each time"
    return Promise(
        SAME_BITS,
        f"{what}, so the adapter does not depend on which node computes which rows",
        from_step,
        next(iter(classes), ""),
    )
