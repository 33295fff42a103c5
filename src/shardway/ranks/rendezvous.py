"""Rendezvous of the agents of several nodes: one coordinates starts and ends, the others follow and can replace it.

The ranks meet in a store of their own (`ranks.local.RankAssignment`), as those of torchrun do.

Invariants:
- Text that is not a note or news reads as None, never as something half understood: it comes from other processes.
- Store: every call returns within `WAIT_S` or raises Unreachable.
- Threads: the thread of a member may block (a network that was cut); the main thread reads its results and never
  waits for it.
- Coordinator: a start begins with nodes that were present and had no ranks left, and is over once any of them failed,
  left or was lost. Decisions depend on the notes and its own clock alone.
- Follower: after LOST_S of its own time without news, or once the store is gone, its start is over; the next
  coordinator begins another.
- The silence of a node grows only while its observer runs: an observer that was suspended reports no node as lost.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar

from pydantic import TypeAdapter
from torch.distributed import DistError, TCPStore

from shardway.errors import SiteError
from shardway.ranks.failure import LaunchOutcome
from shardway.ranks.hang import NO_RANKS, SlowestRank, merge_slowest
from shardway.ranks.network import describe_holder

# --- notes of the agents, news of the coordinator


class AgentState(Enum):
    """The state of an agent: no ranks; ranks; one of them hangs; one has failed; they have ended; the agent leaves."""

    READY = "ready"
    RUNNING = "running"
    HANGS = "hangs"
    FAILED = "failed"
    ENDED = "ended"
    LEFT = "left"


@dataclass(frozen=True)
class Note:
    """The state of one agent: `count` grows with every write, `start` is the start of ranks that it describes."""

    count: int = 0
    start: int = 0
    state: AgentState = AgentState.READY
    slowest: SlowestRank = NO_RANKS
    outcome: LaunchOutcome | None = None


@dataclass(frozen=True)
class News:
    """The state of the group, from the coordinator: the newest start and its nodes, in the order of their ranks.
    `port`: of the store in which the ranks of that start meet. `present`: all nodes that are present. `hangs`: a rank
    of that start hangs, so every node asks its ranks for evidence. `over`: that start has failed on some node. `code`:
    the exit code, once all is done."""

    count: int = 0
    start: int = 0
    members: tuple[int, ...] = ()
    port: int = 0
    present: tuple[int, ...] = ()
    hangs: bool = False
    over: bool = False
    slowest: SlowestRank = NO_RANKS
    code: int | None = None


_NOTE, _NEWS = TypeAdapter(Note), TypeAdapter(News)
M = TypeVar("M", Note, News)


def render(message: Note | News) -> str:
    """As one line of JSON."""
    adapter: TypeAdapter[Any] = _NOTE if isinstance(message, Note) else _NEWS
    return json.dumps(adapter.dump_python(message, mode="json"), separators=(",", ":"))


def read_note(text: str) -> Note | None:
    """The note in a text; None for anything that `render` does not write."""
    return _read(_NOTE, text)


def read_news(text: str) -> News | None:
    """The news in a text; None for anything that `render` does not write."""
    return _read(_NEWS, text)


def _read(adapter: TypeAdapter[M], text: str) -> M | None:
    try:
        message = adapter.validate_python(json.loads(text))
    except (ValueError, RecursionError):
        return None
    return message if render(message) == text else None


# --- membership: nodes whose notes change

LOST_S = 10.0  # a node whose note did not change for so long is lost
LONGEST_TICK_S = 1.0  # the most that one look adds to a silence


class Membership:
    """Tracks the counts of notes, by node; a node that was never seen is neither present nor lost."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._silent_s: dict[int, float] = {}
        self._looked_at: float | None = None

    def look(self, counts: Mapping[int, int], now: float) -> None:
        tick = min(now - self._looked_at, LONGEST_TICK_S) if self._looked_at is not None else 0.0
        self._looked_at = now
        for node, count in counts.items():
            self._silent_s[node] = self._silent_s[node] + tick if self._counts.get(node) == count else 0.0
            self._counts[node] = count

    @property
    def present(self) -> tuple[int, ...]:
        return tuple(sorted(node for node, silent_s in self._silent_s.items() if silent_s <= LOST_S))

    def is_lost(self, node: int) -> bool:
        return self._silent_s.get(node, 0.0) > LOST_S


# --- the key-value store for notes and news

WAIT_S = 10.0
_NEWS_KEY = "shardway/news"


class Unreachable(Exception):
    """The store does not answer: its host process is gone, or the network is."""


class KeyValueStore:
    """Notes, by node, and news in one store. Each method raises Unreachable."""

    def __init__(self, store: TCPStore, nodes: int) -> None:
        self._store = store
        self._keys = [f"shardway/note-{node}" for node in range(nodes)]
        self.port = int(store.port)
        store.set_timeout(timedelta(seconds=WAIT_S))

    def write_note(self, node: int, note: Note) -> None:
        with _reaching():
            self._store.set(self._keys[node], render(note))

    def read_notes(self) -> list[Note | None]:
        with _reaching():
            return [read_note(text.decode(errors="replace")) for text in self._store.multi_get(self._keys)]

    def write_news(self, news: News) -> None:
        with _reaching():
            self._store.set(_NEWS_KEY, render(news))

    def read_news(self) -> News | None:
        with _reaching():
            return read_news(self._store.get(_NEWS_KEY).decode(errors="replace"))


def host_kv_store(port: int, nodes: int) -> KeyValueStore:
    """A store hosted by this process; `port` 0 chooses one. Raises SiteError where another program listens there."""
    try:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except (DistError, RuntimeError) as error:
        why = describe_holder(port) if "EADDRINUSE" in str(error) else _first_line(error)
        raise SiteError(
            f"port {port} of this node could not be had, by which the agents of the nodes meet: {why}\n"
            "  To do: choose another port for all of them (--port), or look for a job that was left over."
        ) from error
    kv_store = KeyValueStore(store, nodes)
    for key in kv_store._keys:  # so that reading a key that was never written does not wait
        store.set(key, "")
    kv_store.write_news(News())
    return kv_store


def join_kv_store(address: str, port: int, nodes: int, wait_s: float) -> KeyValueStore:
    """The store of the agent at `address`, once it is up. Raises Unreachable after `wait_s`."""
    with _reaching():
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=wait_s))
        kv_store = KeyValueStore(store, nodes)
        kv_store.read_news()
        return kv_store


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except (DistError, RuntimeError) as error:
        raise Unreachable(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# --- an agent of the group

LOOK_EVERY_S = 0.25
LEAVE_S = 2.0


class RendezvousMember(ABC):
    """An agent of the group: its own note, the news, and how long others are silent. While `keep` is entered, a thread
    calls `look` every LOOK_EVERY_S, and after every `publish`."""

    def __init__(self, kv_store: KeyValueStore, node: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.node = node
        self._kv_store = kv_store
        self._clock = clock
        self._membership = Membership()
        self._news = News()
        self._note = Note()
        self._note_mutex = threading.Lock()
        self._wake, self._done = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            self._wake.set()
            thread.join(LEAVE_S)  # it may hang in the network; then it is left behind

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._done.is_set()
            self._beat()  # once more at the end, so that the last note is published
            if not is_last:
                self._wake.wait(LOOK_EVERY_S)
                self._wake.clear()

    def _beat(self) -> None:
        with self._note_mutex:
            self._note = own = replace(self._note, count=self._note.count + 1)
        self.look(own)

    @abstractmethod
    def look(self, own: Note) -> None:
        """Hand on the own note, whose new count shows that this agent lives, and read what is new."""

    @abstractmethod
    def is_over(self, start: int) -> bool:
        """Whether the ranks of this start must end because of another node."""

    @property
    def elsewhere(self) -> SlowestRank:
        return self._news.slowest

    def publish(
        self, state: AgentState, start: int, slowest: SlowestRank, outcome: LaunchOutcome | None = None
    ) -> None:
        """Set the state of this node; the others read it at their next look."""
        with self._note_mutex:
            is_news = (state, start) != (self._note.state, self._note.start)
            self._note = replace(self._note, state=state, start=start, slowest=slowest, outcome=outcome)
        if is_news:
            self._wake.set()

    def is_asked(self, start: int) -> bool:
        """Whether a rank of this start hangs on any node, so that all ranks are asked for evidence."""
        return self._news.start == start and self._news.hangs


PAUSE_S = 0.05
END_S = 120.0  # time for the ranks of another node to end once a start is over; a node that takes longer is lost
FINISH_S = 5.0  # time for the others to read that all is done


class Coordinator(RendezvousMember):
    """Node `node` of `nodes`, which coordinates; while `keep` is entered it reads the notes of the others. Nodes that
    are `gone` are not waited for."""

    def __init__(
        self, kv_store: KeyValueStore, node: int, nodes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(kv_store, node, clock)
        self.gone: set[int] = set()
        self._nodes = nodes
        self._notes: dict[int, Note] = {}
        self._mutex = threading.RLock()

    def look(self, own: Note) -> None:
        with contextlib.suppress(Unreachable):
            notes = {node: note for node, note in enumerate(self._kv_store.read_notes()) if note is not None}
            notes[self.node] = own
            self._membership.look({node: note.count for node, note in notes.items()}, self._clock())
            self._notes = notes
            with self._mutex:
                start, members = self._news.start, self._news.members
                own_notes = [notes[node] for node in members if node in notes and notes[node].start == start]
                running = [note for note in own_notes if note.state in (AgentState.RUNNING, AgentState.HANGS)]
                slowest = merge_slowest(note.slowest for note in running)
                hangs = self._news.hangs or any(note.state is AgentState.HANGS for note in running)
                over = self._news.over or any(map(self._has_failed, members))
                self._report(over=over, hangs=hangs, slowest=slowest, present=self.list_present())

    def _report(self, **changes: Any) -> None:
        with self._mutex:
            self._news = replace(self._news, count=self._news.count + 1, **changes)
            self._kv_store.write_news(self._news)

    def _has_failed(self, node: int) -> bool:
        note = self._notes.get(node)
        if note is None or self._membership.is_lost(node):
            return True
        badly = note.outcome is not None and not note.outcome.is_well
        return note.start == self._news.start and (badly or note.state in (AgentState.FAILED, AgentState.LEFT))

    def _has_ended(self, note: Note) -> bool:
        """Whether the ranks of the newest start are gone on the node of this note."""
        return note.start == self._news.start and note.state in (AgentState.ENDED, AgentState.LEFT)

    def is_over(self, start: int) -> bool:
        return self._news.start != start or self._news.over

    @property
    def has_begun(self) -> bool:
        return self._news.start > 0

    def list_present(self) -> tuple[int, ...]:
        """Nodes that are present, whatever their state."""
        left = {node for node, note in self._notes.items() if note.state is AgentState.LEFT}
        return tuple(node for node in self._membership.present if node not in self.gone | left)

    def find_free(self) -> tuple[int, ...]:
        """Nodes that are present and have no ranks."""
        free = (AgentState.READY, AgentState.ENDED)
        return tuple(node for node in self.list_present() if self._notes[node].state in free)

    def _list_missing(self) -> list[int]:
        """Nodes that are not free now and may be soon: those with ranks, and those that never came."""
        never = set(range(self._nodes)) - self._notes.keys() - self.gone
        return sorted(never | set(self.list_present()) - set(self.find_free()))

    def gather(self, wait_s: float, is_called_off: Callable[[], bool]) -> tuple[int, ...]:
        """The nodes that are present and free, once no further ones are expected, or after `wait_s`. Nodes that were
        lost are not waited for."""
        until = self._clock() + wait_s
        while not is_called_off() and self._clock() < until:
            free = self.find_free()
            if not self._list_missing():
                return free
            time.sleep(PAUSE_S)
        return self.find_free()

    def begin(self, members: tuple[int, ...], port: int) -> News:
        """Begin the next start with these nodes; their ranks meet in a store at `port` of this one."""
        self._report(start=self._news.start + 1, members=members, port=port, hangs=False, over=False)
        return self._news

    def await_end(self) -> dict[int, LaunchOutcome | None]:
        """How the newest start ended, by node in the order of their ranks (None: it was lost); waits until the ranks
        are gone on every present node."""
        until: float | None = None
        while waiting := [
            node
            for node in self._news.members
            if (note := self._notes.get(node)) and not self._membership.is_lost(node) and not self._has_ended(note)
        ]:
            if self._news.over and until is None:
                until = self._clock() + END_S
            if until is not None and self._clock() > until:
                self.gone.update(waiting)
                break
            time.sleep(PAUSE_S)
        notes = {node: self._notes.get(node) for node in self._news.members}
        return {node: note.outcome if note and self._has_ended(note) else None for node, note in notes.items()}

    def finish(self, code: int) -> None:
        """Publish the end with the exit code of the whole, and wait until the others have read it."""
        with contextlib.suppress(Unreachable):
            self._report(code=code, over=True)
        until = self._clock() + FINISH_S
        while self._clock() < until and any(
            self._notes[node].state is not AgentState.LEFT for node in self._membership.present if node != self.node
        ):
            time.sleep(PAUSE_S)


class FollowingAgent(RendezvousMember):
    """A node that follows the coordinator, which hosts the store; while `keep` is entered it reads the news."""

    _unreachable = False

    def look(self, own: Note) -> None:
        try:  # it may hang in the network
            self._kv_store.write_note(self.node, own)
            news = self._kv_store.read_news()
        except Unreachable:
            self._unreachable = True
            return
        self._news = news or self._news

    def is_alone(self) -> bool:
        """Whether there is no coordinator any more. Polled by the main thread, since the other thread may hang."""
        self._membership.look({0: self._news.count}, self._clock())
        return self._unreachable or self._membership.is_lost(0)

    @property
    def present(self) -> tuple[int, ...]:
        return self._news.present

    def is_over(self, start: int) -> bool:
        news = self._news
        return self.is_alone() or news.start != start or news.over or news.code is not None

    def await_order(self, after: int, on_wait: Callable[[], None] = lambda: None) -> News | None:
        """News of a start later than `after` with this node, or of the end; None: the coordinator is gone. `on_wait` is
        called while waiting."""
        while not self.is_alone():
            on_wait()
            news = self._news
            if news.code is not None or (news.start > after and self.node in news.members and not news.over):
                return news
            time.sleep(PAUSE_S)
        return None
