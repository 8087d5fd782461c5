"""Fuzzes both sides of the protocol with messages of the real types and mutated values, and prints figures as JSON.

    python scripts/fuzz.py --minutes 10               # half of it against coordinators, half against nodes
    python scripts/fuzz.py --frames 10000000          # the decoder alone

Coordinators and nodes are the real ones, in memory: an admitted node and strangers attack the former, a hostile
coordinator the latter. Every exception that is not an error of mlxdist, every broken law and every wrong sum ends the
script with exit status 1 and the seed that shows it again.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]


def fuzz(minutes: float, frames: int, seed: int) -> dict[str, Any]:
    """Returns the figures of a run. Raises what was found."""
    from tests.simulation.fuzzing import SIDES, for_seconds, fuzz_decoder

    process, began = psutil.Process(), time.monotonic()
    before = process.memory_info().rss
    found: dict[str, Any] = {"seed": seed}
    if frames:
        found["decoder"] = fuzz_decoder(frames, seed)
    if minutes:
        for side, of in SIDES.items():
            found[side] = of(for_seconds(60 * minutes / len(SIDES), seed))
    found["seconds"] = round(time.monotonic() - began, 1)
    found["rss_before_mb"], found["rss_after_mb"] = (
        round(size / 1e6, 1) for size in (before, process.memory_info().rss)
    )
    return found


def main() -> int:
    """Reads the command line. Returns the exit status."""
    sys.path.insert(0, str(ROOT))  # for tests.*, from any folder
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--frames", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if not options.minutes and not options.frames:
        parser.error("give --minutes or --frames")
    try:
        print(json.dumps(fuzz(options.minutes, options.frames, options.seed), indent=2))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
