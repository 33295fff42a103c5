"""When a run is saved besides its cadence in steps, and what a save that failed means for it.

Invariant: a save that fails while the run goes on costs nothing but the time until the next try; where the run ends, it
is an error. This module must not decide when a run ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardway.checkpoint.retention import Keep, retire
from shardway.checkpoint.save import collect_content, is_saved, save_checkpoint
from shardway.checkpoint.state import State
from shardway.errors import Fenced, JobError, LostContact, render_reason
from shardway.plan.economy import daly_interval
from shardway.ranks.start import is_out_of_memory
from shardway.train.saves.background import Background, Landed
from shardway.train.session import Session

RETRY_S = 30.0
"""How long after a save that failed the next is tried: a file system that was busy or full for a moment is well again,
and one that stays full costs a few tries an hour."""

LEAVE_S = 30.0
"""How long a rank that ends with an error waits for a save under way: the others write their parts meanwhile, if they
live."""


@dataclass(frozen=True)
class LeastCost:
    """The interval at which saves and what failures undo cost least together (Daly 2006; `plan.economy`).

    `mtbf_s` is the mean time between failures of the whole job, in seconds. `shortest_s` until a save was measured and
    as the least; `longest_s` is for jobs that hardly ever fail, since people stop them too; `most_share` bounds the
    share of the time that goes into saves.
    """

    mtbf_s: float
    shortest_s: float = 120.0
    longest_s: float = 1800.0
    most_share: float = 0.05

    def interval_s(self, save_s: float | None) -> float:
        """Seconds from one save to the next, where the run stands still for `save_s` at each (None: not known yet)."""
        if save_s is None:
            return self.shortest_s
        least = max(self.shortest_s, save_s / self.most_share)
        return max(least, min(daly_interval(save_s, self.mtbf_s), self.longest_s))


@dataclass(frozen=True)
class Point:
    """What is saved: the state, the step that it belongs to, the run's counters.

    `last`: nothing comes after it. `in_doubt`: it may be undone, so that no older one is removed for it.
    """

    state: State
    step: int
    numbers: Mapping[str, Any]
    last: bool
    in_doubt: bool = False


class Saver:
    """Saves on all ranks together; only rank 0's clock counts.

    `on_saved` is told the seconds that each save took from its beginning until it was complete, whether the run stood
    still meanwhile or not. All methods but `is_due` and `poll` are called on all ranks together.
    """

    def __init__(
        self,
        session: Session,
        every_s: float | LeastCost | None,
        keep: Keep,
        on_saved: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._every_s = every_s
        self._keep = keep
        self._on_saved = on_saved
        self._clock = clock
        self._background = Background(session, keep)
        self._tried_at = clock()
        self._failed = False
        self._stall_s: float | None = None
        session.at_end.push(self._leave)

    @property
    def interval_s(self) -> float | None:
        """Seconds from one save to the next; None where the clock does not ask for any."""
        if isinstance(self._every_s, LeastCost):
            return self._every_s.interval_s(self._stall_s)
        return self._every_s

    def is_due(self) -> bool:
        """Whether rank 0 wishes for a save: by the clock, or since the last failed; never while one is under way."""
        if self._background.saving is not None:
            return False
        since = self._clock() - self._tried_at
        due = self.interval_s is not None and since >= self.interval_s
        return self._session.ranks.is_first and (due or (self._failed and since >= RETRY_S))

    def save(self, point: Point) -> None:
        """Save, or begin to; nothing where this step is saved already, or while an earlier save is under way.

        Raises JobError on every rank where it fails and nothing comes after it, or where memory ran out.
        """
        started = time.perf_counter()
        if point.last:
            self.settle()
        elif self._background.is_busy():
            self._session.recorder.event("save_skipped", step=point.step, saving=self._background.last_begun)
            return
        self.poll()
        with self._failures_noted(point):
            if point.last or not self._background.takes(point.state):
                self._save_now(point, started)
            elif is_saved(self._session.directory, self._session.ranks, point.step):
                self._failed = False
            else:
                content = collect_content(self._session.ranks, point.state, point.step, point.numbers)
                self._background.begin(content, started, retires=not point.in_doubt)
            self._tried_at = self._clock()

    def poll(self) -> None:
        """Tell of a save that was written meanwhile. Raises what ends a run where it failed for no want of room."""
        landed = self._background.take_landed()
        if landed is None:
            return
        with self._failures_noted(landed):
            if landed.error is not None:
                raise landed.error
        if landed.saved is not None:
            self._note_saved(landed)

    def settle(self) -> None:
        """Wait for the save that is under way, if there is one, and tell of it."""
        self._background.wait()
        self.poll()

    def _save_now(self, point: Point, started: float) -> None:
        session = self._session
        saved = save_checkpoint(session.directory, session.ranks, point.state, point.step, point.numbers)
        if saved is not None:
            seconds = time.perf_counter() - started
            self._note_saved(Landed(point.step, saved, None, seconds, seconds))
            if not point.in_doubt:
                retire(session.directory, session.ranks, self._keep, point.step)
        self._failed = False

    def _note_saved(self, landed: Landed) -> None:
        session, saved = self._session, landed.saved
        if saved is None:
            return
        self._failed, self._stall_s = False, landed.stall_s
        facts = {"name": saved.name, "bytes": saved.bytes, "seconds": landed.seconds, "stall_s": landed.stall_s}
        if isinstance(self._every_s, LeastCost):
            facts["next_in_s"] = self.interval_s
        session.recorder.event("saved", step=landed.step, **facts)
        session.recorder.status(saved_step=landed.step, save_seconds=landed.seconds, save_failed="")
        self._on_saved(landed.seconds)

    @contextlib.contextmanager
    def _failures_noted(self, attempt: Point | Landed) -> Iterator[None]:
        """A save that fails while the run goes on is told, and tried again later."""
        try:
            yield
        except (LostContact, Fenced):
            raise
        except JobError as error:
            if self._session.signals.killed:  # torch's writer makes an error of the interrupt
                raise KeyboardInterrupt("a second Ctrl-C") from None
            if attempt.last or is_out_of_memory(error):
                raise
            self._tried_at, self._failed = self._clock(), True
            reason = render_reason(str(error))
            self._session.recorder.event("save_failed", step=attempt.step, reason=reason, retry_s=RETRY_S)
            self._session.recorder.status(save_failed=reason)

    def _leave(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """However the run ends, a save under way may still become whole; not for ever where other ranks may be gone."""
        if kind is None:
            self.settle()
        elif issubclass(kind, Exception):
            self._background.wait(LEAVE_S)
            with contextlib.suppress(Exception):  # the error that ends the run matters more
                self.poll()
