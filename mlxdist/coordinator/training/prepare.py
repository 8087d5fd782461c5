"""A run before its nodes start: the rows are read, the settings fitted to the machines, a resumed run is checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mlxdist.coordinator.batch.batch_order import total_steps
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.data.load import Dataset, read
from mlxdist.coordinator.launch.roster import Roster
from mlxdist.coordinator.memory.fit import Machine, fit, kept_settings, leaf_limit, this_machine
from mlxdist.coordinator.memory.model_files import files_of
from mlxdist.coordinator.memory.node_memory import NodeMemory
from mlxdist.coordinator.memory.probes import ProbeStore
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.storage.adapter_files import load_adapter
from mlxdist.coordinator.storage.first_reading import first_reading
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.measure_memory import measured_on
from mlxdist.coordinator.training.resume import (
    Earlier,
    check_same_bits,
    check_same_rules,
    check_same_run,
    earlier_config,
    earlier_sessions,
    facts_of,
    recorded_seconds,
    resume_notes,
    saved_reference,
    seam_notes,
)
from mlxdist.protocol.budget import usable_bytes
from mlxdist.protocol.messages import RunSpec
from mlxdist.protocol.packing import PACKED


@dataclass(frozen=True)
class Prepared:
    """A run that only lacks its nodes."""

    config: RunConfig  # without "auto" in [batch] and [memory]
    spec: RunSpec
    dataset: Dataset
    total_steps: int | None  # None where only the time is limited
    memory: NodeMemory  # what a node must hold
    earlier: Earlier | None  # what a resumed run goes on from
    recorded_seconds: Mapping[int, float]  # by step, of the steps that a resumed run does again
    data_notes: tuple[str, ...]  # what the person should know of the rows, and of settings that a resumed run changes
    memory_notes: tuple[str, ...]

    @property
    def steps_done(self) -> int:
        """Steps that earlier sessions have saved."""
        return self.earlier.state.step if self.earlier is not None else 0


def prepare(
    config: RunConfig,
    roster: Roster,
    folder: RunFolder,
    report: Reporter,
    *,
    resume: bool,
    previous: bool = False,
    probes: ProbeStore | None = None,
) -> Prepared:
    """Reads and checks everything that needs no node; files that are damaged are found before the rows are read.

    `previous`: resumes from the state before the last one. `probes`: what was measured of models' memory; None: what
    this user's machine remembers.

    Raises UserError for data, settings or a machine that do not fit, and for a run that cannot be resumed with them.
    """
    earlier = earlier_sessions(folder, previous=previous) if resume else None
    before = None
    if earlier is not None:
        check_same_rules(earlier, folder)
        before = earlier_config(folder, earlier.settings)
    elif config.lora.init_adapter:
        load_adapter(Path(config.lora.init_adapter))  # and again when the nodes have told its shapes
    files_of(config.model)  # and again when the rows are known
    dataset = read(config, progress=report.stage, moment=first_reading(folder, datetime.now()))
    notes: list[str] = []
    if earlier is not None:
        config = kept_settings(earlier.settings, config)
        notes = resume_notes(before, folder, config, dataset.digest)
        notes += seam_notes(before, config, len(dataset.train), earlier.state)
        check_same_run(earlier, folder, facts_of(config, dataset.digest))
        if earlier.state.step:
            saved_reference(config, folder)
    elif resume:
        notes = ["the run had ended before anything was saved, and starts again at its first step"]
    rows = [each for each in (dataset.train, dataset.valid) if each is not None]
    here, elsewhere = this_machine(), machines_of(roster)
    measured = measured_on(config, rows, roster, (here, elsewhere), probes or ProbeStore.of_user(), report)
    fitted = fit(config, rows, roster.ready, here, elsewhere, measured)
    packing = earlier.packing if earlier is not None else PACKED
    spec = run_spec(fitted.config, packing=packing, largest_leaf=leaf_limit(fitted.config, rows))
    if earlier is not None:
        check_same_bits(earlier, folder, spec.numerics_id)
    return Prepared(
        config=fitted.config,
        spec=spec,
        dataset=dataset,
        total_steps=total_steps(config.train, len(dataset.train), config.batch, config.method),
        memory=fitted.memory,
        earlier=earlier,
        recorded_seconds=recorded_seconds(folder, earlier.state.step if earlier is not None else 0) if resume else {},
        data_notes=(*notes, *dataset.notes),
        memory_notes=fitted.notes,
    )


def machines_of(roster: Roster) -> dict[str, Machine]:
    """Returns the machines of the hosts that were seen, by node; all that one may use counts as free."""
    seen = {name: each for name, each in roster.seen.items() if each.memory_bytes}
    return {
        name: Machine(each.memory_bytes, usable_bytes(each.memory_bytes, each.system), each.system)
        for name, each in seen.items()
    }
