"""Outputs that may close while a run trains: a terminal, a pipe, PBS's collector of outputs, a log on a full disk.

What is printed to a closed output is lost; the run is not. A full pipe, whose reader is busy, is waited for while the
run trains, and for a few seconds when it ends.

How a process ends, after its outputs have what was printed, is decided here as well.

Invariant: a run never ends because its output is not read. What is printed is decided elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

from shardway.refusals import FULL

_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ESHUTDOWN, errno.ECONNRESET)
"""Errors of a write whose output has no reader any more: a pipe, a terminal that was hung up, a socket."""

_PIECE = select.PIPE_BUF // len(r"\U0001f600")
"""Characters of which a pipe that is ready takes each, whatever they are in its encoding: more than PIPE_BUF bytes may
find it full (poll(2), pipe(7))."""

_LOOK_MS = 200
_MAIN_S = 1.0
_LEAVE_S = 5.0


class EnduringOutput:
    """A stream that discards its output once its reader is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._until = math.inf
        self._held = 0  # characters, at most, that the stream itself still holds

    def leave(self) -> None:
        """From here on the stream is waited for a few seconds in all."""
        self._until = min(self._until, time.monotonic() + _LEAVE_S)

    def settle(self) -> None:
        """Nothing that is printed after this keeps a run that has left."""
        if self._until < math.inf and not self._await_room():
            self._go_nowhere()

    def write(self, text: str) -> int:
        """As of the stream; what cannot be written, or not soon, counts as written."""
        if not isinstance(text, str):  # by which click distinguishes a stream of text from one of bytes
            raise TypeError("an output of text takes no bytes")
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            if self._held + len(piece) > _PIECE:
                self.flush()
            with self._enduring() as has_room:
                if has_room:
                    self._stream.write(piece)
                    self._held += len(piece)
            if not has_room:
                break
        return len(text)

    def flush(self) -> None:
        with self._enduring() as has_room:
            if has_room:
                self._stream.flush()
                self._held = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _enduring(self) -> Iterator[bool]:
        try:
            has_room = self._await_room()
            if not has_room and time.monotonic() > self._until:
                self._go_nowhere()
                has_room = True
            yield has_room
        except OSError as error:
            if error.errno in _GONE:
                self._go_nowhere()
            elif error.errno not in FULL:  # a log on a full disk: what comes later may find room
                raise

    def _await_room(self) -> bool:
        """Wait for room, here rather than in a write that no thread could end; False once it took too long. The main
        thread looks after ranks or trains: it does not wait for long, until the run leaves."""
        is_busy = threading.current_thread() is threading.main_thread() and self._until == math.inf
        own = time.monotonic() + _MAIN_S if is_busy else math.inf
        poll = select.poll()
        try:
            poll.register(self._stream.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # a stream of Python's own
            return True
        while not poll.poll(_LOOK_MS):
            if time.monotonic() > min(own, self._until):  # which may come while this waits
                return False
        return True

    def _go_nowhere(self) -> None:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())  # also for what the stream still holds


def leave_outputs() -> None:
    """The run leaves: what it still prints must not keep it."""
    for stream in _list_enduring():
        stream.leave()


def _list_enduring() -> list[EnduringOutput]:
    return [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, EnduringOutput)]


@contextlib.contextmanager
def enduring_outputs() -> Iterator[None]:
    """While entered, what prints to sys.stdout and sys.stderr does not end where they close. After an error it stays
    so until the error is printed (`outputs_put_back`)."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (EnduringOutput(each) if each is not None else each for each in before)
    try:
        yield
    except BaseException:
        leave_outputs()
        raise
    for stream in _list_enduring():
        stream.settle()
    sys.stdout, sys.stderr = before


@contextlib.contextmanager
def outputs_put_back() -> Iterator[None]:
    """At its end sys.stdout and sys.stderr are what they were, and what enduring ones held is printed or lost."""
    before = sys.stdout, sys.stderr
    try:
        yield
    finally:
        for stream in _list_enduring():
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


# --- the end of the process


class Shutdown:
    """Created before any other exit handler is registered, so that it runs last. It skips C++ destructors. Those of
    torch have ended a rank with SIGABRT after all its work was done, when another rank of its group had left a moment
    before (torch 2.13, gloo, "terminate called without an active exception")."""

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)

    def leave_with(self, code: int) -> None:
        self._code = code

    def _leave(self) -> None:
        if self._code is not None and "torch" in sys.modules:
            with contextlib.suppress(OSError):
                flush_output()
            import ctypes  # most processes end without it

            ctypes.CDLL(None).fflush(None)  # the buffers of C libraries
            os._exit(self._code)


def flush_output() -> None:
    """Flush Python's output; a stream may be closed. Raises OSError."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
