"""The message about an unknown key or a wrong value names the key, the value and what is allowed."""

from pathlib import Path

import pytest

from mlxdist.coordinator.config.keys import hints, tables
from mlxdist.coordinator.config.unknown_keys import OTHER_TABLES, OTHER_WORDS, UNSUPPORTED
from tests.coordinator.config.run_files import refusal, run_file

# --- keys that are not ours


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[batch]\nsise = 8", "run.toml:4: batch.sise is not a key of [batch]; the nearest is batch.size"),
        (
            "[batch]\nlearning_rate = 1e-4",
            "run.toml:4: batch.learning_rate is not a key of [batch]: learning_rate belongs in [train]",
        ),
        ("rank = 8", "run.toml:3: rank is not a key: rank belongs in [lora]"),
        (
            "[train]\nmethod = 'sft'",
            "run.toml:4: train.method is not a key of [train]: method belongs at the top, above the first [table]",
        ),
        (
            "[lora]\nlearning_rat = 1",
            "run.toml:4: lora.learning_rat is not a key of [lora]; the nearest is train.learning_rate",
        ),
        ("[lorra]\nrank = 8", "run.toml:3: lorra is not a table; the nearest is [lora]"),
        ("[lora_parameters]\nrank = 8", "run.toml:3: lora_parameters is not a table; the nearest is [lora]"),
        (
            "[xyz]\na = 1",
            "run.toml:3: xyz is not a table; there are " + ", ".join(f"[{table}]" for table in tables() if table),
        ),
        (
            "[memory]\nqqq = 1",
            "run.toml:4: memory.qqq is not a key of [memory], which has segment_size, head_chunk, grad_checkpoint, "
            "gated_delta",
        ),
        (
            "iters = 600",
            f"run.toml:3: iters is not a key here: it is called train.steps ({OTHER_WORDS['iters'][1]})",
        ),
        (
            "[train]\nnum-train-epochs = 3",
            "run.toml:4: train.num-train-epochs is not a key here: it is called train.epochs "
            "(an epoch is once through the data)",
        ),
        (
            "[lora]\nuse_dora = true",
            "run.toml:4: lora.use_dora is not a key: DoRA is not supported: only lora_a and lora_b are trained; "
            "mlx_lm.lora has it, on one machine",
        ),
        (
            "[train]\nnested.steps = 1",
            "run.toml:4: train.nested is not a key of [train], which has " + ", ".join(tables()["train"]),
        ),
    ],
)
def test_an_unknown_key_is_answered_with_the_right_one(tmp_path: Path, text: str, said: str) -> None:
    assert refusal(run_file(tmp_path, text)) == said


@pytest.mark.parametrize(
    "word",
    [
        "iters",
        "batch_size",
        "lora_layers",
        "per_device_train_batch_size",
        "num_train_epochs",
        "passes",
        "max_seq_length",
    ],
)
def test_words_of_other_trainers_lead_to_ours_from_every_table(tmp_path: Path, word: str) -> None:
    for table in ("", "[train]\n", "[data]\npath = 'rows'\n"):
        text = f"{table}{word} = 4" if "data" not in table else f'model = "m"\n{table}{word} = 4'
        assert f"it is called {OTHER_WORDS[word][0]}" in refusal(run_file(tmp_path, text))


def test_every_translated_word_leads_to_a_key_that_exists() -> None:
    ours = {key.rpartition(".")[2] for key in hints()}  # a word of ours would never be looked up
    assert {key for key, _ in OTHER_WORDS.values()} <= set(hints())
    assert set(OTHER_TABLES.values()) <= set(tables())
    assert ours.isdisjoint(OTHER_WORDS)
    assert ours.isdisjoint(UNSUPPORTED)


@pytest.mark.parametrize(
    "word", ["loraplus_lr_ratio", "embedding_learning_rate", "neftune_noise_alpha", "use_dora", "use_rslora"]
)
def test_features_that_are_not_supported_have_a_sentence_of_their_own(tmp_path: Path, word: str) -> None:
    assert "not supported" in refusal(run_file(tmp_path, f"[train]\n{word} = 1"))


def test_the_size_of_a_leaf_in_rows_is_refused_with_the_key_in_tokens(tmp_path: Path) -> None:
    said = refusal(run_file(tmp_path, "[batch]\nmicro_size = 4"))
    assert "it is called batch.leaf_tokens (tokens, not rows" in said
    assert "rows are always packed" in refusal(run_file(tmp_path, "[batch]\npacking = true"))


# --- types and ranges


def _wrong_values() -> list[tuple[str, str]]:
    fractions = ["data.valid_fraction", "lora.dropout"]
    positive = ["lora.scale", "train.eps", "preference.beta", "train.epochs", "train.max_hours"]
    positive += [key for key in hints() if key.startswith("timing.")]
    counts = [
        "batch.size",
        "batch.grad_accum_steps",
        "batch.leaf_tokens",
        "lora.rank",
        "train.steps",
        "train.report_every",
    ]
    wrong = [(key, value) for key in fractions for value in ("1", "-0.1", "nan", '"0.5"')]
    wrong += [(key, value) for key in positive for value in ("0", "-1", "inf", "true")]
    wrong += [(key, value) for key in counts for value in ("0", "8.0", "true", '"8"')]
    wrong += [(key, value) for key in ("train.min_lr_ratio", "batch.max_cut") for value in ("1.01", "-0.1")]
    wrong += [
        (key, "-1")
        for key in ("train.weight_decay", "train.max_grad_norm", "train.eval_every", "train.early_stop_evals")
    ]
    wrong += [("train.betas", value) for value in ("[0.9]", "[0.9, 1.0]", "[0.9, 0.99, 0.999]", "0.9", "[-0.1, 0.9]")]
    wrong += [("train.learning_rate", value) for value in ("0", "2", '"2e-4"')]
    wrong += [("lora.num_layers", value) for value in ("0", "-2", '"all"')]
    wrong += [("train.eval_rows", value) for value in ("0", '"some"')] + [("train.save_every", '"all"')]
    wrong += [("memory.segment_size", '"of"'), ("memory.head_chunk", '"off"'), ("batch.max_length", "1")]
    wrong += [("batch.seed", "-1"), ("batch.seed", str(2**32)), ("model", '" "'), ("output", '""'), ("data.path", '""')]
    wrong += [("lora.target_modules", '["q_proj", 1]'), ("data.columns", '"q"'), ("data.columns", "{prompt = 1}")]
    wrong += [("data.chat_template_kwargs", "{day = 2025-01-01}"), ("preference.label_smoothing", "0.5")]
    return wrong


@pytest.mark.parametrize(("key", "value"), _wrong_values())
def test_a_wrong_type_or_range_names_key_value_and_what_is_allowed(tmp_path: Path, key: str, value: str) -> None:
    said = refusal(run_file(tmp_path, ""), f"{key}={value}")
    assert said.startswith(f"--set {key} = ")
    assert ": must be " in said


def test_the_range_is_described_in_words(tmp_path: Path) -> None:
    said = refusal(
        run_file(tmp_path, "[train]\nbetas = [0.9, 1]\nsave_every = 0\n[lora]\nnum_layers = 0\n[batch]\norder = 'sort'")
    )
    assert (
        "run.toml:4: train.betas = [0.9, 1]: must be a list of 2 values, each a number, at least 0 and under 1\n"
        in said
    )
    assert 'run.toml:5: train.save_every = 0: must be a whole number, at least 1, or "auto"\n' in said
    assert "run.toml:7: lora.num_layers = 0: must be a whole number, at least 1, or -1\n" in said
    assert said.endswith('run.toml:9: batch.order = "sort": must be "sorted" or "shuffled"; did you mean "sorted"?')


def test_a_table_in_place_of_a_value_and_a_value_in_place_of_a_table(tmp_path: Path) -> None:
    assert refusal(run_file(tmp_path, "train = true")) == "run.toml:3: train = true: must be a table, [train]"
    assert (
        refusal(run_file(tmp_path, "[[lora]]\nrank = 1")) == 'run.toml:3: lora = [{"rank": 1}]: must be a table, [lora]'
    )
    said = refusal(run_file(tmp_path, 'model = "m"\ndata = ["a"]'))
    assert said == 'run.toml:2: data = ["a"]: must be a table, [data], or data = "folder"'


def test_all_faults_are_listed_together_up_to_ten(tmp_path: Path) -> None:
    timing = "".join(f"{key} = 0\n" for key in tables()["timing"])
    lines = refusal(
        run_file(tmp_path, f"[timing]\n{timing}[batch]\nsize = 0\nleaf_tokens = 0\nmax_length = 0\nsise = 1\nseed = -1")
    ).split("\n")
    faults = len(tables()["timing"]) + 5
    assert lines[0] == f"{faults} things to fix, nothing was started:"
    assert lines[1].startswith("  run.toml:4: timing.beat_seconds = 0: ")
    assert len(lines) == 12
    assert lines[-1] == f"  and {faults - 10} more"
