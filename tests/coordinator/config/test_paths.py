"""A model folder that is not there is answered with the one that may be meant."""

from pathlib import Path

import pytest

from mlxdist.coordinator.config.paths import no_folder


def test_a_mistyped_folder_is_answered_with_the_one_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tinny.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert no_folder("models/tinny") == "there is no such folder (did you mean models/tiny?)"
    for other in ("models/quite-another", "elsewhere/tiny", "tiny", "mlx-community/Qwen3-4B-4bit"):
        assert no_folder(other) == "there is no such folder"
