"""The installed package has the files that git has, for every way to build and install it."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("coordinator", "node", "protocol")
# The folder may belong to another user: it is only read.
TRUST = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    """Returns the output of a command, which must succeed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | TRUST
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def make_wheel(source: str | Path, out: Path) -> Path:
    """Builds a wheel of `source`, anything that pip accepts, with the setuptools of this environment: no network."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source, cwd=out)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the project, so that building leaves no files in it."""
    skip = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "__pycache__", ".*_cache", "build", "runs", "models")
    return shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=skip)


@pytest.fixture
def committed() -> str:
    """The address of this checkout for pip; skips where there is no commit."""
    head = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", "HEAD"], cwd=ROOT, env=os.environ | TRUST, capture_output=True
    )
    if not (ROOT / ".git").exists() or head.returncode != 0:
        pytest.skip("not a git checkout with a commit")
    return f"git+file://{ROOT}"


def modules_of_folder(folder: Path) -> set[str]:
    """Returns the files of the package with the names that they must have in a wheel."""
    files = (path for path in (folder / "mlxdist").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)) for path in files}


def modules_of_commit() -> set[str]:
    """Returns the same names for the last commit."""
    return set(run("git", "ls-tree", "-r", "--name-only", "HEAD", "mlxdist", cwd=ROOT).split())


def modules_of_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as packed:
        return {name for name in packed.namelist() if ".dist-info/" not in name}


def assert_installs(wheel: Path, tmp_path: Path) -> None:
    """Asserts that the wheel installs into an empty environment, with one top-level name, and can be imported."""
    clean = tmp_path / "clean"
    venv.create(clean, with_pip=False, symlinks=True)
    python = clean / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site,) = clean.glob("lib/python*/site-packages")
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"mlxdist"}
    rooms = ", ".join(f"mlxdist.{room}" for room in ROOMS)
    where = run(python, "-I", "-c", f"import {rooms}; print(mlxdist.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(clean)
    assert (clean / "bin" / "mlxdist").exists()


def test_a_wheel_of_the_folder_has_every_module(tree: Path, tmp_path: Path) -> None:
    expected = modules_of_folder(tree)
    wheel = make_wheel(tree, tmp_path)
    assert modules_of_wheel(wheel) == expected
    assert_installs(wheel, tmp_path)


def test_a_wheel_of_the_sdist_has_every_module(tree: Path, tmp_path: Path) -> None:
    expected = modules_of_folder(tree)
    build = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, cwd=tree)
    (sdist,) = tmp_path.glob("*.tar.gz")
    wheel = make_wheel(sdist, tmp_path)
    assert modules_of_wheel(wheel) == expected
    assert_installs(wheel, tmp_path)


def test_a_wheel_of_the_git_address_has_every_module(committed: str, tmp_path: Path) -> None:
    wheel = make_wheel(committed, tmp_path)
    assert modules_of_wheel(wheel) == modules_of_commit()
    assert_installs(wheel, tmp_path)


def test_a_copy_without_symlinks_is_the_same_package(tree: Path, tmp_path: Path) -> None:
    for room in ROOMS:  # as in a zip download, which stores a link as a text file
        (tree / room).unlink()
        (tree / room).write_text(f"mlxdist/{room}")
    wheel = make_wheel(tree, tmp_path)
    assert modules_of_wheel(wheel) == modules_of_folder(tree)
    assert_installs(wheel, tmp_path)


def test_git_has_the_top_level_links_as_relative_symlinks(committed: str) -> None:
    listed = run("git", "ls-files", "--stage", *ROOMS, cwd=ROOT)
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.splitlines()}
    assert modes == dict.fromkeys(ROOMS, "120000")
    assert {room: os.readlink(ROOT / room) for room in ROOMS} == {room: f"mlxdist/{room}" for room in ROOMS}
