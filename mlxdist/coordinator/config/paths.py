"""Resolves the paths of a configuration, relative to their file, and checks them before anything is loaded."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlxdist.coordinator.config.unknown_keys import nearest

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


class BadPathError(ValueError):
    """A path that cannot be used. Its text is the rest of the sentence after key and value."""


def absolute(text: str, base: Path) -> Path:
    """Returns the absolute path that `text` means from the folder `base`; ~ is home, links are kept.

    Raises BadPathError.
    """
    if "\0" in text:
        raise BadPathError("is not a path: it has a NUL character")
    return Path(os.path.abspath(base / os.path.expanduser(text)))


def _model(text: str, base: Path) -> str:
    """Returns an existing folder as an absolute path, else a hub id as it is."""
    path = absolute(text, base)
    if path.is_dir():
        return str(path)
    if path.exists():
        raise BadPathError("is a file; the model is a folder, as mlx_lm.load takes it, or a hub id")
    if not _may_be_hub_id(text):
        raise BadPathError(
            f"leads to {path}, where there is no folder; a hub id looks like mlx-community/Qwen3-4B-4bit"
        )
    return text


def no_folder(model: str) -> str:
    """Returns the beginning of a sentence on a model that is no folder here, with the folder that may be meant."""
    path = Path(model)
    near = nearest(path.name, [other.name for other in path.parent.glob("*/")]) if "/" in model else None
    return f"there is no such folder{f' (did you mean {path.parent / near}?)' if near else ''}"


def _data(text: str, base: Path) -> str:
    """Returns an existing folder or file as an absolute path, else a hub id as it is."""
    path = absolute(text, base)
    if path.exists():
        return str(path)
    if not _may_be_hub_id(text) or text.endswith(DATA_SUFFIXES):
        raise BadPathError(f"leads to {path}, where there is no file or folder")
    return text


def _valid_data(text: str, base: Path) -> str:
    """Returns an existing folder or file as an absolute path; "" stays."""
    if text and not absolute(text, base).exists():
        raise BadPathError(f"leads to {absolute(text, base)}, where there is no file or folder")
    return str(absolute(text, base)) if text else ""


def _output(text: str, base: Path) -> Path:
    """Returns the run folder, which need not exist."""
    path = absolute(text, base)
    if path.exists() and not path.is_dir():
        raise BadPathError("is a file; the output is a folder, which the run makes")
    return path


def _init_adapter(text: str, base: Path) -> str:
    """Returns a folder that holds an adapter, mlx-lm's or peft's, as an absolute path; "" stays."""
    if not text:
        return ""
    path = absolute(text, base)
    for names in (("adapter_config.json",), ("adapters.safetensors", "adapter_model.safetensors")):
        if not any((path / name).is_file() for name in names):
            raise BadPathError(f"is not an adapter folder: there is no {path / names[0]}")
    return str(path)


def _chat_template(text: str, base: Path) -> str:
    """Returns the template's text; `text` is that, or the name of a file. "" stays.

    With the text itself in config.json, a later change of the file does not change what a run was trained with.
    """
    if not text or "{" in text or "\n" in text:
        return text
    path = absolute(text, base)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadPathError(f"is not a template (it has no braces), and no text file can be read at {path}") from error


PATHS: Mapping[str, Callable[[str, Path], str | Path]] = MappingProxyType(
    {
        "model": _model,
        "output": _output,
        "data.path": _data,
        "data.valid_path": _valid_data,
        "data.chat_template": _chat_template,
        "lora.init_adapter": _init_adapter,
    }
)


def resolve_path(key: str, value: Any, base: Path) -> Any:
    """Returns the value of `key`, relative to the folder `base`, as the run uses it; a value that is no path as it is.

    Raises BadPathError.
    """
    if key not in PATHS:
        return value
    try:
        return PATHS[key](value, base)
    except (OSError, UnicodeError) as error:  # too long, or in a folder that may not be read
        raise BadPathError(f"cannot be used as a path: {getattr(error, 'strerror', None) or error}") from error


def _may_be_hub_id(text: str) -> bool:
    return not text.startswith((".", "/", "~")) and HUB_ID.fullmatch(text) is not None
