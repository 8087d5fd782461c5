"""Where rows come from: a folder, a file, a hub id. Each kind is a stream of records with line numbers."""

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from mlxdist.coordinator.data.records import Record, Source, Splits
from mlxdist.coordinator.data.text_files import read_csv, read_json, read_jsonl
from mlxdist.protocol.errors import DataError

Reader = Callable[[Path], Iterator[Record]]


def find(path: str, valid_path: str = "") -> Splits:
    """The sources of `data.path` and `data.valid_path`. Raises DataError for what cannot be read."""
    valid = _one(valid_path, "valid") if valid_path else None
    place = Path(path)
    if place.is_dir():
        train = _in_folder(place, "train")
        if train is None:
            there = ", ".join(sorted(entry.name for entry in place.iterdir())[:8]) or "nothing"
            raise DataError(f"data.path: the folder {place} has no train.jsonl (.json, .csv, .parquet); it has {there}")
        return Splits(train, valid or _in_folder(place, "valid"), _in_folder(place, "test"))
    if place.exists() or path == "-" or place.suffix in READERS:
        return Splits(of_file(place), valid, None)
    from mlxdist.coordinator.data.hf_datasets import find_splits

    splits = find_splits(path)
    return Splits(splits.train, valid or splits.valid, splits.test)


def of_file(path: Path) -> Source:
    """The source of one file. Raises DataError for a stream, an unknown kind, an empty or missing file."""
    if str(path) == "-" or (path.exists() and not stat.S_ISREG(os.stat(path).st_mode)):
        raise DataError(
            f"{path} is a stream without a length: the order of the data needs all rows; write them into a .jsonl file"
        )
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        kinds = ", ".join(READERS)
        raise DataError(f"{path} is of no kind that is read ({kinds}); unpack or convert it")
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    if not path.stat().st_size:
        raise DataError(f"{path} is empty")
    return Source(path.name, lambda: reader(path))


def _one(path: str, split: str) -> Source:
    place = Path(path)
    if not place.is_dir():
        return of_file(place)
    found = _in_folder(place, split)
    if found is None:
        raise DataError(f"data.valid_path: the folder {place} has no {split}.jsonl (.json, .csv, .parquet)")
    return found


def _in_folder(folder: Path, split: str) -> Source | None:
    found = [path for suffix in READERS if (path := folder / f"{split}{suffix}").exists()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise DataError(f"{folder} has both {names}: keep one of them")
    return of_file(found[0]) if found else None


def _read_parquet(path: Path) -> Iterator[Record]:
    from mlxdist.coordinator.data.hf_datasets import read_parquet

    return read_parquet(path)


READERS: Mapping[str, Reader] = MappingProxyType(
    {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".parquet": _read_parquet}
)
