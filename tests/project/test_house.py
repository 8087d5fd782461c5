"""Rules of the project that linters cannot check, about folders, names, imports and words."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("coordinator", "node", "keys", "protocol")
HEAVY = {"mlx_lm", "transformers", "datasets"}  # take about two seconds to import
NOT_OURS = {".git", ".venv", "build", "dist", "runs", "models", "golden"}


def sources(*folders: str) -> list[Path]:
    """Returns the Python files of the project in the given folders."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


HOUSE = sources("mlxdist")
CODE = [*HOUSE, *sources("scripts", "tests")]


def files() -> Iterator[Path]:
    """Yields every file of the project, including files that are not committed yet."""
    for folder, names, leaves in os.walk(ROOT):
        hidden = (name for name in names if name.startswith(".") and name not in {".ci", ".github"})
        skipped = NOT_OURS | {"__pycache__"} | set(hidden) | {name for name in names if name.endswith(".egg-info")}
        names[:] = [name for name in names if name not in skipped]
        ours = [leaf for leaf in leaves if leaf not in NOT_OURS]  # in a git worktree `.git` is a file
        yield from (Path(folder, leaf) for leaf in ours if not Path(folder, leaf).is_symlink())


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(node: ast.AST) -> set[str]:
    """Returns the top-level names that one statement imports."""
    match node:
        case ast.Import():
            return {alias.name.partition(".")[0] for alias in node.names}
        case ast.ImportFrom(level=0, module=str(module)):
            return {module.partition(".")[0]}
    return set()


def imported_at_start(path: Path) -> set[str]:
    """Returns the imports of a module that run when it is imported: those outside functions and `if TYPE_CHECKING`."""
    found, waiting = set[str](), list[ast.AST](tree(path).body)
    while waiting:
        node = waiting.pop()
        found |= imports(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        waiting.extend(ast.iter_child_nodes(node))
    return found


def loaded_by(*modules: str) -> set[str]:
    """Returns the top-level names in a fresh interpreter after it imported the modules."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_every_module_says_what_it_is_for() -> None:
    assert [path for path in (*HOUSE, *sources("scripts")) if not ast.get_docstring(tree(path))] == []


def test_no_file_is_a_collection_of_unrelated_functions() -> None:
    drawers = {"utils", "util", "helpers", "misc", "common"}
    assert [path for path in CODE if path.stem in drawers] == []


def folder_of(module: str) -> str:
    """Returns the folder of a module, such as `mlxdist.coordinator.cluster`."""
    path = ROOT.joinpath(*module.split("."))
    return module if path.is_dir() else module.rpartition(".")[0]


def test_no_two_folders_import_each_other_in_a_circle() -> None:
    below: dict[str, set[str]] = {}
    for path in HOUSE:
        here = folder_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlxdist."):
                below.setdefault(here, set()).add(folder_of(str(node.module)))
    top = ("mlxdist", "mlxdist.coordinator", "mlxdist.node")  # the files above the folders
    graph = {here: there - {here, *top} for here, there in below.items() if here not in top}
    assert len(graph) > 15
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_import_is_relative_or_without_the_package_name() -> None:
    wrong = [
        (path, node.lineno)
        for path in CODE
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.ImportFrom) and node.level > 0) or imports(node) & set(ROOMS)
    ]
    assert wrong == []


def test_the_protocol_loads_no_model_library_and_no_socket() -> None:
    modules = [f"mlxdist.protocol.{path.stem}" for path in sources("mlxdist/protocol") if path.stem != "__init__"]
    assert modules
    assert loaded_by(*modules) & {"mlx_lm", "transformers", "zmq"} == set()


def test_model_libraries_are_imported_only_inside_functions() -> None:
    assert [path for path in HOUSE if imported_at_start(path) & HEAVY] == []


def test_a_supervisor_does_not_load_mlx() -> None:
    assert loaded_by("mlxdist.node.supervisor") & {"mlx", "mlx_lm", "transformers"} == set()


@pytest.mark.parametrize(("room", "allowed"), [("coordinator", 1), ("node", 1), ("keys", 1), ("protocol", 0)])
def test_zeromq_is_used_in_one_file_of_coordinator_and_of_node_and_of_keys(room: str, allowed: int) -> None:
    users = [
        path for path in sources(f"mlxdist/{room}") if any("zmq" in imports(node) for node in ast.walk(tree(path)))
    ]
    assert len(users) <= allowed, users


def test_executable_files_name_their_interpreter() -> None:
    run_by_name = {path for path in files() if os.access(path, os.X_OK)}
    with_interpreter = {path for path in files() if path.read_bytes().startswith(b"#!")}
    assert run_by_name == with_interpreter
    assert {ROOT / "scripts" / "test", ROOT / ".ci" / "run"} <= run_by_name


def test_no_file_names_a_machine_or_a_package_index() -> None:
    # The brackets keep this file from containing the names that it looks for.
    places = re.compile(
        rb"(?<!\w)/wor[k]/|/roo[t]/|/tmp/ven[v]|/home/[a-z]+/|pypi\.or[g]|pythonhosted\.or[g]|npmjs\.or[g]|deb\.debian\.or[g]"
    )
    found = {path: places.findall(path.read_bytes()) for path in files()}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_model_has_parameters_and_never_weights() -> None:
    wrong = re.compile(r"\b(model|base|adapter|lora)('s)? weights\b", re.IGNORECASE)
    texts = [*CODE, *(path for path in files() if path.suffix in {".md", ".toml"})]
    assert [path for path in texts if wrong.search(path.read_text(encoding="utf-8"))] == []


def test_every_link_of_a_page_leads_to_a_file() -> None:
    broken = [
        (page, target)
        for page in files()
        if page.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields every docstring of a file, with its line."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def test_docstrings_begin_with_a_verb_or_the_thing_itself() -> None:
    question = re.compile(r"\W*(What|Whether|How|Who|Where|Which|Why)\b")
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in (*HOUSE, *sources("scripts"))
        for line, text in docstrings(path)
        if question.match(text)
    ]
    assert wrong == []


def test_pages_and_code_avoid_old_fashioned_and_vague_words() -> None:
    avoided = re.compile(r"(?<![a-z])(anew|mend[a-z]*|nobody|whoever)(?![a-z])", re.IGNORECASE)
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*HOUSE, *pages)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if avoided.search(line)
    ]
    assert wrong == []


def test_every_file_that_a_page_names_exists() -> None:
    named = re.compile(r"`((?:mlxdist|coordinator|node|protocol|scripts|tests|docs|examples)/[\w./-]+\.\w+)")
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in files()
        if page.suffix == ".md"
        for name in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / name).exists() and not (ROOT / "mlxdist" / name).exists()
    ]
    assert missing == []
