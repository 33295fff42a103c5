"""How all ranks come to one stop: in a step, between two, in a validation, while they wait for data, before the
wall-time.

Invariants:
- Waits: without a request to stop, a wait is as long as it takes, and batches are unchanged. A dummy batch has the
  shapes of the batches before it.
- Validations: the batches at which ranks agree are the same on every rank, whatever their clocks show.
- A stop is obeyed only when all ranks agreed on it. Rank 0 reads the stop file and the clock; a rank that waits for its
  data reads them itself, since rank 0 may wait for it.
- The margin before the wall-time is never less than the measured steps and saves of this attempt need.

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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shardway.data.batch_tree import map_tensors
from shardway.data.loader import Batch
from shardway.errors import Bug
from shardway.ranks.failure import AttemptEnd, find_end
from shardway.ranks.start import Ranks
from shardway.ranks.stop import BrokenOff, Decision, StepRequests, is_orphan, read_decision
from shardway.rundir.attempts import BY_SIGNAL, Attempt
from shardway.train.session import Session
from shardway.train.step import Generators
from shardway.units import MAX_SECONDS

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
        self._profile_file = False
        self.decision = Decision()
        self.deadline: Deadline | None = None

    def set_deadline(self, margin_s: float | None, step: int, parameters: int) -> None:
        """Rank 0 reads when the wall-time ends and sends it; the others count from then on."""
        session = self._session
        if session.ranks.is_first:
            pace = read_pace(session.directory.read_status())
            self.deadline = find_deadline(session.attempt, margin_s, pace)
            measured = {"save_seconds": pace.save_s, "validation_seconds": pace.validation_s}
            session.recorder.keep(**{name: value for name, value in measured.items() if value is not None})
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
            self._profile_file = self._session.directory.profile_requested()
        signalled = self._session.signals.received is not None
        late = looks and self.deadline is not None and self.deadline.is_near()
        return StepRequests(signalled, self._stop_file is not None, save, late, void, finish, log, self._profile_file)

    def profile_file_read(self) -> None:
        """The file that asks for a trace was read: it asks for nothing more until it is seen again."""
        self._profile_file = False

    def agree(self, *, void: bool = False, obeys_clock: bool = True) -> bool:
        """Whether all ranks stop here, between two steps; called on all of them together."""
        if self.decision.stop_reason:
            return True
        self._looked_at = -math.inf  # asked seldom enough to look each time
        requests = self.requests(void=void)
        requests = replace(requests, deadline=requests.deadline and obeys_clock)
        summed = self._session.ranks.sum(torch.tensor(requests.as_numbers(), dtype=torch.float64))
        return self.obey(read_decision(summed.tolist()))

    def obey(self, decision: Decision) -> bool:
        """Apply what all ranks agreed on; returns whether they stop. From here on the stop may take
        `run.stop_timeout`."""
        self.decision = decision
        if decision.stop_reason:
            self._session.stop_watchdog.ask()
        return bool(decision.stop_reason)

    def breaks(self) -> ValidationBreaks:
        """For one validation. It fitted before the deadline; what counts now is that the last save still does."""

        def requests(missed: bool) -> StepRequests:
            late = self._session.ranks.is_first and self.deadline is not None and self.deadline.has_passed()
            return replace(self.requests(void=missed), deadline=late)

        return ValidationBreaks(self._session.ranks, self.fetch, requests)

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

    def fetch(self, stream: Iterator[Any], *, breakable: bool) -> tuple[Any, bool]:
        """The next value of a stream, and whether a stop ended the wait for it; None without one. A stream whose wait
        was ended has ended too."""
        signals, watchdog = self._session.signals, self._session.stop_watchdog
        watchdog.begin_wait(self._knows)
        try:
            try:
                signals.breakable = breakable
                return next(stream), False
            finally:
                signals.breakable = False
                watchdog.end_wait()
        except BrokenOff:
            return None, True
        except StopIteration:
            return None, False

    def _knows(self) -> bool:
        """Whether this rank has a request to stop while it waits; called in another thread."""
        session = self._session
        asked = session.signals.received is not None or session.directory.stop_requested()
        return asked or (self.deadline is not None and self.deadline.is_near())


# --- batches that a stop may end the wait for

Fetch = Callable[..., tuple[Any, bool]]
"""As `StopAgreement.fetch`."""


@dataclass(frozen=True)
class Shapes:
    """The tensors of a batch without their values, on no device."""

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
    run stops before its first step. `count_samples`: how many samples over all ranks the step after a position has; a
    rank cuts a dummy batch by it as the others cut theirs. `can_void`: whether a step may be taken with a dummy batch.
    `draws`: whether reading a batch may draw random numbers in this process.
    """

    def __init__(
        self,
        stream: Iterator[Batch],
        fetch: Fetch,
        device: torch.device,
        agree_first: Callable[[bool], bool],
        count_samples: Callable[[int], int],
        *,
        can_void: bool,
        draws: bool = True,
    ) -> None:
        self._count_samples = count_samples
        self._stream, self._fetch, self._device, self._agree_first = stream, fetch, device, agree_first
        self._can_void, self._draws = can_void, draws
        self._begun, self.missed = False, False
        self._shapes: Shapes | None = None
        self._position = 0
        self._before: Generators | None = None

    def next(self) -> Batch | None:
        """The next batch, or a dummy batch if it is `missed`; None if all ranks stop before their first step."""
        self._before = Generators() if self._draws else None
        can_use_dummy = self._shapes is not None and self._can_void
        batch: Batch | None
        batch, missed = self._fetch(self._stream, breakable=can_use_dummy or not self._begun)
        if batch is None and not missed:
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
        data = self._shapes.make() if self._shapes is not None else None
        return Batch(data, np.array([], np.int64), self._position, self._position, self._count_samples(self._position))

    def put_back(self) -> None:
        """Restore the generators to before the last batch, so that reading it again draws the same numbers."""
        if self._before is not None:
            self._before.put_back()

    def close(self) -> None:
        if (close := getattr(self._stream, "close", None)) is not None:
            close()


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


class ValidationBreaks:
    """The agreements of one validation; `requests(missed)` gives this rank's requests, `decision` what all have agreed
    on."""

    def __init__(self, ranks: Ranks, fetch: Fetch, requests: Callable[[bool], StepRequests]) -> None:
        self._ranks, self._fetch, self._requests = ranks, fetch, requests
        self._asked_at = time.perf_counter()
        self._batch = self._asked_before = self._next = 0
        self.decision = Decision()

    @property
    def batches(self) -> int:
        return max(0, self._batch - 1)

    def over(self, batches: Iterable[Any], rows: Sequence[int] | None) -> Iterator[tuple[Any, bool]]:
        """The batches, and whether each is a dummy for one that this rank gave up waiting for: all are, from the first
        missed one on. `rows`: the samples of each batch to come; None: unknown, so that no wait is ended."""
        stream, number = iter(batches), 0
        shapes: Shapes | None = None
        try:
            while True:
                breakable = rows is not None and (shapes is not None or not number)
                batch, missed = self._fetch(stream, breakable=breakable)
                if batch is None:
                    break
                shapes = shapes or read_shapes(batch, self._ranks.device)
                yield batch, False
                number += 1
            if missed:
                for count in (rows or ())[number:]:
                    yield (shapes.make(max(count, 1)) if shapes is not None else None), True
        finally:
            if (close := getattr(stream, "close", None)) is not None:
                close()

    def breaks_off(self, *, missed: bool, last: bool = False) -> bool:
        """Whether all ranks end the validation here; called on all of them before the same batches. `last`: after all
        of them, since some rank has missed one."""
        if not last:
            self._batch += 1
            if self._batch - 1 < self._next:
                return False
        now, done = time.perf_counter(), self._batch - 1
        asked = torch.tensor([*self._requests(missed).as_numbers(), now - self._asked_at], dtype=torch.float64)
        *wanted, seconds = self._ranks.sum(asked).tolist()
        self.decision = read_decision(wanted)
        self._next = done + count_until_next(max(1, done - self._asked_before), seconds / self._ranks.world)
        self._asked_at, self._asked_before = now, done
        return bool(self.decision.stop_reason)


# --- the deadline and its margin

TEARDOWN_S = 30.0
"""Seconds reserved for the end of the ranks and of the job script after the last save."""
TEARDOWN_LEAST_S, TEARDOWN_PART = 2.0, 0.1
"""For a short wall-time, the reserve is no more than these seconds plus this part of it."""
LAST_SAVES = 3
"""The slowest of this many last saves counts, since a file system has good and bad minutes."""
SAVES, STEPS = 2.0, 2.0
"""Factors: a save on its cadence may come right before the last one, and one more step may follow the current one."""

ESTIMATED_RATE = 200e6
"""Bytes per second that one rank writes, syncs and reads back, until a save was measured (a slow shared disk)."""
ESTIMATED_BYTES = 12
"""Bytes of state per parameter until then: fp32 weights and two moments."""
ESTIMATED_LEAST_S = 1.0


@dataclass(frozen=True)
class Pace:
    """Seconds that were measured before this attempt; None if not measured."""

    save_s: float | None = None
    validation_s: float | None = None


@dataclass(frozen=True)
class Margin:
    """How many seconds before the deadline the run stops, and why so many."""

    seconds: float
    reason: str


class Deadline:
    """The end of the wall-time as rank 0 sees it, and what has been measured so far."""

    def __init__(
        self,
        at: float,
        wall_s: float,
        fixed_margin_s: float | None = None,
        before: Pace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`at` is in Unix seconds, `wall_s` the whole wall-time; a fixed margin is `run.stop_margin`."""
        self._at, self._clock, self._fixed = at, clock, fixed_margin_s
        self._teardown_s = min(TEARDOWN_S, TEARDOWN_LEAST_S + TEARDOWN_PART * wall_s)
        self._before = before or Pace()
        self._saves: deque[float] = deque(maxlen=LAST_SAVES)
        self._first_step_s: float | None = None
        self._step_s: float | None = None
        self._validation_s = self._before.validation_s or 0.0
        self._estimated_save_s = ESTIMATED_LEAST_S
        self._passed = ""

    @property
    def left_s(self) -> float:
        return self._at - self._clock()

    def seen_here(self, left_s: float) -> Deadline:
        """The same on a host whose clock may differ; `left_s` are left now."""
        self._at = self._clock() + left_s
        return self

    def expect_save_of(self, parameters: float) -> None:
        """Estimate the time of a save until one was measured, from the parameters that a rank answers for."""
        self._estimated_save_s = ESTIMATED_LEAST_S + parameters * ESTIMATED_BYTES / ESTIMATED_RATE

    def took_step(self, seconds: float) -> None:
        """A step was measured. The first of an attempt compiles and fills caches: it counts only until there is
        another."""
        if self._first_step_s is None:
            self._first_step_s = seconds
        else:
            self._step_s = max(self._step_s or 0.0, seconds)

    def took_save(self, seconds: float) -> None:
        self._saves.append(seconds)

    def took_validation(self, seconds: float) -> None:
        self._validation_s = max(self._validation_s, seconds)

    def margin(self) -> Margin:
        """The wall-time that must be left for the run to begin another step."""
        if self._fixed is not None:
            return Margin(self._fixed, "run.stop_margin says so")
        save, why = self._save()
        step = self._step_s if self._step_s is not None else self._first_step_s or 0.0
        parts = [f"{SAVES:g} x {save:.1f} s ({why})", f"{STEPS:g} x {step:.1f} s for the longest step"]
        if self._validation_s:
            parts.append(f"{self._validation_s:.1f} s for a validation")
        parts.append(f"{self._teardown_s:.1f} s to end")
        return Margin(SAVES * save + STEPS * step + self._validation_s + self._teardown_s, " + ".join(parts))

    def is_near(self) -> bool:
        """Whether it is time to stop; it stays so, and `describe` gives the clock at that moment."""
        if not self._passed and self.left_s < self.margin().seconds:
            self._passed = self.describe()
        return bool(self._passed)

    def fits_validation(self) -> bool:
        """Whether a validation that begins now ends early enough for a save; True until one was measured."""
        return self.left_s - self._validation_s > self._least_s

    def has_passed(self) -> bool:
        """Whether no more time is left than a save and the end take."""
        return self.left_s < self._least_s

    def describe(self) -> str:
        """ "deadline in 50.0 s, margin 9.2 s: 2 x 0.6 s (the last save took 0.6 s) + ..."."""
        if self._passed:
            return self._passed
        margin = self.margin()
        return f"deadline in {self.left_s:.1f} s, margin {margin.seconds:.1f} s: {margin.reason}"

    def facts(self) -> dict[str, Any]:
        return {"left_s": self.left_s, "margin_s": self.margin().seconds, "reason": self.describe()}

    @property
    def _least_s(self) -> float:
        return self._fixed if self._fixed is not None else self._save()[0] + self._teardown_s

    def _save(self) -> tuple[float, str]:
        if self._saves:
            return max(self._saves), f"the slowest of the last {len(self._saves)} saves"
        if self._before.save_s is not None:
            return self._before.save_s, f"the last save of an earlier attempt took {self._before.save_s:.1f} s"
        return self._estimated_save_s, "an estimate, since nothing was saved yet"


def read_pace(status: Mapping[str, Any]) -> Pace:
    """The measurements of an earlier attempt, from its status."""
    found = (status.get(name) for name in ("save_seconds", "validation_seconds"))
    return Pace(*(float(s) if isinstance(s, int | float) and 0 <= s < MAX_SECONDS else None for s in found))


def find_deadline(attempt: Attempt | None, fixed_margin_s: float | None, before: Pace) -> Deadline | None:
    """The deadline that the job of this attempt has written down; None if there is none."""
    started = attempt.read_started() if attempt is not None else None
    if started is None or started.deadline <= 0:
        return None
    begun = started.started or time.time()
    return Deadline(started.deadline, max(0.0, started.deadline - begun), fixed_margin_s, before)
