"""Leases with a part missing, to see what that part is there for, and that the simulation would find its loss."""

from __future__ import annotations

from shardway.rundir.lease import (
    ClaimState,
    HostClock,
    Lease,
    LeaseFiles,
    LeaseTimes,
    LeaseVerdict,
    beat_name,
    survey,
)


class Unconfirmed(Lease):
    """Never looks whether it still holds."""

    def check(self) -> None:
        """Nothing."""

    def confirm(self) -> None:
        """Nothing."""


class Flagged(Lease):
    """Before a commit, goes by what its last beat has found."""

    def confirm(self) -> None:
        """The cheap check alone."""
        self.check()


class Unsure(Lease):
    """Goes by what its last beat has found, however long ago that was."""

    def check(self) -> None:
        """What is known already."""
        if self._lost is not None:
            raise self._lost


def watch_by_dates(files: LeaseFiles, clock: HostClock, first: ClaimState, terms: LeaseTimes) -> LeaseVerdict:
    """Compares the date of the last beat with that of its own host."""
    seen = survey(files)
    if seen is None or seen.claim != first.claim or seen.beat.released:
        return LeaseVerdict.CHANGED
    beat = files.mount.store.folder("lease").entries.get(beat_name(first.claim.epoch))  # type: ignore[attr-defined]
    date = clock.world.now + clock.host.skew_s  # type: ignore[attr-defined]
    return LeaseVerdict.LIVES if beat is not None and date - beat.date < terms.ttl_s else LeaseVerdict.SILENT
