"""Every message of the wire, frozen and typed; the comment above each group gives its direction.

Two connections per node. CONTROL belongs to the supervisor, DATA to the worker. A message carries the `SessionId` that
it belongs to, so that nothing from an earlier coordinator, or from an earlier worker of the node, counts.
"""

from typing import Annotated, Union

import msgspec
from msgspec import Meta

from mlxdist.protocol.limits import (
    Amount,
    Beat,
    Digests,
    Facts,
    Fixed,
    Heat,
    Index,
    Lines,
    ModelName,
    Name,
    Names,
    Pid,
    Port,
    RowInputs,
    Rows,
    Scalars,
    Seconds,
    Secret,
    Seed,
    Sentence,
    Shape,
    Time,
    Value,
    Word,
)

PROTOCOL_VERSION = 1


class SessionId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One worker's time with one coordinator: the run, the coordinator's incarnation, 128 random bits in hex.

    Only the coordinator and that node know it, so it also shows whose a message is.
    """

    run: Annotated[str, Meta(max_length=300)]
    incarnation: Time
    number: Secret


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="type"):
    """The base of all messages: a msgpack map with its type's name, unknown fields refused."""


class RunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run as a worker must know it: the model, its LoRA layers, and all that fixes the bits of an answer."""

    model: ModelName
    method: Word
    seed: Seed
    max_length: Index
    lora_rank: Index
    lora_scale: Value
    lora_dropout: Value
    rank_scaling: Word
    target_modules: Names
    num_layers: Index
    segment_size: Index  # layers per segment; 0 = the whole graph
    head_chunk: Index  # positions of the LM head per chunk
    grad_checkpoint: bool = False  # mlx-lm's checkpointing, on the whole graph
    packing: Word = "packed"  # the mode of protocol/packing.py in which all nodes compute, or the best to be tried
    largest_leaf: Index = 0  # tokens of the largest leaf, at which the packing is checked
    chunked: bool = False  # gated-delta layers run in chunks of tokens, not token by token
    fixed: Fixed = {}  # what else fixes the bits: batch, order, optimizer
    numerics_id: Name = ""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of the adapter: its name in the model and its shape."""

    name: Annotated[str, Meta(max_length=256)]
    shape: Shape


class ModelFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One file of the run's model, as its coordinator has it: the name, the bytes, their SHA-256 in hex."""

    name: Name
    size: Amount
    sha256: Name


# ---- CONTROL: supervisor -> coordinator


class Register(Message, frozen=True):
    """A supervisor asks to take part. `worker` is the pid of a worker that it already has, else 0."""

    protocol: Index
    name: Name
    worker: Pid
    host: Facts


class Heartbeat(Message, frozen=True):
    """The supervisor is there, and so is the worker with this pid; 0: it has none.

    `serving`: the worker has taken up this session, so what it does not say is lost on the way. The rest is for the
    person who watches the run.
    """

    session: SessionId
    worker_pid: Pid
    serving: bool = False
    swap_bytes: Amount = -1  # of this host's swap that are in use; -1: unknown
    heat: Heat = ""


class WorkerExit(Message, frozen=True):
    """The worker ended: the cause as a sentence, and the last lines that it printed."""

    session: SessionId
    cause: Sentence
    tail: Lines


class Log(Message, frozen=True):
    """Lines that the worker printed."""

    session: SessionId
    lines: Lines


class Leave(Message, frozen=True):
    """The node was told that the run is over, and is gone or waits for the next coordinator."""

    session: SessionId


# ---- CONTROL: coordinator -> supervisor


class Accept(Message, frozen=True):
    """The node takes part: start a worker with this environment, or hand the session to the one there is."""

    session: SessionId
    data_port: Port
    heartbeat_seconds: Beat
    environment: Facts
    restart_seconds: Seconds  # before a worker that ended is started again; doubled each time
    memory_limit_bytes: Amount = 0  # for mlx; 0: what the machine allows


class Restart(Message, frozen=True):
    """An order to end the worker with this pid, which is stuck or sends nonsense; the next one gets a new session."""

    session: SessionId
    worker_pid: Pid


class HeartbeatAck(Message, frozen=True):
    """The answer to a heartbeat: the coordinator is there. The rest is for the person at the node; 0: not measured."""

    session: SessionId
    tokens_per_second: Seconds = 0.0  # of this node
    share: Seconds = 0.0  # of a step that it computes, in [0, 1], by the measured speeds
    peak_bytes: Amount = 0  # of mlx's memory on this node


# ---- DATA: worker -> coordinator


class Hello(Message, frozen=True):
    """A worker is there, with the packages that it would compute with, by name and version."""

    session: SessionId
    versions: Facts


class Pong(Message, frozen=True):
    """The answer to a Ping: the data connection carries messages in both directions."""

    session: SessionId


class Progress(Message, frozen=True):
    """A sentence for a person about what the worker is doing."""

    session: SessionId
    message: Sentence


class ModelWanted(Message, frozen=True):
    """The run's model is not on this node's host: which files does it have?"""

    session: SessionId


class BlockWanted(Message, frozen=True):
    """A request for one block of one of the model's files, by their places; a few may be open at once."""

    session: SessionId
    file: Index
    block: Index


class BlockTaken(Message, frozen=True):
    """The receipt of a block that has come. Without it no more are sent: a node that does not read gets few."""

    session: SessionId
    receipt: Secret


class ModelHere(Message, frozen=True):
    """All files of the model are on this node's host now; the worker loads them."""

    session: SessionId


class Loaded(Message, frozen=True):
    """The model is loaded, its packing checked, and it has its LoRA layers, whose tensors the manifest names."""

    session: SessionId
    model_hash: Name
    manifest: Annotated[tuple[TensorSpec, ...], Meta(max_length=100_000)]
    packing: Word = "packed"  # the mode of protocol/packing.py that was asked for, or a slower one


class CanaryAnswer(Message, frozen=True):
    """SHA-256 of the canary leaf's gradient and row outputs, computed three times."""

    session: SessionId
    digests: Digests


class LeafAnswer(Message, frozen=True):
    """One leaf is computed. Payload: its row outputs, float32 [rows or pairs, columns]."""

    session: SessionId
    step: Index
    attempt: Index
    adapter_version: Index
    leaf: Index
    columns: Amount
    seconds: Seconds
    peak_bytes: Amount


class Fault(Message, frozen=True):
    """A failure of the worker. `kind`: config | nonfinite | error."""

    session: SessionId
    kind: Word
    message: Sentence
    step: Index = -1
    attempt: Index = -1
    leaf: Index = -1


# ---- DATA: coordinator -> worker


class Welcome(Message, frozen=True):
    """The run that the worker now serves."""

    session: SessionId
    spec: RunSpec


class ModelFiles(Message, frozen=True):
    """The files of the run's model. None: the coordinator has no copy either."""

    session: SessionId
    files: Annotated[tuple[ModelFile, ...], Meta(max_length=4096)]


class FileBlock(Message, frozen=True):
    """One block of one of the model's files. Payload: its bytes, 1 MiB, the last one shorter; `digest`: their SHA-256.

    `receipt`: random bits that come back when it was read.
    """

    session: SessionId
    file: Index
    block: Index
    receipt: Secret
    digest: Name


class Ping(Message, frozen=True):
    """A question on a data connection that has been silent for a heartbeat's time: is it still there?"""

    session: SessionId


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
    verb: Word
    step: Index
    attempt: Index
    adapter_version: Index
    start: Index
    stop: Index
    total: Index
    loss: Word
    parameters: Word
    scalars: Scalars


class Cancel(Message, frozen=True):
    """The answers of this attempt are not needed any more: stop at the next leaf. The worker repeats it once it has."""

    session: SessionId
    attempt: Index


class LeafRows(Message, frozen=True):
    """The rows of one leaf. Payload: all ids as int32, then all target masks as one byte each, in row order.

    `row_inputs` holds per-row inputs of the loss (reference log-probs, labels), one per row or pair.
    """

    session: SessionId
    step: Index
    attempt: Index
    leaf: Index
    branches: Index  # rows of one item
    row_ids: Rows
    lengths: Rows
    row_inputs: RowInputs = {}


# ---- both ways, DATA: vectors, in blocks of 1 MiB under credits


class VectorOffer(Message, frozen=True):
    """A vector waits at its sender for credits. `kind`: adapter | reference (down) | partial (up, over
    leaves [start, stop)).

    `slice_start` and `slice_stop` say which elements it covers: today always the whole vector.
    """

    session: SessionId
    stream: Index
    kind: Word
    adapter_version: Index
    elements: Amount
    step: Index = -1
    attempt: Index = -1
    start: Index = -1
    stop: Index = -1
    slice_start: Amount = 0
    slice_stop: Amount = 0


class VectorBlock(Message, frozen=True):
    """One block. Payload: little-endian float32, 1 MiB, the last one shorter."""

    session: SessionId
    stream: Index
    index: Index


class VectorEnd(Message, frozen=True):
    """All blocks were sent; the SHA-256 of the whole vector.

    `grew`: seconds at the sender from the offer to where the vector was whole, which are not the link's.
    """

    session: SessionId
    stream: Index
    digest: Name
    grew: Seconds = 0.0


class Credit(Message, frozen=True):
    """The receiver has room: blocks with an index below `upto` may be sent."""

    session: SessionId
    stream: Index
    upto: Index


class Received(Message, frozen=True):
    """A vector has ended. Not `whole`: its hash differs, please offer it again; else it may be forgotten."""

    session: SessionId
    stream: Index
    whole: bool


# ---- both ways, either connection


class Stale(Message, frozen=True):
    """A message belonged to another incarnation, session or step, and changed nothing. `what`: its name, or the reason.

    `over`: the whole session is, and all of it may be dropped. `stream`: the vector that need not be sent; 0: none.
    """

    session: SessionId
    what: Sentence
    stream: Index = 0
    over: bool = False


class Reject(Message, frozen=True):
    """The node cannot take part, with the reason. It does not try again."""

    reason: Sentence


class Shutdown(Message, frozen=True):
    """The run is over for this node: a launched one leaves, one started by hand waits for the next coordinator."""

    session: SessionId
    reason: Sentence


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
    Pong,
    Progress,
    ModelWanted,
    BlockWanted,
    BlockTaken,
    ModelHere,
    Loaded,
    CanaryAnswer,
    LeafAnswer,
    Fault,
    Welcome,
    ModelFiles,
    FileBlock,
    Ping,
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
