"""`mlxdist plan`: what a run will take, before anything is launched: memory, time, and what travels.

The model's config.json and the headers of its files are read, and the rows as a run reads them; no parameters.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import fmean

from rich.console import Console

from mlxdist.coordinator.batch.batch_order import steps, total_steps
from mlxdist.coordinator.batch.micro_batches import cut
from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.config.hosts import Hosts, NodeSpec, is_local
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.data.load import read
from mlxdist.coordinator.memory.fit import Machine, asked, node_limits, this_machine, with_settings
from mlxdist.coordinator.memory.fit import needed as needed_for
from mlxdist.coordinator.memory.model_files import ModelFiles, find_model, read_model
from mlxdist.coordinator.memory.prediction import Need, ADAPTER_BYTES, WHOLE_GRAPH, choose, peak
from mlxdist.coordinator.plan.estimates import (
    Traffic,
    busy_nodes,
    measured_speed,
    nearest_size,
    step_seconds,
    traffic,
    useful_nodes,
)
from mlxdist.coordinator.schedule.rounds import leaf_tokens
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.protocol.budget import WORKER_BYTES, usable_bytes
from mlxdist.protocol.errors import ConfigError

SEGMENT_SIZES = (WHOLE_GRAPH, 8, 4, 2, 1)  # of which the memory is shown
STEPS_LOOKED_AT = 50  # of the order, for the tokens of a step
LOOPBACK = 1.9e9  # bytes per second between processes of one machine, measured with blocks of 1 MiB
EFFICIENCY = 0.9  # of a link's nominal rate


@dataclass(frozen=True)
class PlanOptions:
    """What the command line may say."""

    tokens_per_second: float | None = None  # of one node, padding included; None: as an earlier run measured
    link_gbit: float = 1.0  # of the coordinator's network
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """What a node would hold at one segment size: bytes, the model included."""

    segment_size: int  # 0 = the whole graph
    head_chunk: int
    total: int


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node: bytes that it may use and that are free there (0: not known), and why it cannot take part."""

    name: str
    limit: int
    free: int
    refusal: str | None
    longest: int | None  # the largest max_length that fits, where the run does not


@dataclass(frozen=True)
class Plan:
    """All that is shown."""

    need: Need
    total: int  # bytes of a node with the settings that would be used
    segment_size: int | str
    head_chunk: int | str
    table: tuple[Held, ...]
    nodes: tuple[NodePlan, ...]
    batch_size: int
    nearest_size: int | None  # batch.size with one partial from each node
    leaves: int  # of a full step
    busy_nodes: int  # that get any of them, all being equally fast
    tokens: float  # of a step, padding included
    sent: Traffic
    tokens_per_second: float | None  # of one node
    speed_from: str
    step_seconds: float | None
    steps: int | None
    hours: float | None
    useful_nodes: int | None  # past which another does not pay


def plan(config: RunConfig, hosts: Hosts, options: PlanOptions, console: Console) -> int:
    """Show the plan of a run on these hosts. Returns 0 where it would start, 2 where a node could not hold it.

    Raises ConfigError or DataError for what a run would be refused for.
    """
    from mlxdist.coordinator.plan.view import show

    with console.status("reading the data"):
        dataset = read(config, progress=lambda message, share: None)
    rows = [each for each in (dataset.train, dataset.valid) if each is not None]
    facts = make_plan(config, hosts.nodes, rows, model_files(config.model), this_machine(), options)
    if options.as_json:
        console.out(json.dumps(asdict(facts), indent=2), highlight=False)
    else:
        show(facts, console)
    return 2 if any(node.refusal for node in facts.nodes) else 0


def model_files(model: str) -> ModelFiles:
    """The model's files on this machine. Raises ConfigError where there are none."""
    folder = find_model(model)
    files = read_model(folder) if folder is not None else None
    if files is None or not files.tensors:
        where = "neither a folder nor in the hub's cache" if folder is None else "of it only the configuration is here"
        raise ConfigError(f"model = {model!r} is not on this machine ({where}): fetch it first with hf download")
    return files


def make_plan(
    config: RunConfig,
    nodes: Sequence[NodeSpec],
    rows: Sequence[Rows],
    files: ModelFiles,
    machine: Machine,
    options: PlanOptions,
) -> Plan:
    """The plan of a run whose training rows are `rows[0]`. Raises ConfigError for a model without known sizes."""
    limits = node_limits(nodes, machine)
    free = min((now for _, now in limits.values()), default=usable_bytes(machine.total, machine.system))
    try:
        need = needed_for(config, files, rows, free)
    except KeyError as error:
        raise ConfigError(f"model = {config.model!r}: its memory cannot be predicted, {error.args[0]}") from error
    data, vector = rows[0], ADAPTER_BYTES * need.leaf.adapter
    looked_at = [costs for costs in islice(_costs(config, data), STEPS_LOOKED_AT) if costs]
    tokens = fmean(sum(costs) for costs in looked_at)
    leaves = max(map(len, looked_at))
    typical = min(looked_at, key=lambda costs: abs(sum(costs) - tokens))
    rate = LOOPBACK if all(is_local(node.host) for node in nodes) else options.link_gbit * 1e9 / 8 * EFFICIENCY
    speed, source = _speed(config, options)
    sent = traffic(typical, len(nodes), vector, rate, speed or 1.0)
    seconds = step_seconds(typical, len(nodes), speed, sent) if speed else None
    total = total_steps(config.train, len(data), config.batch, config.method)
    resolved = with_settings(config, need.settings).memory
    return Plan(
        need=need,
        total=need.total,
        segment_size=resolved.segment_size,
        head_chunk=resolved.head_chunk,
        table=tuple(_table(config, need)),
        nodes=tuple(_node(node.name, need, *limits.get(node.name, (0, 0))) for node in nodes),
        batch_size=config.batch.size,
        nearest_size=nearest_size(config.batch, len(nodes)),
        leaves=leaves,
        busy_nodes=busy_nodes(leaves, len(nodes)),
        tokens=tokens,
        sent=sent,
        tokens_per_second=speed,
        speed_from=source,
        step_seconds=seconds,
        steps=total,
        hours=seconds * total / 3600 if seconds is not None and total is not None else config.train.max_hours,
        useful_nodes=useful_nodes(typical, speed, vector, rate) if speed else None,
    )


def _costs(config: RunConfig, data: Rows) -> Iterator[list[float]]:
    """Padded tokens per leaf, of one step after the other."""
    batch = config.batch
    for step in steps(data.lengths.tolist(), batch, config.method):
        leaves = cut(step, data, batch.micro_size, batch.max_length)
        yield [float(sum(leaf_tokens(leaf))) for leaf in leaves]


def _speed(config: RunConfig, options: PlanOptions) -> tuple[float | None, str]:
    if options.tokens_per_second is not None:
        return options.tokens_per_second, "as given"
    metrics = RunFolder(config.output).metrics_jsonl
    return measured_speed(metrics), f"measured in {metrics}"


def _table(config: RunConfig, need: Need) -> list[Held]:
    """What a node would hold at each segment size, with the head's chunk that goes with it."""
    _, chunk_asked = asked(config.memory)
    chosen = need.settings
    table = []
    for size in sorted({*SEGMENT_SIZES, chosen.segment_size}, key=lambda size: -size if size else -(2**31)):
        if size > need.shape.layers:
            continue
        settings = choose(need.shape, need.leaf, float("inf"), segment_size=size, head_chunk=chunk_asked)
        assert settings is not None, "endless memory holds everything"
        chunk = chosen.head_chunk if size == chosen.segment_size else settings.head_chunk
        held = peak(need.shape, need.leaf, segment_size=size, head_chunk=chunk)
        table.append(Held(size, chunk, need.model + WORKER_BYTES + held))
    return table


def _node(name: str, need: Need, limit: int, free: int) -> NodePlan:
    fault = need.refusal(limit) if limit else None
    return NodePlan(name, limit, free, fault, need.longest(limit) if fault else None)
