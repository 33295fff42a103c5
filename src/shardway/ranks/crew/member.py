"""What the agents of a crew have in common: a note of their own, and a thread that keeps up with the others.

Invariant: what the thread does may block (a network that was cut); the main thread reads what it left and never waits
for it. This module must not start ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from shardway.ranks.agent.hang import Behind
from shardway.ranks.crew.notes import AgentState, NodeOutcome, Note

LOOK_EVERY_S = 0.25
LEAVE_S = 2.0


class RendezvousMember(Protocol):
    """An agent of a crew, as whoever runs its ranks sees it."""

    @property
    def elsewhere(self) -> Behind:
        """How far the hindmost of all ranks is."""

    def say(self, state: AgentState, start: int, behind: Behind, outcome: NodeOutcome | None = None) -> None:
        """Say how this node is; the others hear it at the next look."""

    def is_asked(self, start: int) -> bool:
        """Whether a rank of this start hangs somewhere, so that all are asked where they are."""

    def is_over(self, start: int) -> bool:
        """Whether the ranks of this start are to end, for another node's sake."""


class Keeper:
    """The own note of an agent. While entered, a thread calls `look` every LOOK_EVERY_S, and when something was said.

    `look` is handed the own note, which says anew that this agent lives.
    """

    def __init__(self, look: Callable[[Note], None]) -> None:
        self._look = look
        self._note = Note()
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="crew", daemon=True)

    def say(self, state: AgentState, start: int, behind: Behind, outcome: NodeOutcome | None = None) -> None:
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
        self._thread.join(LEAVE_S)  # it may hang in the network, and is left then

    def _run(self) -> None:
        while True:
            is_last = self._done.is_set()
            self._look(self._beat())  # once more at the end, so that the last words are heard
            if is_last:
                return
            self._wake.wait(LOOK_EVERY_S)
            self._wake.clear()

    def _beat(self) -> Note:
        with self._mutex:
            self._note = replace(self._note, count=self._note.count + 1)
            return self._note
