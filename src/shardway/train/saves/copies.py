"""Copies from the disks of the nodes to the run directory, made while the run goes on.

Invariant: one at a time, begun on all ranks in the same order; a copy begins once every rank's part of its source is
complete, and there is none where that failed. This module must not decide when to copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shardway.checkpoint.async_save import Flight
from shardway.checkpoint.place import CheckpointFolder
from shardway.checkpoint.save import SavedCheckpoint
from shardway.checkpoint.tier_copy import carry_checkpoint
from shardway.ranks.start import Ranks
from shardway.rundir.lineage import SHARED
from shardway.train.saves.background import Landed, UnderWay
from shardway.train.saves.tiers import LocalTier
from shardway.train.session import Session


class RankCopies:
    """The copies that one rank takes part in."""

    def __init__(self, session: Session, tier: LocalTier) -> None:
        self._session = session
        self._tier = tier
        self._under_way: UnderWay | None = None
        self.last_begun = 0

    @property
    def copying(self) -> int | None:
        """The step whose copy this rank has under way or has not told of; None for none."""
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
        """How the copy that was under way has ended, once; with neither `saved` nor `error` where its source failed."""
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
