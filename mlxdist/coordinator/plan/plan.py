"""`mlxdist plan`: the memory, time and network traffic of a run, before anything is launched.

It reads the model's config.json, the headers of its files, and the rows as a run reads them, but no parameters.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean

from rich.console import Console

from mlxdist.coordinator.batch.batch_order import steps, total_steps
from mlxdist.coordinator.batch.micro_batches import fill
from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.config.hosts import Hosts, NodeSpec, is_local
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.data.load import read
from mlxdist.coordinator.memory.fit import (
    Machine,
    free_bytes,
    memory_need,
    node_limits,
    requested,
    resolved_leaf_tokens,
    this_machine,
    with_settings,
)
from mlxdist.coordinator.memory.measured import MeasuredModel
from mlxdist.coordinator.memory.model_files import ModelFiles, files_of, find_model
from mlxdist.coordinator.memory.model_tree import ModelTree, read_tree
from mlxdist.coordinator.memory.node_memory import MemoryNeed
from mlxdist.coordinator.memory.prediction import ADAPTER_BYTES, WHOLE_GRAPH, choose
from mlxdist.coordinator.memory.probes import MachineKind, ProbeStore, remembered
from mlxdist.coordinator.plan.estimates import (
    Traffic,
    busy_nodes,
    measured_speed,
    spread,
    step_seconds,
    traffic,
    useful_nodes,
)
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.protocol.budget import WORKER_BYTES
from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.leaves import item_tokens
from mlxdist.protocol.tree import subtrees

SHOWN_SEGMENT_SIZES = (WHOLE_GRAPH, 8, 4, 2, 1)  # in the table of memory
SHOWN_LEAF_TOKENS = (64, 128, 256, 512, 1024)  # in the table of leaves
STEPS_LOOKED_AT = 50  # whose mean gives the tokens of a step
LOOPBACK = 1.9e9  # bytes per second between processes of one machine, measured with blocks of 1 MiB
AS_HERE = " as this one, which those elsewhere count as"
EFFICIENCY = 0.9  # of the nominal rate of a link


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line."""

    tokens_per_second: float | None = None  # of one node, None: as measured by an earlier run
    link_gbit: float = 1.0  # of the coordinator's network, in Gbit/s
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class SegmentMemory:
    """The memory of a node at one segment size."""

    segment_size: int  # layers; 0 = the whole graph
    head_chunk: int  # positions
    total: int  # bytes, with the model


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node: its memory, and why it cannot take part in the run."""

    name: str
    limit: int  # bytes that it may use; 0 = not known
    free: int  # bytes of these that are free now
    refusal: str | None
    longest: int | None  # tokens: the largest max_length that fits, when the run does not


@dataclass(frozen=True, slots=True)
class LeafChoice:
    """A usual step with another value of batch.leaf_tokens, on equally fast nodes."""

    leaf_tokens: int
    leaves: int
    busy_nodes: int  # that get leaves
    slowest: int  # tokens of the node that computes most
    partials: int  # vectors that come back


@dataclass(frozen=True)
class RunPlan:
    """Everything that `mlxdist plan` shows."""

    need: MemoryNeed
    total: int  # bytes that a node needs with the settings of the next two lines
    segment_size: int | str
    head_chunk: int | str
    table: tuple[SegmentMemory, ...]
    nodes: tuple[NodePlan, ...]
    batch_size: int
    leaf_tokens: int
    leaves: int  # of a full step
    fill: float  # tokens of a usual leaf, relative to leaf_tokens
    choices: tuple[LeafChoice, ...]  # the values of leaf_tokens that are worth comparing
    busy_nodes: int  # that get any of these leaves, when all nodes are equally fast
    tokens: float  # of a step
    sent: Traffic
    tokens_per_second: float | None  # of one node
    speed_from: str
    step_seconds: float | None
    steps: int | None
    hours: float | None
    useful_nodes: int | None  # with more nodes a step is hardly shorter
    memory_from: str = ""  # the origin of the prediction of memory
    targets: str = ""  # the sentence on targets that reach a part of the layers, or every expert
    slow: str = ""  # the sentence on layers that are trained token by token


def show_plan(config: RunConfig, hosts: Hosts, options: PlanOptions, console: Console) -> int:
    """Shows the plan of a run on these hosts. Returns the exit code: 0, or 2 when a node cannot hold the run.

    Raises ConfigError or DataError as a launch would.
    """
    from mlxdist.coordinator.plan.view import print_plan

    files = model_files(config.model)
    with console.status("reading the data"):
        dataset = read(config, progress=lambda message, share: None)
    rows = [each for each in (dataset.train, dataset.valid) if each is not None]
    folder = find_model(config.model)
    assert folder is not None, "its files were read"
    tree = read_tree(folder, config.model, config.lora)
    measured = remembered(config, files, {MachineKind.here()}, ProbeStore.of_user())
    made = make_plan(config, planned_nodes(hosts), rows, files, this_machine(), options, tree, measured)
    if options.as_json:
        console.out(json.dumps(asdict(made), indent=2), highlight=False)
    else:
        print_plan(made, console)
    return 2 if any(node.refusal for node in made.nodes) else 0


def planned_nodes(hosts: Hosts) -> tuple[NodeSpec, ...]:
    """Returns the nodes of the hosts file; when all of them join by hand, as many unknown ones as the run waits for."""
    numbers = range(1, hosts.coordinator.min_nodes + 1)
    return hosts.nodes or tuple(NodeSpec(name=f"node-{number}", host="elsewhere") for number in numbers)


def model_files(model: str) -> ModelFiles:
    """Returns the model's files on this machine. Raises ConfigError when there are none."""
    files = files_of(model)
    if files is None or not files.tensors:
        missing = f"it is not on this machine; fetch it first: hf download {model}"
        if Path(model).is_dir():
            missing = "the folder lacks config.json or model*.safetensors; copy the model again"
        raise ConfigError(f'model = "{model}": {missing}')
    return files


def make_plan(
    config: RunConfig,
    nodes: Sequence[NodeSpec],
    rows: Sequence[Rows],
    files: ModelFiles,
    machine: Machine,
    options: PlanOptions,
    tree: ModelTree | None = None,
    measured: Sequence[MeasuredModel] = (),
) -> RunPlan:
    """Returns the plan of a run whose training rows are `rows[0]`; `tree` and `measured`: see `memory_need`.

    Raises ConfigError for a model of unknown sizes.
    """
    config = resolved_leaf_tokens(config, rows[0])
    limits = node_limits(nodes, machine)
    try:
        need = memory_need(config, files, rows, free_bytes(nodes, limits), tree, measured)
    except KeyError as error:
        raise ConfigError(f'model = "{config.model}": its memory cannot be predicted: {error.args[0]}') from error
    data, vector = rows[0], ADAPTER_BYTES * need.leaf.adapter
    leaf_tokens = config.batch.leaf_tokens
    assert leaf_tokens != "auto"
    looked_at = [items for items in islice(_items(config, data), STEPS_LOOKED_AT) if items]
    tokens = fmean(sum(items) for items in looked_at)
    usual = min(looked_at, key=lambda items: abs(sum(items) - tokens))
    typical = leaf_costs(usual, leaf_tokens)
    leaves = len(typical)
    rate = LOOPBACK if all(is_local(node.host) for node in nodes) else options.link_gbit * 1e9 / 8 * EFFICIENCY
    speed, source = _speed(config, options)
    sent = traffic(typical, len(nodes), vector, rate, speed or 1.0)
    seconds = step_seconds(typical, len(nodes), speed, sent) if speed else None
    total = total_steps(config.train, len(data), config.batch, config.method)
    resolved = with_settings(config, need.settings).memory
    return RunPlan(
        need=need,
        total=need.total,
        segment_size=resolved.segment_size,
        head_chunk=resolved.head_chunk,
        table=tuple(_table(config, need)),
        nodes=tuple(_node(node.name, need, *limits.get(node.name, (0, 0))) for node in nodes),
        batch_size=config.batch.size,
        leaf_tokens=leaf_tokens,
        leaves=leaves,
        fill=fmean(typical) / leaf_tokens,
        choices=tuple(_choices(usual, leaf_tokens, len(nodes))),
        busy_nodes=busy_nodes(leaves, len(nodes)),
        tokens=tokens,
        sent=sent,
        tokens_per_second=speed,
        speed_from=source,
        step_seconds=seconds,
        steps=total,
        hours=seconds * total / 3600 if seconds is not None and total is not None else config.train.max_hours,
        useful_nodes=useful_nodes(typical, speed, vector, rate) if speed else None,
        memory_from=need.source + (AS_HERE if measured and not all(is_local(node.host) for node in nodes) else ""),
        targets=tree.note if tree is not None else "",
        slow=tree.slow if tree is not None else "",
    )


def _items(config: RunConfig, data: Rows) -> Iterator[list[int]]:
    """Yields, step by step, the tokens of each row or pair."""
    for step in steps(data.lengths.tolist(), config.batch, config.method):
        yield [item_tokens(data.rows(row)) for row in step.rows]


def leaf_costs(items: Sequence[int], leaf_tokens: int) -> list[float]:
    """Returns the tokens of each leaf of a step."""
    return [float(sum(items[place] for place in places)) for places in fill(items, leaf_tokens)]


def _choices(items: Sequence[int], leaf_tokens: int, nodes: int) -> Iterator[LeafChoice]:
    """Yields the step with values of leaf_tokens up to the whole step, the run's own and one leaf a node among them."""
    total = sum(items)
    usual = [tokens for tokens in SHOWN_LEAF_TOKENS if tokens < total]
    for tokens in sorted({*usual, leaf_tokens, max(-(-total // nodes), 1)}):
        costs = leaf_costs(items, tokens)
        spans = spread(costs, nodes)
        slowest = max(sum(costs[span.start : span.stop]) for span in spans)
        partials = sum(len(subtrees(len(costs), span)) for span in spans)
        yield LeafChoice(tokens, len(costs), len(spans), round(slowest), partials)


def _speed(config: RunConfig, options: PlanOptions) -> tuple[float | None, str]:
    if options.tokens_per_second is not None:
        return options.tokens_per_second, "as given"
    metrics = RunFolder(config.output).metrics_jsonl
    return measured_speed(metrics), f"measured in {metrics}"


def _table(config: RunConfig, need: MemoryNeed) -> list[SegmentMemory]:
    """Returns the memory at each segment size that is shown, with the head chunk that goes with it."""
    _, chunk = requested(config.memory)
    table = []
    for size in sorted({*SHOWN_SEGMENT_SIZES, need.settings.segment_size}, key=lambda size: -size or float("-inf")):
        if size > need.shape.layers:
            continue
        settings = need.settings
        if size != settings.segment_size:
            settings = choose(need.shape, need.leaf, float("inf"), segment_size=size, head_chunk=chunk) or settings
        table.append(SegmentMemory(size, settings.head_chunk, need.model + WORKER_BYTES + settings.peak))
    return table


def _node(name: str, need: MemoryNeed, limit: int, free: int) -> NodePlan:
    fault = need.refusal(limit) if limit else None
    return NodePlan(name, limit, free, fault, need.longest(limit) if fault else None)
