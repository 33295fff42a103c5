"""Saves that are written while the run goes on: whether a rank can, one at a time, and how each has ended.

Invariant: all ranks begin the same flights in the same order, and none before every rank's last one has ended; what
is written is the state of the moment at which the flight began. This module must not decide when to save, nor what a
save that failed means.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardway.checkpoint.async_save import Flight
from shardway.checkpoint.place import CheckpointFolder
from shardway.checkpoint.save import Content, SavedCheckpoint, write_checkpoint
from shardway.checkpoint.staging import Staging, has_room
from shardway.checkpoint.state import CheckpointState, Tensors
from shardway.parallel.mesh import set_apart
from shardway.ranks.start import Ranks, is_out_of_memory
from shardway.rundir.lineage import SHARED
from shardway.train.session import Session
from shardway.watch.words import render_size


@dataclass(frozen=True)
class Landed:
    """A save that has ended: what was saved or what went wrong, seconds until then, and those that the run stood still.

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
    """A save that is written, where to, when the run came to a stand for it (perf_counter), and for how long."""

    flight: Flight
    started: float
    stall_s: float
    tier: str

    def land(self) -> Landed | None:
        """How it has ended; None while it has not."""
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
        """The step whose save this rank has under way or has not told of; None for none."""
        return self._under_way.flight.step if self._under_way is not None else None

    def is_busy(self) -> bool:
        """Whether any rank has a save under way; asked on all ranks together."""
        if self._apart is None:
            return False
        return any(self._session.ranks.gather(self._under_way is not None and not self._under_way.flight.has_landed))

    def takes(self, state: CheckpointState) -> bool:
        """Whether such a state is written in the background; asked on all ranks together, before each save."""
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
        """How the save that was under way has ended, once; None where there is nothing to tell."""
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
