"""The jobs of a worker, and the results of a job."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from mlxdist.protocol import messages as m
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Buffer

# Inputs of a leaf's loss, one number per row: the labels, and the columns of MethodSpec.reference (NaN: unknown yet).
RowInputs = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class LoadModel:
    """The job to load the model of a run."""

    spec: m.RunSpec


@dataclass(frozen=True)
class FetchModel:
    """The job to see what is missing here of the model's files. None: the coordinator has no copy."""

    files: tuple[m.ModelFile, ...]


@dataclass(frozen=True)
class TakeBlock:
    """The job to take one block of one of the model's files."""

    block: m.FileBlock
    payload: memoryview


@dataclass(frozen=True)
class ComputeCanary:
    """The job to compute the canary leaf."""


@dataclass(frozen=True)
class ComputeAssignment:
    """The job to compute one assignment, of which everything has arrived."""

    assignment: m.Assignment
    leaves: tuple[Leaf, ...]
    row_inputs: tuple[RowInputs, ...]  # by leaf
    adapter: Vector
    reference: Vector | None  # the reference's adapter; None: the base
    row_bytes: int = 0  # that its rows take


@dataclass(frozen=True)
class Finish:
    """The job to end: the coordinator has shut down, or rejected this node."""

    reason: str
    refused: bool


Job = LoadModel | FetchModel | TakeBlock | ComputeCanary | ComputeAssignment | Finish


@dataclass(frozen=True)
class Partial:
    """The sum over one subtree of an assignment. One that grows is a result again each time, until it is whole."""

    assignment: m.Assignment
    span: Span
    vector: Vector
    ready: int | None = None  # elements, from the first on, that are final; None: all, and the partial counts


Result = tuple[m.Message, Buffer] | Partial  # of a job: a message with its payload, or a partial
JobResults = Generator[Result, None, None]
