"""Records that are whole files: their names and sizes in arrays, so that millions of them stay small.

Invariants:
- A file that has another size than its index says, or is gone, is an error that names it, never a short record.
- A name is UTF-8. Other names are refused when the files are listed, since a record gives its name as text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt

from shardway.data.content import DataPath
from shardway.data.formats.base import DataFile, FileParts, Offsets, Sums


@dataclass(frozen=True, eq=False)
class FileTable(Sequence[DataFile]):
    """Names below a folder and sizes of files. `ends` are the ends of the names in `names`, their UTF-8 bytes one
    after the other. `times` are those of change, in nanoseconds."""

    names: npt.NDArray[np.uint8]
    ends: Offsets
    sizes: Offsets
    times: Offsets

    @staticmethod
    def of(files: Iterable[tuple[str, int, int]], place: DataPath) -> FileTable:
        """The table of (name, size, time of change). Raises UserError for a name that is not UTF-8."""
        listed = list(files)
        try:
            encoded = [name.encode() for name, _, _ in listed]
        except UnicodeEncodeError as error:
            shown = os.fsencode(error.object).decode("utf-8", errors="backslashreplace")
            raise place.error(f'has a file whose name is not UTF-8: "{shown}"', remedy="rename it") from error
        return FileTable(
            np.frombuffer(b"".join(encoded), np.uint8),
            np.cumsum([len(name) for name in encoded], dtype=np.int64),
            np.array([size for _, size, _ in listed], np.int64),
            np.array([time for _, _, time in listed], np.int64),
        )

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, number: int) -> DataFile: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[DataFile]: ...

    def __getitem__(self, number: int | slice) -> DataFile | Sequence[DataFile]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        at = range(len(self))[number]
        return DataFile(self.name(at), int(self.sizes[at]), int(self.times[at]))

    def __iter__(self) -> Iterator[DataFile]:
        content, start = self.names.tobytes(), 0
        for end, size, time in zip(self.ends.tolist(), self.sizes.tolist(), self.times.tolist(), strict=True):
            yield DataFile(content[start:end].decode(), size, time)
            start = end

    def name(self, number: int) -> str:
        """The name of a file."""
        start = int(self.ends[number - 1]) if number else 0
        return self.names[start : int(self.ends[number])].tobytes().decode()

    def parts(self, root: Path, sums: Sequence[Sums] = ()) -> FileParts:
        """What reads and checks the files, with this table in place of a tuple of them."""
        parts = FileParts(root, (), sums)
        parts.files = cast("tuple[Any, ...]", self)
        return parts


def read_whole(parts: FileParts, number: int, name: str, size: int) -> bytes:
    """All bytes of a file, opened and closed for it. Raises DamagedData if it is gone, empty, cannot be read, or has
    another size or a block with another checksum."""
    try:
        descriptor = os.open(os.path.join(parts.root, name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.read(descriptor, size + 1)
            while 0 < len(content) < size and (more := os.read(descriptor, size + 1 - len(content))):
                content += more
        finally:
            os.close(descriptor)
    except OSError as error:
        raise parts.damaged(number, 0, f"it cannot be read: {error.strerror}") from error
    if len(content) != size:
        found = f"more than {size}" if len(content) > size else f"{len(content)}"
        raise parts.damaged(number, 0, f"it has {found} bytes, and had {size} when it was listed")
    if parts.sums:
        parts.check(number, 0, size)
    return content
