"""A sealed file that was changed in any bit, or cut anywhere, is not taken for the one that was written."""

from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.storage.sealed import read_sealed, seal

TENSORS = {"b": np.arange(5, dtype=np.float32), "a": np.zeros((3, 0), np.float32), "c": np.ones((2, 2), np.float32)}
ABOUT = {"step": 3, "best": {"value": 0.1}}
DATA = seal(TENSORS, ABOUT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sealed.safetensors"


def test_what_was_written_is_read_and_the_same_content_gives_the_same_bytes(path: Path) -> None:
    path.write_bytes(DATA)
    tensors, about = read_sealed(path)
    assert about == ABOUT
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: tensor.tolist() for name, tensor in TENSORS.items()
    }
    assert all(seal(TENSORS, ABOUT) == DATA for _ in range(20))


@pytest.mark.slow
def test_every_flipped_bit_is_found(path: Path) -> None:
    for bit in range(8 * len(DATA)):
        flipped = bytearray(DATA)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"cut or overwritten|SHA-256"):
            read_sealed(path)


def test_every_cut_and_every_addition_is_found(path: Path) -> None:
    for data in (*(DATA[:size] for size in range(len(DATA))), DATA + b"\0", b"\0" * len(DATA)):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"it is empty|cut or overwritten|SHA-256"):
            read_sealed(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_sealed(path)
