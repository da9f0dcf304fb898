"""Rows of Parquet files and of datasets that the `datasets` library has saved or fetched."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import ConfigError
from trainer.data.json_text import Record

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


def read_parquet(path: str, file: Path, key: str) -> list[Record]:
    """Rows of a Parquet file. Raises ConfigError if it is none."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from pyarrow.parquet import ParquetFile

    try:
        # not read_table, which makes columns of folders called a=b; and nothing is copied into a cache
        dataset = Dataset(InMemoryTable(ParquetFile(file).read()))
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{key}: {path} cannot be read as Parquet: {_line(error)}") from error
    return _records(dataset, path, key)


def read_directory(path: str, folder: Path, key: str, split: str | None, subset: str | None) -> list[Record]:
    """Rows of a directory that save_to_disk has written, or that has Parquet files as a dataset of the hub has."""
    import datasets
    import pyarrow

    datasets.disable_progress_bars()
    kinds = ("dataset_dict.json", "state.json")
    saved = any((folder / name).is_file() for name in kinds)
    if saved and subset is not None:
        raise ConfigError(
            f"task.subset={subset!r}: is for a dataset of the hub, and {path!r} was saved by save_to_disk"
        )
    if not saved and not any(folder.rglob("*.parquet")):
        inside = sorted(item.name for item in folder.iterdir())[:5]
        raise ConfigError(
            f"{key}: {path!r} is a directory, but none that datasets' save_to_disk has written (it would have a"
            f" {' or a '.join(kinds)}), and has no Parquet files; name one, or a file in it (it has:"
            f" {', '.join(inside) or 'nothing'})"
        )
    try:
        loaded = datasets.load_from_disk(str(folder)) if saved else _load_files(str(folder), subset)
    except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:  # files lost or damaged
        raise ConfigError(f"{key}: {path} cannot be read: {_line(error)}") from error
    return _chosen(loaded, path, key, split)


def read_hub(path: str, key: str, split: str | None, subset: str | None) -> list[Record]:
    """Rows of a dataset of the hub, as it lies in a cache; it is fetched only where HF_HUB_OFFLINE=0 allows it."""
    import datasets
    from huggingface_hub import constants, snapshot_download

    datasets.disable_progress_bars()
    try:
        try:
            loaded = datasets.load_dataset(path, subset)
        except OSError:  # not in datasets' own cache; what was downloaded without it is not looked for there
            folder = snapshot_download(path, repo_type="dataset", local_files_only=True)
            loaded = _load_files(folder, subset)
    except (OSError, ValueError) as error:  # those of the libraries for what is not there are of these kinds
        arguments = ", ".join(repr(name) for name in (path, subset) if name is not None)
        name = path.rpartition("/")[2]
        raise ConfigError(
            f"{key}: {path!r} is no file or directory here ({Path(path).absolute()}), and cannot be had from"
            f" {datasets.config.HF_DATASETS_CACHE} or {constants.HF_HUB_CACHE}"
            f"{'; the hub is not asked (HF_HUB_OFFLINE)' if datasets.config.HF_HUB_OFFLINE else ''} ({_line(error)})."
            f' Where there is a network python -c "import datasets;'
            f' datasets.load_dataset({arguments}).save_to_disk({name!r})" makes a directory {name}, which {key}={name}'
            " names"
        ) from error
    return _chosen(loaded, path, key, split)


def _load_files(folder: str, subset: str | None) -> "DatasetDict":
    """The splits of a directory, past the library's cache: that would not notice that a file has changed."""
    import datasets

    with tempfile.TemporaryDirectory(prefix="cowroll-") as cache:
        return datasets.load_dataset(folder, subset, cache_dir=cache, keep_in_memory=True)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def _chosen(loaded: "Dataset | DatasetDict", path: str, key: str, split: str | None) -> list[Record]:
    """Rows of a dataset, or of the split that is named, the only one, or "train"."""
    named = f"{key.replace('path', 'split')}"
    if not isinstance(loaded, Mapping):
        if split is not None:
            raise ConfigError(f"{named}={split!r}: {path!r} is one dataset without splits; leave it out")
        return _records(loaded, path, key)
    if split is None:
        split = next(iter(loaded)) if len(loaded) == 1 else "train"
    if split not in loaded:
        raise ConfigError(f"{named}={split!r}: {path!r} has the splits {', '.join(loaded)}; name one of them")
    return _records(loaded[split], f"{path}/{split}", key)


def _records(dataset: "Dataset", path: str, key: str) -> list[Record]:
    """Rows as Python values, counted from 1."""
    dataset = dataset.with_format(None)
    for name, feature in dataset.features.items():
        media = _media(feature)
        if media is not None:
            raise ConfigError(
                f"{key}: {path}: column {name!r} holds values of the kind {media}, and rows are text, numbers, lists"
                " and objects; leave it out (dataset.remove_columns) where the data is made"
            )
    columns = dataset[:]
    rows = zip(*columns.values(), strict=True)
    return [
        Record(dict(zip(columns, values, strict=True)), f"{path}:{number}", filled=True)
        for number, values in enumerate(rows, start=1)
    ]


def _media(feature: Any) -> str | None:
    """What is inside a column that the library would open: an image, a sound."""
    if isinstance(feature, Mapping | list):
        inside = feature.values() if isinstance(feature, Mapping) else feature
        return next((found for found in map(_media, inside) if found is not None), None)
    if hasattr(feature, "feature"):
        return _media(feature.feature)
    name = type(feature).__name__
    return name if hasattr(feature, "decode_example") and name != "Json" else None


def without_nulls(value: Any) -> Any:
    """The value without the fields that are null: Arrow gives every object of a column the fields of all."""
    if isinstance(value, Mapping):
        return {name: without_nulls(inside) for name, inside in value.items() if inside is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [without_nulls(inside) for inside in value]
    return value
