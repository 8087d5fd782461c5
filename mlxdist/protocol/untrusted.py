"""Values that another machine or a model's author has written: checked before use, cut before they are shown.

The list of what a coordinator may choose for a node is here. Nothing else of a message reaches an environment, a path
or a command line.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

from mlxdist.protocol.errors import ConfigError, MismatchError

SHOWN_CHARS = 200
ENVIRONMENT: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {"MLX_ENABLE_TF32": re.compile("[01]"), "OPENBLAS_NUM_THREADS": re.compile("[1-9][0-9]{0,2}")}
)
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # it names files too
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
CODE_KEYS = ("auto_map", "model_file")  # of config.json and tokenizer_config.json: they name Python files
CODE_FILES = ("config.json", "tokenizer_config.json")


def quoted(text: object, limit: int = SHOWN_CHARS) -> str:
    """Returns text of a peer as it may stand in a sentence, on a terminal or in a log: one line, cut, nothing hidden.

    Control characters, separators of lines and marks of direction become escapes.
    """
    whole = str(text)
    cut = "".join(one if one.isprintable() else repr(one)[1:-1] for one in whole[:limit])
    return f"{cut[:limit]}…" if len(whole) > limit or len(cut) > limit else cut


def sentence(text: str) -> str:
    """Returns a peer's sentence, or a few lines of it, each marked as such: none can pass for one of ours."""
    lines = text[:4000].splitlines()[:24]
    return "\n  | ".join(quoted(line, 2000) for line in lines)


def worker_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment that a coordinator asks for. Raises MismatchError for a name or value not allowed."""
    for name, value in given.items():
        if name not in ENVIRONMENT or not ENVIRONMENT[name].fullmatch(value):
            raise MismatchError(
                f"the coordinator asks for {quoted(name)}={quoted(value)} in the worker's environment, and only "
                f"{' and '.join(ENVIRONMENT)} may be set: install the same mlxdist on both, and look at who asks"
            )
    return dict(given)


def model_name(text: str) -> str:
    """Returns the model that a coordinator names: a hub id, or the absolute path of a folder. Raises ConfigError.

    A path is read only. It is taken as it is: nothing in it is expanded, and it leads nowhere but where it says.
    """
    path = PurePosixPath(text)
    if not text.isprintable() or len(text) > 1024:
        raise ConfigError(f"model {quoted(text)!r} is no hub id and no path of a folder")
    if HUB_ID.fullmatch(text) and ".." not in text:
        return text
    if not path.is_absolute() or ".." in path.parts or "://" in text:
        raise ConfigError(f"model {quoted(text)!r} must be a hub id, or an absolute path without '..'")
    return text


def refuse_own_code(model: str, documents: Mapping[str, Any]) -> None:
    """Raises ConfigError for a model that brings Python of its own. `documents`: its JSON files by name, as read."""
    for name, document in documents.items():
        for key in CODE_KEYS:
            if isinstance(document, Mapping) and document.get(key):
                raise ConfigError(
                    f"model {quoted(model)!r} brings code of its own ({key} in its {name}), which mlxdist never runs: "
                    "take a conversion without it, as those of mlx-community"
                )
