"""Predicts the steps of clusters up to 64 Macs in virtual time, and writes docs/scaling.md.

    python -m scripts.simulate_cluster --write          # docs/scaling.md again
    python -m scripts.simulate_cluster --json --model 8B --rank 8 --link "1 GbE" --nodes 1 4 8

The fleet, the cluster, the scheduler, the split, the sum and the sessions are those of a run; nodes, chips and links
are modelled (simulated_cluster.py, simulate_cluster.toml). Nothing here was measured on a Mac.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mlxdist.coordinator.config.schema import TimingConfig
from mlxdist.coordinator.plan.estimates import WORTH
from scripts.scaling_models import Assumed, assumed
from scripts.simulated_cluster import StepResult, usual_step
from scripts.simulated_office import Mac, Office

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
LEAVES, TOKENS = 32, 512  # of a step: 32 rows, each a leaf
# Where all is well. A vector is one message here, so no blocks show on the way that a node is still there.
LONG = 1e6
CALM = TimingConfig(
    beat_seconds=30.0,
    suspect_seconds=LONG,
    dead_seconds=2 * LONG,
    data_seconds=LONG,
    progress_seconds=LONG,
    start_timeout=LONG,
    copy_factor=1000.0,
)
COUNTS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Cell:
    """A cluster of equal Macs. `chip`: of all; empty: the model's own."""

    model: str = "8B"
    rank: int = 8
    link: str = "1 GbE"
    nodes: int = 1
    leaves: int = LEAVES
    chip: str = ""


@dataclass(frozen=True)
class Prediction:
    """A step of a cell. `sliced`: its seconds if the sum were sliced, at best, by a formula and not simulated."""

    cell: Cell
    step: StepResult
    alone: float  # seconds of one such Mac's step, without a network
    sliced: float

    @property
    def speedup(self) -> float:
        """The speed, where that of one Mac alone is 1."""
        return self.alone / self.step.seconds

    @property
    def efficiency(self) -> float:
        """The speedup as a share of the number of nodes."""
        return self.speedup / self.cell.nodes


def office_of(cell: Cell, given: Assumed) -> Office:
    """Returns the cluster of a cell."""
    speed, rate = given.speed(cell.model, cell.chip), given.links[cell.link]
    macs = tuple(Mac(f"mac-{place:02}", speed, rate) for place in range(cell.nodes))
    vector_bytes = given.models[cell.model].vector_bytes(cell.rank)
    return Office(macs, vector_bytes, rate, given.frames, given.delay, timing=CALM)


def predict(cell: Cell, given: Assumed) -> Prediction:
    """Returns the usual step of a cell."""
    office = office_of(cell, given)
    leaf = TOKENS / given.speed(cell.model, cell.chip)
    step = usual_step(office, cell.leaves, TOKENS, warm=1)
    most = -(-cell.leaves // cell.nodes) * leaf
    return Prediction(cell, step, cell.leaves * leaf, most + sliced_seconds(office, cell.nodes))


def sliced_seconds(office: Office, nodes: int) -> float:
    """Returns the least seconds of reduce-scatter and all-gather: 2 (N-1)/N vectors through every cable."""
    return 2 * (nodes - 1) / nodes * office.vector_bytes * office.frames / office.bytes_per_second


def worthwhile(predictions: Sequence[Prediction]) -> int:
    """Returns the number of nodes beyond which more do not pay: a step must then take at most 95 % of the time."""
    best = predictions[0]
    for one in predictions[1:]:
        if one.step.seconds <= WORTH * best.step.seconds:
            best = one
    return best.cell.nodes


def sliced_pays(predictions: Sequence[Prediction]) -> int | None:
    """Returns the number of nodes from which a sliced sum could save 5 % of the step, at best; None: from none."""
    several = (one for one in predictions if one.cell.nodes > 1)
    pays = (one.cell.nodes for one in several if one.sliced <= WORTH * one.step.seconds)
    return next(pays, None)


def over_nodes(cell: Cell, counts: Sequence[int], given: Assumed) -> list[Prediction]:
    """Returns the predictions of a cell with each number of nodes."""
    return [predict(replace(cell, nodes=count), given) for count in counts]


def main() -> None:
    """Prints the page, writes it, or prints the cells that were asked for as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="writes docs/scaling.md")
    parser.add_argument("--json", action="store_true", help="prints cells instead of the page")
    parser.add_argument("--model", default="8B")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--link", default="1 GbE")
    parser.add_argument("--chip", default="", help="M4 | M4-Pro | M3-Ultra; the model's own by default")
    parser.add_argument("--leaves", type=int, default=LEAVES, help="of 512 tokens")
    parser.add_argument("--nodes", type=int, nargs="+", default=COUNTS)
    asked = parser.parse_args()
    if asked.json:
        cell = Cell(asked.model, asked.rank, asked.link, 1, asked.leaves, asked.chip)
        found = over_nodes(cell, asked.nodes, assumed())
        print(json.dumps([{**asdict(one), "speedup": round(one.speedup, 3)} for one in found], indent=1))
        return
    from scripts.scaling_page import page

    text = page(assumed())
    if asked.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
