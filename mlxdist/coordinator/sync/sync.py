"""`mlxdist sync`: one download here, then every host at the same time gets what it lacks, and says how far it is."""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlxdist.coordinator.config.hosts import Hosts, NodeSpec, is_local
from mlxdist.coordinator.launch.elsewhere import coordinator_node
from mlxdist.coordinator.launch.findings import finding
from mlxdist.coordinator.launch.ssh import Target, everywhere, run, target_of
from mlxdist.coordinator.launch.workdir import workdir_of
from mlxdist.coordinator.sync.downloads import Kit, held, kit_for, managed_python
from mlxdist.coordinator.sync.environment import clean, is_made, make
from mlxdist.coordinator.sync.files import File, copied, differing
from mlxdist.coordinator.sync.host_facts import MINORS, HostFacts, Platform, facts_script, read_facts
from mlxdist.coordinator.sync.model_files import model_files
from mlxdist.protocol.budget import format_bytes
from mlxdist.protocol.errors import MlxdistError, NodeError

SPARE_BYTES = 300e6  # that a disk keeps free


@dataclass(frozen=True)
class Progress:
    """One host while it is synced. `stage` is empty at the end, where `result` says what was done."""

    host: str
    stage: str
    done: int = 0  # bytes
    total: int = 0
    result: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Wanted:
    """The files and the environment for one host."""

    node: NodeSpec
    facts: HostFacts
    kit: Kit | None  # None: hosts.toml names an interpreter
    interpreter: str  # to make the environment with; "" is the kit's
    model: tuple[File, ...]
    clean: bool


def sync(hosts: Hosts, model: str, cache: Path, *, clean_up: bool) -> Iterator[Progress]:
    """Syncs the hosts of a cluster, that of its coordinator too, and tells their progress.

    Every host ends with a result, or with its failure. `model`: the run's model, a folder or hub id; "" for none.
    Raises UserError when a download fails.
    """
    away = [] if is_local(hosts.coordinator.host) else [coordinator_node(hosts)]
    nodes = [*hosts.nodes, *away]
    for node in nodes:
        if target_of(node).local:
            yield Progress(node.name, "", result="is this machine: nothing to copy")
    work = []
    there = added(node for node in nodes if not target_of(node).local)
    for item in prepared(there, model, cache, clean_up=clean_up):
        if isinstance(item, Progress):
            yield item
        else:
            work.append(item)
    yield from _parallel(work)


def added(nodes: Iterable[NodeSpec]) -> list[NodeSpec]:
    """Returns one node for each work folder of a host; it needs what any of the nodes there needs."""
    found: dict[tuple[Target, str], NodeSpec] = {}
    for node in nodes:
        first = found.setdefault((target_of(node), workdir_of(node)), node)
        both = replace(first, python=first.python and node.python, model=first.model and node.model)
        found[target_of(node), workdir_of(node)] = both
    return list(found.values())


def prepared(
    nodes: Sequence[NodeSpec], model: str, cache: Path, *, clean_up: bool = False
) -> Iterator[Wanted | Progress]:
    """Yields the files for each host, or why it cannot have them; downloads what this machine does not have yet."""
    for node in nodes:
        yield Progress(node.name, "looking at the host")
    answers = everywhere(lambda node: run(target_of(node), facts_script(workdir_of(node))), nodes)
    files = model_files(model) if model and nodes else ()
    kits: dict[tuple[Platform, str], Kit] = {}
    for node, answer in zip(nodes, answers, strict=True):
        failed = finding(target_of(node), answer)
        facts = str(failed) if failed else read_facts(answer)
        if not isinstance(facts, HostFacts):
            yield Progress(node.name, "", result=facts, failed=True)
            continue
        yield Progress(node.name, "downloading what is not on this machine yet")
        with held(cache):
            wanted = None if node.python else _kit(kits, cache, facts)
        if isinstance(wanted, str):
            yield Progress(node.name, "", result=wanted, failed=True)
            continue
        kit, interpreter = wanted or (None, "")
        yield Wanted(node, facts, kit, interpreter, () if node.model else files, clean_up)


def _kit(kits: dict[tuple[Platform, str], Kit], cache: Path, facts: HostFacts) -> tuple[Kit, str] | str:
    """Returns the kit for a host and its interpreter ("" is the kit's), or why there is none."""
    python = managed_python(cache, facts.platform)
    minor, interpreter = (MINORS[0], "") if python else facts.pythons[0] if facts.pythons else ("", "")
    if not minor:
        return (
            "it has no Python 3.11 to 3.14, and this machine cannot download one (is it connected to the internet?): "
            "connect it and run sync again, or install one there (brew install python@3.12)"
        )
    key = (facts.platform, minor)
    if key not in kits:
        kits[key] = kit_for(cache, facts.platform, minor, python)
    return kits[key], interpreter


def sync_host(wanted: Wanted) -> Iterator[Progress]:
    """Syncs one host. Raises NodeError."""
    node, facts, kit = wanted.node, wanted.facts, wanted.kit
    target, workdir, name = target_of(node), facts.workdir, node.name
    yield Progress(name, "comparing files")
    made = kit is None or is_made(target, workdir, kit.name)
    files = [*(kit.files if kit and not made else ()), *wanted.model]
    missing = differing(target, workdir, files)
    total = sum(file.size for file in missing)
    needed = total + (kit.unpacked_bytes if kit and not made else 0)
    if needed and needed + SPARE_BYTES > facts.free_bytes:
        raise NodeError(
            f"{name}: {format_bytes(facts.free_bytes)} are free in {workdir}, and {format_bytes(needed)} are needed, "
            f"{format_bytes(SPARE_BYTES)} to spare: free {format_bytes(needed + SPARE_BYTES - facts.free_bytes)} "
            "there, or set workdir to a folder of another volume"
        )
    if missing:
        yield Progress(name, "copying", 0, total)
    for done in copied(target, workdir, missing, facts.rsync) if missing else ():
        yield Progress(name, "copying", done, total)
    said = [f"{format_bytes(total)} copied"] if missing else []
    if kit and not made:
        yield Progress(name, "installing", total, total)
        make(target, workdir, kit, wanted.interpreter)
        said.append(f"environment {kit.name} made with {wanted.interpreter or f'its own Python {kit.minor}'}")
    if kit and wanted.clean:
        yield Progress(name, "removing old files", total, total)
        gone = clean(target, workdir, kit)
        said.append(f"{sum(line.startswith('removed') for line in gone)} old files removed")
        said += [line for line in gone if not line.startswith("removed")]
    yield Progress(name, "", total, total, result="; ".join(said) or "all is there")


def _parallel(work: Sequence[Wanted]) -> Iterator[Progress]:
    """Syncs all hosts at the same time, and yields their progress as it comes."""
    told: queue.SimpleQueue[Progress] = queue.SimpleQueue()
    for wanted in work:
        threading.Thread(target=_told, args=(wanted, told), name=wanted.node.name, daemon=True).start()
    left = len(work)
    while left:
        item = told.get()
        left -= not item.stage
        yield item


def _told(wanted: Wanted, told: "queue.SimpleQueue[Progress]") -> None:
    name = wanted.node.name
    try:
        for item in sync_host(wanted):
            told.put(item)
    except MlxdistError as error:
        told.put(Progress(name, "", result=str(error).removeprefix(f"{name}: "), failed=True))
    except Exception as error:  # the other hosts go on, and this one is named
        told.put(Progress(name, "", result=f"failed: {error!r}", failed=True))
