"""How all ranks come to one stop: in a step, between two, in a validation, while they wait for data.

Invariants:
- Waits: without a request to stop, a wait is as long as it takes, and batches are unchanged. A dummy batch has the
  shapes of the batches before it.
- Validations: the batches at which ranks agree are the same on every rank, whatever their clocks show.
- A stop is obeyed only when all ranks agreed on it. Rank 0 reads the stop file and the clock; a rank that waits for its
  data reads them itself, since rank 0 may wait for it.

A rank that waits for its data keeps all others waiting in a collective, so it cannot simply leave: it computes on a
dummy batch and votes to discard the step.

All ranks agree before the first batch and then about once a second, by a small sum over CPU tensors that waits for no
device. The number of batches until the next agreement follows from the time that all ranks together took for the last
ones.

All requests take one path: a signal, the stop file (which job scripts and agents touch as well), the end of the
wall-time. Each is a request of some rank. The requests are added up, and all ranks read the same decision from the sum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from shardway.data.batch_tree import map_tensors
from shardway.data.loader import Batch
from shardway.errors import Bug
from shardway.ranks.failure import AttemptEnd, find_end
from shardway.ranks.start import Ranks
from shardway.ranks.stop import BrokenOff, Decision, SignalWatch, StepRequests, StopWatchdog, is_orphan, read_decision
from shardway.rundir.attempts import BY_SIGNAL
from shardway.train.attempt_end import Deadline, find_deadline, read_pace
from shardway.train.session import Session
from shardway.train.step import Generators, find_generators
from shardway.train.validate import Validation

# --- waits for batches that a stop may end

T = TypeVar("T")


@dataclass(frozen=True)
class Fetched(Generic[T]):
    """The result of a wait: a value, or none since the stream ended or a stop ended the wait (`missed`)."""

    value: T | None = None
    missed: bool = False


@dataclass(frozen=True)
class Waits:
    """The waits of one rank; `is_asked` (called in any thread): whether this rank has a request to stop."""

    signals: SignalWatch
    stop_watchdog: StopWatchdog
    is_asked: Callable[[], bool]

    def fetch(self, stream: Iterator[T], *, breakable: bool = True) -> Fetched[T]:
        """The next value of a stream. A stream whose wait was ended has ended too."""
        self.stop_watchdog.begin_wait(self.is_asked)
        try:
            try:
                self.signals.breakable = breakable
                return Fetched(next(stream))
            finally:
                self.signals.breakable = False
                self.stop_watchdog.end_wait()
        except BrokenOff:
            return Fetched(missed=True)
        except StopIteration:
            return Fetched()


@dataclass(frozen=True)
class Shapes:
    """The tensors of a batch without their values, on no device; None if they have no shapes."""

    tree: Any
    device: torch.device

    def make(self, rows: int | None = None) -> Any:
        """Such a batch of zeros, with `rows` samples (None: as many)."""

        def zeros(tensor: torch.Tensor) -> torch.Tensor:
            shape = tensor.shape if rows is None or not tensor.dim() else (rows, *tensor.shape[1:])
            return torch.zeros(shape, dtype=tensor.dtype, device=self.device)

        return map_tensors(zeros, self.tree)


def read_shapes(data: Any, device: torch.device) -> Shapes | None:
    """The shapes of a batch; None where torch has no empty tensor of such a kind."""
    try:
        return Shapes(map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), data), device)
    except (RuntimeError, NotImplementedError):
        return None


class TrainingStream:
    """The batches of training, from the first one of this process.

    `agree_first(ready)` is called once, on all ranks together, when each has its first batch or gave up: whether the
    run stops before its first step. `can_void`: whether a step may be taken with a dummy batch. `draws`: whether
    reading a batch may draw random numbers in this process.
    """

    def __init__(
        self,
        stream: Iterator[Batch],
        waits: Waits,
        device: torch.device,
        agree_first: Callable[[bool], bool],
        *,
        can_void: bool,
        draws: bool = True,
    ) -> None:
        self._draws = draws
        self._stream, self._waits, self._device, self._agree_first = stream, waits, device, agree_first
        self._begun = False
        self._shapes: Shapes | None = None
        self._position = 0
        self._before: Generators | None = None
        self._can_void = can_void
        self.missed = False

    def next(self) -> Batch | None:
        """The next batch, or a dummy batch if it is `missed`; None if all ranks stop before their first step."""
        self._before = find_generators() if self._draws else None
        can_use_dummy = self._shapes is not None and self._can_void
        fetched = self._waits.fetch(self._stream, breakable=can_use_dummy or not self._begun)
        batch = fetched.value
        if batch is None and not fetched.missed:
            raise Bug("the stream of training batches has ended")
        if not self._begun:
            self._begun = True
            if self._agree_first(batch is not None):
                return None
            self._shapes = read_shapes(batch.data, self._device) if batch is not None else None
        if batch is not None:
            self._position = batch.next_position
            return batch
        self.missed = True
        return self._make_dummy()

    def put_back(self) -> None:
        """Restore the generators to before the last batch, so that reading it again draws the same numbers."""
        if self._before is not None:
            self._before.put_back()

    def close(self) -> None:
        """End the reading."""
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()

    def _make_dummy(self) -> Batch:
        data = self._shapes.make() if self._shapes is not None else None
        return Batch(data, np.array([], np.int64), self._position, self._position)


def with_dummies(
    stream: Iterator[Any], waits: Waits, device: torch.device, rows: Sequence[int] | None
) -> Iterator[tuple[Any, bool]]:
    """The batches of a validation, and whether each is a dummy: all are, from the first missed one on.

    `rows`: the samples of each batch to come; None: unknown, so that no wait is ended.
    """
    shapes: Shapes | None = None
    number = 0
    while True:
        fetched = waits.fetch(stream, breakable=rows is not None and (shapes is not None or not number))
        if fetched.value is None:
            break
        shapes = shapes or read_shapes(fetched.value, device)
        yield fetched.value, False
        number += 1
    if fetched.missed:
        for count in (rows or ())[number:]:
            yield (shapes.make(max(count, 1)) if shapes is not None else None), True


# --- the early end of a validation

ASK_EVERY_S = 1.0
GROWTH = 4
"""The most by which the batches between two agreements may grow at once: the first ones are slow (compilers,
caches)."""


def count_until_next(batches: int, seconds: float) -> int:
    """Batches until the next agreement, from the time of the last `batches`: about ASK_EVERY_S, at least one."""
    if seconds <= 0 or not math.isfinite(seconds):
        return max(1, GROWTH * batches)
    return max(1, min(int(batches * ASK_EVERY_S / seconds), GROWTH * batches))


def agree(ranks: Ranks, wishes: StepRequests) -> Decision:
    """What all ranks decide between two steps; called on all of them together."""
    return read_decision(ranks.sum(torch.tensor(wishes.as_numbers(), dtype=torch.float64)).tolist())


class ValidationBreaks:
    """The agreements of one validation; `requests(missed)` gives this rank's requests, `decision` what all have agreed
    on."""

    def __init__(
        self,
        ranks: Ranks,
        waits: Waits,
        requests: Callable[[bool], StepRequests],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ranks, self._waits, self._requests, self._clock = ranks, waits, requests, clock
        self._asked_at = clock()
        self._batch = self._asked_before = self._next = 0
        self.decision = Decision()

    @property
    def batches(self) -> int:
        """How many batches were evaluated."""
        return max(0, self._batch - 1)

    def over(self, validation: Validation) -> Iterator[tuple[Any, bool]]:
        """The batches; once this rank gave up waiting for one, only dummies."""
        stream = iter(validation.batches())
        rows = validation.rows() if validation.rows is not None else None
        try:
            yield from with_dummies(stream, self._waits, self._ranks.device, rows)
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()

    def breaks_off(self, *, missed: bool, last: bool = False) -> bool:
        """Whether all ranks stop here."""
        if not last:
            self._batch += 1
            if self._batch - 1 < self._next:
                return False
        now, done = self._clock(), self._batch - 1
        asked = torch.tensor([*self._requests(missed).as_numbers(), now - self._asked_at], dtype=torch.float64)
        *wanted, seconds = self._ranks.sum(asked).tolist()
        self.decision = read_decision(wanted)
        self._next = done + count_until_next(max(1, done - self._asked_before), seconds / self._ranks.world)
        self._asked_at, self._asked_before = now, done
        return bool(self.decision.stop_reason)


# --- how all ranks agree on a stop

ORPHANED = "the agent that started the ranks is gone (killed?)"

LOOK_EVERY_S = 0.5
"""Seconds between two looks of rank 0 at the stop file: a look costs a millisecond on a busy parallel file system."""


class StopAgreement:
    """One rank's part in stopping; `decision` is what all ranks agreed on last, `deadline` is None without one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._looked_at = time.monotonic()
        self._stop_file: str | None = None
        self.decision = Decision()
        self.deadline: Deadline | None = None
        self.waits = Waits(session.signals, session.stop_watchdog, self._knows)

    def set_deadline(self, margin_s: float | None, step: int, parameters: int) -> None:
        """Rank 0 reads when the wall-time ends and sends it; the others count from then on."""
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

    def requests(
        self, *, save: bool = False, void: bool = False, finish: bool = False, log: bool = False
    ) -> StepRequests:
        """This rank's requests after the current step; `void`: it gave up waiting for data."""
        now, looks = time.monotonic(), void or self._session.ranks.is_first
        if void or (looks and now - self._looked_at >= LOOK_EVERY_S):
            self._looked_at = now
            self._look_for_stop_file()
        signalled = self._session.signals.received is not None
        return StepRequests(
            signalled, self._stop_file is not None, save, looks and self._is_near_deadline(), void, finish, log
        )

    def agree(self, *, void: bool = False, obeys_clock: bool = True) -> bool:
        """Whether all ranks stop here, between two steps; called on all of them together."""
        if self.decision.stop_reason:
            return True
        self._looked_at = -math.inf  # asked seldom enough to look each time
        wishes = self.requests(void=void)
        return self.obey(agree(self._session.ranks, replace(wishes, deadline=wishes.deadline and obeys_clock)))

    def obey(self, decision: Decision) -> bool:
        """Apply what all ranks agreed on; returns whether they stop. From here on the stop may take
        `run.stop_timeout`."""
        self.decision = decision
        if decision.stop_reason:
            self._session.stop_watchdog.ask()
        return bool(decision.stop_reason)

    def breaks(self) -> ValidationBreaks:
        """For one validation."""
        return ValidationBreaks(self._session.ranks, self.waits, self._validation_requests)

    def skips_validation(self, step: int) -> bool:
        """Whether the validation that is due would not end before the deadline: rank 0's clock, for all."""
        if self.deadline is None:
            return False
        skips = self._session.ranks.gather(not self.deadline.fits_validation())[0]
        if skips:
            self._session.recorder.event("validation_skipped", step=step, **self.deadline.facts())
        return skips

    def find_end(self) -> AttemptEnd:
        """How the attempt ends; a user's request wins over the clock up to the last moment."""
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
        """Whether this rank has a request to stop while it waits; called in another thread."""
        session = self._session
        asked = session.signals.received is not None or session.directory.stop_requested()
        return asked or self._is_near_deadline()

    def _validation_requests(self, missed: bool) -> StepRequests:
        """The requests in a validation. It fitted before the deadline; what counts now is that the last save still
        does."""
        late = self._session.ranks.is_first and self.deadline is not None and self.deadline.has_passed()
        return replace(self.requests(void=missed), deadline=late)
