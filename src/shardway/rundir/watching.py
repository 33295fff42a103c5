"""Watches a holder that cannot be asked: whether it still says that it lives.

Invariant: time is measured on the watcher's own clock alone, from one of its own looks to another; no clock of another
host is read, nor any date of a file. Time in which the watcher slept itself, or could not see, does not count. This
module must not claim anything.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from shardway.rundir.claims import ClaimFiles, ClaimState, survey


class LeaseClock(Protocol):
    """A clock of this host that never goes back, the way to wait on it, and the host's date for words alone."""

    def now(self) -> float:
        """Seconds since some moment."""

    def date(self) -> str:
        """The host's date and time, like "2026-01-02 03:04:05"; nothing is decided by it."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class HostClock:
    """The clock of this host that counts while the host sleeps too, where the system has one."""

    def now(self) -> float:
        """Seconds since the host was started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()

    def date(self) -> str:
        """The host's date and time, like "2026-01-02 03:04:05"; nothing is decided by it."""
        return time.strftime("%Y-%m-%d %H:%M:%S")

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


@dataclass(frozen=True)
class LeaseTimes:
    """The times of a lease in seconds.

    A holder beats every `beat_s`. Whoever saw no beat for `ttl_s` may take over. A holder that could not beat for
    `sure_s` writes nothing before it has looked; what is left to `ttl_s` is for clocks that go at different speeds. A
    watcher looks every `look_s`; a look or a wait that took `slack_s` longer does not count.
    """

    beat_s: float = 2.0
    sure_s: float = 10.0
    ttl_s: float = 15.0
    look_s: float = 0.5
    slack_s: float = 2.0


class LeaseVerdict(Enum):
    """What a watch found: another beat; none for long enough; another epoch, or that it was released."""

    LIVES = "lives"
    SILENT = "silent"
    CHANGED = "changed"


def watch(files: ClaimFiles, clock: LeaseClock, first: ClaimState, terms: LeaseTimes) -> LeaseVerdict:
    """Watch the holder of an epoch from now on, which was last seen as `first`.

    Raises OSError where the folder could not be read for as long as a watch takes.
    """
    seen_at = since = clock.now()
    while True:
        asked = clock.now()
        clock.sleep(terms.look_s)
        began = clock.now()
        try:
            seen = survey(files)
        except OSError:
            since = clock.now()
            if since - seen_at > terms.ttl_s:
                raise
            continue
        seen_at = clock.now()
        if seen is None or seen.claim != first.claim or seen.beat.released:
            return LeaseVerdict.CHANGED
        if seen.beat.count > first.beat.count:
            return LeaseVerdict.LIVES
        if began - asked > terms.look_s + terms.slack_s or seen_at - began > terms.slack_s:
            since = seen_at
        elif began - since >= terms.ttl_s:
            return LeaseVerdict.SILENT
