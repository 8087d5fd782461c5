"""Fuzzing: the decoder, a coordinator under attack, and a node whose coordinator is hostile."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxdist.protocol.errors import WireError
from mlxdist.protocol.wire import Frames, decode, encode
from tests.protocol.example_messages import EXAMPLES
from tests.simulation.besieged_world import Besieged
from tests.simulation.hostile_coordinator import KNOWN, BesiegedWorker, besiege_supervisor
from tests.simulation.hostile_words import Words

PER_WORLD = 500  # hostile messages, then another seed


def fuzz_decoder(frames: int, seed: int) -> dict[str, Any]:
    """Decodes so many damaged or invented messages. Only WireError may leave the decoder."""
    words = Words(random.Random(seed))
    whole: list[Frames] = [encode(message, bytes(5)) for message in EXAMPLES]
    taken = 0
    for _ in range(frames):
        each = words.damaged(words.rng.choice(whole)) if words.rng.random() < 0.8 else words.frames()
        try:
            decode(each)
            taken += 1
        except WireError:
            continue
    return {"messages": frames, "decoded": taken, "refused": frames - taken}


def for_seconds(seconds: float, seed: int) -> Iterator[int]:
    """Yields seeds until so many seconds have passed, one at least."""
    until = time.monotonic() + seconds
    for each in count(seed):
        yield each
        if time.monotonic() > until:
            return


def fuzz_coordinator(seeds: Iterable[int]) -> dict[str, Any]:
    """Attacks a coordinator for each seed. Raises what breaks a law."""
    sent: Counter[str] = Counter()
    worlds = steps = 0
    for seed in seeds:
        with _named(f"coordinator, seed {seed}"):
            world = Besieged(seed, scored=bool(seed % 2))
            world.siege(PER_WORLD)
        sent += world.sent
        worlds, steps = worlds + 1, steps + world.steps
    return {"worlds": worlds, "steps": steps, "messages": sent.total(), "by_type": dict(sent.most_common())}


def fuzz_node(seeds: Iterable[int]) -> dict[str, Any]:
    """Attacks sessions of a worker and a supervisor for each seed. Raises what breaks a law."""
    to_workers: Counter[str] = Counter()
    to_supervisors: Counter[str] = Counter()
    rounds = sessions = 0
    for seed in seeds:
        with _named(f"node, seed {seed}"):
            words = Words(random.Random(seed), KNOWN)
            with TemporaryDirectory(prefix="mlxdist-") as disk, closing(BesiegedWorker(words, Path(disk))) as worker:
                for _ in range(PER_WORLD):
                    worker.attack()
                worker.look_at_disk()
            to_supervisors += besiege_supervisor(words)
        to_workers += worker.sent
        rounds, sessions = rounds + 1, sessions + worker.sessions
    return {
        "rounds": rounds,
        "sessions": sessions,
        "to_workers": to_workers.total(),
        "to_supervisors": to_supervisors.total(),
        "by_type": dict((to_workers + to_supervisors).most_common()),
    }


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Notes on an exception where it can be seen again."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"fuzzing a {where}")
        raise


SIDES: dict[str, Callable[[Iterable[int]], dict[str, Any]]] = {"coordinator": fuzz_coordinator, "node": fuzz_node}
