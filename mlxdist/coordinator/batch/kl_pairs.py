"""KTO's mismatched pairs, from whose log-probabilities the reference point of a step comes."""

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.row_store import PairedRows
from mlxdist.protocol.leaves import Row


def kl_rows(data: PairedRows, step: Step) -> list[Row]:
    """Row i of the step with the completion of row i-1, row 0 with the last one's, over all windows in row order.

    Each prompt is trimmed again for the completion that it gets. https://arxiv.org/abs/2402.01306, section 4.1.
    """
    order = [row for window in step.windows for row in window]
    return [data.joined(row, order[place - 1]) for place, row in enumerate(order)]
