"""The first settings of a run: rules of thumb over a survey, and the memory of this machine where it is the limit."""

from dataclasses import dataclass, replace

import numpy as np

from mlxdist.coordinator.batch.batch_order import total_steps
from mlxdist.coordinator.config.advice import kto_weights_advice, weight_ranges
from mlxdist.coordinator.config.hosts import local_hosts
from mlxdist.coordinator.config.schema import PreferenceConfig, RunConfig
from mlxdist.coordinator.data.checks import length_that_fits
from mlxdist.coordinator.memory.fit import Machine, fit, free_bytes, memory_need, node_limits
from mlxdist.coordinator.memory.model_files import find_model, read_model
from mlxdist.coordinator.memory.model_tree import UnloadableError, read_tree
from mlxdist.coordinator.starter.survey import Survey, uncut
from mlxdist.protocol.errors import ConfigError, UserError
from mlxdist.protocol.methods import METHODS

FITS = 0.99  # of the rows are not cut
LENGTH_GRAIN = 32  # tokens
SIZES = (8, 16, 32)  # rows of a step, from few rows to many
ROWS_OF_SIZE = 2000  # a step gets larger where there are more rows than this for each row of it
EPOCHS = ((1000, 3.0), (10_000, 2.0))  # up to so many rows; then 1
PREFERENCE_EPOCHS = ((200, 3.0), (1000, 2.0))
EVALUATIONS = 10  # of a run
VALID = ((1000, 0.1), (10_000, 0.05))  # up to so many rows, the share that is kept back; then 0.02
FEW_ROWS = 20  # none is kept back from fewer


@dataclass(frozen=True)
class Choice:
    """The settings that are written, and what a person should know of them."""

    config: RunConfig
    steps: int
    cut: int  # rows that are longer than max_length
    memory: str  # a sentence on what a node needs; empty where it is not known
    limited: bool  # max_length is what fits into the memory of this machine, not what fits the rows


def choose(survey: Survey, machine: Machine) -> Choice:
    """Returns settings for the rows and this machine. Raises UserError where the model does not fit into it at all."""
    n_rows = len(survey.rows)
    fraction = 0.0 if survey.has_valid or n_rows < FEW_ROWS else by_count(VALID, n_rows, 0.02)
    trained = n_rows - max(round(fraction * n_rows), 1) if fraction else n_rows
    config = uncut(survey.data, survey.model, survey.method)
    size = min(next((size for size in SIZES if trained <= size * ROWS_OF_SIZE), SIZES[-1]), max(trained // 4, 2))
    length = -(-length_that_fits(survey.lengths, FITS) // LENGTH_GRAIN) * LENGTH_GRAIN
    config = replace(
        config,
        data=replace(config.data, valid_fraction=fraction),
        batch=replace(config.batch, size=min(size, trained), max_length=length),
        preference=with_weights(survey, config),
    )
    config, memory, limited = fitted(survey, config, machine)
    epochs = by_count(PREFERENCE_EPOCHS if METHODS[survey.method].losses else EPOCHS, trained, 1.0)
    train = replace(config.train, steps=None, epochs=epochs)
    steps = total_steps(train, trained, config.batch, survey.method)
    assert steps is not None, "epochs have steps"
    config = replace(config, train=replace(train, eval_every=max(steps // EVALUATIONS, 1)))
    cut = sum(each > config.batch.max_length for each in survey.lengths)
    if cut > config.batch.max_cut * len(survey.lengths):  # the run would not start: the person is told, and it does
        config = replace(config, batch=replace(config.batch, max_cut=-(-100 * cut // len(survey.lengths)) / 100))
    return Choice(config, steps, cut, memory, limited)


def by_count(table: tuple[tuple[int, float], ...], count: int, beyond: float) -> float:
    """Returns the value of the first line of the table whose limit `count` does not exceed."""
    return next((value for limit, value in table if count <= limit), beyond)


def with_weights(survey: Survey, config: RunConfig) -> PreferenceConfig:
    """Returns [preference], for kto with the weight that balances the labels where their counts are far apart."""
    labels, preference = survey.rows.labels, config.preference
    if labels is None or len(set(labels.tolist())) == 1 or kto_weights_advice(labels, 1.0, 1.0) is None:
        return preference
    desirable = int(np.count_nonzero(labels))
    good, bad = weight_ranges(desirable, len(labels) - desirable, 1.0, 1.0)
    if good[0] > 1:
        return replace(preference, desirable_weight=good[0])
    return replace(preference, undesirable_weight=bad[1])


def fitted(survey: Survey, config: RunConfig, machine: Machine) -> tuple[RunConfig, str, bool]:
    """Returns the settings with a length that this machine holds, a sentence on the memory, and if it was the limit.

    The settings as they are where the model is not on this machine yet, or its memory cannot be predicted.
    """
    folder = find_model(survey.model) if survey.model_given else None
    if folder is None:
        return config, "", False
    nodes = local_hosts(1).nodes
    try:
        files = read_model(folder)
        positions = files.config.get("max_position_embeddings")
        if isinstance(positions, int) and positions < config.batch.max_length:
            config = replace(config, batch=replace(config.batch, max_length=positions))
        limits = node_limits(nodes, machine)
        tree = read_tree(folder, config.model, config.lora)
        need = memory_need(config, files, [survey.rows], free_bytes(nodes, limits), tree)
    except (KeyError, UnloadableError):
        return config, "", False
    limit = min(limit for limit, _ in limits.values())
    limited = need.total > limit
    if limited:
        longest = need.longest(limit)
        if longest < LENGTH_GRAIN:
            raise UserError(f"{survey.model} is too large for this machine: it {need.refusal(limit)}")
        config = replace(config, batch=replace(config.batch, max_length=longest // LENGTH_GRAIN * LENGTH_GRAIN))
    try:
        notes = fit(config, [survey.rows], nodes, machine).notes
    except ConfigError as error:
        raise UserError(str(error)) from None
    return config, notes[0], limited
