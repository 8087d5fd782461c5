"""The measurements of models' layers that this user's machine remembers, one small file for each.

One holds for a model, its LoRA layers, a kind of machine and the versions of mlx and mlx-lm: what decides the kernels.
"""

import hashlib
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.memory.measured import MeasuredModel, measured_model
from mlxdist.coordinator.memory.model_files import ModelFiles
from mlxdist.coordinator.memory.prediction import WHOLE_GRAPH, LeafSize, ModelShape, model_shape, peak
from mlxdist.coordinator.storage.run_folder import write_bytes
from mlxdist.macos import chip
from mlxdist.protocol.errors import SaveError
from mlxdist.protocol.memory_probe import CHUNK, MOST_ANSWER, SEVERAL, SHORT, ProbeAnswer, ProbeOrder, read_answer
from mlxdist.protocol.model_files import WORK_FOLDER
from mlxdist.protocol.versions import package_versions

FORM = 1  # of what is measured; raised when it changes
LONG = (1024, 512)  # tokens of the longer row; the first whose measurement stays small
MOST_BYTES = 2e9  # of activations, by the table
MOST_RATIO = 30.0  # of measurement and table, either way; beyond it the answer is not believed


@dataclass(frozen=True, slots=True)
class MachineKind:
    """Everything about a machine that decides what a layer takes there."""

    system: str  # Darwin or Linux
    chip: str
    mlx: str
    mlx_lm: str

    @classmethod
    def here(cls) -> "MachineKind":
        """Returns the kind of this machine."""
        return cls.seen(platform.system(), chip(), package_versions())

    @classmethod
    def seen(cls, system: str, chip: str, versions: Mapping[str, str]) -> "MachineKind":
        """Returns the kind of a machine by what was seen of it."""
        return cls(system, chip.strip()[:80], versions.get("mlx", ""), versions.get("mlx-lm", ""))


@dataclass(frozen=True)
class ProbeStore:
    """The folder of measurements. A file that is missing or damaged costs the time to measure again."""

    folder: Path

    @classmethod
    def of_user(cls) -> "ProbeStore":
        """Returns the store of this user."""
        return cls(Path.home() / WORK_FOLDER / "memory")

    def answer(self, key: str) -> ProbeAnswer | None:
        """Returns what was measured; None where it was not, or cannot be read."""
        path = self.folder / f"{key}.json"
        try:
            return read_answer(path.read_bytes()) if path.stat().st_size <= MOST_ANSWER else None
        except (OSError, ValueError):
            return None

    def keep(self, key: str, answer: ProbeAnswer) -> None:
        """Remembers a measurement. Where that cannot be written, the next run measures again."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes(self.folder / f"{key}.json", msgspec.json.encode(answer))
        except (OSError, SaveError):
            return


def probe_order(config: RunConfig, shape: ModelShape) -> ProbeOrder:
    """Returns the order to measure the model of a run, in rows so short that it needs little memory."""
    few = min(shape.layers, SEVERAL)
    part = replace(shape, layers=few, state_layers=min(shape.state_layers, few), measured=())
    rows = ((long, LeafSize(long, long, long)) for long in LONG)
    fits = (long for long, leaf in rows if peak(part, leaf, segment_size=WHOLE_GRAPH, head_chunk=CHUNK) <= MOST_BYTES)
    return ProbeOrder(run_spec(config), next(fits, LONG[-1]))


def probe_key(files: ModelFiles, order: ProbeOrder, kind: MachineKind) -> str:
    """Returns the name of a measurement: a SHA-256 over all that it depends on."""
    spec = order.spec
    lora = (spec.lora_rank, spec.lora_dropout > 0, spec.rank_scaling, spec.target_modules, spec.num_layers)
    tensors = sorted((name, tensor.dtype, tensor.shape) for name, tensor in files.tensors.items())
    facts = (FORM, order.long, lora, spec.chunked, dict(files.config), tensors, kind)
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()[:32]


def believed(answer: ProbeAnswer, shape: ModelShape) -> MeasuredModel | None:
    """Returns the law of an answer; None where it is so far from the table that it cannot be a measurement.

    So no node can make the coordinator plan with any memory that it likes.
    """
    model = measured_model(answer)
    leaf = LeafSize(SHORT, SHORT, SHORT)
    expected = peak(shape, leaf, segment_size=WHOLE_GRAPH, head_chunk=CHUNK)
    found = model.whole(SHORT, SHORT, SHORT, CHUNK)
    return model if expected / MOST_RATIO <= found <= expected * MOST_RATIO else None


def table_shape(config: RunConfig, files: ModelFiles) -> ModelShape:
    """Returns the sizes of the run's model, as the table takes them. Raises KeyError where its configuration has none.

    A measurement is judged by them.
    """
    return replace(model_shape(files.config), half=files.half, chunked=config.memory.gated_delta == "chunked")


def remembered(
    config: RunConfig, files: ModelFiles, kinds: Collection[MachineKind], store: ProbeStore
) -> tuple[MeasuredModel, ...]:
    """Returns the model as all these kinds of machine have measured it; () unless all of them have."""
    try:
        shape = table_shape(config, files)
    except KeyError:
        return ()
    order = probe_order(config, shape)
    return known_by_all([probe_key(files, order, kind) for kind in kinds], shape, store)


def known_by_all(keys: Collection[str], shape: ModelShape, store: ProbeStore) -> tuple[MeasuredModel, ...]:
    """Returns the model as the measurements with these keys have it; () unless all are there and believed."""
    answers = [store.answer(key) for key in keys]
    models = [believed(answer, shape) for answer in answers if answer is not None]
    known = tuple(model for model in models if model is not None)
    return known if len(known) == len(keys) else ()
