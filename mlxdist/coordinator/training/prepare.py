"""A run before its nodes start: the rows are read, the settings fitted to the machines, a resumed run is checked."""

from dataclasses import dataclass
from datetime import datetime

from mlxdist.coordinator.batch.batch_order import total_steps
from mlxdist.coordinator.config.hosts import Hosts
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.data.load import Dataset, read
from mlxdist.coordinator.memory.fit import fit, kept_settings, this_machine
from mlxdist.coordinator.memory.node_memory import NodeMemory
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.storage.first_reading import first_reading
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.resume import Earlier, check_same_bits, earlier_sessions, resume_notes
from mlxdist.protocol.messages import RunSpec


@dataclass(frozen=True)
class Prepared:
    """A run that only lacks its nodes."""

    config: RunConfig  # without "auto" in [memory]
    spec: RunSpec
    dataset: Dataset
    total_steps: int | None  # None where only the time is limited
    memory: NodeMemory  # what a node must hold
    earlier: Earlier | None  # what a resumed run goes on from
    data_notes: tuple[str, ...]  # what the person should know of the rows, and of settings that a resumed run changes
    memory_notes: tuple[str, ...]

    @property
    def steps_done(self) -> int:
        """Steps that earlier sessions have saved."""
        return self.earlier.state.step if self.earlier is not None else 0


def prepare(config: RunConfig, hosts: Hosts, folder: RunFolder, report: Reporter, *, resume: bool) -> Prepared:
    """Reads and checks everything that needs no node.

    Raises UserError for data, settings or a machine that do not fit, and for a run that cannot be resumed with them.
    """
    dataset = read(config, progress=report.stage, moment=first_reading(folder, datetime.now()))
    earlier = earlier_sessions(folder) if resume else None
    notes: list[str] = []
    if earlier is not None:
        config = kept_settings(folder, config)
        notes = resume_notes(folder, config, dataset.digest)
    elif resume:
        notes = ["the run had ended before anything was saved, and starts again at its first step"]
    rows = [each for each in (dataset.train, dataset.valid) if each is not None]
    fitted = fit(config, rows, hosts.nodes, this_machine())
    spec = run_spec(fitted.config)
    if earlier is not None:
        check_same_bits(earlier, folder, spec.numerics_id)
    return Prepared(
        config=fitted.config,
        spec=spec,
        dataset=dataset,
        total_steps=total_steps(config.train, len(dataset.train), config.batch, config.method),
        memory=fitted.memory,
        earlier=earlier,
        data_notes=(*notes, *dataset.notes),
        memory_notes=fitted.notes,
    )
