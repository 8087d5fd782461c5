"""The chips, links and models of scripts/simulate_cluster.toml: the seconds of a leaf, and the bytes of a vector."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("simulate_cluster.toml")
LANES = 128  # of a GPU core, with a multiply-add each
OPERATIONS = 6  # for each parameter and token: two forward passes, and the gradient of the inputs


@dataclass(frozen=True)
class Model:
    """A transformer with LoRA on all of its seven linear layers. `attention`: the size of all queries, if not `hidden`.

    `chip`: of the Macs that it is trained on.
    """

    parameters: float
    layers: int
    hidden: int
    mlp: int
    kv: int
    chip: str
    attention: int = 0

    def vector_bytes(self, rank: int) -> int:
        """Returns the bytes of the adapter, or of a partial gradient, in float32."""
        queries = self.attention or self.hidden
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + self.kv)
        return 4 * rank * self.layers * (attention + 3 * (self.hidden + self.mlp))


@dataclass(frozen=True)
class Chip:
    """A Mac's chip. `memory_gbps`: its memory bandwidth in GB/s, which the model of time does not use."""

    name: str
    cores: int
    clock_ghz: float
    memory_gbps: float

    def tokens_per_second(self, model: Model, efficiency: float) -> float:
        """Returns the assumed speed of training."""
        per_second = self.cores * LANES * 2 * self.clock_ghz * 1e9
        return per_second * efficiency / (OPERATIONS * model.parameters)


@dataclass(frozen=True)
class Bed:
    """Measurements in network namespaces: (nodes, 10^6 bytes of a vector, seconds of communication)."""

    mbit: int
    leaf_seconds: float
    leaves: int  # of each node
    frames: float
    uneven: float
    cells: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class Assumed:
    """All of the file. Links: bytes per second by name."""

    efficiency: float
    frames: float
    delay: float
    chips: Mapping[str, Chip]
    links: Mapping[str, float]
    models: Mapping[str, Model]
    bed: Bed

    def speed(self, model: str, chip: str = "") -> float:
        """Returns the tokens per second of a model on a chip; by default on its own."""
        shape = self.models[model]
        return self.chips[chip or shape.chip].tokens_per_second(shape, self.efficiency)


def assumed(path: Path = FILE) -> Assumed:
    """Reads the file."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    return Assumed(
        efficiency=found["efficiency"],
        frames=found["frames"],
        delay=found["delay"],
        chips={key: Chip(**values) for key, values in found["chips"].items()},
        links={key: gigabits * 1e9 / 8 for key, gigabits in found["links"].items()},
        models={key: Model(**values) for key, values in found["models"].items()},
        bed=Bed(**{**found["bed"], "cells": tuple(tuple(cell) for cell in found["bed"]["cells"])}),
    )
