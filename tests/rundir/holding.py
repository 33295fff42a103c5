"""Another process that holds a run directory, with or without file locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLD = """
import errno, fcntl, sys
from dataclasses import replace
from pathlib import Path
from shardway.errors import ShardwayError
from shardway.rundir.directory import RunDir
from shardway.rundir.lease import LeaseOptions
from shardway.rundir.lease import WriterLock
from shardway.rundir.lease import LeaseTimes

def refuse(descriptor, operation):
    raise OSError(errno.ENOSYS, "Function not implemented")

folder, locks, beat_s = Path(sys.argv[1]), sys.argv[2] == "locks", float(sys.argv[3])
if not locks:
    fcntl.flock = refuse
terms = LeaseTimes(beat_s, 5 * beat_s, 8 * beat_s, beat_s / 4, beat_s)
lock = WriterLock(folder, LeaseOptions(terms=terms))
lock.acquire(lambda line: print("told", line, flush=True))
run = replace(RunDir(folder), lease=lock.lease)
print("held", lock.lease.epoch, flush=True)
for line in sys.stdin:
    word = line.strip()
    try:
        if word == "confirm":
            run.confirm_writer()
        elif word == "check":
            run.check_writer()
        elif word == "release":
            lock.release()
        print("done", word, flush=True)
    except ShardwayError as error:
        print(type(error).__name__, error.exit_code, repr(str(error)), flush=True)
"""


class Holder:
    """A process that holds a run directory; `say` asks it something and gives its answer."""

    def __init__(self, folder: Path, *, locks: bool, beat_s: float) -> None:
        words = [sys.executable, "-c", HOLD, str(folder), "locks" if locks else "none", str(beat_s)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid

    def read(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def say(self, word: str) -> str:
        """Its answer to a word."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.read()

    def send(self, number: int) -> None:
        """Send it a signal; one that stops it has done so."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        """Kill it, and wait."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def starting(folder: Path, *, locks: bool = True, beat_s: float = 2.0) -> Iterator[Holder]:
    """A process that begins to take the directory."""
    holder = Holder(folder, locks=locks, beat_s=beat_s)
    try:
        yield holder
    finally:
        holder.end()


@contextmanager
def holding(folder: Path, *, locks: bool = True, beat_s: float = 2.0) -> Iterator[Holder]:
    """A process that holds the directory."""
    with starting(folder, locks=locks, beat_s=beat_s) as holder:
        assert holder.read().startswith("held ")
        yield holder
