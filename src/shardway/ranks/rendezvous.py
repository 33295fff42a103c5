"""Rendezvous of the agents of several nodes: one coordinates starts and ends, the others follow and can replace it.

The ranks meet in the same store under other keys (`ranks.local.Seats`), as those of torchrun do.

Invariants:
- Store: every call returns within `WAIT_S` or raises Unreachable. What is read comes from other processes and may be
  anything (`rendezvous_notes`).
- Threads: the thread of `Keeper` may block (a network that was cut); the main thread reads its results and never waits
  for it.
- Coordinator: a start begins with nodes that were present and had no ranks left, and is over once any of them failed,
  left or was lost. Decisions depend on the notes and its own clock alone.
- Follower: after LOST_S of its own time without news, or once the store is gone, its start is over; the next
  coordinator begins another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

from torch.distributed import DistError, TCPStore

from shardway.errors import SiteError
from shardway.ranks.agent.hang import Behind, merge_behind
from shardway.ranks.port import describe_holder
from shardway.ranks.rendezvous_notes import (
    AgentState,
    Membership,
    News,
    NodeOutcome,
    Note,
    read_news,
    read_note,
    render,
)

# --- the key-value store for notes and news

WAIT_S = 10.0
_NEWS = "shardway/news"


class Unreachable(Exception):
    """The store does not answer: its host process is gone, or the network is."""


class KeyValueStore:
    """Notes and news in one store."""

    def __init__(self, store: TCPStore, nodes: int) -> None:
        self._store = store
        self._keys = [f"shardway/note-{node}" for node in range(nodes)]
        store.set_timeout(timedelta(seconds=WAIT_S))

    @property
    def port(self) -> int:
        """The port at which the store listens."""
        return int(self._store.port)

    def write_note(self, node: int, note: Note) -> None:
        """Write the state of this node. Raises Unreachable."""
        with _reaching():
            self._store.set(self._keys[node], render(note))

    def read_notes(self) -> list[Note | None]:
        """The notes of all nodes, by node; None for none yet. Raises Unreachable."""
        with _reaching():
            return [read_note(_decode(text)) for text in self._store.multi_get(self._keys)]

    def write_news(self, news: News) -> None:
        """Write the state of the whole group. Raises Unreachable."""
        with _reaching():
            self._store.set(_NEWS, render(news))

    def read_news(self) -> News | None:
        """The coordinator's last news. Raises Unreachable."""
        with _reaching():
            return read_news(_decode(self._store.get(_NEWS)))


def host_board(port: int, nodes: int) -> KeyValueStore:
    """A store hosted by this process; `port` 0 chooses one. Raises SiteError where another program listens there."""
    try:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except (DistError, RuntimeError) as error:
        why = describe_holder(port) if "EADDRINUSE" in str(error) else _first_line(error)
        raise SiteError(
            f"port {port} of this node could not be had, by which the agents of the nodes meet: {why}\n"
            "  To do: choose another port for all of them (--port), or look for a job that was left over."
        ) from error
    board = KeyValueStore(store, nodes)
    for key in board._keys:  # so that reading a key that was never written does not wait
        store.set(key, "")
    board.write_news(News())
    return board


def join_board(address: str, port: int, nodes: int, wait_s: float) -> KeyValueStore:
    """The store hosted by the agent at `address`, once it is up. Raises Unreachable after `wait_s`."""
    with _reaching():
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=wait_s))
        board = KeyValueStore(store, nodes)
        board.read_news()
        return board


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except (DistError, RuntimeError) as error:
        raise Unreachable(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _decode(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


# --- the agent's own note and its thread

LOOK_EVERY_S = 0.25
LEAVE_S = 2.0


class RendezvousMember(Protocol):
    """An agent of the group, as the code that runs its ranks sees it."""

    @property
    def elsewhere(self) -> Behind:
        """The progress of the hindmost of all ranks."""

    def publish(self, state: AgentState, start: int, behind: Behind, outcome: NodeOutcome | None = None) -> None:
        """Set the state of this node; the others read it at their next look."""

    def is_asked(self, start: int) -> bool:
        """Whether a rank of this start hangs on any node, so that all ranks are asked for their state."""

    def is_over(self, start: int) -> bool:
        """Whether the ranks of this start must end because of another node."""


class Keeper:
    """The own note of an agent. While entered, a thread calls `look` every LOOK_EVERY_S, and after every `publish`.

    `look` receives the own note with a new count, which shows that this agent lives.
    """

    def __init__(self, look: Callable[[Note], None]) -> None:
        self._look = look
        self._note = Note()
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="crew", daemon=True)

    def publish(self, state: AgentState, start: int, behind: Behind, outcome: NodeOutcome | None = None) -> None:
        """Change the own note."""
        with self._mutex:
            is_news = (state, start) != (self._note.state, self._note.start)
            self._note = replace(self._note, state=state, start=start, behind=behind, outcome=outcome)
        if is_news:
            self._wake.set()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._wake.set()
        self._thread.join(LEAVE_S)  # it may hang in the network; then it is left behind

    def _run(self) -> None:
        while True:
            is_last = self._done.is_set()
            self._look(self._beat())  # once more at the end, so that the last note is published
            if is_last:
                return
            self._wake.wait(LOOK_EVERY_S)
            self._wake.clear()

    def _beat(self) -> Note:
        with self._mutex:
            self._note = replace(self._note, count=self._note.count + 1)
            return self._note


class GroupAgent(ABC):
    """What the coordinator and the agents that follow share: a note of their own, the news, how long others are silent.

    A RendezvousMember but for `is_over`. While `keep` is entered, a thread calls `look`.
    """

    def __init__(self, board: KeyValueStore, node: int, clock: Callable[[], float]) -> None:
        self.node = node
        self._board = board
        self._clock = clock
        self._roll = Membership()
        self._news = News()
        self._keeper = Keeper(self.look)

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """While entered, a thread reads and writes at the store."""
        with self._keeper:
            yield

    @abstractmethod
    def look(self, own: Note) -> None:
        """Hand on the own note and read what is new; called by the thread, and by tests."""

    @property
    def elsewhere(self) -> Behind:
        """The progress of the hindmost of all ranks."""
        return self._news.behind

    def publish(self, state: AgentState, start: int, behind: Behind, outcome: NodeOutcome | None = None) -> None:
        """Set the state of this node."""
        self._keeper.publish(state, start, behind, outcome)

    def is_asked(self, start: int) -> bool:
        """Whether a rank of this start hangs on any node, so that all ranks are asked for their state."""
        return self._news.start == start and self._news.hangs


# --- the coordinator

PAUSE_S = 0.05
END_S = 120.0
"""Time for the ranks of another node to end once a start is over; a node that takes longer is lost."""
FINISH_S = 5.0
"""Time for the others to read that all is done."""

_FREE = (AgentState.READY, AgentState.ENDED)
_WITH_RANKS = (AgentState.RUNNING, AgentState.HANGS)


@dataclass(frozen=True)
class Ends:
    """How a start ended on its nodes, in the order of their ranks; None for a node that was lost."""

    outcomes: dict[int, NodeOutcome | None]

    @property
    def lost(self) -> tuple[int, ...]:
        """Nodes that were lost."""
        return tuple(node for node, outcome in self.outcomes.items() if outcome is None)


class Coordinator(GroupAgent):
    """Node `node` of `nodes`, which coordinates; while `keep` is entered it reads the others' notes."""

    def __init__(
        self, board: KeyValueStore, node: int, nodes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(board, node, clock)
        self._nodes = nodes
        self._notes: dict[int, Note] = {}
        self._gone: set[int] = set()
        self._mutex = threading.RLock()

    # --- exchange

    def look(self, own: Note) -> None:
        """Read the notes and write the news; called by the thread, and by tests."""
        with contextlib.suppress(Unreachable):
            notes = {node: note for node, note in enumerate(self._board.read_notes()) if note is not None}
            notes[self.node] = own
            self._roll.look({node: note.count for node, note in notes.items()}, self._clock())
            self._notes = notes
            with self._mutex:
                members = self._news.members
                running = [node for node in members if self._is_running(node)]
                behind = merge_behind(notes[node].behind for node in running)
                hangs = self._news.hangs or any(notes[node].state is AgentState.HANGS for node in running)
                over = self._news.over or any(map(self._has_failed, members))
                self._report(over=over, hangs=hangs, behind=behind, present=self.list_present())

    def _report(self, **changes: Any) -> None:
        with self._mutex:
            self._news = replace(self._news, count=self._news.count + 1, **changes)
            self._board.write_news(self._news)

    def _is_running(self, node: int) -> bool:
        note = self._notes.get(node)
        return note is not None and note.start == self._news.start and note.state in _WITH_RANKS

    def _has_failed(self, node: int) -> bool:
        note = self._notes.get(node)
        if note is None or self._roll.is_lost(node):
            return True
        if note.start != self._news.start:
            return False
        badly = note.outcome is not None and not note.outcome.is_well
        return badly or note.state in (AgentState.FAILED, AgentState.LEFT)

    def is_over(self, start: int) -> bool:
        """Whether the ranks of this start must end."""
        return self._news.start != start or self._news.over

    # --- starts

    @property
    def has_begun(self) -> bool:
        """Whether there was a start."""
        return self._news.start > 0

    def find_free(self) -> tuple[int, ...]:
        """Nodes that are present and have no ranks."""
        return tuple(node for node in self.list_present() if self._notes[node].state in _FREE)

    def list_present(self) -> tuple[int, ...]:
        """Nodes that are present, whatever their state."""
        left = {node for node, note in self._notes.items() if note.state is AgentState.LEFT}
        return tuple(node for node in self._roll.present if node not in self._gone | left)

    def gather(self, wait_s: float, is_called_off: Callable[[], bool]) -> tuple[int, ...]:
        """The nodes that are present and free, once no further ones are expected, or after `wait_s`.

        Nodes that were lost are not waited for.
        """
        until = self._clock() + wait_s
        while not is_called_off() and self._clock() < until:
            free, missing = self.find_free(), self._list_missing()
            if not missing:
                return free
            time.sleep(PAUSE_S)
        return self.find_free()

    def _list_missing(self) -> list[int]:
        """Nodes that are not free now and may be soon: those with ranks, and those that never came."""
        free, present = self.find_free(), self.list_present()
        never = {node for node in range(self._nodes) if node not in self._notes and node not in self._gone}
        return [node for node in range(self._nodes) if node in never or (node in present and node not in free)]

    def give_up_on(self, nodes: tuple[int, ...]) -> None:
        """No longer wait for these nodes."""
        self._gone.update(nodes)

    def begin(self, members: tuple[int, ...], port: int) -> News:
        """Begin the next start with these nodes; their ranks meet in a store at `port` of this one."""
        self._report(start=self._news.start + 1, members=members, port=port, hangs=False, over=False)
        return self._news

    def await_end(self) -> Ends:
        """How the newest start ended on each node; waits until the ranks are gone on every present node."""
        until: float | None = None
        while waiting := [node for node in self._news.members if not self._has_ended(node)]:
            if self._news.over and until is None:
                until = self._clock() + END_S
            if until is not None and self._clock() > until:
                self.give_up_on(tuple(waiting))
                break
            time.sleep(PAUSE_S)
        return Ends({node: self._find_outcome(node) for node in self._news.members})

    def _has_ended(self, node: int) -> bool:
        note = self._notes.get(node)
        if note is None or self._roll.is_lost(node):
            return True
        return note.start == self._news.start and note.state in (AgentState.ENDED, AgentState.LEFT)

    def _find_outcome(self, node: int) -> NodeOutcome | None:
        note = self._notes.get(node)
        if note is None or note.start != self._news.start or note.state not in (AgentState.ENDED, AgentState.LEFT):
            return None
        return note.outcome

    def finish(self, code: int) -> None:
        """Publish the end with the exit code of the whole, and wait until the others have read it."""
        with contextlib.suppress(Unreachable):
            self._report(code=code, over=True)
        until = self._clock() + FINISH_S
        while self._clock() < until and any(self._listens(node) for node in self._roll.present if node != self.node):
            time.sleep(PAUSE_S)

    def _listens(self, node: int) -> bool:
        return self._notes[node].state is not AgentState.LEFT


# --- the following agent


class FollowingAgent(GroupAgent):
    """Node `node`, which follows the coordinator that hosts the store; while `keep` is entered it reads the news."""

    def __init__(self, board: KeyValueStore, node: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(board, node, clock)
        self._unreachable = False

    def look(self, own: Note) -> None:
        """Write the own note and read the news; called by the thread, and by tests. It may hang in the network."""
        try:
            self._board.write_note(self.node, own)
            news = self._board.read_news()
        except Unreachable:
            self._unreachable = True
            return
        if news is not None:
            self._news = news

    def is_alone(self) -> bool:
        """Whether there is no coordinator any more. Polled by the main thread, since the other thread may hang."""
        self._roll.look({0: self._news.count}, self._clock())
        return self._unreachable or self._roll.is_lost(0)

    @property
    def present(self) -> tuple[int, ...]:
        """Nodes that were present at the last news."""
        return self._news.present

    def is_over(self, start: int) -> bool:
        """Whether the ranks of this start must end."""
        news = self._news
        return self.is_alone() or news.start != start or news.over or news.code is not None

    def await_order(self, after: int, on_wait: Callable[[], None] = lambda: None) -> News | None:
        """News of a start later than `after` with this node, or of the end; None: the coordinator is gone.

        `on_wait` is called while waiting.
        """
        while not self.is_alone():
            on_wait()
            news = self._news
            if news.code is not None or (news.start > after and self.node in news.members and not news.over):
                return news
            time.sleep(PAUSE_S)
        return None
