"""NaN and Inf in the answers of nodes: the rows' doing, or that of the node? Another node decides it.

A leaf that gave NaN or Inf is computed alone on another node. Where two nodes find it, it is a failure that names the
rows; where the other one does not, the first one was wrong, and its worker is restarted. The only node that there is
computes the leaf again after its worker was restarted. A partial with numbers so large that a sum could leave the range
of float32 is taken for one with Inf: a single node could end the run with it.
"""

from collections.abc import Mapping

from mlxdist.coordinator.cluster.events import Event, WrongAnswer, news_of
from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.schedule.assignments import Assignment
from mlxdist.coordinator.schedule.rounds import Round
from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.tree import Span


def believed(round_: Round, span: Span, name: str, nodes: Mapping[str, Node]) -> bool:
    """True if NaN or Inf that a node finds in these leaves is a result, and no fault of that node.

    Another node has found it in one of them; or no other can compute them, and an earlier worker of this one has found
    it there too. A restart because of other leaves proves nothing about these.
    """
    before = {node for leaf in range(span.start, span.stop) for node in round_.nonfinite.get(leaf, ())}
    others = any(node.computes and node.name not in before | {name} for node in nodes.values())
    again = any((leaf, name) in round_.restarted for leaf in range(span.start, span.stop))
    return bool(before - {name}) or (again and not others)


def reported(
    round_: Round, assignment: Assignment, span: Span, nodes: Mapping[str, Node], *, said: bool
) -> tuple[list[Event], NonFiniteError | None]:
    """Takes back leaves in which NaN or Inf was found: what is done about it, and the failure where it is believed.

    `said`: the worker itself found it. If it did not, it is restarted; so is the worker of the only node.
    """
    node = nodes[assignment.node]
    final = believed(round_, span, node.name, nodes)
    round_.recomputed += 1
    for leaf in range(span.start, span.stop):
        round_.nonfinite.setdefault(leaf, []).append(node.name)
    leaves = leaf_phrase(round_, span.start) if len(span) == 1 else f"leaves {span} of step {round_.request.step}"
    what = f"NaN or Inf in {leaves}"
    if final:
        round_.drop(assignment)
        return [news_of(node, what)], _failure(round_, span)
    if said and any(one.computes and one is not node for one in nodes.values()):
        round_.drop(assignment)
        return [news_of(node, what, "computed on another node")], None
    _note_restart(round_, node.name)
    return [WrongAnswer(node, what if said else f"{what}, which it did not say", counts=not said)], None


def refuted(round_: Round, span: Span, name: str, nodes: Mapping[str, Node]) -> list[Event]:
    """Has the workers restarted that found NaN or Inf in leaves which the node `name` has computed without."""
    events: list[Event] = []
    for leaf in range(span.start, span.stop):
        for other in dict.fromkeys(round_.nonfinite.pop(leaf, ())):
            if other != name and other in nodes and (leaf, other) not in round_.restarted:
                _note_restart(round_, other)
                what = f"{name} computed {leaf_phrase(round_, leaf)} without NaN or Inf"
                events.append(WrongAnswer(nodes[other], what))
        round_.restarted = {mark for mark in round_.restarted if mark[0] != leaf}
    return events


def leaf_phrase(round_: Round, index: int) -> str:
    """The words for a leaf and its rows."""
    ids = dict.fromkeys(str(row.row_id) for row in round_.request.leaves[index].rows)
    return f"leaf {index} of step {round_.request.step} (rows {', '.join(ids)})"


def _note_restart(round_: Round, name: str) -> None:
    """Notes that the worker that found NaN or Inf on this node, in whatever leaves, is restarted."""
    round_.restarted.update((leaf, name) for leaf, names in round_.nonfinite.items() if name in names)


def _failure(round_: Round, span: Span) -> NonFiniteError:
    """The failure at the leaf that most nodes have found, or one node most often."""

    def weight(leaf: int) -> tuple[int, int, int]:
        found = round_.nonfinite[leaf]
        return len(set(found)), len(found), -leaf

    leaf = max(range(span.start, span.stop), key=weight)
    names = list(dict.fromkeys(round_.nonfinite[leaf]))
    where, cure = f"on {' and on '.join(names)}", "Look at these rows, or lower train.learning_rate"
    if len(names) == 1:
        where += ", also after its worker was restarted, and no other node is there to compute it"
        cure += f", or run `mlxdist selfcheck` on {names[0]}"
    return NonFiniteError(f"NaN or Inf in {leaf_phrase(round_, leaf)}, {where}: no step was taken. {cure}", leaf=leaf)
