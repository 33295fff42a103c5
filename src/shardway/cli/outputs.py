"""Outputs that may close while a run trains: a terminal that goes, a pipe whose reader has ended, PBS's collector of
outputs after `qdel`. What is printed then is lost; the run is not.

Invariant: a run does not end for want of somebody who reads what it prints. This module must not decide what is
printed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ESHUTDOWN, errno.ECONNRESET)
"""What a write says where nobody will ever read: of a pipe, a terminal that was hung up, a socket."""


class EnduringOutput:
    """A stream that goes on, to nowhere, once nobody reads it any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As of the stream; what cannot be written any more counts as written."""
        with self._enduring():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As of the stream."""
        with self._enduring():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _enduring(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _GONE:
                raise
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())  # also for what the stream still holds


@contextlib.contextmanager
def enduring_outputs() -> Iterator[None]:
    """While entered, what prints to sys.stdout and sys.stderr does not end where they close."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (EnduringOutput(each) if each is not None else each for each in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
