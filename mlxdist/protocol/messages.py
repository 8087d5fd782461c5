"""Every message of the wire, frozen and typed; the comment above each group gives its direction.

Two connections per node. CONTROL belongs to the supervisor, DATA to the worker. A message carries the `SessionId` that
it belongs to, so that nothing from an earlier coordinator, or from an earlier worker of the node, counts.
"""

from typing import Union

import msgspec

PROTOCOL_VERSION = 1


class SessionId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One worker's time with one coordinator: the run, the coordinator's incarnation, a number that grows."""

    run: str
    incarnation: int
    number: int


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="type"):
    """The base of all messages: a msgpack map with its type's name, unknown fields refused."""


class RunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run as a worker must know it: the model, its LoRA layers, and all that fixes the bits of an answer."""

    model: str
    method: str
    seed: int
    max_length: int
    lora_rank: int
    lora_scale: float
    lora_dropout: float
    rank_scaling: str
    target_modules: tuple[str, ...]
    num_layers: int
    segment_size: int  # layers per segment; 0 = the whole graph
    head_chunk: int  # positions of the LM head per chunk
    grad_checkpoint: bool = False  # mlx-lm's checkpointing, on the whole graph
    fixed: dict[str, str | int | float] = {}  # what else fixes the bits: batch, order, optimizer
    numerics_id: str = ""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of the adapter: its name in the model and its shape."""

    name: str
    shape: tuple[int, ...]


# ---- CONTROL: supervisor -> coordinator


class Register(Message, frozen=True):
    """A supervisor asks to take part. `worker` is the pid of a worker that it already has, else 0."""

    protocol: int
    name: str
    worker: int
    host: dict[str, str]


class Heartbeat(Message, frozen=True):
    """The supervisor is there, and so is the worker with this pid; 0: it has none."""

    session: SessionId
    worker_pid: int


class WorkerExit(Message, frozen=True):
    """The worker ended: the cause as a sentence, and the last lines that it printed."""

    session: SessionId
    cause: str
    tail: tuple[str, ...]


class Log(Message, frozen=True):
    """Lines that the worker printed."""

    session: SessionId
    lines: tuple[str, ...]


class Leave(Message, frozen=True):
    """The node was told that the run is over, and is gone or waits for the next coordinator."""

    session: SessionId


# ---- CONTROL: coordinator -> supervisor


class Accept(Message, frozen=True):
    """The node takes part: start a worker with this environment, or hand the session to the one there is."""

    session: SessionId
    data_port: int
    beat_seconds: float
    environment: dict[str, str]
    restart_seconds: float  # before a worker that ended is started again; doubled each time
    memory_limit_bytes: int = 0  # for mlx; 0: what the machine allows


class Restart(Message, frozen=True):
    """An order to end the worker with this pid, which is stuck or sends nonsense; the next one gets a new session."""

    session: SessionId
    worker_pid: int


class HeartbeatAck(Message, frozen=True):
    """The answer to a beat: the coordinator is there."""

    session: SessionId


# ---- DATA: worker -> coordinator


class Hello(Message, frozen=True):
    """A worker is there, with the packages that it would compute with, by name and version."""

    session: SessionId
    versions: dict[str, str]


class Progress(Message, frozen=True):
    """A sentence for a person about what the worker is doing."""

    session: SessionId
    message: str


class Loaded(Message, frozen=True):
    """The model is loaded and has its LoRA layers, whose tensors the manifest names."""

    session: SessionId
    model_hash: str
    manifest: tuple[TensorSpec, ...]


class CanaryAnswer(Message, frozen=True):
    """SHA-256 of the canary leaf's gradient and row outputs, computed three times."""

    session: SessionId
    digests: tuple[str, ...]


class LeafAnswer(Message, frozen=True):
    """One leaf is computed. Payload: its row outputs, float32 [rows or pairs, columns]."""

    session: SessionId
    step: int
    attempt: int
    adapter_version: int
    leaf: int
    columns: int
    seconds: float
    peak_bytes: int


class Fault(Message, frozen=True):
    """A failure of the worker. `kind`: config | nonfinite | error."""

    session: SessionId
    kind: str
    message: str
    step: int = -1
    attempt: int = -1
    leaf: int = -1


# ---- DATA: coordinator -> worker


class Welcome(Message, frozen=True):
    """The run that the worker now serves."""

    session: SessionId
    spec: RunSpec


class Canary(Message, frozen=True):
    """A request to compute the canary leaf."""

    session: SessionId


class Assignment(Message, frozen=True):
    """Work: the leaves [start, stop) of a step that has `total` of them; their rows follow, one LeafRows each.

    `verb`: gradient (one partial per whole subtree comes back) | score (row outputs only).
    `parameters`: what to score with, current | reference | current+reference, one column each; the reference is the
    base unless its adapter was sent.
    """

    session: SessionId
    verb: str
    step: int
    attempt: int
    adapter_version: int
    start: int
    stop: int
    total: int
    loss: str
    parameters: str
    scalars: dict[str, float]


class Cancel(Message, frozen=True):
    """The answers of this attempt are not needed any more: stop at the next leaf. The worker repeats it once it has."""

    session: SessionId
    attempt: int


class LeafRows(Message, frozen=True):
    """The rows of one leaf. Payload: all ids as int32, then all target masks as one byte each, in row order.

    `row_inputs` holds per-row inputs of the loss (reference log-probs, labels), one per row or pair.
    """

    session: SessionId
    step: int
    attempt: int
    leaf: int
    widths: tuple[int, ...]
    row_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    row_inputs: dict[str, tuple[float, ...]] = {}


# ---- both ways, DATA: vectors, in blocks of 1 MiB under credits


class VectorOffer(Message, frozen=True):
    """A vector waits at its sender for credits. `kind`: adapter | reference (down) | partial (up, over
    leaves [start, stop)).

    `slice_start` and `slice_stop` say which elements it covers: today always the whole vector.
    """

    session: SessionId
    stream: int
    kind: str
    adapter_version: int
    elements: int
    step: int = -1
    attempt: int = -1
    start: int = -1
    stop: int = -1
    slice_start: int = 0
    slice_stop: int = 0


class VectorBlock(Message, frozen=True):
    """One block. Payload: little-endian float32, 1 MiB, the last one shorter."""

    session: SessionId
    stream: int
    index: int


class VectorEnd(Message, frozen=True):
    """All blocks were sent; the SHA-256 of the whole vector.

    `grew`: seconds at the sender from the offer to where the vector was whole, which are not the link's.
    """

    session: SessionId
    stream: int
    digest: str
    grew: float = 0.0


class Credit(Message, frozen=True):
    """The receiver has room: blocks with an index below `upto` may be sent."""

    session: SessionId
    stream: int
    upto: int


class Received(Message, frozen=True):
    """A vector has ended. Not `whole`: its hash differs, please offer it again; else it may be forgotten."""

    session: SessionId
    stream: int
    whole: bool


# ---- both ways, either connection


class Stale(Message, frozen=True):
    """A message belonged to another incarnation, session or step, and changed nothing. `what`: its name, or the reason.

    `over`: the whole session is, and all of it may be dropped. `stream`: the vector that need not be sent; 0: none.
    """

    session: SessionId
    what: str
    stream: int = 0
    over: bool = False


class Reject(Message, frozen=True):
    """The node cannot take part, with the reason. It does not try again."""

    reason: str


class Shutdown(Message, frozen=True):
    """The run is over for this node: a launched one leaves, one started by hand waits for the next coordinator."""

    session: SessionId
    reason: str


AnyMessage = Union[  # noqa: UP007 - msgspec reads the union at run time
    Register,
    Heartbeat,
    WorkerExit,
    Log,
    Leave,
    Accept,
    Restart,
    HeartbeatAck,
    Hello,
    Progress,
    Loaded,
    CanaryAnswer,
    LeafAnswer,
    Fault,
    Welcome,
    Canary,
    Assignment,
    Cancel,
    LeafRows,
    VectorOffer,
    VectorBlock,
    VectorEnd,
    Credit,
    Received,
    Stale,
    Reject,
    Shutdown,
]
