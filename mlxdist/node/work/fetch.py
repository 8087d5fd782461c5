"""A model on its way from the coordinator to this host's disk, for one session.

    ModelFiles -> what is missing? -> BlockWanted ... FileBlock -> BlockTaken, BlockWanted ... the last one -> ModelHere

Blocks are asked for in order, a few at a time, and each is compared with its hash before the disk gets it. A file gets
its name when the hash of the whole is right. What a broken connection has left is continued by the next session.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from mlxdist.node.link.jobs import Result
from mlxdist.node.work.model_store import MARGIN_BYTES, ModelStore, Part
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import NodeError, WireError
from mlxdist.protocol.model_files import WINDOW, block_count, checked_files, model_digest, size_phrase
from mlxdist.protocol.vectors import BLOCK_BYTES

MOST_DAMAGED = 3  # blocks in a row with another hash, or files; after that the node gives up
SAY_SECONDS = 5.0  # between two lines at the coordinator


class Fetch:
    """The transfer: `have` of `size` bytes are here, in `folder`."""

    def __init__(
        self,
        session: m.SessionId,
        models: Path,
        files: tuple[m.ModelFile, ...],
        *,
        margin: int = MARGIN_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`models`: the folder of all models on this host.

        Raises WireError for files that no model has, and what ModelStore raises.
        """
        self.session, self.files, self._clock = session, checked_files(files), clock
        self.folder = models / model_digest(files)[:32]
        self.size, self.have = sum(file.size for file in files), 0
        self._store = ModelStore(self.folder, margin=margin)
        self._part: Part | None = None
        self._missing: deque[int] = deque()  # files, in the order in which they come
        self._ranges: deque[tuple[int, int]] = deque()  # of blocks to ask for: a file, and the first block
        self._asked: set[tuple[int, int]] = set()
        self._early: dict[tuple[int, int], memoryview] = {}  # blocks behind one that is asked for again
        self._damaged_blocks = self._damaged_files = 0
        self._began = self._said = clock()

    @property
    def done(self) -> bool:
        """True when all files are here."""
        return not self._missing

    def close(self) -> None:
        """Ends the transfer; what has come is kept."""
        if self._part is not None:
            self._part.close()
        self._store.close()

    def begin(self) -> Iterator[Result]:
        """Looks for what is here already, and asks for the first blocks of the rest.

        Raises ConfigError where the disk would not hold it.
        """
        for index, file in enumerate(self.files):
            if not self._store.has(file):
                copy = self._store.copy_elsewhere(file)
                if copy is None:
                    self._missing.append(index)
                    self.have += (part := self._store.part(file))
                    self._ranges.append((index, part // BLOCK_BYTES if part < file.size else block_count(file.size)))
                    continue
                self._store.link(file, copy)
            self.have += file.size
        self._store.check_space(self.size - self.have)
        if self.have and not self.done:
            yield self._progress(f"{self._share()} of the model's files are on this disk already")
        yield from self._go_on()

    def take(self, message: m.FileBlock, payload: memoryview) -> Iterator[Result]:
        """Takes one block. Raises WireError for one that was not asked for, NodeError when too much was damaged."""
        place = (message.file, message.block)
        if place not in self._asked:
            raise WireError(f"block {message.block} of file {message.file}, which was not asked for")
        file = self.files[message.file]
        yield m.BlockTaken(self.session, message.receipt), b""
        right = payload.nbytes == min(BLOCK_BYTES, file.size - message.block * BLOCK_BYTES)
        if not right or hashlib.sha256(payload).hexdigest() != message.digest:
            self._damaged_blocks += 1
            if self._damaged_blocks > MOST_DAMAGED:
                raise NodeError(f"{self._damaged_blocks} blocks in a row of {file.name} arrived damaged")
            yield m.BlockWanted(self.session, *place), b""
            return
        self._damaged_blocks = 0
        self._asked.discard(place)
        self._early[place] = payload
        yield from self._go_on()

    def _go_on(self) -> Iterator[Result]:
        """Writes what has come, and asks for more."""
        yield from self._write()
        while len(self._asked) + len(self._early) < WINDOW and self._ranges:
            index, block = self._ranges.popleft()
            if block < block_count(self.files[index].size):
                self._ranges.appendleft((index, block + 1))
                self._asked.add((index, block))
                yield m.BlockWanted(self.session, index, block), b""
        now = self._clock()
        if self.done:
            seconds = now - self._began
            yield self._progress(f"the model's {size_phrase(self.size)} are here, after {seconds:.0f} s")
            yield m.ModelHere(self.session), b""
        elif now - self._said >= SAY_SECONDS:
            self._said = now
            yield self._progress(f"{self._share()} of the model are here")

    def _write(self) -> Iterator[Result]:
        """Writes the blocks whose turn it is, and names the files that are whole."""
        while self._missing:
            index = self._missing[0]
            file = self.files[index]
            if self._part is None:
                self._part = self._store.open(file)
            while self._part.size < file.size:
                payload = self._early.pop((index, self._part.size // BLOCK_BYTES), None)
                if payload is None:
                    return
                self._part.write(payload)
                self.have += payload.nbytes
            whole, self._part = self._part.end(), None
            self._missing.popleft()
            if whole:
                continue
            self._damaged_files += 1
            if self._damaged_files > MOST_DAMAGED:
                raise NodeError(f"{file.name} arrived with another hash {self._damaged_files} times")
            yield self._progress(
                f"{file.name} arrived with another hash than it has there: deleted, and asked for again"
            )
            self.have -= file.size
            self._missing.append(index)
            self._ranges.append((index, 0))

    def _share(self) -> str:
        return f"{100 * self.have / max(self.size, 1):.0f} % of {size_phrase(self.size)}"

    def _progress(self, sentence: str) -> Result:
        return m.Progress(self.session, sentence), b""
