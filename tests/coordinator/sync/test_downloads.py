"""The coordinator's cache of downloads."""

import fcntl
from pathlib import Path

import pytest

from mlxdist.coordinator.sync.downloads import held


def test_two_syncs_do_not_download_into_one_cache_at_once(tmp_path: Path) -> None:
    cache = tmp_path / "not" / "there yet"
    with held(cache), (cache / "lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with held(cache):
        assert cache.is_dir()
