"""A node without the model gets it from the coordinator: whole or not at all, whatever happens on the way."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mlxdist.coordinator.cluster.model_transfer import Listed, ListFiles
from mlxdist.coordinator.fleet.model_source import ModelSource
from mlxdist.node.link.jobs import FetchModel, Job, JobResults, LoadModel
from mlxdist.node.work.locate import Locator
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import NodeError, WireError
from mlxdist.protocol.model_files import WINDOW, checked_files, model_digest
from mlxdist.protocol.transport import DATA, PROBE, REVOKED, Parcel
from mlxdist.protocol.vectors import BLOCK_BYTES
from mlxdist.protocol.wire import decode, encode
from tests.coordinator.cluster.scripted_node import MANIFEST, SPEC, new_cluster
from tests.memory_cluster import RunningCluster
from tests.memory_nodes import MemoryNode, PretendedEngine

SIZES = {"config.json": 40, "model.safetensors": 3 * BLOCK_BYTES + 5, "tokenizer.json": BLOCK_BYTES, "empty.txt": 0}
BLOCKS = 1 + 4 + 1  # of these files
LARGE = 2  # the place of the large one in the list
SESSION = m.SessionId("run", 1, "1")


def engine_of(locator: Locator | None) -> PretendedEngine:
    """An engine that computes nothing of interest."""
    return PretendedEngine(MANIFEST, lambda job, leaf: np.zeros(1), lambda job, leaf: np.zeros(1), locator=locator)


class OtherFiles(PretendedEngine):
    """An engine that finds other files where the run names its model than the first node."""

    def perform(self, job: Job, session: m.SessionId, progress: Callable[[str], None]) -> JobResults:
        """Yields the results of one job."""
        for result in super().perform(job, session, progress):
            if isinstance(job, LoadModel) and isinstance(result, tuple) and isinstance(result[0], m.Loaded):
                yield msgspec.structs.replace(result[0], model_hash="f" * 64), b""
            else:
                yield result


class Sharing(RunningCluster):
    """A coordinator with a model's folder, and nodes without. Blocks on their way down are counted."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.there, self.homes = folder / "there", folder / "homes"
        draw = random.Random(3)
        self.there.mkdir()
        for name, size in SIZES.items():
            (self.there / name).write_bytes(draw.randbytes(size))
        (self.there / "code.py").write_text("raise SystemExit")
        self.locators: list[Locator] = []
        self.sent: list[tuple[int, int]] = []  # the blocks that were sent: file, block
        self.step = 0.0  # seconds that go by whenever the coordinator waits
        self.kept = 0  # blocks of the large file that the node had written when the connection broke
        self.cut_at: int | None = None  # the connection breaks in place of this block
        self.begin()

    def begin(self, incarnation: int = 5, model: str = "/a/place/of/the/coordinator") -> None:
        """A coordinator starts."""
        spec = msgspec.structs.replace(SPEC, model=model)
        source = ModelSource(self.there, self.homes / "hashes.json")
        self.told: list[str] = []
        cluster = new_cluster(spec=spec, incarnation=incarnation)
        self.coordinate(cluster, lambda news: None, model=source)

    def node(self, name: str = "a", *, margin: int = 0) -> MemoryNode:
        """A node that has no copy joins."""
        self.locators.append(Locator(self.homes / name, margin=margin))
        return self.join(engine_of(self.locators[-1]), name)

    def send(self, parcel: Parcel) -> bool:
        """Counts the blocks, and breaks the connection at one of them."""
        message, _ = decode(parcel.frames)
        if isinstance(message, m.FileBlock):
            self.sent.append((message.file, message.block))
            if self.blocks == self.cut_at:
                parts = (self.homes / "a").glob("*/model.safetensors.part")
                self.kept = sum(path.stat().st_size for path in parts) // BLOCK_BYTES
                wire = self.wires[parcel.channel, parcel.peer]
                wire.lose_all()
                wire.up.append(list(PROBE))
                return True
        return super().send(parcel)

    def turn(self) -> None:
        """A moment goes by, in which each node sends a heartbeat."""
        self.pump()
        self.now += 0.1
        for node in self.nodes.values():
            if node.session is not None:
                node.control.send(encode(m.Heartbeat(node.session.id, 1, True)))

    @property
    def blocks(self) -> int:
        """The number of blocks that were sent."""
        return len(self.sent)

    def receive(self, timeout: float) -> list[Parcel]:
        """Lets time go by, and everything move."""
        self.now += self.step
        return super().receive(timeout)

    def go_on(self) -> str:
        """All that happens until nothing does. Returns the news as lines."""
        for _ in range(300):
            self.turn()
            while self.cluster.news:
                self.told.append(self.cluster.news.popleft().message)
            if all(each.refusal for each in self.nodes.values()) or self.ready():
                break
        return "\n".join(self.told)

    def ready(self) -> bool:
        return {node.name for node in self.cluster.ready()} == set(self.nodes)

    def arrived(self, name: str = "a") -> dict[str, bytes]:
        """The files of the model at a node, by name; what is not whole is left out."""
        found = {}
        for path in (self.homes / name).glob("*/*"):
            if path.suffix != ".part" and not path.name.startswith("."):
                found[path.name] = path.read_bytes()
        return found

    @property
    def right(self) -> dict[str, bytes]:
        return {name: (self.there / name).read_bytes() for name in SIZES}


@pytest.fixture
def sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sharing]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    sharing = Sharing(tmp_path)
    yield sharing
    for locator in sharing.locators:
        locator.close()
    shutil.rmtree(tmp_path)


def test_a_node_without_the_model_gets_its_files_and_no_others_and_works(sharing: Sharing) -> None:
    node = sharing.node()
    said = sharing.go_on()
    assert sharing.ready(), said
    assert sharing.arrived() == sharing.right
    assert sharing.blocks == BLOCKS
    assert "it gets 4.2 MB from here" in said
    (folder,) = (sharing.homes / "a").iterdir()
    files = next(one.files for one in node.heard if isinstance(one, m.ModelFiles))
    assert folder.name == model_digest(files)[:32]


@pytest.mark.parametrize("cut", range(1, BLOCKS + 1))
def test_after_a_cut_at_any_block_the_rest_comes_and_nothing_comes_twice(sharing: Sharing, cut: int) -> None:
    """But for blocks that were under way."""
    sharing.cut_at = cut
    sharing.node()
    assert sharing.go_on()
    assert sharing.ready()
    assert sharing.arrived() == sharing.right
    assert sharing.blocks <= BLOCKS + WINDOW
    again = [block for file, block in sharing.sent[cut:] if file == LARGE and block < sharing.kept]
    assert again == []
    assert sharing.kept == {1: 0, 2: 0, 3: 1, 4: 2, 5: 3, 6: 0}[cut]


@pytest.mark.parametrize("cut", [4, 5])
def test_a_coordinator_that_comes_back_sends_the_rest(sharing: Sharing, cut: int) -> None:
    node = sharing.node()
    while sharing.blocks < cut:
        sharing.turn()
    before = sharing.blocks
    (part,) = (sharing.homes / "a").glob("*/model.safetensors.part")
    kept = part.stat().st_size // BLOCK_BYTES
    sharing.begin(incarnation=6)
    node.register()
    assert "% of 4.2 MB of the model's files are on this disk already" in sharing.go_on()
    assert sharing.arrived() == sharing.right
    assert kept
    assert [block for file, block in sharing.sent[before:] if file == LARGE] == list(range(kept, 4))


@pytest.mark.parametrize("damage", [1, 3])
def test_a_block_that_arrives_damaged_is_asked_for_again(sharing: Sharing, damage: int) -> None:
    sharing.damage_down = damage
    sharing.node()
    sharing.go_on()
    assert sharing.arrived() == sharing.right
    assert sharing.blocks == BLOCKS + damage


def test_a_link_that_damages_every_block_is_given_up_with_a_sentence(sharing: Sharing) -> None:
    sharing.damage_down = 100
    node = sharing.node()
    sharing.go_on()
    assert "4 blocks in a row of " in node.refusal
    assert not sharing.ready()
    assert sharing.arrived() == {}


def test_a_part_that_was_spoiled_on_the_disk_is_found_by_the_hash_deleted_and_said(sharing: Sharing) -> None:
    sharing.cut_at = 4
    sharing.node()
    while sharing.blocks < 4:
        sharing.turn()
    (part,) = (sharing.homes / "a").glob("*/model.safetensors.part")
    part.write_bytes(bytes(part.stat().st_size // BLOCK_BYTES * BLOCK_BYTES))
    assert "model.safetensors arrived with another hash than it has there: deleted" in sharing.go_on()
    assert sharing.arrived() == sharing.right
    assert not list((sharing.homes / "a").glob("*/*.part"))


def test_a_disk_that_would_not_hold_the_model_refuses_before_the_first_byte(sharing: Sharing) -> None:
    node = sharing.node(margin=2**50)
    sharing.go_on()
    assert "the model needs 4.2 MB on this Mac, and the disk of" in node.refusal
    assert "free some space" in node.refusal
    assert sharing.blocks == 0
    assert not list((sharing.homes / "a").glob("*/*.part"))


@pytest.mark.parametrize(
    "name",
    ["../evil.json", "/etc/evil.json", "a/b.json", "..", ".json", "run.py", "x.safetensors.part", "a\n.json", "ä.json"],
)
def test_a_name_that_no_model_file_has_is_refused_before_a_path_is_made(sharing: Sharing, name: str) -> None:
    hostile = m.ModelFile(name, 3, "0" * 64)
    with pytest.raises(WireError, match="which no model has"):
        checked_files((m.ModelFile("config.json", 3, "0" * 64), hostile))
    locator = Locator(sharing.homes / "a")
    assert list(locator.locate(LoadModel(sharing.cluster.settings.spec), SESSION))
    with pytest.raises(WireError, match="which no model has"):
        list(locator.locate(FetchModel((hostile,)), SESSION))
    assert not sharing.homes.exists()


def test_two_names_that_a_disk_of_a_mac_takes_for_one_are_refused() -> None:
    with pytest.raises(WireError):
        checked_files((m.ModelFile("a.json", 3, "0" * 64), m.ModelFile("A.json", 3, "1" * 64)))


@pytest.mark.parametrize("where", ["hub", "another model"])
def test_a_file_that_is_on_the_disk_already_is_not_sent(sharing: Sharing, tmp_path: Path, where: str) -> None:
    folders = {
        "hub": tmp_path / "hub" / "models--x--y" / "snapshots" / "1",
        "another model": sharing.homes / "a" / ("1" * 32),
    }
    folders[where].mkdir(parents=True)
    shutil.copy(sharing.there / "model.safetensors", folders[where])
    (folders[where] / "tokenizer.json").write_bytes(bytes(SIZES["tokenizer.json"]))  # same size, other bytes
    sharing.node()
    sharing.go_on()
    assert sharing.blocks == BLOCKS - 4
    assert sharing.right.items() <= sharing.arrived().items()
    got = next(path for path in (sharing.homes / "a").glob("*/model.safetensors") if path.is_symlink())
    assert got.read_bytes() == sharing.right["model.safetensors"]


def test_a_model_that_came_once_is_not_sent_again(sharing: Sharing) -> None:
    sharing.node()
    sharing.go_on()
    sent = sharing.blocks
    sharing.begin(incarnation=6)
    sharing.nodes["a"].register()
    sharing.go_on()
    assert sharing.ready()
    assert sharing.blocks == sent
    assert sharing.arrived() == sharing.right


def test_hashes_are_computed_once_and_again_for_a_file_that_changed(sharing: Sharing) -> None:
    def listed() -> str:
        answer = ModelSource(sharing.there, remembered).answer(ListFiles())
        assert isinstance(answer, Listed)
        return next(file.sha256 for file in answer.files if file.name == "config.json")

    remembered, config = sharing.homes / "hashes.json", sharing.there / "config.json"
    right = listed()
    remembered.write_text(remembered.read_text().replace(right, "0" * 64))
    assert listed() == "0" * 64, "it was remembered"
    os.utime(config, ns=(1, 1))
    assert listed() == right
    remembered.write_text("damaged")
    assert listed() == right


def test_a_file_that_changes_at_the_coordinator_ends_the_transfer_and_not_the_run(sharing: Sharing) -> None:
    node = sharing.node()
    while sharing.blocks < 3:
        sharing.turn()
    os.utime(sharing.there / "model.safetensors", ns=(1, 1))
    said = sharing.go_on()
    assert "model.safetensors has changed since the run began" in said
    assert "and not here: it looks at the hub" in said
    assert sharing.cluster.failure is None
    assert node.refusal == ""
    assert "model.safetensors" not in sharing.arrived()


def test_a_coordinator_without_a_copy_leaves_the_node_to_the_hub(sharing: Sharing) -> None:
    sharing.cluster.model.shared = False
    sharing.node()
    assert "it looks at the hub" in sharing.go_on()
    assert sharing.ready(), "the pretended engine finds it there"
    assert sharing.blocks == 0


def test_a_node_that_is_forgotten_in_the_middle_is_sent_no_more(sharing: Sharing) -> None:
    node = sharing.node()
    while sharing.blocks < 3:
        sharing.turn()
    assert node.wire is not None
    sharing.inbox.append(Parcel(DATA, node.wire.peer, [], REVOKED))
    sent = sharing.blocks
    sharing.go_on()
    assert "its key was taken off the list" in node.refusal
    assert sharing.blocks == sent
    assert not sharing.cluster.model.under_way("a")


def test_a_node_that_does_not_read_holds_a_window_of_blocks_and_no_more(sharing: Sharing) -> None:
    node = sharing.node()
    while sharing.blocks < 1:
        sharing.turn()
    assert node.wire is not None
    assert node.session is not None
    for block in range(WINDOW + 1):
        sharing.post(DATA, node.wire.peer, encode(m.BlockWanted(node.session.id, 2, block % 4)))
        sharing.fleet._pump(0.0)
    assert sharing.blocks <= WINDOW
    said = [news.message for news in sharing.cluster.news]
    assert any("it sent what makes no sense: more than 4 blocks asked for and not read" in each for each in said), said


def test_two_nodes_get_the_model_at_the_same_time(sharing: Sharing) -> None:
    sharing.node("a")
    sharing.node("b")
    sharing.go_on()
    assert sharing.arrived("a") == sharing.arrived("b") == sharing.right
    assert sharing.blocks == 2 * BLOCKS


def test_a_node_with_other_files_of_the_model_is_sent_those_of_the_run(sharing: Sharing) -> None:
    sharing.begin(model=str(sharing.there))
    sharing.join(engine_of(None), "right")
    sharing.go_on()
    other = OtherFiles(MANIFEST, lambda job, leaf: np.zeros(1), lambda job, leaf: np.zeros(1))
    other.locator = Locator(sharing.homes / "a", margin=0)
    node = sharing.join(other, "other")
    assert "it has other files of the model" in sharing.go_on()
    assert sharing.ready(), node.refusal
    assert sharing.arrived("a") == sharing.right


def seconds_to_ready(sharing: Sharing, name: str, *, vectors: bool) -> float:
    """The seconds until a node has the model and is ready, while vectors travel or not."""
    node, began = sharing.node(name), sharing.now
    while node.name not in {one.name for one in sharing.cluster.ready()}:
        if vectors:
            sharing.cluster.transfers.moved = sharing.now
        sharing.pump()
        sharing.now += 0.01
        assert sharing.now < began + 60
    return sharing.now - began


def test_while_vectors_travel_a_block_waits_many_times_as_long_as_one_takes(sharing: Sharing) -> None:
    alone = seconds_to_ready(sharing, "a", vectors=False)
    assert seconds_to_ready(sharing, "b", vectors=True) > 5 * alone


def test_a_node_that_gets_the_model_does_not_count_and_is_waited_for_until_it_is_ready(sharing: Sharing) -> None:
    """Longer than a start may take, as long as blocks come."""
    sharing.node()
    while sharing.blocks < 3:
        sharing.turn()
    assert sharing.cluster.nodes["a"].state.value == "fetching"
    assert sharing.cluster.ready() == []
    sharing.step, began = 0.2, sharing.now
    assert sharing.fleet.wait_for_nodes(1, 1, timeout=2.0) == 1
    assert sharing.now - began > 2.0
    assert sharing.arrived() == sharing.right


def test_a_node_that_stops_getting_the_model_is_not_waited_for_without_end(sharing: Sharing) -> None:
    node = sharing.node()
    while sharing.blocks < 3:
        sharing.turn()
    node.stopped, sharing.step = True, 0.2
    with pytest.raises(NodeError, match="0 of 1 nodes are ready after 1 s, and 1 are needed"):
        sharing.fleet.wait_for_nodes(1, 1, timeout=1.0)
