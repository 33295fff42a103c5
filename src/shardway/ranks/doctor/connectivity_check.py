"""Connectivity check: ranks report to rank 0 over plain TCP, so that each missing rank and its attempts are known.

torch's store is not used: it reports how many ranks are missing, not which; and torch may be what is broken.

Invariants:
- A message is whole or an OSError; none is larger than `MAX_BYTES`.
- Rank 0 asks and the others answer, each wait has a limit, and a lost rank does not affect the others.
- The meeting point is that of the launch: the master's address, and the port at which training will meet. Under
  torchrun the agent listens there already, so every rank derives another port from it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardway.ranks.launcher import FIRST_PORT, PORTS, Placement, list_ports

# --- JSON messages over TCP, one object a line

MAX_BYTES = 4 * 2**20


class Wire:
    """One end of a connection; each wait has a limit. Raises OSError at its end, at a limit, or for foreign data."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any], limit_s: float = 10.0) -> None:
        """Send one message."""
        self._socket.settimeout(max(0.01, limit_s))
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, limit_s: float) -> dict[str, Any]:
        """The next message."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            more = self._socket.recv(2**16)
            if not more:
                raise ConnectionResetError("the other end closed the connection")
            self._buffer += more
            if len(self._buffer) > MAX_BYTES:
                raise ConnectionError("the other end sends what no doctor sends")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionError("the other end is no doctor")
        return message

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()


# --- the check itself

_CONNECT_S = 3.0
_HELLO_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_CLOCK_ROUNDS = 5
_SILENCE_S = 600.0
"""Longer than anything that rank 0 does between two questions; the end of its connection is noticed sooner."""

Answer = dict[str, Any]
Answerer = Callable[[Answer], Answer]
"""Carries out a request of rank 0, and returns the answer to it."""


@dataclass(frozen=True)
class MeetingPoint:
    """Where the ranks of one launch report; `launch` separates its ranks from those of others. `further` ports are
    tried where the first is taken, as for training (`ranks.port`)."""

    address: str
    port: int
    launch: str
    further: tuple[int, ...] = ()

    def list_all(self) -> list[MeetingPoint]:
        """The same with one port each."""
        return [replace(self, port=port, further=()) for port in (self.port, *self.further)]

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def find_point(placement: Placement, job: str) -> MeetingPoint:
    """The meeting point of a launch, the same on each of its ranks."""
    launch = f"{job} {placement.world} {placement.master_addr}:{placement.master_port}"
    if not placement.has_agent:
        further = list_ports(placement.launch)[1:] if placement.launch else ()
        return MeetingPoint(placement.master_addr, placement.master_port, launch, further)
    port = FIRST_PORT + zlib.crc32(f"doctor {placement.master_port}".encode()) % PORTS
    return MeetingPoint(placement.master_addr, port, launch)


class CheckPortTaken(Exception):
    """Rank 0 cannot listen at the meeting point; the message is the system's."""


@dataclass(frozen=True)
class ClockOffset:
    """How far a rank's clock is ahead of rank 0's, in seconds, and its uncertainty (half the round trip)."""

    ahead_s: float
    error_s: float


@dataclass
class ConnectivityCheck:
    """Rank 0's side."""

    point: MeetingPoint
    world: int
    reports: dict[int, Answer] = field(default_factory=dict)
    """The first message of each rank."""
    took_s: float = 0.0

    def __post_init__(self) -> None:
        self._wires: dict[int, Wire] = {}

    @property
    def missing(self) -> list[int]:
        """Ranks other than 0 that did not come."""
        return [rank for rank in range(1, self.world) if rank not in self.reports]

    @property
    def here(self) -> list[int]:
        """Ranks that came and are still connected."""
        return sorted(self._wires)

    def gather(self, wait_s: float) -> None:
        """Wait for every rank, at most `wait_s` seconds. Raises CheckPortTaken."""
        start = time.monotonic()
        listener = _listen_at_first(self.point)
        self.point = replace(self.point, port=listener.getsockname()[1], further=())
        with listener:
            while self.missing and (left := start + wait_s - time.monotonic()) > 0:
                listener.settimeout(left)
                try:
                    connection, _ = listener.accept()
                except OSError:
                    continue
                self._greet(Wire(connection))
        self.took_s = time.monotonic() - start

    def _greet(self, wire: Wire) -> None:
        """Accept a rank of this launch; a stranger gets no answer."""
        try:
            hello = wire.receive(_HELLO_S)
            rank = hello.get("rank")
            if hello.get("launch") != self.point.launch or not isinstance(rank, int) or not 0 < rank < self.world:
                raise ConnectionError("not of this launch")
            wire.send({"welcome": True})
        except OSError:
            wire.close()
            return
        self._wires[rank] = wire
        self.reports[rank] = hello

    def compare_clocks(self, ranks: Iterable[int]) -> dict[int, ClockOffset]:
        """Clocks of ranks against ours, from the quickest of a few exchanges (as NTP does, RFC 5905 section 8)."""
        clocks = {}
        for rank in ranks:
            rounds = [found for _ in range(_CLOCK_ROUNDS) if (found := self._ask_clock(rank)) is not None]
            if rounds:
                clocks[rank] = min(rounds, key=lambda clock: clock.error_s)
        return clocks

    def _ask_clock(self, rank: int) -> ClockOffset | None:
        before, start = time.time(), time.monotonic()
        answer = self.ask({rank: {"ask": "clock"}}, 5.0).get(rank)
        trip = time.monotonic() - start
        if answer is None or not isinstance(answer.get("time"), int | float):
            return None
        return ClockOffset(float(answer["time"]) - (before + trip / 2), trip / 2)

    def ask(
        self, questions: Mapping[int, Answer], limit_s: float, meanwhile: Callable[[], None] | None = None
    ) -> dict[int, Answer]:
        """Ask ranks, do own work `meanwhile`, and collect their answers; a rank without an answer is dropped."""
        deadline = time.monotonic() + limit_s
        asked = [rank for rank, question in questions.items() if self._report(rank, question)]
        if meanwhile is not None:
            meanwhile()
        answers = {}
        for rank in asked:
            try:
                answers[rank] = self._wires[rank].receive(max(0.2, deadline - time.monotonic()))
            except OSError:
                self._wires.pop(rank).close()
        return answers

    def _report(self, rank: int, question: Answer) -> bool:
        try:
            self._wires[rank].send(question)
        except (OSError, KeyError):
            return False
        return True

    def end(self) -> None:
        """Release every rank."""
        for rank in self.here:
            self._report(rank, {"ask": "end"})
            self._wires[rank].close()
        self._wires.clear()


def _listen_at_first(point: MeetingPoint) -> socket.socket:
    """Listen at the first free port. Raises CheckPortTaken."""
    trouble = ""
    for each in point.list_all():
        try:
            return _listen(each)
        except OSError as error:
            trouble = trouble or error.strerror or str(error)
    raise CheckPortTaken(trouble)


def _listen(point: MeetingPoint) -> socket.socket:
    """Listen at every address of this host: the master's name may resolve to another one here than elsewhere."""
    listener = socket.socket(socket.AF_INET6 if ":" in point.address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", point.port))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener


@dataclass(frozen=True)
class Attendance:
    """The result for a rank other than 0: `met`, or how its attempts ended, commonest first."""

    met: bool
    tries: Mapping[str, int] = field(default_factory=dict)


def attend(point: MeetingPoint, hello: Answer, answer: Answerer, wait_s: float) -> Attendance:
    """Report to rank 0 and carry out its requests until it releases this rank."""
    start, tries, pause = time.monotonic(), Counter[str](), _FIRST_PAUSE_S
    points = itertools.cycle(point.list_all())
    while (left := start + wait_s - time.monotonic()) > 0:
        try:
            wire = _connect(next(points), hello, left)
        except OSError as error:
            tries[explain_error(error)] += 1
            time.sleep(max(0.0, min(pause, start + wait_s - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            continue
        try:
            _obey(wire, answer, wait_s)
        except OSError as error:
            return Attendance(True, {f"then rank 0 was lost: {explain_error(error)}": 1})
        finally:
            wire.close()
        return Attendance(True)
    return Attendance(False, dict(tries.most_common()))


def _connect(point: MeetingPoint, hello: Answer, limit_s: float) -> Wire:
    wire = Wire(socket.create_connection((point.address, point.port), timeout=min(limit_s, _CONNECT_S)))
    try:
        wire.send({"launch": point.launch, **hello})
        wire.receive(min(limit_s, 2 * _HELLO_S))  # rank 0 may first have to wait for a stranger
    except OSError as error:
        wire.close()
        raise ConnectionError("something answered that is not rank 0 of this launch") from error
    return wire


def _obey(wire: Wire, answer: Answerer, wait_s: float) -> None:
    """Answer until released; rank 0 may wait for other ranks for as long as this one would."""
    while True:
        question = wire.receive(wait_s + _SILENCE_S)
        if question.get("ask") == "end":
            return
        wire.send({"time": time.time()} if question.get("ask") == "clock" else answer(question))


_WORDS = {
    errno.ECONNREFUSED: "connection refused: nothing listens there",
    errno.EHOSTUNREACH: "no route to that host",
    errno.ENETUNREACH: "no network leads there",
}


def explain_error(error: OSError) -> str:
    """The meaning of a connection error."""
    if isinstance(error, socket.gaierror):
        return "the name is not known here"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer: a firewall, or an address that leads elsewhere"
    return _WORDS.get(error.errno or 0) or error.strerror or str(error)
