"""A lost node changes no number: real nodes, killed, stopped, cut off, started anew; the adapter has the same bits."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault_runs import Nodes, Script, config_of, events, nodes_by_hand, sha, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Three nodes that live through all tests that leave them whole in the end."""
    with nodes_by_hand(tmp_path_factory.mktemp("nodes"), *NAMES) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def undisturbed(nodes: Nodes, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The SHA-256 of the adapter of a run that nothing happened to, by method."""
    known: dict[str, str] = {}

    def of(method: str) -> str:
        if method not in known:
            folder = tmp_path_factory.mktemp("whole") / method
            assert train(config_of(model, folder, method), nodes, 3) == 0
            known[method] = sha(folder)
        return known[method]

    return of


Hurt = Callable[..., None]


def told(folder: Path) -> str:
    return "\n".join(f"{event['name']} {event['state']} {event['message']}" for event in events(folder, "node"))


@pytest.mark.parametrize("method", ["kto", "sft", "dpo"])
def test_a_killed_worker_changes_no_bit(
    method: str, nodes: Nodes, undisturbed: Callable[[str], str], model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed(method)
    with Script(folder, (2, lambda: nodes.worker("b").kill()), (6, lambda: nodes.worker("a").kill())):
        assert train(config_of(model, folder, method), nodes, 1) == 0
    assert sha(folder) == expected
    assert "b connecting the worker was killed" in told(folder)
