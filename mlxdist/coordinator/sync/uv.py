"""The uv of this machine and of other platforms, out of its package, and downloads of packages for any platform."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from mlxdist.coordinator.sync.files import File, aside
from mlxdist.coordinator.sync.host_facts import MINORS, Platform
from mlxdist.protocol.errors import UserError

UV = "uv>=0.9"
NO_RETRIES = {"UV_HTTP_RETRIES": "0"}  # a machine without the internet is told so at once


def uv_for(cache: Path, platform: Platform) -> File:
    """Returns the standalone uv of a platform; the newest, when the cache has none. Raises UserError."""
    folder = cache / f"uv-{platform.system}-{platform.processor}"
    path = _unpacked(folder)
    if path is None:
        download(cache, folder, [UV], platform, MINORS[0])
        path = _unpack(folder)
    return File.of(f"uv/{path.name}", path)


def own_uv(cache: Path) -> str:
    """Returns the path of a uv for this machine: out of the cache, by pip, or the installed one. Raises UserError."""
    folder = cache / "uv-own"
    if found := _unpacked(folder):
        return str(found)
    if importlib.util.find_spec("pip") is None:
        if installed := shutil.which("uv"):
            return installed
        raise UserError(
            f"sync needs pip or uv to fetch packages, and {sys.executable} has neither: install uv "
            "(brew install uv), then run sync again"
        )
    _pip(cache, ["--dest", str(folder), "--no-deps", UV])
    return str(_unpack(folder))


def run_uv(cache: Path, words: Sequence[str], what: str, platform: Platform | None = None) -> None:
    """Runs this machine's uv, for another platform if one is given. Raises UserError that says `what` is missing."""
    environ = {**os.environ, **NO_RETRIES}
    if platform is not None and platform.system == "Darwin":
        environ["MACOSX_DEPLOYMENT_TARGET"] = f"{platform.release}.0"
    _run([own_uv(cache), *words], what, environ)


def download(cache: Path, folder: Path, words: Sequence[str], platform: Platform, minor: str) -> None:
    """Downloads packages for a platform and Python `minor` into `folder`. Raises UserError."""
    kinds = [word for tag in platform.tags for word in ("--platform", tag)]
    kinds += ["--python-version", minor, "--implementation", "cp", "--only-binary", ":all:"]
    _pip(cache, ["--dest", str(folder), "--no-deps", *kinds, *words])


def _pip(cache: Path, words: Sequence[str]) -> None:
    here = importlib.util.find_spec("pip") is not None
    pip = [sys.executable, "-m", "pip"] if here else [own_uv(cache), "tool", "run", "pip"]
    command = [*pip, "download", "--quiet", "--disable-pip-version-check", "--no-input", *words]
    _run(command, "packages", {**os.environ, **NO_RETRIES})


def _run(command: Sequence[str], what: str, environ: dict[str, str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("WARNING")]
        said = "\n".join(f"  | {line}" for line in lines[-12:])
        raise UserError(f"{what} cannot be fetched; is this machine connected to the internet?\n{said}")


def _unpacked(folder: Path) -> Path | None:
    return max((path for path in folder.glob("uv-*") if path.suffix not in (".part", ".whl")), default=None)


def _unpack(folder: Path) -> Path:
    """Returns the program out of the package in `folder`, which it replaces."""
    package = next(folder.glob("uv-*.whl"))
    path = folder / "-".join(package.name.split("-")[:2])
    with zipfile.ZipFile(package) as archive:
        inside = next(name for name in archive.namelist() if name.endswith(".data/scripts/uv"))
        aside(path).write_bytes(archive.read(inside))
    aside(path).chmod(0o755)
    package.unlink()
    return aside(path).replace(path)
