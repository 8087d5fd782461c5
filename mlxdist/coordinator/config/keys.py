"""The configuration as dotted keys: their names and types, and the way between keys and dataclasses."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from mlxdist.coordinator.config.schema import RunConfig


def hints() -> dict[str, Any]:
    """Returns every dotted key with its type: {"method": Literal[…], "batch.size": Count, …}."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(RunConfig, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            inner = get_type_hints(hint, include_extras=True)
            found |= {f"{name}.{key}": inner_hint for key, inner_hint in inner.items()}
        else:
            found[name] = hint
    return found


def tables() -> dict[str, list[str]]:
    """Returns the keys of each table. Table "" is the top of the file, where data = "folder" is allowed too."""
    found: dict[str, list[str]] = {"": []}
    for key in hints():
        table, _, name = key.rpartition(".")
        found.setdefault(table, []).append(name)
    found[""].append("data")
    return found


def flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields nested `values` by dotted key; a value that is a table stays whole. data = "…" becomes data.path."""
    known = tables()
    for name, value in values.items():
        if name == "data" and isinstance(value, str):
            yield "data.path", value
        elif isinstance(value, dict) and name in known:
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def nested(key: str, value: Any) -> dict[str, Any]:
    """Returns {"a": {"b": value}} for the dotted key a.b."""
    for part in reversed(key.split(".")):
        value = {part: value}
    tree: dict[str, Any] = value
    return tree


def build(values: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration of checked `values` by dotted key. A missing key takes its default."""
    top: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    for name, hint in get_type_hints(RunConfig).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            inner = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
            top[name] = hint(**inner)
    return RunConfig(**top)
