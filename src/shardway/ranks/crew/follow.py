"""An agent of a crew that does not lead: it does what the news say, and knows when nobody leads any more.

Invariant: without news for LOST_S of its own time, or once the store is gone, its start is over: whoever leads next
begins another. This module must not lead.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from shardway.ranks.agent.hang import Behind
from shardway.ranks.crew.kv_store import KeyValueStore, Unreachable
from shardway.ranks.crew.member import Keeper
from shardway.ranks.crew.membership import Membership
from shardway.ranks.crew.notes import AgentState, News, NodeOutcome, Note

PAUSE_S = 0.05


class FollowingAgent:
    """Node `node`, which follows the agent that keeps the board; while `keep` is entered it hears the news."""

    def __init__(self, board: KeyValueStore, node: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.node = node
        self._board = board
        self._clock = clock
        self._roll = Membership()
        self._news = News()
        self._unreachable = False
        self._keeper = Keeper(self.look)

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """While entered, a thread hears the news."""
        with self._keeper:
            yield

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
        """Whether nobody leads any more. Asked again and again by the main thread, since the other may hang."""
        self._roll.look({0: self._news.count}, self._clock())
        return self._unreachable or self._roll.is_lost(0)

    @property
    def present(self) -> tuple[int, ...]:
        """Nodes that were there when the last news came."""
        return self._news.present

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
        news = self._news
        return self.is_alone() or news.start != start or news.over or news.code is not None

    def await_order(self, after: int, on_wait: Callable[[], None] = lambda: None) -> News | None:
        """News of a start later than `after` in which this node takes part, or of the end; None: nobody leads.

        `on_wait` is called now and then.
        """
        while not self.is_alone():
            on_wait()
            news = self._news
            if news.code is not None or (news.start > after and self.node in news.members and not news.over):
                return news
            time.sleep(PAUSE_S)
        return None
