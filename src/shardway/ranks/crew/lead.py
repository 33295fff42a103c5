"""The agent that leads a crew: it gathers nodes, begins a start of the ranks, finds that it is over, ends all.

Invariant: a start begins with nodes that were there and had no ranks left, and is over once any of them failed, left
or was lost. What it decides depends on the notes and its own clock alone. This module must not decide whether the
ranks start again (`ranks.agent.policy`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardway.ranks.agent.hang import Behind, merge_behind
from shardway.ranks.crew.kv_store import KeyValueStore, Unreachable
from shardway.ranks.crew.member import Keeper
from shardway.ranks.crew.membership import Membership
from shardway.ranks.crew.notes import AgentState, News, NodeOutcome, Note

PAUSE_S = 0.05
END_S = 120.0
"""How long the ranks of another node may take to be gone once a start is over; a node that takes longer is lost."""
FINISH_S = 5.0
"""How long the others may take to hear that all is done."""

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


class Coordinator:
    """Node `node` of `nodes`, which leads; while `keep` is entered it hears the others."""

    def __init__(
        self, board: KeyValueStore, node: int, nodes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.node = node
        self._board = board
        self._nodes = nodes
        self._clock = clock
        self._roll = Membership()
        self._notes: dict[int, Note] = {}
        self._gone: set[int] = set()
        self._news = News()
        self._mutex = threading.RLock()
        self._keeper = Keeper(self.look)

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """While entered, a thread looks at the notes."""
        with self._keeper:
            yield

    # --- what it hears and says

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
                self._say(over=over, hangs=hangs, behind=behind, present=self.list_present())

    def _say(self, **changes: Any) -> None:
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

    # --- a Member

    @property
    def elsewhere(self) -> Behind:
        """How far the hindmost of all ranks is."""
        return self._news.behind

    def say(self, state: AgentState, start: int, behind: Behind, outcome: NodeOutcome | None = None) -> None:
        """Say how this node is."""
        self._keeper.say(state, start, behind, outcome)

    def is_asked(self, start: int) -> bool:
        """Whether a rank of this start hangs somewhere, so that all are asked where they are."""
        return self._news.start == start and self._news.hangs

    def is_over(self, start: int) -> bool:
        """Whether the ranks of this start are to end."""
        return self._news.start != start or self._news.over

    # --- starts

    @property
    def has_begun(self) -> bool:
        """Whether there was a start."""
        return self._news.start > 0

    def find_free(self) -> tuple[int, ...]:
        """Nodes that are there and have no ranks."""
        return tuple(node for node in self.list_present() if self._notes[node].state in _FREE)

    def list_present(self) -> tuple[int, ...]:
        """Nodes that are there, whatever they do."""
        left = {node for node, note in self._notes.items() if note.state is AgentState.LEFT}
        return tuple(node for node in self._roll.present if node not in self._gone | left)

    def gather(self, wait_s: float, is_called_off: Callable[[], bool]) -> tuple[int, ...]:
        """The nodes that are there and free, once all are that can be, or after `wait_s` those that are.

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
        """Nodes that are not free now, and may be soon: those with ranks, and those that never came."""
        free, present = self.find_free(), self.list_present()
        never = {node for node in range(self._nodes) if node not in self._notes and node not in self._gone}
        return [node for node in range(self._nodes) if node in never or (node in present and node not in free)]

    def give_up_on(self, nodes: tuple[int, ...]) -> None:
        """Do not wait for these any more."""
        self._gone.update(nodes)

    def begin(self, members: tuple[int, ...], port: int) -> News:
        """Begin the next start with these nodes, whose ranks meet in a store at `port` of this one."""
        self._say(start=self._news.start + 1, members=members, port=port, hangs=False, over=False)
        return self._news

    def await_end(self) -> Ends:
        """How the newest start ended everywhere; waits until the ranks are gone on every node that is there."""
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
        """Tell the others that all is done, with the exit code of the whole, and wait until they have heard it."""
        with contextlib.suppress(Unreachable):
            self._say(code=code, over=True)
        until = self._clock() + FINISH_S
        while self._clock() < until and any(self._listens(node) for node in self._roll.present if node != self.node):
            time.sleep(PAUSE_S)

    def _listens(self, node: int) -> bool:
        return self._notes[node].state is not AgentState.LEFT
