"""Paths of a configuration: relative to the file they stand in, checked before anything is loaded."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


class BadPathError(ValueError):
    """A path that leads nowhere useful: the rest of the sentence after key and value."""


def absolute(text: str, base: Path) -> Path:
    """`text` as a person writes a path (~ is home), from the folder `base`; links are kept. Raises BadPathError."""
    if "\0" in text:
        raise BadPathError("is no path: it has a NUL character")
    return Path(os.path.abspath(base / os.path.expanduser(text)))


def model(text: str, base: Path) -> str:
    """An existing folder as an absolute path, else a hub id as it is."""
    path = absolute(text, base)
    if path.is_dir():
        return str(path)
    if path.exists():
        raise BadPathError("is a file; the model is a folder, as mlx_lm.load takes it, or a hub id")
    if not _may_be_hub_id(text):
        raise BadPathError(f"leads to {path}, and there is no folder; a hub id looks like mlx-community/Qwen3-4B-4bit")
    return text


def data(text: str, base: Path) -> str:
    """An existing folder or file as an absolute path, else a hub id as it is."""
    path = absolute(text, base)
    if path.exists():
        return str(path)
    if not _may_be_hub_id(text) or text.endswith(DATA_SUFFIXES):
        raise BadPathError(f"leads to {path}, and there is no file or folder")
    return text


def valid_data(text: str, base: Path) -> str:
    """An existing folder or file as an absolute path; "" stays."""
    if text and not absolute(text, base).exists():
        raise BadPathError(f"leads to {absolute(text, base)}, and there is no file or folder")
    return str(absolute(text, base)) if text else ""


def output(text: str, base: Path) -> Path:
    """The run folder, which need not exist."""
    path = absolute(text, base)
    if path.exists() and not path.is_dir():
        raise BadPathError("is a file; the output is a folder, made when the run starts")
    return path


def init_adapter(text: str, base: Path) -> str:
    """A folder that holds an adapter, as an absolute path; "" stays."""
    if not text:
        return ""
    path = absolute(text, base)
    for name in ("adapter_config.json", "adapters.safetensors"):
        if not (path / name).is_file():
            raise BadPathError(f"is no adapter folder: there is no {path / name}")
    return str(path)


def chat_template(text: str, base: Path) -> str:
    """The template itself, read where `text` names its file (so that config.json holds what was rendered); "" stays."""
    if not text or "{" in text or "\n" in text:
        return text
    path = absolute(text, base)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadPathError(f"is no template (it has no braces), and no text file can be read at {path}") from error


# The keys that hold paths, and how each is read: (value, folder it is relative to) -> value. Raises BadPathError.
PATHS: Mapping[str, Callable[[str, Path], str | Path]] = MappingProxyType(
    {
        "model": model,
        "output": output,
        "data.path": data,
        "data.valid_path": valid_data,
        "data.chat_template": chat_template,
        "lora.init_adapter": init_adapter,
    }
)


def _may_be_hub_id(text: str) -> bool:
    return not text.startswith((".", "/", "~")) and HUB_ID.fullmatch(text) is not None
