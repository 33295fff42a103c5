"""Parts of staged files between the nodes of one job: which node reads which part, a server of them, and fetching.

Invariants:
- Each node computes the same owner for each part, from the same files and nodes, without asking.
- Both ends of a connection prove that they know the job's secret (HMAC-SHA256 over random numbers of both and the
  number of the node that serves) before a byte of data is sent; the secret itself is never sent. So no other job and
  no other user of a node gets data here, or can supply them.
- Only files of this job's data sets are served, by their keys.
- What is fetched is compared with checksums of each MiB that its owner made when it read it, before it is written.
- Each wait has a limit: for a connection, for the next byte, for a part as a whole. What goes wrong with a node raises
  PeerTrouble, and the part is read from where the data lie.
"""

from __future__ import annotations

import contextlib
import heapq
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from shardway.data.formats.base import BLOCK_BYTES
from shardway.ranks.network import listen_anywhere

if TYPE_CHECKING:
    from shardway.data.joint_copy import GrowingFile

PART_BYTES = 2**26
"""A file is read in parts of so many bytes, each by one node."""

PIECE_BYTES = 8 * BLOCK_BYTES
"""What is received before it is compared and written."""

CONNECT_S = 2.0
STALL_S = 5.0
"""How long the next byte may take."""

REST_S = 30.0
"""How long a node is not asked after something went wrong with it; twice as long after each further time."""

SLOW_BYTES = 2**27
"""A node is not judged slow before so many bytes have come from it, and from where the data lie."""

SLOW = 0.5
"""A node that sends at less than this part of the speed at which the data are read where they lie is not asked."""

_HELLO_S = 5.0
_IDLE_S = 600.0
_MOST_CONNECTIONS = 512
_MOST_IDLE = 16
"""How many connections to other nodes are kept open for the next part, for half of _IDLE_S."""

_ASK, _HEAD = struct.Struct("!HI"), struct.Struct("!cQI")


class PeerTrouble(Exception):
    """A node did not send what it was asked for; the message says why."""


class PartState(Enum):
    """What a node answers about a part: it is here and follows; it will come; it will not."""

    HERE = b"h"
    LATER = b"l"
    NEVER = b"n"


@dataclass(frozen=True)
class FoundPart:
    """A part that can be sent: an open file, which the one that sends closes, and its checksums a MiB."""

    descriptor: int
    offset: int
    size: int
    sums: bytes


Find = Callable[[str, int], "FoundPart | PartState"]
"""(key of a file, part) -> the part, or whether it will come."""


def count_parts(size: int) -> int:
    """The number of parts of a file; an empty one has one too."""
    return max(1, -(-size // PART_BYTES))


def span_of(size: int, part: int) -> tuple[int, int]:
    """(offset, bytes) of a part of a file."""
    offset = part * PART_BYTES
    return offset, min(PART_BYTES, size - offset)


def assign_parts(
    files: Mapping[str, int], nodes: int, there: Mapping[int, npt.NDArray[np.bool_]] | None = None
) -> dict[str, tuple[int, ...]]:
    """The owner of each part of each file (key -> bytes), balanced by bytes. `there`: which files, in this order, nodes
    have from earlier on; one of those is the owner of such a file."""
    hashes = {key: xxhash.xxh3_64_intdigest(key.encode()) for key in files}
    places = {key: place for place, key in enumerate(files)}
    first = sum(hashes.values()) % nodes
    loads = [(0, order, (first + order) % nodes) for order in range(nodes)]
    owners = {}
    for key in sorted(files, key=lambda key: (hashes[key], key)):
        holders = [node for node, has in (there or {}).items() if has[places[key]]]
        own = []
        for part in range(count_parts(files[key])):
            if holders:
                own.append(holders[(hashes[key] + part) % len(holders)])
                continue
            load, order, node = loads[0]
            heapq.heapreplace(loads, (load + span_of(files[key], part)[1], order, node))
            own.append(node)
        owners[key] = tuple(own)
    return owners


# --- the server


class PartServer:
    """Sends parts of staged files to the other nodes of the job, in a thread for each connection, until `close`."""

    def __init__(self, node: int, secret: bytes, find: Find) -> None:
        """Raises OSError if this process cannot listen."""
        self._node, self._secret, self._find = node, secret, find
        self._listener = listen_anywhere()
        self.port = int(self._listener.getsockname()[1])
        self.sent_bytes = 0
        self._open: set[socket.socket] = set()
        self._mutex, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._accept, name="stage-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections; no thread waits for another node after this."""
        with self._mutex:
            self._closed = True
            open_ones = list(self._open)
        for each in (self._listener, *open_ones):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(STALL_S)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.05)  # as without a free descriptor
                continue
            with self._mutex:
                is_welcome = not self._closed and len(self._open) < _MOST_CONNECTIONS
                if is_welcome:
                    self._open.add(connection)
            if not is_welcome:
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="stage-sender", daemon=True).start()
            except RuntimeError:  # a limit on threads
                self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._mutex:
            self._open.discard(connection)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HELLO_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self._greet(connection):
                return
            while not self._closed:
                connection.settimeout(_IDLE_S)
                length, part = _ASK.unpack(_receive(connection, _ASK.size))
                key = _receive(connection, length).decode()
                connection.settimeout(STALL_S)
                found = self._find(key, part)
                if isinstance(found, PartState):
                    connection.sendall(_HEAD.pack(found.value, 0, 0))
                    continue
                with os.fdopen(found.descriptor, "rb", buffering=0) as file:
                    head = _HEAD.pack(PartState.HERE.value, found.size, len(found.sums))
                    connection.sendall(head + found.sums)
                    if found.size and connection.sendfile(file, found.offset, found.size) < found.size:
                        return  # it was removed meanwhile
                with self._mutex:
                    self.sent_bytes += found.size
        except (OSError, ValueError, EOFError):  # the other end is gone, or is no node of this job
            pass
        finally:
            self._forget(connection)

    def _greet(self, connection: socket.socket) -> bool:
        own = secrets.token_bytes(32)
        connection.sendall(own)
        other, proof = _receive(connection, 32), _receive(connection, 32)
        if not hmac.compare_digest(proof, _prove(self._secret, b"client", self._node, own + other)):
            return False
        connection.sendall(_prove(self._secret, b"server", self._node, own + other))
        return True


def _prove(secret: bytes, role: bytes, node: int, numbers: bytes) -> bytes:
    return hmac.digest(secret, role + struct.pack("!I", node) + numbers, "sha256")


def _receive(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes. Raises EOFError."""
    found = bytearray(size)
    _fill(connection, memoryview(found))
    return bytes(found)


def _fill(connection: socket.socket, view: memoryview, until: float = float("inf")) -> None:
    """Fill a buffer. Raises EOFError, TimeoutError."""
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection was closed")
        if time.monotonic() > until:
            raise TimeoutError("it sends more slowly than the data are read where they lie")
        view = view[count:]


# --- the other nodes


@dataclass(frozen=True)
class PeerNode:
    """How a node is reached: its addresses, the likeliest first, a port, and its name for messages; port 0: not."""

    name: str
    addresses: tuple[str, ...]
    port: int


class _Pace:
    """Bytes and the seconds in which they came."""

    def __init__(self) -> None:
        self.bytes, self.seconds = 0, 0.0

    def add(self, size: int, seconds: float) -> None:
        self.bytes, self.seconds = self.bytes + size, self.seconds + seconds

    @property
    def rate(self) -> float:
        return self.bytes / max(self.seconds, 1e-9)


class StagePeers:
    """The nodes of a job as one of them sees them: owners of parts, connections, and which nodes are not asked now.

    `growing`: files that this node puts together, by key, for its own server. `coming`: whether a file will come to
    this node.
    """

    def __init__(self, own: int, nodes: Sequence[PeerNode], owners: Mapping[str, tuple[int, ...]], secret: bytes):
        self.own, self.owners = own, owners
        self.growing: dict[str, GrowingFile] = {}
        self.coming: Callable[[str], bool] = lambda key: False
        self.troubles: dict[int, str] = {}
        """What went wrong last with a node."""
        self._secret, self._mutex = secret, threading.Lock()
        self._idle: list[tuple[int, socket.socket, float]] = []
        self._rests: dict[int, tuple[float, float]] = {}
        self._shared = _Pace()
        self.set_nodes(nodes)

    def set_nodes(self, nodes: Sequence[PeerNode]) -> None:
        """All nodes of the job, this one too, in the order in which owners are numbered."""
        self.nodes, self._paces = tuple(nodes), [_Pace() for _ in nodes]

    def owner_of(self, key: str, part: int) -> int:
        """The node that reads a part from where the data lie."""
        owners = self.owners.get(key)
        return self.own if owners is None else owners[part]

    def find_part(self, key: str, part: int, find_whole: Find) -> FoundPart | PartState:
        """A part of a file that this node puts together, or one that `find_whole` finds; for its server."""
        if part >= len(self.owners.get(key, ())):
            return PartState.NEVER
        growing = self.growing.get(key)
        found = growing.find_part(part) if growing is not None else None
        if found is not None:
            return found
        whole = find_whole(key, part)
        return PartState.LATER if whole is PartState.NEVER and self.coming(key) else whole

    def rests(self, node: int) -> bool:
        """Whether a node is not asked now."""
        return time.monotonic() < self._rests.get(node, (0.0, 0.0))[0]

    def note_shared(self, size: int, seconds: float) -> None:
        """Count what was read from where the data lie."""
        with self._mutex:
            self._shared.add(size, seconds)

    def fetch(self, node: int, key: str, part: int, size: int, write: Callable[[int, memoryview], object]) -> PartState:
        """Fetch a part of `size` bytes from a node; `write` (offset in the part, bytes) gets each piece once its
        checksums were compared. Raises PeerTrouble, after which the node is not asked for a while, and what `write`
        raises."""
        connection: socket.socket | None = None
        began = time.monotonic()
        try:
            connection = self._connect(node)
            state = self._fetch(connection, key, part, size, write)
        except (OSError, EOFError, ValueError) as error:
            _close(connection)
            raise self._note_trouble(node, str(error) or type(error).__name__) from error
        except BaseException:
            _close(connection)
            raise
        self._keep(node, connection)
        if state is PartState.HERE:
            self._judge(node, size, time.monotonic() - began)
        return state

    def _judge(self, node: int, size: int, seconds: float) -> None:
        with self._mutex:
            pace, shared = self._paces[node], self._shared
            pace.add(size, seconds)
            enough = min(pace.bytes, shared.bytes) >= SLOW_BYTES
        if enough and pace.rate < SLOW * shared.rate:
            self._note_trouble(node, "it sends more slowly than the data are read where they lie")
            with self._mutex:
                self._paces[node] = _Pace()

    def close(self) -> None:
        """Close the connections."""
        with self._mutex:
            idle, self._idle = self._idle, []
        for _, connection, _ in idle:
            connection.close()

    def _note_trouble(self, node: int, why: str) -> PeerTrouble:
        with self._mutex:
            rest = 2 * self._rests.get(node, (0.0, REST_S / 2))[1]
            self._rests[node] = time.monotonic() + rest, rest
            self.troubles[node] = f"{self.nodes[node].name}: {why}"
            stale = [each for other, each, _ in self._idle if other == node]
            self._idle = [each for each in self._idle if each[0] != node]
        for each in stale:
            each.close()
        return PeerTrouble(self.troubles[node])

    def _fetch(
        self, connection: socket.socket, key: str, part: int, size: int, write: Callable[[int, memoryview], object]
    ) -> PartState:
        name = key.encode()
        connection.sendall(_ASK.pack(len(name), part) + name)
        word, promised, of_sums = _HEAD.unpack(_receive(connection, _HEAD.size))
        state = PartState(word)
        if state is not PartState.HERE:
            return state
        if promised != size or of_sums != 8 * -(-size // BLOCK_BYTES):
            raise ValueError(f"it has {promised} bytes of a part of {size}")
        sums = np.frombuffer(_receive(connection, of_sums), np.uint64).tolist()
        with self._mutex:
            until = time.monotonic() + max(STALL_S, 2 * size / SLOW / self._shared.rate if self._shared.bytes else 0.0)
        buffer = memoryview(bytearray(min(size, PIECE_BYTES)))
        for at in range(0, size, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, size - at)]
            _fill(connection, piece, until)
            for start in range(0, len(piece), BLOCK_BYTES):
                if xxhash.xxh3_64_intdigest(piece[start : start + BLOCK_BYTES]) != sums[(at + start) // BLOCK_BYTES]:
                    raise ValueError("bytes that it sent disagree with their checksum")
            write(at, piece)
        return state

    def _connect(self, node: int) -> socket.socket:
        with self._mutex:
            for place, (other, kept, since) in enumerate(self._idle):
                if other == node and time.monotonic() - since < _IDLE_S / 2:
                    del self._idle[place]
                    return kept
        peer, errors = self.nodes[node], []
        for address in peer.addresses if peer.port else ():
            try:
                connection = socket.create_connection((address, peer.port), timeout=CONNECT_S)
                try:
                    self._greet(connection, node)
                except BaseException:
                    connection.close()
                    raise
            except (OSError, EOFError) as error:
                errors.append(f"{address} port {peer.port}: {error}")
                continue
            connection.settimeout(STALL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._prefer(node, address)
            return connection
        raise ConnectionError("; ".join(errors) or "it has no address")

    def _prefer(self, node: int, address: str) -> None:
        """From now on this address of a node is tried first."""
        with self._mutex:
            peer = self.nodes[node]
            rest = tuple(each for each in peer.addresses if each != address)
            moved = PeerNode(peer.name, (address, *rest), peer.port)
            self.nodes = (*self.nodes[:node], moved, *self.nodes[node + 1 :])

    def _greet(self, connection: socket.socket, node: int) -> None:
        own, other = secrets.token_bytes(32), _receive(connection, 32)
        connection.sendall(own + _prove(self._secret, b"client", node, other + own))
        if not hmac.compare_digest(_receive(connection, 32), _prove(self._secret, b"server", node, other + own)):
            raise ConnectionError("it is no node of this job")

    def _keep(self, node: int, connection: socket.socket) -> None:
        with self._mutex:
            self._idle.append((node, connection, time.monotonic()))
            oldest = self._idle.pop(0)[1] if len(self._idle) > _MOST_IDLE else None
        _close(oldest)


def _close(connection: socket.socket | None) -> None:
    if connection is not None:
        connection.close()
