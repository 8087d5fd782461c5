"""Rows through the optional `datasets` library: parquet files and data sets of the hub."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxdist.coordinator.data.records import Record, Source, Splits
from mlxdist.protocol.errors import DataError

HUB_SECONDS = 10.0  # for its answer whether it has a data set
VALID = ("validation", "valid", "val", "dev", "eval")


def read_parquet(path: Path) -> Iterator[Record]:
    """The rows of a parquet file; the line is the row's number, from 1. Raises DataError for a broken file."""
    library = _library(str(path))
    try:
        data = library.load_dataset("parquet", data_files=str(path), split="train")
    except Exception as error:  # the library raises errors of many others
        raise DataError(f"{path} cannot be read as parquet ({_first_line(error)})") from error
    for number, row in enumerate(data, start=1):
        yield Record(number, row, number / len(data))


def ask_hub(name: str) -> None:
    """Asks the hub once for a data set that no earlier run has downloaded. Raises an error of its library.

    `load_dataset` would ask for half a minute, again and again, for a name that is wrong.
    """
    import datasets
    from huggingface_hub import HfApi

    if not (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).exists():
        HfApi().dataset_info(name, timeout=HUB_SECONDS)


def find_splits(name: str, ask: Callable[[str], None] = ask_hub) -> Splits:
    """The splits of a hub data set. Raises DataError where it cannot be read, or has no train split.

    `ask` raises an error where the hub has no such data set, or does not answer.
    """
    library = _library(name)
    try:
        ask(name)
        loaded: Mapping[str, Any] = library.load_dataset(name)
    except Exception as error:  # as above
        raise DataError(
            f"data.path: there is no file or folder {name!r} here, and the hub gives no data set of that name "
            f"({_hub_said(error)})"
        ) from error
    return splits_of(name, loaded)


def splits_of(name: str, loaded: Mapping[str, Any]) -> Splits:
    """Splits by the names that data sets use. Raises DataError for a stream, which has no length."""
    if "train" not in loaded:
        raise DataError(f"{name} has no split train; it has {', '.join(loaded) or 'none'}")
    valid = next((split for split in VALID if split in loaded), None)
    return Splits(
        _source(name, "train", loaded["train"]),
        _source(name, valid, loaded[valid]) if valid else None,
        _source(name, "test", loaded["test"]) if "test" in loaded else None,
        tuple(f"{name} [{split}]" for split in loaded if split not in ("train", valid, "test")),
    )


def _source(name: str, split: str, data: Any) -> Source:
    if not hasattr(data, "__len__"):
        raise DataError(
            f"{name} [{split}] is a stream without a length: the order of the data needs all rows; "
            "load it without streaming"
        )

    def records() -> Iterator[Record]:
        for number, row in enumerate(data, start=1):
            yield Record(number, row, number / len(data))

    return Source(f"{name} [{split}]", records)


def _library(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{what} is read through the library datasets: pip install 'mlxdist[data]', or give a .jsonl file"
        ) from error
    datasets.disable_progress_bars()  # `progress` shows what is read
    return datasets


def _hub_said(error: Exception) -> str:
    if getattr(getattr(error, "response", None), "status_code", 0) in (401, 404):
        return "it has none, or only for those who are logged in and may see it"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
