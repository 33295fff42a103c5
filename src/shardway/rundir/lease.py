"""Who may write a run directory: the holder of its highest epoch, for as long as it can say that it lives.

Invariant: an epoch has one holder, and a holder that was overtaken finds out at its next `confirm`, which looks
itself, and never later than `sure_s` of its own clock at its next `check`. Correct without file locks and whatever the
clocks of the hosts say; it needs a file system where a name is made exclusively and where a process that has changed
a folder sees all of it. This module must not start threads nor know where the files are (that is `rundir.lock`).
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardway.errors import Fenced, JobError, UserError
from shardway.rundir.claims import (
    Beat,
    Claim,
    ClaimFiles,
    ClaimState,
    newest_epoch,
    read_claim,
    remove_claim,
    remove_old,
    survey,
    write_beat,
    write_claim,
    write_silent,
)
from shardway.rundir.identity import Identity, is_gone, is_here, own_identity
from shardway.rundir.watching import HostClock, LeaseClock, LeaseTimes, LeaseVerdict, watch

TRIES = 20
"""How often somebody tries to claim an epoch while others are faster."""

TAKEN_OVER = "another run has taken over"
"""How the error of a writer begins that was overtaken."""


Tell = Callable[[str], None]


class Tenure(Protocol):
    """The right to write a run directory, as whoever writes sees it."""

    @property
    def epoch(self) -> int:
        """The epoch in which is written."""

    def check(self) -> None:
        """Cheap. Raises Fenced where the right is lost, OSError where that cannot be known now."""

    def confirm(self) -> None:
        """Looks. Raises Fenced where the right is lost, OSError where that cannot be known now."""


@dataclass(frozen=True)
class Means:
    """Who asks, as which part of what; how it knows who is gone; what makes tokens and mutexes; its clock and times."""

    who: Identity = field(default_factory=own_identity)
    attempt: str = ""
    is_gone: Callable[[Identity], bool] = is_gone
    make_token: Callable[[], str] = lambda: uuid.uuid4().hex
    make_mutex: Callable[[], contextlib.AbstractContextManager[Any]] = threading.Lock
    clock: LeaseClock = field(default_factory=HostClock)
    terms: LeaseTimes = field(default_factory=LeaseTimes)


class Lease:
    """An epoch of one run directory, from `take` until `release`; `where` is what its messages call the directory.

    Whoever holds it calls `beat` every `terms.beat_s`, from any thread.
    """

    def __init__(self, files: ClaimFiles, where: str, means: Means | None = None) -> None:
        self._files = files
        self._where = where
        self._means = means or Means()
        self._clock, self._terms = self._means.clock, self._means.terms
        self._claim = Claim(0)
        self._count = 0
        self._beaten_at = 0.0
        self._lost: Fenced | None = None
        self._mutex = self._means.make_mutex()

    @property
    def epoch(self) -> int:
        """The epoch that this process holds; 0 before `take`."""
        return self._claim.epoch

    # --- to take

    def take(self, tell: Tell) -> None:
        """Claim the next epoch once the newest is free; `tell` is told where that takes a while.

        Raises UserError where somebody holds it and lives, JobError where others are always faster, OSError.
        """
        for tries_left in reversed(range(TRIES)):
            try:
                standing = self._await_free(tell)
                if self._try_claim(standing.claim.epoch + 1 if standing is not None else 1):
                    return
            except FileNotFoundError:  # somebody may have withdrawn between two looks
                if not tries_left:
                    raise
            self._clock.sleep(self._terms.look_s)
        raise JobError(
            f"the lease of {self._where} could not be taken: others were faster {TRIES} times.\n"
            "  To do: start one run in that directory; if only one was started, look at the file system."
        )

    def await_free(self, tell: Tell) -> None:
        """Return once the newest epoch is free; what was found out is noted for whoever takes the next.

        Raises UserError where somebody holds it and lives, OSError.
        """
        self._await_free(tell)

    def _await_free(self, tell: Tell) -> ClaimState | None:
        while True:
            standing = survey(self._files)
            if standing is None or standing.given_up or self._means.is_gone(standing.claim.who):
                return standing
            tell(render_watch(standing.claim, self._terms))
            verdict = watch(self._files, self._clock, standing, self._terms)
            if verdict is LeaseVerdict.LIVES:
                raise UserError(render_held(self._where, render_holder(standing.claim)))
            if verdict is LeaseVerdict.SILENT:
                with contextlib.suppress(OSError):
                    write_silent(self._files, standing)
                return standing

    def _try_claim(self, epoch: int) -> bool:
        """Claim an epoch; whether it is ours, and the highest: a later one may have come and gone meanwhile."""
        means = self._means
        began, since = self._clock.now(), self._clock.date()
        claim = Claim(epoch, means.make_token(), means.who, since, means.attempt)
        if not write_claim(self._files, claim) or newest_epoch(self._files.names()) != epoch:
            return False
        self._claim, self._count, self._lost, self._beaten_at = claim, 0, None, began
        with contextlib.suppress(OSError):
            self.beat()
        return True

    # --- to hold

    def beat(self) -> None:
        """Say that this process lives, and look whether it still holds.

        The look comes after a change of the folder: a network file system shows it as it is then. Raises Fenced where
        another epoch is the highest, OSError where it cannot be said or seen.
        """
        with self._mutex:
            if self._lost is not None:
                raise Fenced(str(self._lost))
            began = self._clock.now()
            self._count += 1
            write_beat(self._files, self.epoch, Beat(self._count))
            self._look()
            self._beaten_at = began

    def check(self) -> None:
        """Cheap: looks only where this process could not beat for a while (it was stopped, files were away).

        Raises Fenced where it holds no more, OSError where that cannot be known now.
        """
        if self._lost is not None:
            raise Fenced(str(self._lost))
        if self._clock.now() - self._beaten_at > self._terms.sure_s:
            self.beat()

    def confirm(self) -> None:
        """Look now; for what must not happen twice. Raises as `check` does."""
        self.beat()

    def prune(self) -> None:
        """Remove what is left of epochs long before this one; called once something is written under it."""
        remove_old(self._files, self.epoch)

    def withdraw(self) -> None:
        """Give the epoch back as if it had never been taken; for a holder that wrote nothing under it."""
        with self._mutex:
            if self.epoch and self._lost is None:
                with contextlib.suppress(Fenced, OSError):
                    self._look()
                    self._lost = Fenced(f"this run has ended its writing in {self._where}.")
                    remove_claim(self._files, self.epoch)

    def release(self) -> None:
        """Give the epoch back, so that the next is taken at once; where that cannot be written, it takes a watch."""
        with self._mutex:
            if self.epoch and self._lost is None:
                self._lost = Fenced(f"this run has ended its writing in {self._where}.")
                with contextlib.suppress(OSError):
                    write_beat(self._files, self.epoch, Beat(self._count, released=True))

    def _look(self) -> None:
        newest = newest_epoch(self._files.names())
        if newest is None:
            raise FileNotFoundError(2, "its lease is not there")
        claim = read_claim(self._files, newest)
        if claim.token != self._claim.token:
            self._lost = Fenced(render_lost(self._where, self._claim, claim))
            raise self._lost


@dataclass(frozen=True)
class Follower:
    """A rank beside the one that holds: it writes in that epoch, and does not say that it lives."""

    files: ClaimFiles
    where: str
    epoch: int

    def check(self) -> None:
        """Nothing: this rank takes no step that the holder does not take."""

    def confirm(self) -> None:
        """Look now. Raises Fenced where another epoch is the highest, OSError where that cannot be seen."""
        newest = newest_epoch(self.files.names())
        if newest is None:
            raise FileNotFoundError(2, "its lease is not there")
        if newest != self.epoch:
            raise Fenced(render_lost(self.where, Claim(self.epoch), read_claim(self.files, newest)))


# --- words


def render_holder(claim: Claim | None) -> str:
    """Who holds: "process 4711 on host n1 since 2026-01-02 03:04:05"."""
    if claim is None or not (claim.who.pid and claim.who.host and claim.since):
        return "a process that has just started"
    return f"process {claim.who.pid} on host {claim.who.host} since {claim.since}"


def render_held(where: str, holder: str) -> str:
    """What a second writer is told."""
    return (
        f"another run is training into {where}: {holder}.\n"
        "  Two writers would destroy each other's checkpoints, so this one stops before it wrote anything.\n"
        f"  To do: wait for it, stop it gracefully with `touch {where}/stop`, or give this run another "
        "directory with --dir."
    )


def render_watch(claim: Claim, terms: LeaseTimes) -> str:
    """What somebody who has to wait is told, in a line."""
    who = f"another host ({claim.who.host or 'unknown'})"
    if is_here(claim.who):
        who = f"process {claim.who.pid} of this host"
    return f"{who} held this run; watching for {terms.ttl_s:.0f} s whether it still does"


def render_lost(where: str, own: Claim, other: Claim) -> str:
    """What a writer is told that was overtaken."""
    return (
        f"{TAKEN_OVER} {where}: {render_holder(other)} (epoch {other.epoch}; this one had {own.epoch}).\n"
        "  This one could not show for a while that it lives: it was stopped, or the file system did not answer. It "
        "writes nothing more; what it had saved is unchanged.\n"
        "  To do: nothing, if the other one is meant to go on; else stop that one, then run the same command again."
    )
