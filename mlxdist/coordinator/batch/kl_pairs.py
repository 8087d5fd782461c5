"""KTO's mismatched pairs. The reference point of a step is computed from their log-probabilities."""

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.row_store import PairedRows
from mlxdist.protocol.leaves import Row


def kl_rows(data: PairedRows, step: Step) -> list[Row]:
    """Returns row i of the step with the completion of row i-1 (row 0: of the last row), in row order.

    The rows are those of all windows. Each prompt is trimmed again for its new completion. Section 4.1 of
    https://arxiv.org/abs/2402.01306.
    """
    order = step.rows
    return [data.joined(row, order[place - 1]) for place, row in enumerate(order)]
