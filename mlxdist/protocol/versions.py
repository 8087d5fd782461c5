"""The versions that all machines of a run must share, and a short hash of the code of mlxdist itself."""

import hashlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mlxdist.protocol.version import VERSION

PACKAGES = ("mlx", "mlx-lm")
CODE = "mlxdist-code"


def versions() -> dict[str, str]:
    """Returns the versions of this interpreter's packages, "" for one that is missing, and the hash of the code."""
    return {"mlxdist": VERSION, **package_versions(), CODE: code_hash()}


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that must be the same on all nodes, "" for one that is missing."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def package_files() -> Iterator[tuple[str, Path]]:
    """Yields every file of the installed package: its name from the package's parent folder, and its path."""
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(root.parent).as_posix(), path


def code_hash() -> str:
    """Returns twelve hexadecimal digits over the names and bytes of the package's files."""
    total = hashlib.sha256()
    for name, path in package_files():
        total.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:12]
