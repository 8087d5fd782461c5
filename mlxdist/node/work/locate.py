"""The run's model on this host: found where the run names it, or brought from the coordinator first."""

from collections.abc import Generator
from pathlib import Path

import msgspec

from mlxdist.node.link.jobs import FetchModel, LoadModel, Result, TakeBlock
from mlxdist.node.work.fetch import Fetch
from mlxdist.node.work.model_store import MARGIN_BYTES, is_here, own_models
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MlxdistError

Located = Generator[Result, None, m.RunSpec | None]


class Locator:
    """Says where the model is. `models`: the folder for those that come from a coordinator; `fetch`: one on its way."""

    def __init__(self, models: Path | None = None, *, margin: int = MARGIN_BYTES) -> None:
        self.models = models or own_models()
        self.margin = margin
        self.fetch: Fetch | None = None
        self._spec: m.RunSpec | None = None  # of the run, as it names its model

    def locate(self, job: LoadModel | FetchModel | TakeBlock, session: m.SessionId) -> Located:
        """Yields the messages that bring the model here. Returns the run with its place, once it can be loaded.

        Raises MlxdistError where that is not possible. What was not asked for changes nothing.
        """
        try:
            return (yield from self._locate(job, session))
        except MlxdistError:
            self.close()
            raise

    def _locate(self, job: LoadModel | FetchModel | TakeBlock, session: m.SessionId) -> Located:
        match job:
            case LoadModel(spec=spec):
                self.close()
                self._spec = spec
                if is_here(spec.model):
                    return spec
                yield m.ModelWanted(session), b""
            case FetchModel(files=()) if self._spec is not None:
                self.close()
                yield m.ModelHere(session), b""  # mlx-lm looks at the hub, and says what is wrong there
                return self._spec
            case FetchModel(files=files) if self.fetch is None:  # also where this host's files are other ones
                self.fetch = Fetch(session, self.models, files, margin=self.margin)
                yield from self.fetch.begin()
            case TakeBlock(block=block, payload=payload) if self.fetch is not None:
                yield from self.fetch.take(block, payload)
        if self._spec is None or self.fetch is None or not self.fetch.done:
            return None
        folder = self.fetch.folder
        self.close()
        return msgspec.structs.replace(self._spec, model=str(folder))

    def close(self) -> None:
        """Ends what is under way; what has come is kept."""
        if self.fetch is not None:
            self.fetch.close()
            self.fetch = None
