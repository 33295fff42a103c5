"""Text files as records, one a file.

Invariants:
- Record i is file i, sorted by its path below the folder.
- Bytes that are not UTF-8 become U+FFFD, as they do for the tokenizer of a run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from shardway.data.content import DataPath
from shardway.data.formats.base import Extent, FileParts, Record, Records, check_ids, list_files
from shardway.data.formats.indexes import read_sums
from shardway.data.formats.whole_files import read_whole
from shardway.errors import list_some

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
"""Names of text files end so."""

_LOOKED_AT = 1000
"""So many files of a folder show whether it is one of text."""


class TextRecords(Records):
    """Records {"text": content of the file, "name": its path below the folder}."""

    format = "text"

    def __init__(self, parts: FileParts) -> None:
        """Use `open`."""
        self.parts = parts

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether it is a file with the name of text, or a folder of which at least half of the files are such (of the
        first thousand)."""
        if path.is_file():
            return is_text(path.name)
        if not path.is_dir():
            return False
        visible = (file for file in path.rglob("*") if not any(part.startswith(".") for part in _below(path, file)))
        names = [file.name for file in itertools.islice(visible, _LOOKED_AT) if file.is_file()]
        return bool(names) and 2 * sum(map(is_text, names)) >= len(names)

    @classmethod
    def open(cls, place: DataPath) -> TextRecords:
        """The text files at a path: one of any name, those of a folder whose names end in TEXT_SUFFIXES, or those of a
        pattern. Raises UserError if there is none, or all are empty."""
        root, files = list_files(place, is_text, f"text files ({', '.join(TEXT_SUFFIXES)})")
        if not any(file.size for file in files):
            raise place.error("is empty" if len(files) == 1 else f"has {len(files)} files, all of them empty")
        unnamed = [file.name for file in files if not _is_utf8(file.name)]
        if unnamed:
            shown = [name.encode(errors="backslashreplace").decode() for name in unnamed]
            raise place.error(f"has files whose names are not UTF-8: {list_some(shown, 3)}", remedy="rename them")
        return cls(FileParts(root, files, read_sums(root, files)))

    def __len__(self) -> int:
        return len(self.parts.files)

    @property
    def fields(self) -> dict[str, str]:
        return {"text": "text", "name": "text"}

    def extent(self, number: int) -> Extent:
        return Extent(self.parts.path(number), 0, self.parts.files[number].size)

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        check_ids(ids, len(self))
        wanted = [name for name in self.fields if not fields or name in fields]
        return [{name: self._read_field(number, name) for name in wanted} for number in ids]

    def _read_field(self, number: int, field: str) -> str:
        file = self.parts.files[number]
        if field == "name":
            return file.name
        return read_whole(self.parts, number, file.name, file.size).decode("utf-8", errors="replace")


def is_text(name: str) -> bool:
    """Whether a file has the name of text."""
    return name.lower().endswith(TEXT_SUFFIXES)


def _below(folder: Path, file: Path) -> tuple[str, ...]:
    return file.relative_to(folder).parts


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
