"""Prints a plan: memory, then a step, then the run."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdist.coordinator.plan.plan import NodePlan, RunPlan
from mlxdist.coordinator.report.format import count
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
    console.print("[bold]Memory of a node[/bold], predicted", highlight=False)
    console.print(
        f"  {format_bytes(need.model)} for the model and its adapter ({need.leaf.adapter:,} trainable parameters), "
        f"{format_bytes(WORKER_BYTES)} for the process, "
        f"{format_bytes(need.settings.peak)} for a leaf: {need.rows} of up to {need.leaf.length + 1} tokens",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(
        "segment_size", "head_chunk", "needed", *(node.name for node in plan.nodes), box=None, header_style="dim"
    )
    for column in table.columns:
        column.justify = "right"
    for held in plan.table:
        size = str(held.segment_size or "off")
        chosen = size == str(plan.segment_size)
        cells = (_fits(held.total, node) for node in plan.nodes)
        table.add_row(size, str(held.head_chunk), format_bytes(held.total), *cells, style="bold" if chosen else "")
    console.print(table)
    if need.doubt:
        console.print(f"  {need.doubt}", style="yellow", highlight=False, soft_wrap=True)
    for node in plan.nodes:
        said = f"may use {format_bytes(node.limit)}, {format_bytes(node.free)} free now" if node.limit else _unknown()
        console.print(f"  {node.name}: {said}", highlight=False, soft_wrap=True)


def _unknown() -> str:
    return "its memory is not known here; memory_limit_gb in hosts.toml says it"


def _fits(total: int, node: NodePlan) -> str:
    if not node.limit:
        return "?"
    if total > node.limit:
        return "no"
    return "fits" if total <= node.free else "tight"


def _step(plan: RunPlan, console: Console) -> None:
    nodes, sent = len(plan.nodes), plan.sent
    console.print("\n[bold]A step[/bold]", highlight=False)
    console.print(
        f"  {plan.leaves} leaves, {plan.tokens:,.0f} tokens with padding; {count(sent.partials, 'partial')} from "
        f"{count(nodes, 'node')}; {sent.bytes_down / 1e6:.1f} MB down and {sent.bytes_up / 1e6:.1f} MB up: "
        f"{sent.seconds:.2g} s",
        highlight=False,
        soft_wrap=True,
    )
    if plan.busy_nodes < nodes:
        idle = count(nodes - plan.busy_nodes, "node")
        said = f"{idle} would idle: {count(plan.leaves, 'leaf', 'leaves')} take no longer with {plan.busy_nodes}"
        console.print(f"  {said}", highlight=False)
    if plan.nearest_size is None:
        console.print("  no batch.size gives one partial per node with this grad_accum_steps", highlight=False)
    elif plan.nearest_size != plan.batch_size:
        said = f"batch.size = {plan.nearest_size} is the nearest with one partial from each node"
        console.print(f"  {said} (it is {plan.batch_size})", highlight=False)


def _run(plan: RunPlan, console: Console) -> None:
    console.print("\n[bold]The run[/bold]", highlight=False)
    if plan.tokens_per_second is None or plan.step_seconds is None:
        console.print(
            "  its time is not known: give --tokens-per-second of one node; a run of five steps measures it",
            highlight=False,
            soft_wrap=True,
        )
        return
    share = plan.sent.seconds / plan.step_seconds
    length = "until max_hours" if plan.steps is None else count(plan.steps, "step")
    hours = f"{plan.hours:.1f} hours" if plan.hours and plan.hours >= 1 else f"{60 * (plan.hours or 0):.0f} minutes"
    console.print(
        f"  {length} of {plan.step_seconds:.2g} s ({share:.0%} of it on the network): {hours} without evaluations, at "
        f"{plan.tokens_per_second:,.0f} tokens/s a node, {plan.speed_from}",
        highlight=False,
        soft_wrap=True,
    )
    useful = plan.useful_nodes or 1
    console.print(f"  past {count(useful, 'equal node')} another Mac would not pay", highlight=False)
