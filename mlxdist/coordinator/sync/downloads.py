"""The files for hosts of one platform, downloaded once into the coordinator's cache: uv, packages, perhaps a Python.

The packages of the lock are found by uv, which knows the conditions of another platform, and fetched by pip, which
stores them as they are. A second sync with the same lock asks the network for nothing.
"""

import fcntl
import hashlib
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions, requires
from pathlib import Path

from mlxdist.coordinator.sync.files import File, aside
from mlxdist.coordinator.sync.host_facts import MINORS, Platform
from mlxdist.coordinator.sync.uv import download, run_uv, uv_for
from mlxdist.coordinator.sync.wheel import write_wheel
from mlxdist.protocol.errors import UserError

EXACT = ("mlx", "mlx-lm")  # a node with another version of these is refused, so the lock holds those of this machine


@dataclass(frozen=True)
class Kit:
    """All files that make one environment on hosts of one platform, and the lock that names every package."""

    name: str  # of the environment: the version and a hash of the lock and the minor version of Python
    minor: str  # of Python, as "3.12"
    uv: File
    python: File | None  # an archive with an interpreter; None: the host has its own
    wheels: tuple[File, ...]
    lock: str  # a requirements file with hashes
    unpacked_bytes: int  # of the environment

    @property
    def files(self) -> tuple[File, ...]:
        """All files that a host of the platform needs."""
        return (self.uv, *([self.python] if self.python else []), *self.wheels)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Returns the coordinator's cache of downloads: MLXDIST_CACHE, or a folder where the system keeps such things."""
    if given := environ.get("MLXDIST_CACHE"):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlxdist"
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlxdist"


@contextmanager
def held(cache: Path) -> Iterator[None]:
    """Holds the cache, which is made first; waits while another sync downloads into it."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def managed_python(cache: Path, platform: Platform) -> File | None:
    """Returns an archive with the interpreter that uv manages for a platform; None where it cannot be downloaded."""
    found = sorted(cache.glob(f"cpython-{MINORS[0]}.*-{platform.python}.tar.gz"))
    if found:
        return File.of(f"python/{found[-1].name}", found[-1])
    folder = cache / "python"
    name = f"cpython-{MINORS[0]}-{platform.python}"
    with suppress(UserError):  # no way to its release page from here; the host may have an interpreter
        run_uv(cache, ["python", "install", "--no-bin", "--install-dir", str(folder), name], name)
    made = sorted(folder.glob(f"cpython-{MINORS[0]}.*-{platform.python}"))
    if not made:
        return None
    path = cache / f"{made[-1].name}.tar.gz"
    with tarfile.open(aside(path), "w:gz", compresslevel=1) as archive:
        archive.add(made[-1], made[-1].name)
    return File.of(f"python/{path.name}", aside(path).replace(path))


def kit_for(cache: Path, platform: Platform, minor: str, python: File | None) -> Kit:
    """Returns all files for hosts of a platform with Python `minor`; downloads what the cache, held, does not have.

    Raises UserError when a package cannot be found or fetched.
    """
    uv = uv_for(cache, platform)
    lock = _lock(cache, platform, minor)
    folder = cache / f"{platform.uv}-py{minor}-{hashlib.sha256(lock.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        _fetch(cache, folder, lock, platform, minor)
    own = write_wheel(cache)
    wheels = tuple(File.of(f"wheels/{path.name}", path) for path in (*sorted(folder.glob("*.whl")), own))
    version = own.name.split("-")[1]
    lock += f"mlxdist=={version} --hash=sha256:{wheels[-1].sha256}\n"
    name = f"{version}-{hashlib.sha256(f'{minor} {lock}'.encode()).hexdigest()[:12]}"
    return Kit(name, minor, uv, python, wheels, lock, sum(_unpacked(file.path) for file in wheels))


def _lock(cache: Path, platform: Platform, minor: str) -> str:
    """Returns every package that the project needs on a platform, with its version and hashes.

    The versions of this machine are preferred, and those that a node is checked for are taken exactly.
    """
    wanted = "".join(f"{line}\n" for line in requires("mlxdist") or () if "extra ==" not in line)
    here = {_normal(one.metadata["Name"]): one.version for one in distributions()}
    preferred = "".join(f"{name}=={version}\n" for name, version in sorted(here.items()))
    exact = "".join(f"{name}=={here[name]}\n" for name in EXACT if name in here)
    key = hashlib.sha256(f"{wanted}|{preferred}|{platform}|{minor}".encode()).hexdigest()[:12]
    path = cache / f"lock-{key}.txt"
    if not path.exists():
        (cache / "wanted.in").write_text(wanted)
        (cache / "exact.txt").write_text(exact)
        aside(path).write_text(preferred)  # uv keeps the versions of the file that it writes over
        words = ["pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes"]
        words += ["--only-binary", ":all:", "--python-platform", platform.uv, "--python-version", minor]
        words += ["--constraint", str(cache / "exact.txt"), "--output-file", str(aside(path))]
        words.append(str(cache / "wanted.in"))
        run_uv(cache, words, f"the packages for {platform.uv} and Python {minor}", platform)
        aside(path).replace(path)
    return path.read_text()


def _fetch(cache: Path, folder: Path, lock: str, platform: Platform, minor: str) -> None:
    """Downloads every package of the lock into `folder`, which is there when it is complete."""
    part = aside(folder)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    (part / "lock.txt").write_text(lock)
    words = ["--require-hashes", "--requirement", str(part / "lock.txt")]
    download(cache, part, words, platform, minor)
    part.replace(folder)


def _unpacked(wheel: Path) -> int:
    with zipfile.ZipFile(wheel) as archive:
        return sum(item.file_size for item in archive.infolist())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
