"""The places that rows come from: a folder, a file, a hub id. Each kind is a stream of records with line numbers."""

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from mlxdist.coordinator.data.records import Record, Source, Splits
from mlxdist.coordinator.data.text_files import read_csv, read_json, read_jsonl
from mlxdist.protocol.errors import DataError

Reader = Callable[[Path], Iterator[Record]]

# The names of the splits that data sets use, ours first.
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"train": ("train",), "valid": ("valid", "validation", "val", "dev", "eval"), "test": ("test",)}
)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")  # as the hub and `datasets` write a split of several files
_ALSO_ROWS = (".arrow", ".bz2", ".gz", ".tsv", ".txt", ".xlsx", ".xz", ".zip", ".zst")  # of rows, but not read


def find(path: str, valid_path: str = "") -> Splits:
    """The sources of `data.path` and `data.valid_path`. Raises DataError for what cannot be read."""
    valid = _one(valid_path, "valid", "data.valid_path") if valid_path else None
    place = Path(path)
    if place.is_dir():
        folder = place if _of_split(place, "train") or not (place / "data").is_dir() else place / "data"
        train = _in_folder(folder, "train")
        if train is None:
            there = ", ".join(sorted(entry.name for entry in place.iterdir())[:8]) or "nothing"
            raise DataError(f"data.path: the folder {place} has no train.jsonl (.json, .csv, .parquet); it has {there}")
        given = Path(valid_path) if valid_path else None
        found = Splits(train, valid or _in_folder(folder, "valid"), _in_folder(folder, "test"))
        return replace(found, unread=tuple(_unread(folder, given)))
    if place.exists() or path == "-" or place.suffix in READERS:
        beside = [] if valid is not None or not place.is_file() else _of_split(place.parent, "valid")
        own = [each for each in beside if _split_of(place) == "train" and each != place]
        return Splits(of_file(place), valid, None, tuple(each.name for each in own))
    from mlxdist.coordinator.data.hf_datasets import find_splits

    splits = find_splits(path)
    return replace(splits, valid=valid or splits.valid)


def find_split(path: str, split: str, key: str) -> Source:
    """The source of a file, or of one split of a folder or hub id. Raises DataError, about the option `key`."""
    place = Path(path)
    if place.exists() or path == "-" or place.suffix in READERS:
        return _one(path, split, key)
    from mlxdist.coordinator.data.hf_datasets import find_splits

    splits = find_splits(path)
    source = {"train": splits.train, "valid": splits.valid, "test": splits.test}[split]
    if source is None:
        raise DataError(f"{key}: {path} has no split named {split}")
    return source


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


def of_shards(paths: Sequence[Path]) -> Source:
    """The source of one split in several files, read in the order of their numbers. Raises DataError for a gap."""
    numbers = [_SHARD.search(path.stem) for path in paths]
    count = int(numbers[0][2]) if numbers[0] else 0
    there = [int(each[1]) for each in numbers if each]
    if missing := sorted(set(range(count)) - set(there)):
        lost = ", ".join(f"{number:05d}" for number in missing[:4])
        raise DataError(f"{paths[0].name} is one of {count} files, and there is no number {lost}: copy them all")
    sources = [of_file(path) for path in paths]

    def records() -> Iterator[Record]:
        for number, source in enumerate(sources):
            for record in source.records():
                yield replace(record, share=(number + record.share) / len(sources), file=source.name)

    name = sources[0].name if len(sources) == 1 else f"{sources[0].name} to {sources[-1].name}"
    return Source(name, records)


def _one(path: str, split: str, key: str) -> Source:
    place = Path(path)
    if not place.is_dir():
        return of_file(place)
    found = _in_folder(place, split)
    if found is None:
        raise DataError(f"{key}: the folder {place} has no {split}.jsonl (.json, .csv, .parquet)")
    return found


def _in_folder(folder: Path, split: str) -> Source | None:
    found = _of_split(folder, split)
    if len(found) == 1 and not _SHARD.search(found[0].stem):
        return of_file(found[0])
    kinds = {(_name(path), path.suffix, bool(_SHARD.search(path.stem))) for path in found}
    if len(kinds) > 1 or any(not shard for _, _, shard in kinds):
        raise DataError(f"{folder} has both {' and '.join(path.name for path in found)}: keep one of them")
    return of_shards(found) if found else None


def _of_split(folder: Path, split: str) -> list[Path]:
    """The files of a split in `folder`, by kind and name: our own name first, shards by their numbers."""
    found = [path for path in folder.iterdir() if path.suffix.lower() in READERS and _split_of(path) == split]
    kinds, names = list(READERS), NAMES[split]
    return sorted(found, key=lambda path: (names.index(_name(path)), kinds.index(path.suffix.lower()), path.name))


def _split_of(path: Path) -> str:
    """The split that a file's name says, "" for none."""
    return next((split for split, names in NAMES.items() if _name(path) in names), "")


def _name(path: Path) -> str:
    return _SHARD.sub("", path.stem).lower()


def _unread(folder: Path, given: Path | None) -> Iterator[str]:
    """The files in `folder` that look like rows, belong to no split and are not `given` as validation."""
    unused = "valid" if given is not None else ""
    for path in sorted(folder.iterdir()):
        rows = path.suffix.lower() in (*READERS, *_ALSO_ROWS) and path.is_file() and not path.name.startswith(".")
        used = path.suffix.lower() in READERS and _split_of(path) not in ("", unused)
        if rows and not used and not (given is not None and given.exists() and path.samefile(given)):
            yield path.name


def _read_parquet(path: Path) -> Iterator[Record]:
    from mlxdist.coordinator.data.hf_datasets import read_parquet

    return read_parquet(path)


READERS: Mapping[str, Reader] = MappingProxyType(
    {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".parquet": _read_parquet}
)
