"""When a run is saved besides its cadence in steps, where, in the background, and what a failed save means.

Invariants:
- Background saves and copies run one at a time and begin on all ranks in the same order, after every rank's last one
  has ended. What is written is the state at the moment when the save began.
- A copy begins once every rank's part of its source is complete; if that failed, there is none.
- A save that fails during the run costs nothing but the time until the next try; at the end of the run it is an error.
  The last save goes into the run directory, and so does what is due there while the disks of the nodes take nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardway.checkpoint.async_save import Flight, Staging, has_room
from shardway.checkpoint.folders import CheckpointFolder, RetentionPolicy, retire, shared_place
from shardway.checkpoint.local_tier import carry_checkpoint
from shardway.checkpoint.state import CheckpointState, Tensors
from shardway.checkpoint.writer import Content, SavedCheckpoint, collect_content, is_saved, save_to, write_checkpoint
from shardway.errors import Fenced, JobError, LostContact, render_reason
from shardway.parallel.mesh import set_apart
from shardway.ranks.start import Ranks, is_out_of_memory
from shardway.rundir.lineage import LOCAL, SHARED
from shardway.train.local_tier import Cadence, LeastCost, LocalTier
from shardway.train.session import Session
from shardway.watch.words import render_size

# --- saves in the background


@dataclass(frozen=True)
class Landed:
    """A save that has ended: what was saved or the error, seconds until then, and seconds that the run stood still.

    `tier` is where it went.
    """

    step: int
    saved: SavedCheckpoint | None
    error: BaseException | None
    seconds: float
    stall_s: float
    tier: str = SHARED


@dataclass(frozen=True)
class UnderWay:
    """A save in progress, its folder, when the run stopped for it (perf_counter), and for how long."""

    flight: Flight
    started: float
    stall_s: float
    tier: str

    def land(self) -> Landed | None:
        """How it has ended; None while it runs."""
        landing = self.flight.landing
        if landing is None:
            return None
        seconds = landing.ended - self.started
        return Landed(self.flight.step, landing.saved, landing.error, seconds, self.stall_s, self.tier)


class Background:
    """The saves of one rank that are written while it trains."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._staging = Staging()
        self._apart: Ranks | None = None
        self._possible = session.resolved.values.checkpoint.background
        self._under_way: UnderWay | None = None
        self.last_begun = 0

    @property
    def saving(self) -> int | None:
        """The step whose save on this rank is running or not yet reported; None for none."""
        return self._under_way.flight.step if self._under_way is not None else None

    def is_busy(self) -> bool:
        """Whether any rank has a save under way; called on all ranks together."""
        if self._apart is None:
            return False
        return any(self._session.ranks.gather(self._under_way is not None and not self._under_way.flight.has_landed))

    def takes(self, state: CheckpointState) -> bool:
        """Whether this state is written in the background; called on all ranks together, before each save."""
        if not self._possible or state.count_file_bytes():
            return False
        if self._apart is None:
            self._open(state.collect())
        return self._possible

    def begin(
        self, content: Content, started: float, place: CheckpointFolder, then: Callable[[Ranks], None]
    ) -> UnderWay:
        """Copy the state, and write it in a thread; `started` is when the run came to a stand (perf_counter).

        `then` is called once it is written, on all ranks together.
        """
        apart = self._apart or self._session.ranks
        staged = replace(content, tensors=self._staging.stage(content.tensors))

        def write() -> SavedCheckpoint:
            saved = write_checkpoint(place, apart, staged)
            then(apart)
            return saved

        self.last_begun = content.step
        flight = Flight(content.step, apart, write)
        self._under_way = UnderWay(flight, started, time.perf_counter() - started, place.tier)
        return self._under_way

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until this rank's save has ended, or for so many seconds."""
        if self._under_way is not None:
            self._under_way.flight.wait(timeout_s)

    def take_landed(self) -> Landed | None:
        """How the last save has ended, once; None if there is nothing to report."""
        landed = self._under_way.land() if self._under_way is not None else None
        if landed is not None:
            self._under_way = None
        return landed

    def _open(self, tensors: Tensors) -> None:
        """At the first save: make the buffers and the group, or find that the memory of some host does not suffice."""
        ranks, needed = self._session.ranks, self._staging.missing_bytes(tensors)
        self._possible = all(ranks.gather(self._reserve(tensors, needed * ranks.placement.local_world)))
        if self._possible:
            self._apart = set_apart(ranks)
            return
        self._staging = Staging()
        self._session.recorder.event(
            "background_off", reason=f"a copy of the state takes {render_size(needed)} a rank, which some host lacks"
        )

    def _reserve(self, tensors: Tensors, on_host_bytes: int) -> bool:
        if not has_room(on_host_bytes):
            return False
        try:
            self._staging.reserve(tensors)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True


# --- copies from the disks of the nodes


class RankCopies:
    """The copies that one rank takes part in."""

    def __init__(self, session: Session, tier: LocalTier) -> None:
        self._session = session
        self._tier = tier
        self._under_way: UnderWay | None = None
        self.last_begun = 0

    @property
    def copying(self) -> int | None:
        """The step whose copy on this rank is running or not yet reported; None for none."""
        return self._under_way.flight.step if self._under_way is not None else None

    def is_busy(self) -> bool:
        """Whether any rank has a copy under way; asked on all ranks together."""
        return any(self._session.ranks.gather(self._under_way is not None and not self._under_way.flight.has_landed))

    def begin(self, source: UnderWay | Landed, target: CheckpointFolder, then: Callable[[Ranks], None]) -> None:
        """Copy in a thread what is written to the disks of the nodes, once it is; `then` is called afterwards."""
        apart, place = self._tier.apart(), self._tier.place
        step = source.flight.step if isinstance(source, UnderWay) else source.step
        started = source.started if isinstance(source, UnderWay) else time.perf_counter() - source.seconds

        def write() -> SavedCheckpoint | None:
            saved = _await(source)
            if saved is None:
                return None
            carried = carry_checkpoint(place, target, apart, saved)
            then(apart)
            return carried

        self._tier.copied = self.last_begun = step
        self._under_way = UnderWay(Flight(step, apart, write), started, source.stall_s, SHARED)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until this rank's copy has ended, or for so many seconds."""
        if self._under_way is not None:
            self._under_way.flight.wait(timeout_s)

    def take_landed(self) -> Landed | None:
        """How the last copy has ended, once; with neither `saved` nor `error` if its source failed."""
        landed = self._under_way.land() if self._under_way is not None else None
        if landed is not None:
            self._under_way, self._tier.copied = None, None
        return landed


def _await(source: UnderWay | Landed) -> SavedCheckpoint | None:
    if isinstance(source, Landed):
        return source.saved
    source.flight.wait()
    landing = source.flight.landing
    return landing.saved if landing is not None else None


# --- when and where a run is saved

RETRY_S = 30.0
"""Seconds from a failed save to the next try: a file system that was busy or full for a moment works again, and one
that stays full costs few tries."""

LEAVE_S = 30.0
"""Seconds that a rank with an error waits for a save under way: the other ranks, if alive, write their parts
meanwhile."""


@dataclass(frozen=True)
class SavePoint:
    """What is saved: the state, its step, the run's counters.

    `last`: nothing comes after it. `in_doubt`: it may be undone, so no older one is removed for it. `shared` and
    `local`: the tiers whose cadence asks for this step. `best`: its validation is one of the best, so it is never left
    out. `ranking`: the validated steps, the best first.
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

    `on_saved` gets the seconds that each save into the run directory took from its beginning until it was complete,
    whether the run stood still meanwhile or not. With a `tier`, saves go to the disks of the nodes, and from there to
    the run directory if that is due. All methods but `is_due` and `poll` are called on all ranks together.
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
        """Whether rank 0 asks for a save: by the clock, or since the last failed; never while one is under way."""
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
        """Report saves that have ended. Raises the errors that end a run; other failures are tried again later."""
        self._report(self._background.take_landed())
        if self._copies is not None and (landed := self._copies.take_landed()) is not None:
            self._report(landed)
            if landed.saved is None and landed.error is None:  # what it was to be copied from has failed
                self._cadences[SHARED].fail()

    def settle(self) -> None:
        """Wait for a save under way, and report it."""
        self._wait()
        self.poll()

    def prune(self, ranking: tuple[int, ...], *, in_doubt: bool) -> None:
        """Remove checkpoints that the last validation made superfluous, unless it may be undone; no save is under
        way."""
        if not self._keep.best or in_doubt:
            return
        steps = self._session.ranks.ask_first(self._session.directory.checkpoint_steps)
        if steps:
            retire(self._session.directory, self._session.ranks, self._keep, steps[-1], ranking)

    def finish(self) -> None:
        """The run is finished and saved: remove its files on the disks of the nodes."""
        self.settle()
        if self._tier is not None:
            self._tier.remove()

    def _is_under_way(self, step: int) -> bool:
        """Whether this step is on its way into the run directory; called on all ranks together."""
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
        """Where to save, and whether it is copied on from there; the same on all ranks. At most one folder."""
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
        """A save is complete: older ones may be removed, unless it may be undone."""
        if place.local is not None and self._tier is not None:
            self._tier.retire(point.step, ranks)
        elif not point.in_doubt:
            retire(self._session.directory, ranks, self._keep, point.step, point.ranking)

    # --- what is reported

    def _report(self, landed: Landed | None) -> None:
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
        """A save that fails during the run is reported, and tried again later."""
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
        """However the run ends, let a save under way complete; with a limit if other ranks may be gone."""
        if kind is None:
            self.settle()
        elif issubclass(kind, Exception):
            self._wait(LEAVE_S)
            with contextlib.suppress(Exception):  # the error that ends the run matters more
                self.poll()
