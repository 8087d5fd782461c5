"""`--set key=value`: a dotted key and a TOML value; a bare word is taken as text."""

import datetime
import tomllib
from collections.abc import Sequence
from typing import Any


def parse_overrides(texts: Sequence[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Returns the (dotted key, value) pairs of `texts`, and a sentence for each text that is not such a pair."""
    overrides, faults = [], []
    for text in texts:
        key, equals, raw = text.partition("=")
        key = ".".join(part.strip() for part in key.split("."))
        if not equals:
            faults.append(f"--set {text} has no value: write --set {key or 'key'}=value")
        elif not all(key.split(".")):
            faults.append(f"--set {text} has no key: write --set train.steps=5")
        else:
            overrides.append((key, _value(raw.strip())))
    return overrides, faults


def _value(raw: str) -> Any:
    try:
        values = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw  # a bare word: --set method=dpo
    # TOML reads a bare 2025-01-31 as a date; a line break could bring in a second key
    return raw if len(values) != 1 or isinstance(values["value"], datetime.date | datetime.time) else values["value"]
