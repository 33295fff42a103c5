"""When a run is saved besides its cadence in steps, in which of its places, and what a save that failed means for it.

Invariant: a save that fails while the run goes on costs nothing but the time until the next try; where the run ends, it
is an error. The last save goes into the run directory, and so does what is due there while the disks of the nodes take
nothing. This module must not decide when a run ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardway.checkpoint.place import CheckpointFolder, shared_place
from shardway.checkpoint.retention import RetentionPolicy, retire
from shardway.checkpoint.save import SavedCheckpoint, collect_content, is_saved, save_to
from shardway.checkpoint.state import CheckpointState
from shardway.errors import Fenced, JobError, LostContact, render_reason
from shardway.ranks.start import Ranks, is_out_of_memory
from shardway.rundir.lineage import LOCAL, SHARED
from shardway.train.saves.background import Background, Landed, UnderWay
from shardway.train.saves.cadence import Cadence, LeastCost
from shardway.train.saves.copies import RankCopies
from shardway.train.saves.tiers import LocalTier
from shardway.train.session import Session

RETRY_S = 30.0
"""How long after a save that failed the next is tried: a file system that was busy or full for a moment is well again,
and one that stays full costs a few tries an hour."""

LEAVE_S = 30.0
"""How long a rank that ends with an error waits for a save under way: the others write their parts meanwhile, if they
live."""


@dataclass(frozen=True)
class SavePoint:
    """What is saved: the state, the step that it belongs to, the run's counters.

    `last`: nothing comes after it. `in_doubt`: it may be undone, so that no older one is removed for it. `shared` and
    `local`: for which tiers its number is one to be saved at. `best`: its validation is one of the best, so that it is
    never left out. `ranking`: the steps that were validated, the best first.
    """

    state: CheckpointState
    step: int
    numbers: Mapping[str, Any]
    last: bool
    in_doubt: bool = False
    shared: bool = True
    local: bool = False
    best: bool = False
    ranking: tuple[int, ...] = ()


class Saver:
    """Saves on all ranks together; only rank 0's clock counts.

    `on_saved` is told the seconds that each save into the run directory took from its beginning until it was complete,
    whether the run stood still meanwhile or not. With a `tier` what is saved goes to the disks of the nodes, and on to
    the run directory where that is due. All methods but `is_due` and `poll` are called on all ranks together.
    """

    def __init__(
        self,
        session: Session,
        every_s: float | LeastCost | None,
        keep: RetentionPolicy,
        on_saved: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
        tier: tuple[LocalTier, float | LeastCost | None] | None = None,
    ) -> None:
        self._session = session
        self._keep = keep
        self._on_saved = on_saved
        self._background = Background(session)
        self._cadences = {SHARED: Cadence(every_s, clock), LOCAL: Cadence(tier[1] if tier else None, clock)}
        self._tier = tier[0] if tier is not None else None
        self._copies = RankCopies(session, self._tier) if self._tier is not None else None
        self._owed = False
        """Whether a save into the run directory was due while nodes wrote to their disks: it comes right after."""
        session.at_end.push(self._leave)

    @property
    def interval_s(self) -> float | None:
        """Seconds from one save into the run directory to the next; None where the clock does not ask for any."""
        return self._cadences[SHARED].interval_s

    def is_due(self) -> bool:
        """Whether rank 0 wishes for a save: by the clock, or since the last failed; never while one is under way."""
        return self._session.ranks.is_first and self._background.saving is None and any(self._due().values())

    def save(self, point: SavePoint) -> None:
        """Save, or begin to; nothing where this step is saved already, or while an earlier save is under way.

        Raises JobError on every rank where it fails and nothing comes after it, or where memory ran out.
        """
        started = time.perf_counter()
        if point.best and not point.last and self._is_under_way(point.step):
            return
        if point.last or point.best:
            self.settle()
        elif self._background.is_busy():
            self._skip(point.step, self._background.last_begun)
            self._owed = self._owed or (point.shared and self._tier is not None)
            return
        self.poll()
        for place, copies in self._route(point):
            with self._failures_noted(point.step, place.tier, last=point.last):
                self._save_to(place, point, started, copies=copies)
                self._cadences[place.tier].try_now()

    def poll(self) -> None:
        """Tell of saves that were written meanwhile. Raises what ends a run where one failed for no want of room."""
        self._tell(self._background.take_landed())
        if self._copies is not None and (landed := self._copies.take_landed()) is not None:
            self._tell(landed)
            if landed.saved is None and landed.error is None:  # what it was to be copied from has failed
                self._cadences[SHARED].fail()

    def settle(self) -> None:
        """Wait for what is under way, if anything is, and tell of it."""
        self._wait()
        self.poll()

    def prune(self, ranking: tuple[int, ...], *, in_doubt: bool) -> None:
        """Remove what the last validation has made one too many, unless it may be undone; nothing is under way."""
        if not self._keep.best or in_doubt:
            return
        steps = self._session.ranks.ask_first(self._session.directory.checkpoint_steps)
        if steps:
            retire(self._session.directory, self._session.ranks, self._keep, steps[-1], ranking)

    def finish(self) -> None:
        """The run is at its end, and saved: nothing of it stays on the disks of the nodes."""
        self.settle()
        if self._tier is not None:
            self._tier.remove()

    def _is_under_way(self, step: int) -> bool:
        """Whether this step is on its way into the run directory by now; asked on all ranks together."""
        if self._copies is None:
            return self._background.last_begun == step and self._background.is_busy()
        return self._copies.last_begun == step and self._copies.is_busy()

    # --- where to

    def _due(self) -> dict[str, bool]:
        """By this rank's clock; what is being copied is not due again."""
        copying = self._copies is not None and self._copies.copying is not None
        due = {tier: cadence.is_due(RETRY_S) for tier, cadence in self._cadences.items()}
        return {**due, SHARED: (due[SHARED] or self._owed) and not copying}

    def _route(self, point: SavePoint) -> list[tuple[CheckpointFolder, bool]]:
        """Where to save, and whether it is copied on from there; the same on all ranks. At most one place."""
        shared = shared_place(self._session.directory, self._session.ranks)
        if point.last or self._tier is None or self._copies is None:
            return [(shared, False)]
        if point.best and is_saved(shared, self._session.ranks, point.step):
            return []
        due = self._session.ranks.ask_first(self._due)
        wants_shared, wants_local = point.shared or point.best or due[SHARED], point.local or due[LOCAL]
        self._owed = False
        if wants_shared and self._copies.is_busy():
            self._skip(point.step, self._copies.copying)
            wants_shared = False
        self.poll()  # a copy that has ended on all ranks may have ended since
        local = self._tier.place
        if wants_shared and (self._cadences[LOCAL].has_failed or not self._can_copy(local, point.step)):
            return [(shared, False)]
        return [(local, wants_shared)] if wants_local or wants_shared else []

    def _can_copy(self, local: CheckpointFolder, step: int) -> bool:
        """Whether this step can be saved on the disks of the nodes and copied from there while the run goes on."""
        in_background = self._session.resolved.values.checkpoint.background
        return in_background and not is_saved(local, self._session.ranks, step)

    def _save_to(self, place: CheckpointFolder, point: SavePoint, started: float, *, copies: bool) -> None:
        """Save there, or begin to, unless that is done; then let it be copied on."""
        session = self._session
        if self._tier is not None:
            point = replace(point, numbers={**point.numbers, **self._tier.as_numbers()})
        source: UnderWay | Landed | None
        if point.last or not self._background.takes(point.state):
            source = self._save_now(place, point, started)
        elif is_saved(place, session.ranks, point.step):
            source = None
            self._cadences[place.tier].has_failed = False
        else:
            content = collect_content(session.ranks, point.state, point.step, point.numbers)
            source = self._background.begin(content, started, place, lambda on: self._retire(place, point, on))
        if copies and source is not None and self._copies is not None:
            target = shared_place(session.directory, session.ranks)
            self._cadences[SHARED].try_now()
            self._copies.begin(source, target, lambda on: self._retire(target, point, on))

    def _save_now(self, place: CheckpointFolder, point: SavePoint, started: float) -> Landed | None:
        session, step = self._session, point.step
        saved = save_to(place, session.ranks, point.state, step, point.numbers)
        self._cadences[place.tier].has_failed = False
        if saved is None:
            return None
        seconds = time.perf_counter() - started
        landed = Landed(step, saved, None, seconds, seconds, place.tier)
        self._note_saved(landed, saved)
        self._retire(place, point, session.ranks)
        return landed

    def _retire(self, place: CheckpointFolder, point: SavePoint, ranks: Ranks) -> None:
        """A save is complete: older ones may go, unless it may be undone."""
        if place.local is not None and self._tier is not None:
            self._tier.retire(point.step, ranks)
        elif not point.in_doubt:
            retire(self._session.directory, ranks, self._keep, point.step, point.ranking)

    # --- what is told

    def _tell(self, landed: Landed | None) -> None:
        if landed is None:
            return
        with self._failures_noted(landed.step, landed.tier):
            if landed.error is not None:
                raise landed.error
        if landed.saved is not None:
            self._note_saved(landed, landed.saved)

    def _skip(self, step: int, saving: int | None) -> None:
        self._session.recorder.event("save_skipped", step=step, saving=saving)

    def _note_saved(self, landed: Landed, saved: SavedCheckpoint) -> None:
        recorder, cadence = self._session.recorder, self._cadences[landed.tier]
        cadence.succeed(landed.stall_s)
        facts = {"name": saved.name, "bytes": saved.bytes, "seconds": landed.seconds, "stall_s": landed.stall_s}
        if cadence.is_measured:
            facts["next_in_s"] = cadence.interval_s
        recorder.event("saved", step=landed.step, tier=landed.tier, **facts)
        if landed.tier == LOCAL:
            recorder.status(local_step=landed.step, save_failed="")
            return
        recorder.status(saved_step=landed.step, save_seconds=landed.seconds, save_failed="")
        self._on_saved(landed.seconds)

    @contextlib.contextmanager
    def _failures_noted(self, step: int, tier: str, *, last: bool = False) -> Iterator[None]:
        """A save that fails while the run goes on is told, and tried again later."""
        try:
            yield
        except (LostContact, Fenced):
            raise
        except JobError as error:
            if self._session.signals.killed:  # torch's writer makes an error of the interrupt
                raise KeyboardInterrupt("a second Ctrl-C") from None
            if last or is_out_of_memory(error):
                raise
            self._cadences[tier].fail()
            reason = render_reason(str(error))
            self._session.recorder.event("save_failed", step=step, tier=tier, reason=reason, retry_s=RETRY_S)
            self._session.recorder.status(save_failed=reason)

    # --- how it ends

    def _wait(self, timeout_s: float | None = None) -> None:
        self._background.wait(timeout_s)
        if self._copies is not None:
            self._copies.wait(timeout_s)

    def _leave(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """However the run ends, a save under way may still become whole; not for ever where other ranks may be gone."""
        if kind is None:
            self.settle()
        elif issubclass(kind, Exception):
            self._wait(LEAVE_S)
            with contextlib.suppress(Exception):  # the error that ends the run matters more
                self.poll()
