"""The text of docs/scaling.md, from the predictions of scripts/simulate_cluster.py."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from scripts.scaling_models import Assumed
from scripts.scaling_scenarios import SEEDS, Fault, Mixed, faults, mixed, on_the_bed
from scripts.simulate_cluster import COUNTS, LEAVES, TOKENS, Cell, Prediction, over_nodes, sliced_pays, worthwhile

RANKS = (8, 16, 64)
MANY, MANY_LEAVES = (8, 16, 32, 64), 512
MIXES = (
    {"M4": 4},
    {"M4": 4, "M4-Pro": 1},
    {"M4": 4, "M4-Pro": 2},
    {"M3-Ultra": 1},
    {"M3-Ultra": 1, "M4": 1},
    {"M3-Ultra": 1, "M4-Pro": 2, "M4": 4},
)


def page(given: Assumed) -> str:
    """Returns the whole page."""
    main = over_nodes(Cell(), COUNTS, given)
    parts = (INTRODUCTION.format(speed=given.speed("8B"), efficiency=given.efficiency), aim(main, given), models(given))
    return "\n\n".join([*parts, links(given), mixes(given), troubles(given), many(given), bed(given), AGAIN]) + "\n"


INTRODUCTION = """\
# How a step scales: predictions

**Nothing on this page was measured on a Mac.** `scripts/simulate_cluster.py` drives the coordinator of a run, its \
scheduler, its split, its sum and the sessions of its nodes in virtual time, on a star: every node has a cable to a \
switch, and the coordinator has one too. Chips and cables are modelled. The rates of the cables and the shapes of the \
models are facts; the speed of training is an assumption: {efficiency:.0%} of the multiply-adds of the GPU, which \
makes {speed:.0f} tokens per second of an 8B model on a Mac mini M4. Each figure and its source stand in \
`scripts/simulate_cluster.toml`. With a faster chip the network weighs more, and the speedups are smaller. The time of \
the coordinator itself, the upload of a partial that begins while its last leaf computes, and the memory that a model \
needs are left out.

*If sliced* is a bound and not a simulation: the sum would be sliced over the nodes, so that every cable carries \
2 (N-1)/N vectors, and the computation is that of the node with most leaves. A run does not do this today."""

AGAIN = """\
## The page again

    python -m scripts.simulate_cluster --write
    python -m scripts.simulate_cluster --json --model 8B --rank 16 --link "2.5 GbE" --nodes 1 2 4"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; all columns but the first are right-aligned."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def aim(found: Sequence[Prediction], given: Assumed) -> str:
    """Returns the section on an 8B model on M4 minis."""
    by_nodes = {one.cell.nodes: one for one in found}
    rows = [
        (
            str(one.cell.nodes),
            f"{one.step.seconds:.1f}",
            f"**{one.speedup:.2f}**",
            f"{one.efficiency:.0%}",
            f"{one.step.bytes_down / 1e6:,.0f}",
            f"{one.step.bytes_up / 1e6:,.0f}",
            f"{one.alone / one.sliced:.2f}",
        )
        for one in found
    ]
    four, eight = by_nodes[4], by_nodes[8]
    vector = given.models["8B"].vector_bytes(8) / 1e6
    return f"""\
## An 8B model on M4 minis

Rank 8, a vector of {vector:.0f} MB, {LEAVES} rows of {TOKENS} tokens in a step, cables of 1 Gbit/s. MB are those of \
the coordinator's cable in a step. Speedups are those over one Mac that trains alone, without a network.

{table(("Macs", "seconds", "speedup", "of ideal", "MB down", "MB up", "if sliced, at best"), rows)}

The aim is 3.6 on four Macs and 7.2 on eight. On paper the star reaches {four.speedup:.2f} on four, and \
{eight.speedup:.2f} on eight, where a sliced sum could reach {eight.alone / eight.sliced:.2f}. Beyond \
{worthwhile(found)} Macs another one does not pay: the star's cable carries a vector down and one up for each."""


def models(given: Assumed) -> str:
    """Returns the section on models and ranks."""
    rows = []
    for name, model in given.models.items():
        for rank in RANKS:
            found = over_nodes(Cell(name, rank), COUNTS, given)
            pays = sliced_pays(found)
            speedups = [f"{one.speedup:.1f}" for one in found[1:]]
            seconds = f"{found[0].alone:,.0f}"
            sliced = str(pays) if pays else "none"
            chip = given.chips[model.chip].name
            vector = f"{model.vector_bytes(rank) / 1e6:,.0f}"
            rows.append((f"{name}, {chip}", str(rank), vector, seconds, *speedups, str(worthwhile(found)), sliced))
    head = ("model", "rank", "MB", "s, one", *map(str, COUNTS[1:]), "pays up to", "sliced from")
    return f"""\
## Models and ranks

{LEAVES} rows of {TOKENS} tokens in a step, cables of 1 Gbit/s; the seconds of a step on one Mac alone, and the \
speedup on 2 to {COUNTS[-1]} of them. *Pays up to*: more Macs do not make a step 5 % shorter; {COUNTS[-1]} is the most \
that was tried, and only the numbers of the table were. *Sliced from*: with so many Macs a sliced sum could make the \
step at least 5 % shorter than the star, at best.

{table(head, rows)}

With two Macs and more a sliced sum moves fewer bytes than the star in every case; the last column says where that is \
more than noise."""


def links(given: Assumed) -> str:
    """Returns the section on links."""
    rows = []
    for rank in (8, 64):
        for link in given.links:
            found = over_nodes(Cell(rank=rank, link=link), (4, 8, 16, 32), given)
            both = [f"{one.speedup:.1f} ({one.alone / one.sliced:.1f})" for one in found]
            rows.append((link, str(rank), *both))
    return f"""\
## Links

An 8B model on M4 minis: the speedup of the star, and in parentheses that if sliced, at best. All cables have the same \
rate, the coordinator's too.

{table(("cables", "rank", "4 Macs", "8 Macs", "16 Macs", "32 Macs"), rows)}"""


def mixes(given: Assumed) -> str:
    """Returns the section on mixes of chips."""

    def line(found: Mixed) -> tuple[str, ...]:
        what = " + ".join(f"{count} {chip}" for chip, count in found.chips.items())
        share = f"{found.speedup / found.worth:.0%}"
        return (
            what,
            f"{found.worth:.1f}",
            f"{found.speedup:.2f}",
            share,
            f"{found.nodes} of {sum(found.chips.values())}",
        )

    rows = [line(mixed(chips, "8B", "1 GbE", given)) for chips in MIXES]
    return f"""\
## Mixes

An 8B model at rank 8 on cables of 1 Gbit/s, after six steps in which the speeds are measured. *Worth*: the speed of \
all chips together, in M4s. Leaves are the smallest share that a Mac can have, so that {LEAVES} of them cannot follow \
every speed.

{table(("Macs", "worth", "speedup over one M4", "of ideal", "Macs with leaves"), rows)}"""


def troubles(given: Assumed) -> str:
    """Returns the section on losses, joins and a slow Mac."""

    def line(found: Fault) -> tuple[str, ...]:
        return found.what, *(f"{seconds:.1f}" for seconds in found.seconds[1:]), str(found.again)

    head = ("what happens", "step 2", "step 3", "step 4", "leaves computed twice or in vain")
    return f"""\
## A Mac that is lost, slow, or joins

Eight M4 minis on cables of 1 Gbit/s, an 8B model at rank 8, the default `[timing]`; seconds of each step. A lost Mac \
says nothing: its leaves go to others after 15 s of silence.

{table(head, map(line, faults(given)))}"""


def many(given: Assumed) -> str:
    """Returns the section on up to 64 Macs."""
    rows = []
    for link in ("1 GbE", "10 GbE"):
        found = over_nodes(replace(Cell(link=link), leaves=MANY_LEAVES), MANY, given)
        rows.append((link, *(f"{one.speedup:.1f} ({one.alone / one.sliced:.1f})" for one in found)))
    return f"""\
## Up to 64 Macs

The same model with {MANY_LEAVES} rows in a step: the speedup of the star (if sliced, at best).

{table(("cables", *(f"{nodes} Macs" for nodes in MANY)), rows)}"""


def bed(given: Assumed) -> str:
    """Returns the section on what the simulator was held against."""
    rows = []
    for nodes, megabytes, seconds in given.bed.cells:
        even, uneven = on_the_bed(given.bed, nodes, megabytes)
        rows.append(
            (
                str(nodes),
                str(megabytes),
                f"{seconds:.1f}",
                *(f"{each:.1f} ({each / seconds - 1:+.0%})" for each in (even, uneven)),
            )
        )
    head = ("nodes", "MB of a vector", "measured", "even shares", "uneven shares")
    return f"""\
## Held against real connections

Seconds of communication in a step, with real processes and sockets in network namespaces on one machine, cables of \
{given.bed.mbit} Mbit/s (`scripts/bench_cluster.py`; the machine was loaded), and as predicted. The tables above let \
all connections share a cable evenly, which is slower than what was measured: real connections share it unevenly, so \
that the first nodes compute and send while the last ones still receive. With drawn shares, whose one parameter was \
fitted to the cells of 10 and 40 MB (mean of {SEEDS} runs), all predictions are within 10 %, also those of 160 MB.

{table(head, rows)}"""
