"""Files copied to this node's disk together with the other nodes of the job: each node reads its own parts from where
the data lie, and fetches the others from the nodes that own them.

Invariants:
- A part that its owner does not send is read from where the data lie: after trouble at once, and if the owner has not
  read it yet, after this node has waited for some time with nothing else to do.
- Parts of a file may come in any order. The file gets its name as any other copy does, after the same checks; a file
  that fails them is read again where it lies, as far as it was fetched, before it counts as damaged.
- Own parts come before fetched ones, over some files ahead, so that all nodes read at the same time.
- What an end of the run leaves unfinished is bounded by AHEAD_BYTES.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from shardway.data.formats.base import BLOCK_BYTES, DamagedData, FileParts
from shardway.data.stage_peers import (
    PIECE_BYTES,
    FoundPart,
    PartState,
    PeerTrouble,
    StagePeers,
    count_parts,
    span_of,
)

THREADS = 4
"""How many parts a node copies at once."""

AHEAD_BYTES = 2**32
AHEAD_FILES = 1024
"""How far ahead of the first file that is not complete own parts are read."""

PATIENCE_S = 5.0
"""How long a node with nothing else to do waits for a part that its owner has not read yet, if the run needs it."""

LATER_PATIENCE_S = 60.0
"""The same for a part that the run needs later."""

LOOK_S = 0.02
"""How often an owner is asked again for a part that it has not read yet."""

MORE_S = 0.25
"""How often is looked for further files where there were none."""

Note = Callable[[int, bool], object]
"""(bytes copied, whether they were fetched from another node) -> nothing; raises to end the copy."""


class GrowingFile:
    """A copy of a file that is put together below a temporary name, part by part in any order."""

    def __init__(self, parts: FileParts, number: int, key: str, temporary: Path) -> None:
        """Raises OSError."""
        self.parts, self.number, self.key, self.temporary = parts, number, key, temporary
        self.size = parts.files[number].size
        self.sums = np.zeros(-(-self.size // BLOCK_BYTES), np.uint64)
        self.fetched: set[int] = set()
        """Parts that came from other nodes."""
        self.is_open = True
        self._there, self._mutex = [False] * count_parts(self.size), threading.Lock()
        self.descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def write(self, at: int, piece: bytes | memoryview) -> None:
        """Write bytes from a multiple of BLOCK_BYTES on, and keep their checksums."""
        view = memoryview(piece)
        for start in range(0, len(view), BLOCK_BYTES):
            self.sums[(at + start) // BLOCK_BYTES] = xxhash.xxh3_64_intdigest(view[start : start + BLOCK_BYTES])
        while view:
            count = os.pwrite(self.descriptor, view, at)
            view, at = view[count:], at + count

    def read_part(self, part: int, note: Callable[[int], object]) -> None:
        """Copy a part from where the data lie. Raises OSError, DamagedData if the file has become shorter."""
        at, size = span_of(self.size, part)
        end = at + size
        source = os.open(self.parts.path(self.number), os.O_RDONLY | os.O_CLOEXEC)
        try:
            while at < end:
                wanted = min(PIECE_BYTES, end - at)
                piece = read_exactly(source, wanted, at)
                if len(piece) < wanted:
                    what = f"it ends there and had {self.size} bytes when it was opened"
                    raise self.parts.damaged(self.number, at + len(piece), what)
                self.write(at, piece)
                note(wanted)
                at += wanted
        finally:
            os.close(source)
        self.fetched.discard(part)

    def complete(self, part: int) -> None:
        """A part is there: it may be sent to other nodes."""
        self._there[part] = True

    @property
    def has_any(self) -> bool:
        """Whether a part is there."""
        return any(self._there)

    def find_part(self, part: int) -> FoundPart | None:
        """A part for another node; None if it is not there yet."""
        offset, size = span_of(self.size, part)
        with self._mutex:
            if not self.is_open or not self._there[part]:
                return None
            sums = self.sums[offset // BLOCK_BYTES : -(-(offset + size) // BLOCK_BYTES)]
            return FoundPart(os.dup(self.descriptor), offset, size, sums.tobytes())

    def close(self) -> None:
        """Close the temporary file."""
        with self._mutex:
            if self.is_open:
                self.is_open = False
                os.close(self.descriptor)


def read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    """So many bytes from an offset on, or as many as there are."""
    found = os.pread(descriptor, size, offset)
    while len(found) < size:
        more = os.pread(descriptor, size - len(found), offset + len(found))
        if not more:
            break
        found += more
    return found


class CopyHost(Protocol):
    """The set of files that is filled, as `JointCopy` uses it; each method may be called from any of its threads."""

    parts: FileParts
    keys: list[str]

    def next_number(self) -> int | None:
        """A further file to copy, each once; None if there is none now. Called by one thread at a time."""

    def is_urgent(self, number: int) -> bool:
        """Whether the run waits for a file."""

    def begin(self, number: int) -> GrowingFile | bool:
        """A file to put together, locked; True: it is in its place by now; False: another process copies it. Called by
        one thread at a time."""

    def end(self, growing: GrowingFile) -> None:
        """Check a file whose parts are all there, and put it in its place. Raises DamagedData."""

    def release(self, growing: GrowingFile) -> None:
        """Let go of a file that `begin` gave, whether it is in its place or not; it may begin anew."""

    def finish(self, number: int) -> None:
        """Nothing is copied of a file any more."""

    def fail(self, number: int, error: Exception) -> None:
        """A file could not be copied; raises what ends the copy of all."""


@dataclass(eq=False)
class _Copied:
    """A file that is copied: parts that are missing, threads at work on it, the file itself once it has begun."""

    number: int
    left: int
    at_work: int = 0
    growing: GrowingFile | None = None
    is_over: bool = False


class JointCopy:
    """Copies the files of a host with some threads, until there is no further one."""

    def __init__(self, host: CopyHost, peers: StagePeers, note: Note) -> None:
        self._host, self._peers, self._note = host, peers, note
        self._changed = threading.Condition()
        self._own: deque[tuple[_Copied, int]] = deque()
        self._of_others: dict[int, deque[tuple[_Copied, int]]] = {}
        self._files: dict[int, _Copied] = {}
        self._ahead = 0
        self._ask_at: dict[int, float] = {}
        self._waits_since: dict[int, float] = {}
        self._last_asked: set[tuple[int, int]] = set()
        """(file, part) that are read where they lie if their owner, asked once more, does not have them yet."""
        self._more_at = 0.0
        self._turn = peers.own
        self._error: BaseException | None = None

    def run(self) -> None:
        """Raises what a file could not be copied for, unless the host takes it, and what `note` raises."""
        threads = [threading.Thread(target=self._work, name=f"stage-{n}", daemon=True) for n in range(THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for left in list(self._files.values()):
            self._close(left)
        if self._error is not None:
            raise self._error

    # --- what is next

    def _work(self) -> None:
        try:
            while (job := self._await_job()) is not None:
                self._copy(*job)
        except BaseException as error:  # raised by `run`
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _await_job(self) -> tuple[_Copied, int, int] | None:
        """(file, part, node to fetch it from; the own one to read it); None: all is done."""
        with self._changed:
            while self._error is None:
                self._note(0, False)
                if (job := self._choose()) is not None:
                    job[0].at_work += 1
                    return job
                if not self._files and self._more_at == float("inf"):
                    self._changed.notify_all()
                    return None
                self._changed.wait(LOOK_S)
        return None

    def _choose(self) -> tuple[_Copied, int, int] | None:
        while (job := _take_first(self._own)) is None and self._add_file():
            pass
        if job is not None:
            return (*job, self._peers.own)
        now, nodes = time.monotonic(), len(self._peers.nodes)
        for step in range(1, nodes + 1):
            owner = (self._turn + step) % nodes
            waiting = self._of_others.get(owner)
            if not waiting:
                continue
            if self._peers.rests(owner):
                if (job := _take_first(waiting)) is not None:
                    return (*job, self._peers.own)
                continue
            if self._ask_at.get(owner, 0.0) <= now and (job := _take_first(waiting)) is not None:
                self._turn = owner
                return (*job, owner)
        for owner, since in self._waits_since.items():  # there is nothing else to do
            waiting = self._of_others.get(owner)
            is_long = waiting and now - since > self._patience(waiting[-1][0].number)
            if waiting and is_long and (job := _take_last(waiting)) is not None:
                self._last_asked.add((job[0].number, job[1]))
                return (*job, owner)
        return None

    def _patience(self, number: int) -> float:
        return PATIENCE_S if self._host.is_urgent(number) else LATER_PATIENCE_S

    def _add_file(self) -> bool:
        """Whether parts of a further file are waiting to be copied now."""
        now = time.monotonic()
        if now < self._more_at or len(self._files) >= AHEAD_FILES or (self._files and self._ahead >= AHEAD_BYTES):
            return False
        number = self._host.next_number()
        if number is None:
            # None comes for good once nothing is left at all, as far as this call of `run` goes.
            self._more_at = now + MORE_S if self._files else float("inf")
            return False
        size, key = self._host.parts.files[number].size, self._host.keys[number]
        copied = _Copied(number, count_parts(size))
        self._files[number], self._ahead = copied, self._ahead + size
        for part in range(copied.left):
            owner = self._peers.owner_of(key, part)
            mine = owner == self._peers.own or self._peers.rests(owner)
            (self._own if mine else self._of_others.setdefault(owner, deque())).append((copied, part))
        return True

    # --- one part

    def _copy(self, copied: _Copied, part: int, node: int) -> None:
        state, error, is_busy = PartState.HERE, None, False
        try:
            growing = self._begin(copied)
            if growing is not None:
                if node == self._peers.own:
                    self._read(growing, part)
                else:
                    state = self._fetch(growing, part, node)
                if state is PartState.HERE:
                    growing.complete(part)
            elif not copied.is_over:  # another process copies it
                state, is_busy = PartState.LATER, True
        except Exception as raised:
            error = raised
        with self._changed:
            copied.at_work -= 1
            if error is not None:
                self._fail(copied, error)
            elif not copied.is_over:
                self._note_state(copied, part, node, state, is_busy=is_busy)
            ends = not copied.is_over and not copied.left
            if copied.is_over and not copied.at_work:
                self._close(copied)
            self._changed.notify_all()
        if ends:
            self._end(copied)

    def _begin(self, copied: _Copied) -> GrowingFile | None:
        """The file that is put together; None if another process copies it, or it is over."""
        with self._changed:
            if copied.growing is None and not copied.is_over:
                found = self._host.begin(copied.number)
                if isinstance(found, GrowingFile):
                    copied.growing = self._peers.growing[found.key] = found
                elif found:
                    copied.is_over = True
            return None if copied.is_over else copied.growing

    def _read(self, growing: GrowingFile, part: int) -> None:
        began = time.monotonic()
        growing.read_part(part, lambda size: self._note(size, False))
        self._peers.note_shared(span_of(growing.size, part)[1], time.monotonic() - began)

    def _fetch(self, growing: GrowingFile, part: int, node: int) -> PartState:
        offset, size = span_of(growing.size, part)
        growing.fetched.add(part)

        def write(at: int, piece: memoryview) -> None:
            growing.write(offset + at, piece)
            self._note(len(piece), True)

        try:
            return self._peers.fetch(node, growing.key, part, size, write)
        except PeerTrouble:
            return PartState.NEVER

    def _note_state(self, copied: _Copied, part: int, node: int, state: PartState, *, is_busy: bool) -> None:
        self._last_asked -= {(copied.number, part)} if state is PartState.HERE else set()
        if state is PartState.HERE:
            copied.left -= 1
            self._waits_since.pop(node, None)
        elif state is PartState.NEVER or ((copied.number, part) in self._last_asked and not is_busy):
            self._own.append((copied, part))
        else:
            now, waiting = time.monotonic(), self._of_others.setdefault(node, deque())
            self._ask_at[node] = now + LOOK_S
            if is_busy:
                waiting.append((copied, part))
            else:  # among the first: it comes soon, and if not, it is not in the way of others
                self._waits_since.setdefault(node, now)
                waiting.insert(min(len(waiting), 3), (copied, part))
        growing = copied.growing
        if state is not PartState.HERE and growing is not None and not copied.at_work and not growing.has_any:
            copied.growing = None  # so that its lock is free meanwhile
            self._peers.growing.pop(growing.key, None)
            self._host.release(growing)

    def _end(self, copied: _Copied) -> None:
        growing, error = copied.growing, None
        try:
            if growing is not None:
                try:
                    self._host.end(growing)
                except DamagedData:
                    if not growing.fetched:
                        raise
                    for part in sorted(growing.fetched):
                        self._read(growing, part)
                    self._host.end(growing)
        except Exception as raised:
            error = raised
        with self._changed:
            copied.is_over = True
            if error is not None:
                self._fail(copied, error)
            self._close(copied)
            self._changed.notify_all()

    def _fail(self, copied: _Copied, error: Exception) -> None:
        if not copied.is_over or copied.growing is not None:
            copied.is_over = True
            self._host.fail(copied.number, error)

    def _close(self, copied: _Copied) -> None:
        if self._files.pop(copied.number, None) is None:
            return
        self._ahead -= self._host.parts.files[copied.number].size
        if copied.growing is not None:
            self._peers.growing.pop(copied.growing.key, None)
            self._host.release(copied.growing)
            copied.growing = None
        self._host.finish(copied.number)
        if not self._files:
            self._more_at = 0.0


def _take_first(waiting: deque[tuple[_Copied, int]]) -> tuple[_Copied, int] | None:
    """The first part of a file that is not over."""
    while waiting:
        if not (found := waiting.popleft())[0].is_over:
            return found
    return None


def _take_last(waiting: deque[tuple[_Copied, int]]) -> tuple[_Copied, int] | None:
    """The last part of a file that is not over."""
    while waiting:
        if not (found := waiting.pop())[0].is_over:
            return found
    return None
