"""Event files: one JSON object a line, append only.

Invariant: a line is never changed, and what the file system refuses is written later, in order; a torn last line (the
writer was killed) is skipped by readers and closed off by the next writer. This module must not interpret events
beyond `event` and `step`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from shardway.errors import JobError
from shardway.rundir.atomic import render_json

Event = dict[str, Any]


_LASTING = frozenset(("started", "fault", "rolled_back"))
"""Events that hold also where the steps that they belong to were undone."""


class EventWriter:
    """Appends events to one file; each carries `event` and `time` (Unix seconds). Raises JobError where a device or the
    like stands in place of the file: it would take every event and keep none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._waiting: deque[bytes] = deque()
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise JobError(
                f"events would be lost in {path}, which is no plain file.\n"
                "  To do: move away what stands there, then run the same command again; checkpoints are unchanged."
            )
        size = found.st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._waiting.append(b"\n")

    @property
    def waiting(self) -> int:
        """How many lines the file system has not taken yet."""
        return len(self._waiting)

    def write(self, event: str, /, **facts: Any) -> None:
        """Append one event, after those that wait.

        Raises OSError where the file system refuses it: then it waits, for the next write or for `flush`.
        """
        self.keep(event, **facts)
        self.flush()

    def keep(self, event: str, /, **facts: Any) -> None:
        """Let an event wait, for the next write or for `flush`."""
        line = render_json({"event": event, **facts, "time": time.time()}, separators=(", ", ": "))
        self._waiting.append(line.encode() + b"\n")

    def flush(self) -> None:
        """Write what waits. Raises OSError where the file system refuses it."""
        while self._waiting:
            data = self._waiting[0]
            written = os.write(self._descriptor, data)
            if written < len(data):
                self._waiting[0] = data[written:]
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes of an event could be written")
            self._waiting.popleft()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parse_event(line: bytes) -> Event | None:
    """The event of one line, or None for a torn or foreign line."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _open(path: Path) -> contextlib.AbstractContextManager[BinaryIO | None]:
    """The file, None where there is none. Raises JobError where it cannot be read."""
    try:
        return open(path, "rb")
    except (FileNotFoundError, NotADirectoryError):
        return contextlib.nullcontext()
    except OSError as error:
        raise JobError(
            f"the events in {path} cannot be read: {error.strerror}.\n"
            "  To do: move away what stands there in place of a file, or see who may read it; to go on, checkpoints do."
        ) from None


def read_events(path: Path, names: Sequence[str] = ()) -> Iterator[Event]:
    """Every whole event of a file, in the order written, or those of some names, which is many times as quick; nothing
    where there is no file. Raises JobError where it cannot be read."""
    begins = tuple(f'{{"event": "{name}"'.encode() for name in names) or b""
    with _open(path) as file:
        for line in file or ():
            if line.startswith(begins) and line.endswith(b"\n") and (event := parse_event(line)) is not None:
                yield event


def read_last_events(path: Path, most_bytes: int) -> list[Event]:
    """The whole events among the last bytes of a file, in the order written; none where there is no file. Raises
    JobError where it cannot be read."""
    with _open(path) as file:
        if file is None:
            return []
        file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
        lines = file.read().splitlines()
    return [event for event in map(parse_event, lines) if event is not None]


def drop_undone(events: Iterator[Event]) -> list[Event]:
    """The events that still hold: a run that resumed at step s, or went back to it, undoes the steps after s that came
    before."""
    kept: list[Event] = []
    for event in events:
        if event["event"] in ("started", "rolled_back"):
            base = _step_of(event)
            kept = [old for old in kept if _step_of(old) <= base or old["event"] in _LASTING]
        kept.append(event)
    return kept


def _step_of(event: Event) -> int:
    step = event.get("step")
    return step if isinstance(step, int) else 0


class EventFollower:
    """Reads what was appended to an event file since the last call."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset, self._rest = 0, b""
        self._inode: int | None = None
        if from_end and path.exists():
            found = path.stat()
            self._offset, self._inode = found.st_size, found.st_ino

    def new_events(self) -> list[Event]:
        """Whole events that were appended since the last call; from its start for a file that took its place. Raises
        JobError where it cannot be read."""
        with _open(self._path) as file:
            if file is None:
                self._offset, self._rest = 0, b""
                return []
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._offset, self._rest = 0, b""
            self._inode = found.st_ino
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [event for event in map(parse_event, lines) if event is not None]

    def follow(self, until: Callable[[], bool], pause_s: float = 0.25) -> Iterator[Event]:
        """Yield events as they come; after `until` turns true, what is left, then end."""
        while True:
            ended = until()
            yield from self.new_events()
            if ended:
                return
            time.sleep(pause_s)
