"""Which format lies at a path, and its records.

Invariants:
- A format is known by names and first bytes; nothing is read that opening would not read. Formats are asked in the
  order of `_ORDER`: one that has a mark of its own before one that any folder could be.
- A file without a mark that is not named as another format is text.
"""

from __future__ import annotations

import contextlib
import shlex
from importlib import import_module
from pathlib import Path

from shardway.data.content import DataPath
from shardway.data.formats.base import Records
from shardway.data.formats.text import TEXT_SUFFIXES
from shardway.data.kinds import DataKind
from shardway.errors import UserError
from shardway.plugins import GROUPS, list_names, load_plugin
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


_UTF_16 = (b"\xff\xfe", b"\xfe\xff")

_FIELD = ' (and data.inputs to the field with the text, if that has no usual name such as "text")'
_WIDTH = " (and data.token_dtype to the width of a token)"
_BESIDE = {**dict.fromkeys(("parquet", "arrow", "jsonl", "hdf5", "lmdb", "webdataset"), _FIELD), "tokens": _WIDTH}
"""What else a model of tokens may need, by the kind; a .npy file states the width of its tokens."""


def check_is_text(place: DataPath) -> None:
    """Raise UserError where a file is of another kind than text by its name or its first bytes, or is text in UTF-16:
    trained on as text, it would be bytes of a container. For a run whose data.kind is only its default. Folders are not
    looked at: of these, text takes files by their names."""
    try:
        if not place.path.is_file():
            return
        with place.path.open("rb") as file:
            head = file.read(8)
    except OSError:
        return  # opening reports it
    as_it_is = 'or data.kind = "text" to train on the bytes as they are'
    if head.startswith(_UTF_16):
        command = f"`iconv -f UTF-16 -t UTF-8 {shlex.quote(place.text)} > NEW_FILE`"
        raise place.error(
            "is text in UTF-16 by its first bytes, of which every second one would be an empty token",
            allowed="text in UTF-8, or in another encoding that has ASCII as it is",
            remedy=f"convert it: {command}, and set data.path to that, {as_it_is}",
        )
    kind = _find_other_kind(place, head)
    if kind:
        key = _kind_key(place)
        raise place.error(
            f'is of the kind "{kind}" by its name or its first bytes, and data.kind is "text", the default',
            remedy=f"set {name_kind_key(place, kind)}, {as_it_is.replace('data.kind', key)}",
        )


def _kind_key(place: DataPath) -> str:
    return "kind" if place.key.startswith("data.blend") else "data.kind"


def name_kind_key(place: DataPath, kind: str) -> str:
    """The key of a run that reads this path as this kind, with its value, and what else it may need."""
    beside = "" if place.path.suffix == ".npy" else _BESIDE.get(kind, "")
    return f'{_kind_key(place)} = "{kind}"{beside}'


def find_record_kind(place: DataPath) -> str:
    """The kind of records at a path; "" for text, and for what no format takes."""
    with contextlib.suppress(UserError):
        kind = detect_kind(place)
        return "" if kind == "text" else kind
    return ""


def _find_other_kind(place: DataPath, head: bytes) -> str:
    """The kind of a file that is not text; "" for text."""
    for name in GROUPS["data_sources"].own:
        magic = load_plugin("data_sources", name).magic
        if magic and head.startswith(magic):
            return name
    if place.path.name.lower().endswith((*TEXT_SUFFIXES, ".json")):  # of which few have a record in each line
        return ""
    return find_record_kind(place)


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
