"""What this rank knows of a stop, and how all ranks come to one: in a step, between two, in a validation.

One path for all that asks: a signal, the stop file (which job scripts and agents touch as well), the end of the
wall-time. Each is a wish of some rank; the wishes are added up, and all ranks read the same decision from the sum.

Invariant: what is obeyed was agreed. Rank 0 looks for the stop file and at the clock; a rank that waits for its data
looks itself, since rank 0 may wait for it. This module must not do what was decided.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from shardway.ranks.agreement import Decision, Wishes
from shardway.ranks.parent import is_orphan
from shardway.rundir.attempts import BY_SIGNAL
from shardway.train.ending import AttemptEnd, find_end
from shardway.train.session import Session
from shardway.train.stops.breaking import ValidationBreaks, agree
from shardway.train.stops.deadline import Deadline, find_deadline, read_pace
from shardway.train.stops.waiting import Waits

ORPHANED = "the agent that started the ranks is gone (killed?)"

LOOK_EVERY_S = 0.5
"""How often rank 0 looks for the stop file: a look costs a millisecond on a busy parallel file system."""


class StopAgreement:
    """One rank's part in stopping; `decision` is what all ranks agreed on last, `deadline` None without one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._looked_at = time.monotonic()
        self._stop_file: str | None = None
        self.decision = Decision()
        self.deadline: Deadline | None = None
        self.waits = Waits(session.signals, session.lookout, self._knows)

    def set_deadline(self, margin_s: float | None, step: int, parameters: int) -> None:
        """Rank 0 reads when the wall-time ends and tells of it; the others count from then on."""
        session = self._session
        if session.ranks.is_first:
            pace = read_pace(session.directory.read_status())
            self.deadline = find_deadline(session.attempt, margin_s, pace)
            session.recorder.keep(**pace.as_facts())
        deadline, left_s = session.ranks.gather((self.deadline, self.deadline.left_s if self.deadline else 0.0))[0]
        if deadline is None:
            return
        self.deadline = self.deadline or deadline.seen_here(left_s)
        self.deadline.expect_save_of(parameters / session.ranks.world)
        session.recorder.event("deadline", step=step, **self.deadline.facts())

    def wishes(self, *, save: bool = False, void: bool = False, finish: bool = False, log: bool = False) -> Wishes:
        """What this rank wants to happen after the current step; `void`: it waited for data until it gave up."""
        now, looks = time.monotonic(), void or self._session.ranks.is_first
        if void or (looks and now - self._looked_at >= LOOK_EVERY_S):
            self._looked_at = now
            self._look_for_stop_file()
        signalled = self._session.signals.received is not None
        return Wishes(
            signalled, self._stop_file is not None, save, looks and self._is_near_deadline(), void, finish, log
        )

    def agree(self, *, void: bool = False, obeys_clock: bool = True) -> bool:
        """Whether all ranks stop here, between two steps; called on all of them together."""
        if self.decision.stop_reason:
            return True
        self._looked_at = -math.inf  # asked seldom enough to look each time
        wishes = self.wishes(void=void)
        return self.obey(agree(self._session.ranks, replace(wishes, deadline=wishes.deadline and obeys_clock)))

    def obey(self, decision: Decision) -> bool:
        """What all ranks agreed on; whether they stop. From here on the stop may take `run.stop_timeout`."""
        self.decision = decision
        if decision.stop_reason:
            self._session.lookout.ask()
        return bool(decision.stop_reason)

    def breaks(self) -> ValidationBreaks:
        """For one validation."""
        return ValidationBreaks(self._session.ranks, self.waits, self._validation_wishes)

    def skips_validation(self, step: int) -> bool:
        """Whether the validation that is due would not end before the deadline: rank 0's clock, for all."""
        if self.deadline is None:
            return False
        skips = self._session.ranks.gather(not self.deadline.fits_validation())[0]
        if skips:
            self._session.recorder.event("validation_skipped", step=step, **self.deadline.facts())
        return skips

    def find_end(self) -> AttemptEnd:
        """How the attempt ends; a person's request wins over the clock up to the last moment."""
        if self._session.ranks.is_first:
            self._look_for_stop_file()
        end = find_end(self.decision, self._stop_file, self.deadline.describe() if self.deadline else "")
        # Looked at when all is saved: the signal comes a moment before the last thread of the agent is gone.
        return replace(end, reason=ORPHANED) if end.failure == BY_SIGNAL and is_orphan(self._session.agent) else end

    def _look_for_stop_file(self) -> None:
        if self._session.directory.stop_requested():
            self._stop_file = self._session.directory.stop_reason()

    def _is_near_deadline(self) -> bool:
        return self.deadline is not None and self.deadline.is_near()

    def _knows(self) -> bool:
        """Whether this rank knows of a wish to stop while it waits; called in another thread."""
        session = self._session
        asked = session.signals.received is not None or session.directory.stop_requested()
        return asked or self._is_near_deadline()

    def _validation_wishes(self, missed: bool) -> Wishes:
        """Whether it fits before the deadline was asked before; what counts now is that the last save still does."""
        late = self._session.ranks.is_first and self.deadline is not None and self.deadline.has_passed()
        return replace(self.wishes(void=missed), deadline=late)
