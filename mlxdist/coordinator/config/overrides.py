"""`--set key=value`: dotted keys, TOML values, bare words taken as text."""

import datetime
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxdist.coordinator.config.toml_file import Fault


@dataclass(frozen=True)
class Override:
    """One `--set`: its dotted key and value."""

    key: str
    value: Any


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[Fault]]:
    """The overrides in `texts`, and what is wrong with the others."""
    overrides, faults = [], []
    for text in texts:
        key, equals, raw = text.partition("=")
        key = ".".join(part.strip() for part in key.split("."))
        if not equals:
            faults.append(Fault(f"--set {text} has no value: write --set {key or 'key'}=value"))
        elif not all(key.split(".")):
            faults.append(Fault(f"--set {text} has no key: write --set train.steps=5"))
        else:
            overrides.append(Override(key, _value(raw.strip())))
    return overrides, faults


def _value(raw: str) -> Any:
    try:
        values = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw  # a bare word: --set method=dpo
    value = values["value"]
    # a bare word that TOML takes for a date, or a line break that would smuggle in a second key
    if len(values) != 1 or isinstance(value, datetime.date | datetime.time):
        return raw
    return value
