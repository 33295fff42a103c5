"""What is wrong with data of any format, as `shardway data verify` says it; checksums of data that have none.

Invariant: damage is named also where it keeps the data from being opened, as far as checksums of Shardway reach, or
the reader of the format says which bytes it cannot read. An error that is no damage (another kind, a library that is
not installed) stays an error.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

from shardway.data.content import DataPath
from shardway.data.detect import detect_kind, open_records, reader_of
from shardway.data.formats.base import DamagedData, Records
from shardway.data.formats.indexes import find_sums_damage, make_sums
from shardway.data.formats.tar_headers import BadTar
from shardway.errors import UserError


def make_checksums(records: Records) -> Path:
    """Make and keep checksums of every MiB of all files of a data set; returns where. Raises UserError if they cannot
    be kept."""
    return make_sums(records.parts.root, records.parts.files, records.index_files())


def verify_data(place: DataPath, kind: str, say: Callable[[str], object]) -> Records | None:
    """Read all, and say each damage as a sentence with file and offset. Returns the records, or None where they could
    not be opened for it. Raises UserError for what cannot be opened for other reasons."""
    try:
        records = open_records(place, kind)
    except (UserError, DamagedData) as error:
        found = _find_without_opening(place, kind, error)
        if not found:
            raise
        for each in found:
            say(each)
        return None
    try:
        for each in chain(find_sums_damage(place.path, records.parts.files), records.find_damage()):
            say(each)
    except DamagedData as error:
        say(str(error).splitlines()[0])
    return records


def _find_without_opening(place: DataPath, kind: str, error: Exception) -> list[str]:
    """The damage of data that could not be opened because of an error."""
    if found := list(find_sums_damage(place.path)):
        return found
    cause = error if isinstance(error, DamagedData) else error.__cause__
    if isinstance(cause, DamagedData | BadTar):
        return [str(cause).splitlines()[0]]
    try:
        reader = reader_of(kind or detect_kind(place))
    except UserError:
        return []
    return [] if reader is None else list(reader.find_damage_unopened(place.path))
