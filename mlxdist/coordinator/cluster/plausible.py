"""The checks of row outputs that need no second node: their shape, and sums that cannot be those of the leaf."""

import numpy as np

from mlxdist.coordinator.schedule.rounds import Request, RowOutputs
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import WireError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.methods import LOSS, columns_of

ROUNDING = 1e-4  # nats per token by which a log-probability may be above 0, and two sums of the same may differ


def row_outputs(request: Request, leaf: Leaf, message: m.LeafAnswer, payload: memoryview) -> RowOutputs:
    """The float32 row outputs [rows or pairs, columns] of an answer. Raises WireError for another shape."""
    rows = leaf.items
    columns = len(request.columns) or message.columns
    if message.columns != columns or columns < 1 or payload.nbytes != 4 * rows * columns:
        due = f"{len(request.columns)} columns" if request.columns else "a column or more"
        what = f"{payload.nbytes} bytes in {message.columns} columns for {rows} rows, where {due} of float32 are due"
        raise WireError(f"the answer to leaf {message.leaf} has {what}")
    return np.frombuffer(payload, np.float32).reshape(rows, columns)


def check_sums(request: Request, leaf: Leaf, outputs: RowOutputs) -> None:
    """Raises WireError for finite row outputs that no computation of this leaf gives.

    A log-probability is not above 0; the reference log-probs that were sent come back as they are; the loss of a row
    without a reference is its negative log-probability.
    """
    if not request.columns:
        return
    columns, inputs = columns_of(request.columns, outputs), request.row_inputs.get(leaf.index, {})
    slack = ROUNDING * sum(len(row.ids) for row in leaf.rows)
    where = f"the answer to leaf {leaf.index} has"
    for name, values in columns.items():
        sent = np.array(inputs.get(name, [np.nan] * len(values)), np.float32)
        known = ~np.isnan(sent)
        if not np.array_equal(values[known], sent[known]):
            raise WireError(f"{where} other reference log-probs ({name}) than those that were sent")
        if name != LOSS and (highest := values[~known].max(initial=-np.inf)) > slack:
            raise WireError(f"{where} a log-probability above 0 ({name} {highest:.3g})")
    if LOSS in columns and len(columns) == 2:
        (other,) = (values for name, values in columns.items() if name != LOSS)
        if np.abs(columns[LOSS] + other).max() > slack:
            raise WireError(f"{where} a loss sum that is not that of its log-probabilities")
