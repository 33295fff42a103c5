"""What a rank can be busy with, the entry of a heartbeat that shows it (`ranks.heartbeat`), and a reader for samples.

Invariants:
- One read of a kept descriptor a rank and sample; a rank that has no heartbeat yet, or is writing it, has no value.
- The numbers of activities and the layout are those of files and samples, and stay as they are.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from enum import IntEnum


class Activity(IntEnum):
    """What a rank can be busy with; the numbers are part of the heartbeat file and stay as they are. START lasts until
    a checkpoint is looked for. DATA lasts from the end of a step until the next batch is there, and includes the record
    of the step. REPEAT is a step that an earlier attempt had done. SCRIPT is the time of a script that owns its loop
    between its batch and its step. SAMPLE is the time in which the model in training continues prompts."""

    START = 0
    LOAD = 1
    DATA = 2
    STEP = 3
    REPEAT = 4
    VALIDATE = 5
    SAVE = 6
    END = 7
    SCRIPT = 8
    SAMPLE = 9


LAYOUT = struct.Struct("<QqqqdQ")
"""Count of changes, process id, activity, steps done, since when (seconds), count of changes again."""
NAN = float("nan")


class RankReader:
    """The activity of `count` local ranks, of which the first is rank `first` of all: a series a rank. `folder` has a
    file `rank-N` for local rank N."""

    def __init__(self, folder: str, first: int, count: int) -> None:
        self._paths = [f"{folder}/rank-{local}" for local in range(count)]
        self._files: list[int | None] = [None] * count
        self.series = tuple(f"rank/{first + local}/activity" for local in range(count))

    def read(self) -> list[float]:
        """The `Activity` of each rank as a number, NaN for none. Never raises OSError."""
        return [self._read(local) for local in range(len(self._paths))]

    def _read(self, local: int) -> float:
        with suppress(OSError):
            if (file := self._files[local]) is None:
                file = self._files[local] = os.open(self._paths[local], os.O_RDONLY | os.O_CLOEXEC)
            for _ in range(3):
                entry = os.pread(file, LAYOUT.size + 1, 0)
                if len(entry) != LAYOUT.size:
                    return NAN
                first, _, activity, _, _, last = LAYOUT.unpack(entry)
                if first == last:
                    return float(activity) if first else NAN
        return NAN

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            if file is not None:
                with suppress(OSError):
                    os.close(file)
        self._files = [None] * len(self._files)
