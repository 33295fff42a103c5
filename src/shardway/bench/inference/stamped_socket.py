"""A socket of TCP that knows when what it gave was received: by the kernel's own stamp, where there is one.

Between the arrival of a packet and its read lies all that the reader's thread did meanwhile: of 256 streams that are
due together the last one would seem later by the work for all others, and any one by the wait for a processor. Linux
stamps each packet as it comes in, also for TCP, and gives the stamp with the bytes (socket(7), SO_TIMESTAMPNS): that of
the last packet among them. So what is measured does not depend on how busy the reader is, but for pieces that lay
there together.

Invariant: without a stamp (another system, a kernel or event loop that gives none) `take_arrival` has none, and the
caller's own clock is as good as it was.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python 3.11 has no name for it
_TIMESPEC = struct.Struct("@ll")
_ROOM = socket.CMSG_SPACE(_TIMESPEC.size) if sys.platform == "linux" else 0


class StampedSocket(socket.socket):
    """A socket whose reads note when their bytes came. asyncio reads it by `recv`, and below TLS by `recv_into`."""

    _arrived_s: float | None = None
    _stamps = False

    def ask_for_stamps(self) -> None:
        """Have the kernel stamp what comes, where it can: from a moment later on where no other socket has asked."""
        if not _ROOM:
            return
        try:
            self.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        except OSError:
            return
        self._stamps = True

    def take_arrival(self) -> float | None:
        """When the bytes of the last read came, in seconds of `time.perf_counter`; None where that is not known."""
        found, self._arrived_s = self._arrived_s, None
        return found

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """As of any socket."""
        if not self._stamps:
            return super().recv(size, flags)
        data, notes, *_ = self.recvmsg(size, _ROOM, flags)
        self._arrived_s = _read_arrival(notes)
        return data

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        """As of any socket."""
        if not self._stamps:
            return super().recv_into(buffer, size, flags)
        count, notes, *_ = self.recvmsg_into([memoryview(buffer)[:size] if size else buffer], _ROOM, flags)
        self._arrived_s = _read_arrival(notes)
        return count


def _read_arrival(notes: Sequence[tuple[int, int, bytes]]) -> float | None:
    """The kernel's clock is that of the day, which may be set: an age is counted from it, at once."""
    for level, kind, data in notes:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(data)
            age_s = (time.time_ns() - seconds * 1_000_000_000 - nanoseconds) / 1e9
            return time.perf_counter() - max(age_s, 0.0)
    return None
