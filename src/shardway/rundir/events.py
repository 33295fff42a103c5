"""Event files: one JSON object a line, append only.

Invariant: a line is never changed; a line that the file system refuses is written later, in order. Readers skip a torn
last line (the writer was killed), and the next writer closes it off. This module interprets no events beyond `event`
and `step`.
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
from typing import Any, BinaryIO

from shardway.earlier_names import EARLIER_EVENTS
from shardway.errors import JobError
from shardway.rundir.file_io import check_answers, is_there, render_json

Event = dict[str, Any]


_LASTING = frozenset(("started", "fault", "rolled_back"))
"""Events that stay valid when the steps they belong to were undone."""


class EventWriter:
    """Appends events to one file; each carries `event` and `time` (Unix seconds). Raises JobError where the path is a
    device or the like, which would take every event and keep none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._waiting: deque[bytes] = deque()
        self._is_sure = False  # whether the file ends with a whole line and the last write succeeded
        self._descriptor = _open_to_append(path)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self.close()
            raise JobError(
                f"events would be lost in {path}, which is no plain file.\n"
                "  To do: move away what stands there, then run the same command again; checkpoints are unchanged."
            )

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def write(self, event: str, /, **facts: Any) -> None:
        """Append one event, after those that wait. Raises OSError where the file system refuses; then the event waits
        for the next write or for `flush`."""
        self.keep(event, **facts)
        self.flush()

    def keep(self, event: str, /, **facts: Any) -> None:
        """Hold an event back for the next write or for `flush`."""
        line = render_json({"event": event, **facts, "time": time.time()}, separators=(", ", ": "))
        self._waiting.append(line.encode() + b"\n")

    def flush(self) -> None:
        """Write the waiting events. Raises OSError where the file system refuses, or the file was closed."""
        if self._descriptor < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        while self._waiting:
            rest = self._waiting[0] if self._is_sure else self._find_rest(self._waiting[0])
            self._is_sure = False
            written = os.write(self._descriptor, rest) if rest else 0
            if written < len(rest):
                raise OSError(errno.ENOSPC, f"only {written} of {len(rest)} bytes of an event could be written")
            self._waiting.popleft()
            self._is_sure = True

    def _find_rest(self, line: bytes) -> bytes:
        """The part of a line that is not yet in the file, after a torn write. The file is opened again, since an open
        file may not survive an outage of its server."""
        reopened = _open_to_append(self._path)
        self.close()
        self._descriptor = reopened
        size = os.fstat(self._descriptor).st_size
        most = min(size, len(line))
        end = os.pread(self._descriptor, most, size - most)
        if end == line:
            return b""
        torn = end.rpartition(b"\n")[2]
        return line[len(torn) :] if line.startswith(torn) else b"\n" + line

    def close(self) -> None:
        """Close the file; a second call does nothing. Its events are in it already, or still wait."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _open_to_append(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)


def parse_event(line: bytes) -> Event | None:
    """The event of one line, or None for a torn or foreign line."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    event["event"] = EARLIER_EVENTS.get(event["event"], event["event"])
    return event


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[BinaryIO | None]:
    """The file, or None where there is none. Raises JobError where it cannot be opened or read."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(path, "rb") as file:
            yield file
            return
    except OSError as error:
        check_answers(path, error)
        raise JobError(
            f"the events in {path} cannot be read: {error.strerror}.\n"
            "  To do: move away what stands there in place of a file, or see who may read it; to go on, checkpoints do."
        ) from None
    yield None


def read_events(path: Path, names: Sequence[str] = (), most_bytes: int | None = None) -> Iterator[Event]:
    """Every whole event of a file in order; none where there is no file. Raises JobError where it cannot be read.

    Only those of some `names` are many times faster, and so are those among the last `most_bytes`.
    """
    names = (*names, *(earlier for earlier, name in EARLIER_EVENTS.items() if name in names))
    begins = tuple(f'{{"event": "{name}"'.encode() for name in names) or b""
    with _reading(path) as file:
        if file is not None and most_bytes is not None:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
        for line in file or ():
            if line.startswith(begins) and line.endswith(b"\n") and (event := parse_event(line)) is not None:
                yield event


def drop_undone(events: Iterator[Event]) -> list[Event]:
    """The valid events: a run that resumed at step s, or went back to it, undoes the earlier events of steps after
    s."""

    def step_of(event: Event) -> int:
        step = event.get("step")
        return step if isinstance(step, int) else 0

    kept: list[Event] = []
    for event in events:
        if event["event"] in ("started", "rolled_back"):
            base = step_of(event)
            kept = [old for old in kept if step_of(old) <= base or old["event"] in _LASTING]
        kept.append(event)
    return kept


_STEP = b'{"event": "step"'
_STEP_BYTES = 256  # about the length of a step's line
_STEPS_BYTES = 1 << 16  # of the end of a file, whose steps are all read


class EventFollower:
    """Reads what was appended to an event file since the last call. Raises JobError where it cannot be read."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset, self._rest = 0, b""
        self._inode: int | None = None
        if from_end and is_there(path):
            found = path.stat()
            self._offset, self._inode = found.st_size, found.st_ino

    def new_events(self) -> list[Event]:
        """Whole events appended since the last call; a file that replaced it is read from its start. Raises JobError
        where it cannot be read."""
        with _reading(self._path) as file:
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

    def catch_up(self, most_steps: int = 4096) -> Iterator[Event]:
        """For a first look at a long file: every event so far, but only some of the steps: about `most_steps` evenly
        chosen ones, the first and the last of each attempt, and those at the end. `new_events` goes on after it. Raises
        JobError where it cannot be read."""
        with _reading(self._path) as file:
            if file is None:
                return
            found = os.fstat(file.fileno())
            stride = max(1, found.st_size // (most_steps * _STEP_BYTES))
            self._offset, self._inode, self._rest = 0, found.st_ino, b""
            steps, left_out = 0, b""
            for line in file:
                self._offset += len(line)
                if not line.endswith(b"\n"):
                    self._rest = line
                    return
                is_step = line.startswith(_STEP)
                if is_step and self._offset < found.st_size - _STEPS_BYTES:
                    steps += 1
                    if steps % stride != 1 % stride:
                        left_out = line
                        continue
                elif not is_step:
                    steps = 0
                    if left_out and (event := parse_event(left_out)) is not None:
                        yield event
                left_out = b""
                if (event := parse_event(line)) is not None:
                    yield event

    def follow(self, until: Callable[[], bool], pause_s: float = 0.25) -> Iterator[Event]:
        """Yield events as they come; once `until` turns true, yield the rest and end."""
        while True:
            ended = until()
            yield from self.new_events()
            if ended:
                return
            time.sleep(pause_s)
