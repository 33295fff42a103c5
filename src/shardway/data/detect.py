"""Which format lies at a path, and its records.

Invariant: a format is known by names and first bytes; nothing is read that opening would not read. Formats are asked in
the order of `_ORDER`: one that has a mark of its own before one that any folder could be.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from shardway.data.content import DataPath
from shardway.data.formats.base import Records
from shardway.data.kinds import DataKind
from shardway.errors import UserError
from shardway.plugins import list_names, load_plugin
from shardway.refusals import find_remedy

_ORDER = (
    *("shards", "tokens", "energon", "mds", "arrow", "lmdb", "megatron", "parquet", "webdataset", "hdf5", "jsonl"),
    *("idx", "arrays", "images", "text"),
)


_PATHS = "a file, a folder, or a pattern such as train-{000..127}.tar"


def detect_kind(place: DataPath) -> str:
    """The value of data.kind for what lies at a path. Raises UserError if no format takes it."""
    if not place.text:
        raise place.error("is empty", allowed=_PATHS)
    others = [name for name in list_names("data_sources") if name not in _ORDER]
    try:
        for name in (*_ORDER, *others):
            reader = reader_of(name)
            if reader is not None and reader.is_at(place.path):
                return name
        is_empty = place.path.is_dir() and not any(place.path.iterdir())
    except OSError as error:
        raise _unreadable(place, error) from error
    if not place.path.exists():
        raise place.error("does not exist", allowed=_PATHS)
    if is_empty:
        raise place.error("is a folder without files", allowed=_PATHS)
    known = ", ".join(name for name in list_names("data_sources") if reader_of(name))
    raise place.error("is of no format that Shardway reads", allowed=known)


def open_records(place: DataPath, kind: str = "") -> Records:
    """The records at a path, of a kind or of the one that lies there. Raises UserError."""
    name = kind or detect_kind(place)
    if name not in list_names("data_sources"):
        allowed = ", ".join(each for each in list_names("data_sources") if reader_of(each))
        raise DataPath("--kind", name).error("is no kind of data", allowed=allowed)
    reader = reader_of(name)
    if reader is None:
        allowed = ", ".join(each for each in list_names("data_sources") if reader_of(each))
        raise UserError(f'data of kind "{name}" has no records to look at\n  allowed: {allowed}')
    try:
        return reader.open(place)
    except OSError as error:
        raise _unreadable(place, error) from error


def _unreadable(place: DataPath, error: OSError) -> UserError:
    at = f' at "{error.filename}"' if error.filename and str(error.filename) != place.text else ""
    return place.error(f"cannot be read: {error.strerror or error}{at}", remedy=find_remedy(error))


def reader_of(name: str) -> type[Records] | None:
    """The class that reads records of a kind; None where the kind has none."""
    kind: type[DataKind] = load_plugin("data_sources", name)
    module, _, reader = kind.records.partition(":")
    if not module:
        return None
    found: type[Records] = getattr(import_module(module), reader)
    return found


def place_of(path: Path | str) -> DataPath:
    """A path of a command line, for messages."""
    return DataPath("PATH", str(path))
