"""What happens inside a rank: it hangs, raises or is killed in a save, at a step that the environment says.

FAULT_HARM = KIND:RANK:STEP:FILE   "hang" or "raise" before that step, "die" in the save of that step; hang and die make
                                   FILE and strike only where it is not there, raise strikes as long as it is not there
                                   and makes FILE.first
FAULT_PACE = SECONDS               each step takes so much longer, so that there is time to strike

Used by the peers' scripts and, through inject/sitecustomize.py, by Shardway's ranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class Harm:
    """What is to happen to this rank; nothing where `kind` is empty."""

    kind: str
    step: int
    mark: Path
    pace_s: float

    def before_step(self, step: int) -> None:
        """To be called before each step (1 is the first)."""
        time.sleep(self.pace_s)
        if step != self.step:
            return
        if self.kind == "raise" and not self.mark.exists():
            self.mark.with_suffix(".first").open("a").close()
            raise ValueError("these labels are of another data set")
        if self.kind == "hang" and self._is_first():
            library = ctypes.PyDLL(None)  # unlike CDLL, does not give the lock back
            while True:
                library.sleep(3600)

    def in_save(self, step: int) -> None:
        """To be called when some of a checkpoint has been written."""
        if self.kind == "die" and step == self.step and self._is_first():
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self) -> bool:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def read_harm(rank: int) -> Harm:
    """What the environment says of this rank."""
    pace_s = float(os.environ.get("FAULT_PACE", "0"))
    words = os.environ.get("FAULT_HARM", "").split(":", 3)
    if len(words) == 4 and int(words[1]) == rank:
        return Harm(words[0], int(words[2]), Path(words[3]), pace_s)
    return Harm("", 0, Path(), pace_s)


class HalfWritten:
    """A file that tells `harm` after each piece from the second on that was written into it."""

    def __init__(self, file: IO[bytes], harm: Harm, step: int) -> None:
        self._file, self._harm, self._step, self._pieces = file, harm, step, 0

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        self._pieces += 1
        if self._pieces > 4:
            self._file.flush()
            self._harm.in_save(self._step)
        return written

    def flush(self) -> None:
        self._file.flush()
