"""Audits: a node that computes wrongly is found, named and put out, an honest one never; no adapter changes."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxdist.coordinator.cluster.audit import (
    TOLERANCE,
    Answer,
    Finding,
    answer_of,
    chosen,
    distance,
    judge,
)
from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, LoraConfig, RunConfig, TrainConfig
from mlxdist.coordinator.methods.kinds import Sft
from mlxdist.coordinator.train import Run, train
from mlxdist.coordinator.training.adamw import no_moments
from mlxdist.coordinator.training.initial_adapter import draw
from mlxdist.coordinator.training.startup import plan_sentences
from mlxdist.coordinator.training.state import State
from mlxdist.node.link.jobs import Job, JobResults, Partial
from mlxdist.node.work.engine import Engine
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import NodeError
from mlxdist.protocol.transport import CONTROL
from mlxdist.protocol.vectors import BLOCK_ELEMENTS, Vector
from tests.coordinator.cluster.scripted_node import Bench, ScriptedNode
from tests.coordinator.training.silent import Silent
from tests.laws.memory_fleet import ListRows, make_row, memory_cluster
from tests.laws.model_folder import VOCABULARY
from tests.laws.preference_cases import case_of
from tests.laws.preference_runs import train_here

# ---- which leaves


@given(st.floats(0, 1), st.integers(0, 2**32 - 1), st.integers(1, 10**6), st.integers(1, 40))
def test_the_leaves_are_a_function_of_share_seed_and_step(share: float, seed: int, step: int, leaves: int) -> None:
    found = chosen(share, seed, step, leaves)
    assert found == chosen(share, seed, step, leaves) <= set(range(leaves))
    assert chosen(0.0, seed, step, leaves) == set()
    assert chosen(1.0, seed, step, leaves) == set(range(leaves))
    assert found <= chosen(min(2 * share, 1.0), seed, step, leaves)


def test_one_leaf_in_a_hundred_is_one_in_a_hundred() -> None:
    counts = [len(chosen(0.01, seed, step, 16)) for seed in (0, 7) for step in range(2000)]
    assert 0.008 < sum(counts) / (16 * len(counts)) < 0.012
    assert {leaf for step in range(2000) for leaf in chosen(0.01, 0, step, 16)} == set(range(16))


# ---- how answers are compared


@settings(max_examples=25)
@given(st.integers(1, 3 * BLOCK_ELEMENTS // 2), st.integers(0, 1000), st.sampled_from([1e-6, 1e-3, 0.05, 0.3, 1.0]))
def test_the_distance_of_two_sketches_is_that_of_the_vectors(elements: int, seed: int, much: float) -> None:
    random = np.random.default_rng(seed)
    one = random.standard_normal(elements).astype(np.float32)
    other = (one + much * random.standard_normal(elements)).astype(np.float32)
    true = float(np.linalg.norm(one - other) / max(np.linalg.norm(one), np.linalg.norm(other)))
    found = distance(answer_of("a", one), answer_of("b", other))
    assert found == pytest.approx(true, rel=0.15, abs=1e-7)
    assert distance(answer_of("a", one), answer_of("b", one)) == 0


def test_vectors_of_zeros_are_equal() -> None:
    assert distance(answer_of("a", np.zeros(5, np.float32)), answer_of("b", np.zeros(5, np.float32))) == 0


# ---- who is right

RIGHT = np.arange(1, 100, dtype=np.float32)
WRONG = RIGHT[::-1].copy()
NEAR = RIGHT * np.float32(1 + 1e-6)


def conclude(
    vectors: dict[str, list[Vector]], alike: Callable[[str, str], bool] = lambda one, other: True
) -> tuple[Finding, list[str]]:
    """The finding over nodes that give these vectors in turn, the last one for ever; and who was asked."""
    nodes = list(vectors)
    answers, asked = [answer_of(nodes[0], vectors[nodes[0]][0])], [nodes[0]]
    while True:
        next_ = judge(answers, alike, nodes)
        if isinstance(next_, Finding):
            return next_, asked
        asked.append(next_)
        given = vectors[next_]
        answers.append(answer_of(next_, given[min(asked.count(next_), len(given)) - 1]))
        assert len(asked) <= 2 * len(nodes), "asked for ever"


def test_two_that_agree_are_asked_no_further() -> None:
    assert conclude({"a": [RIGHT], "b": [RIGHT], "c": [WRONG]}) == (Finding(), ["a", "b"])


@pytest.mark.parametrize("bad", ["a", "b"])
@pytest.mark.parametrize("wrong", [[WRONG], [WRONG, RIGHT], [NEAR, RIGHT]], ids=["always", "once", "a last bit once"])
def test_a_third_node_says_who_is_wrong(bad: str, wrong: list[Vector]) -> None:
    vectors = {name: wrong if name == bad else [RIGHT] for name in "abc"}
    finding, asked = conclude(vectors)
    assert finding == Finding(wrong=(bad,))
    assert asked == ["a", "b", "c", bad]


@pytest.mark.parametrize("bad", ["a", "b"])
def test_of_two_nodes_the_one_that_takes_its_answer_back_is_wrong(bad: str) -> None:
    other = "b" if bad == "a" else "a"
    vectors = {bad: [WRONG, RIGHT], other: [RIGHT]}
    assert conclude({name: vectors[name] for name in "ab"})[0] == Finding(wrong=(bad,))


def test_of_two_nodes_the_one_that_never_repeats_its_bits_is_wrong() -> None:
    assert conclude({"a": [WRONG, 2 * WRONG], "b": [RIGHT]})[0] == Finding(wrong=("a",))


def test_two_nodes_that_both_insist_cannot_be_judged() -> None:
    assert conclude({"a": [WRONG], "b": [RIGHT]})[0] == Finding(undecided=True)


@pytest.mark.parametrize("vectors", [{"a": [NEAR], "b": [RIGHT]}, {"a": [NEAR], "b": [RIGHT], "c": [RIGHT]}])
def test_the_same_other_last_bits_each_time_are_no_fault(vectors: dict[str, list[Vector]]) -> None:
    finding, _ = conclude(vectors)
    assert finding.wrong == ()
    assert "a" in finding.unlike


def test_nodes_of_two_classes_agree_within_the_tolerance() -> None:
    classes = {"a": 1, "b": 2, "c": 2}

    def alike(one: str, other: str) -> bool:
        return classes[one] == classes[other]

    assert conclude({"a": [NEAR], "b": [RIGHT], "c": [RIGHT]}, alike) == (Finding(), ["a", "b"])
    assert conclude({"a": [WRONG], "b": [RIGHT], "c": [RIGHT]}, alike)[0] == Finding(wrong=("a",))
    assert conclude({"a": [RIGHT * np.float32(1 + 2 * TOLERANCE)], "b": [RIGHT]}, alike)[0].undecided


def test_other_row_numbers_are_another_answer() -> None:
    one, other = answer_of("a", RIGHT), answer_of("b", RIGHT)
    assert judge([replace(one, rows=b"1"), other], lambda *_: True, "ab") == Finding()  # not of the same node
    assert judge([replace(one, rows=b"1"), replace(other, rows=b"2")], lambda *_: True, "ab") == "a"


def test_who_is_gone_is_not_asked_and_not_believed_against_one_that_repeats_its_bits() -> None:
    answers = [answer_of("gone", WRONG), answer_of("b", RIGHT)]
    assert judge(answers, lambda *_: True, ["b"]) == "b"
    assert judge([*answers, answer_of("b", RIGHT)], lambda *_: True, ["b"]) == Finding(wrong=("gone",))
    assert judge([answer_of("a", RIGHT)], lambda *_: True, ["a"]) == Finding()  # no other node is left


@pytest.mark.slow
@given(st.lists(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=2, max_size=2), min_size=2, max_size=5))
@example([[1, 0], [2, 1], [0, 0], [0, 0], [0, 0]])
@example([[1, 1], [0, 0], [1, 1], [0, 0], [0, 0]])
def test_every_cluster_comes_to_a_finding_that_names_no_honest_node(kinds: list[list[int]]) -> None:
    vectors = [RIGHT, WRONG, WRONG * 3]
    nodes = {f"n{index}": [vectors[kind] for kind in pair] for index, pair in enumerate(kinds)}
    finding, _ = conclude(nodes)
    honest = [name for name, given in nodes.items() if all(vector is RIGHT for vector in given)]
    if len(honest) == len(nodes):
        assert finding == Finding()
    if len(honest) > len(nodes) / 2:
        assert not set(honest) & set(finding.wrong)


# ---- whole runs


class Flipping(Engine):
    """Another engine whose nth partials have one bit flipped: of their greatest element."""

    def __init__(self, inner: Engine, *at: int, bit: int = 20) -> None:
        super().__init__()
        self.inner, self.at, self.bit, self.offered = inner, at, bit, 0

    def perform(self, job: Job, session: m.SessionId, progress: Callable[[str], None]) -> JobResults:
        for result in self.inner.perform(job, session, progress):
            if isinstance(result, Partial):
                self.offered += 1
                if self.offered in self.at:
                    vector = result.vector.copy()
                    vector.view(np.uint32)[np.abs(vector).argmax()] ^= np.uint32(1 << self.bit)
                    yield replace(result, vector=vector)
                    continue
            yield result


Trained = tuple[str, list[str], int]  # SHA-256 of the adapter, news, audited leaves


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return [Engine() for _ in range(5)]


@pytest.fixture(scope="module")
def plain(trained: Callable[..., Trained], engines: list[Engine]) -> str:
    """The adapter of the undisturbed run."""
    return trained(engines[:1], 0.0)[0]


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    random = np.random.default_rng(3)
    lengths = [int(random.integers(3, 60)) for _ in range(24)]
    rows = ListRows([make_row(i, random.integers(0, VOCABULARY, n).tolist(), 1) for i, n in enumerate(lengths)])

    def run(engines: Sequence[Engine], audit: float, steps: int = 3) -> Trained:
        config = RunConfig(
            model=str(model),
            output=tmp_path_factory.mktemp("audits"),
            data=DataConfig(path="none"),
            batch=BatchConfig(size=8, leaf_tokens=1),  # a leaf for each row
            lora=LoraConfig(rank=4),
            train=TrainConfig(steps=steps, learning_rate=1e-2, eval_every=0, audit=audit),
        )
        silent, news = Silent(), []
        with memory_cluster(config, engines, lambda item: news.append(f"{item.name} {item.message}")) as (fleet, _):
            vector = draw(fleet.wait_for_model().manifest, config.batch.seed)
            fleet.send_adapter(0, vector)
            fleet.wait_for_nodes(len(engines), len(engines), 0.0)
            loop = Run(config, Sft(config, rows, None), rows, silent, steps, fleet, silent, silent)  # type: ignore[arg-type]
            state = train(loop, State(vector, no_moments(len(vector))))
            assert fleet._pool.most_held <= len(engines) + 2 + 3
        return hashlib.sha256(state.adapter.tobytes()).hexdigest(), news, fleet.audited

    return run


def quarantined(news: Sequence[str]) -> list[str]:
    return [line.split()[0] for line in news if "quarantined" in line]


@pytest.mark.parametrize(("nodes", "share"), [(2, 1.0), (3, 0.1), (5, 1.0)])
def test_audits_of_an_honest_cluster_change_nothing_and_accuse_no_node(
    nodes: int, share: float, trained: Callable[..., Trained], engines: list[Engine], plain: str
) -> None:
    found, news, audited = trained(engines[:nodes], share)
    assert (found, quarantined(news)) == (plain, [])
    assert audited == sum(len(chosen(share, 0, step, 8)) for step in (1, 2, 3)) > 0


@pytest.mark.parametrize(("bad", "at"), [(0, (1,)), (1, (5,)), (2, (9, 10))])
def test_a_node_that_flips_a_bit_now_and_then_is_quarantined_and_the_adapter_has_the_undisturbed_bits(
    bad: int, at: tuple[int, ...], trained: Callable[..., Trained], engines: list[Engine], plain: str
) -> None:
    mixed: list[Engine] = [Flipping(engine, *at) if index == bad else engine for index, engine in enumerate(engines)]
    found, news, _ = trained(mixed[:3], 1.0)
    assert found == plain
    assert quarantined(news) == [f"node-{bad}"]
    (line,) = [line for line in news if "quarantined" in line]
    others = " and ".join(f"node-{other}" for other in range(3) if other != bad)
    assert f"differs from that of {others} (relative difference" in line


@pytest.mark.parametrize("loss", ["kto", "sigmoid"])
def test_a_preference_step_is_done_again_from_its_first_round_on(loss: str, model: Path, engines: list[Engine]) -> None:
    case = case_of(loss, total_steps=2)
    mixed = [engines[0], Flipping(engines[1], 2), engines[2]]
    assert train_here(replace(case, audit=1.0), model, mixed).sha == train_here(case, model, engines[:1]).sha


def test_where_no_audit_looks_a_flipped_bit_counts(
    trained: Callable[..., Trained], engines: list[Engine], plain: str
) -> None:
    found, news, audited = trained([engines[0], Flipping(engines[1], 1)], 0.0)
    assert found != plain
    assert (quarantined(news), audited) == ([], 0)


def test_with_two_nodes_the_one_that_takes_it_back_goes_and_the_other_finishes_alone(
    trained: Callable[..., Trained], engines: list[Engine], plain: str
) -> None:
    found, news, _ = trained([engines[0], Flipping(engines[1], 3)], 1.0)
    assert (found, quarantined(news)) == (plain, ["node-1"])


def test_two_nodes_that_both_insist_stop_the_run_with_both_names(
    trained: Callable[..., Trained], engines: list[Engine]
) -> None:
    with pytest.raises(NodeError, match=r"node-0 and node-1 do not agree .* no step was taken") as told:
        trained([engines[0], Flipping(engines[1], *range(1, 100), bit=30)], 1.0)
    assert "leaf" in str(told.value)
    assert "rows" in str(told.value)


def test_a_node_that_was_put_out_is_told_why_and_not_admitted_again() -> None:
    bench = Bench()
    good, bad = bench.ready("good", "bad")
    bench.cluster.quarantine("bad", "its numbers are wrong")
    bench.collect()
    assert [refusal.reason for refusal in bad.heard(m.Reject, CONTROL)] == ["its numbers are wrong"]
    again = ScriptedNode(bench, "bad", pid=2)
    again.enlist()
    assert [refusal.reason for refusal in again.heard(m.Reject, CONTROL)] == ["its numbers are wrong"]
    assert (good.state, bad.state, bench.failure) == ("ready", "left", "")


def test_one_node_alone_is_not_audited_and_that_is_said() -> None:
    batch, train = BatchConfig(leaf_tokens=64), TrainConfig(audit=0.01)
    config = RunConfig(model="m", output=Path("o"), data=DataConfig(path="d"), train=train, batch=batch)
    said = list(plan_sentences(config, (), 100, 512, 10, 1))
    assert "train.audit = 0.01 needs a second node: nothing is audited until one joins" in said
    assert not any("audit" in sentence for sentence in plan_sentences(config, (), 100, 512, 10, 2))


def test_one_node_alone_trains_as_without_audits(
    trained: Callable[..., Trained], engines: list[Engine], plain: str
) -> None:
    found, _, audited = trained(engines[:1], 1.0)
    assert (found, audited) == (plain, 0)


def test_answers_hold_no_vector() -> None:
    large: Answer = answer_of("a", np.ones(5 * BLOCK_ELEMENTS, np.float32))
    assert large.sketch.nbytes < BLOCK_ELEMENTS
