"""Prints a plan: memory, then a step, then the run."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdist.coordinator.plan.plan import NodePlan, RunPlan
from mlxdist.coordinator.report.format import count, duration_phrase
from mlxdist.protocol.budget import WORKER_BYTES, format_bytes


def print_plan(plan: RunPlan, console: Console) -> None:
    """Prints everything; refusals last, where a person looks first."""
    _memory(plan, console)
    _step(plan, console)
    _run(plan, console)
    console.print()
    for node in plan.nodes:
        if node.refusal:
            console.print(Text(f"A run would be refused: node {node.name} {node.refusal}", style="red"), soft_wrap=True)


def _memory(plan: RunPlan, console: Console) -> None:
    need = plan.need
    console.print(f"[bold]Memory of a node[/bold], predicted {plan.memory_from}", highlight=False, soft_wrap=True)
    console.print(
        f"  {format_bytes(need.model)} for the model and its adapter ({need.leaf.adapter:,} trainable parameters), "
        f"{format_bytes(WORKER_BYTES)} for the process, "
        f"{format_bytes(need.settings.peak)} for {need.rows}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(
        "segment_size", "head_chunk", "needed", *(node.name for node in plan.nodes), box=None, header_style="dim"
    )
    for column in table.columns:
        column.justify = "right"
    for row in plan.table:
        size = str(row.segment_size or "off")
        style = "bold" if size == str(plan.segment_size) else ""
        cells = (_fits(row.total, node) for node in plan.nodes)
        table.add_row(size, str(row.head_chunk), format_bytes(row.total), *cells, style=style)
    console.print(table)
    used = f"segment_size = {plan.segment_size}, head_chunk = {plan.head_chunk}"
    console.print(f"  a run would use {used}", highlight=False)
    if plan.targets:
        console.print(f"  {plan.targets}", style="yellow", highlight=False, soft_wrap=True, markup=False)
    if plan.slow:
        console.print(f"  {plan.slow}", style="yellow", highlight=False, soft_wrap=True, markup=False)
    if need.doubt:
        console.print(f"  {need.doubt}", style="yellow", highlight=False, soft_wrap=True)
    for node in plan.nodes:
        memory = "its memory is not known here; set memory_limit_gb in hosts.toml"
        if node.limit:
            memory = f"may use {format_bytes(node.limit)}, {format_bytes(node.free)} of it free now"
        console.print(f"  {node.name}: {memory}", highlight=False, soft_wrap=True)


def _fits(total: int, node: NodePlan) -> str:
    if not node.limit:
        return "?"
    if total > node.limit:
        return "no"
    return "fits" if total <= node.free else "tight"


def _step(plan: RunPlan, console: Console) -> None:
    nodes, sent = len(plan.nodes), plan.sent
    lines = [
        f"{plan.tokens:,.0f} tokens in {count(plan.leaves, 'leaf (micro-batch)', 'leaves (micro-batches)')}, filled to "
        f"{plan.fill:.0%} of batch.leaf_tokens = {plan.leaf_tokens}; nothing is padded",
        f"{sent.bytes_down / 1e6:.1f} MB to {count(nodes, 'node')}, {sent.bytes_up / 1e6:.1f} MB back in "
        f"{count(sent.partials, 'partial gradient')}: {sent.seconds:.2g} s",
    ]
    if plan.busy_nodes < nodes:
        idle = count(nodes - plan.busy_nodes, "node")
        leaves = count(plan.leaves, "leaf", "leaves")
        lines.append(f"{idle} would idle: {leaves} take {count(plan.busy_nodes, 'node')} as long as {nodes}")
    _section("A step", lines, console)
    table = Table(
        "leaf_tokens", "leaves", "nodes at work", "tokens of the slowest", "partials", box=None, header_style="dim"
    )
    for column in table.columns:
        column.justify = "right"
    for each in plan.choices:
        cells = (each.leaf_tokens, each.leaves, each.busy_nodes, each.slowest, each.partials)
        table.add_row(*(f"{cell:,}" for cell in cells), style="bold" if each.leaf_tokens == plan.leaf_tokens else "")
    console.print(table)
    console.print(
        "  fewer tokens on the slowest node are faster, and so are larger leaves: a leaf costs time of its own",
        highlight=False,
        soft_wrap=True,
    )


def _run(plan: RunPlan, console: Console) -> None:
    time = duration_phrase(3600 * (plan.hours or 0))
    limited = plan.steps is None  # by train.max_hours
    if plan.tokens_per_second is None or plan.step_seconds is None:
        unknown = f"{time} with evaluations and saves; number of steps" if limited else "time"
        cure = "give --tokens-per-second of one node, or train a few steps first (--set train.steps=5)"
        _section("The run", [f"{unknown} not known: {cure}"], console)
        return
    step = f"{plan.step_seconds:.2g} s, {plan.sent.seconds / plan.step_seconds:.0%} of it for the network"
    length = f"{count(plan.steps or 0, 'step')} of {step}: {time} without evaluations"
    if limited:
        most = count(math.ceil(3600 * (plan.hours or 0) / plan.step_seconds), "step")
        length = f"{time} with evaluations and saves: at most {most} of {step}"
    lines = [
        length,
        f"at {plan.tokens_per_second:,.0f} tokens/s per node, {plan.speed_from}",
        f"more than {count(plan.useful_nodes or 1, 'equal node')} would hardly be faster",
    ]
    _section("The run", lines, console)


def _section(title: str, lines: Sequence[str], console: Console) -> None:
    console.print(f"\n[bold]{title}[/bold]", highlight=False)
    for line in lines:
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
