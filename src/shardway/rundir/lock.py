"""One writer for each run directory: a lease on disk, and `flock` where the file system has it.

A held lock proves at once that its holder lives. A free one proves nothing, since not every file system shows locks to
other hosts. So the lease decides, and the lock only saves the wait for it.

Invariants:
- While a `WriterLock` is held, no `acquire` of another process returns before the lease was found silent for its time.
- The lock file is removed only with a lease that was never held: unlinking a locked file lets two writers hold two
  locks of the same name, and then the lease alone decides.
- `hold_folder`: the kernel frees a folder when its holder ends, in any namespace. Where the file system has no locks,
  no holder is taken for gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardway.errors import Fenced, UserError
from shardway.refusals import find_remedy
from shardway.rundir.file_io import is_there
from shardway.rundir.lease import (
    Claim,
    ClaimState,
    DiskFiles,
    Lease,
    Means,
    Tell,
    beat_name,
    is_gone,
    is_seen_here,
    render_held,
    render_holder,
    survey,
)

TRIES, PAUSE_S = 5, 0.05
LEAVE_S = 5.0
"""How long a release waits for a heartbeat under way, so that a hanging file system does not keep a run from ending."""

SHOWN_S = 120.0
"""How long after its last heartbeat a holder without a visible lock is still shown."""


@dataclass(frozen=True)
class LockPaths:
    """The lock file and the lease folder of a run directory."""

    lock: Path
    lease: Path

    @property
    def files(self) -> DiskFiles:
        """The files of the lease."""
        return DiskFiles(self.lease)

    @property
    def run(self) -> str:
        """The run directory's name in messages."""
        return str(self.lock.parent)


class WriterLock:
    """The right to write one run directory, until `release` or the end of the process."""

    def __init__(self, place: LockPaths, means: Means | None = None) -> None:
        self._place = place
        self._means = means or Means()
        self._descriptor = -1
        self._made = False
        """Whether this object made the lock file."""
        self._beats: _Beats | None = None
        self.lease = self._make_lease()

    def acquire(self, tell: Tell = lambda line: None) -> None:
        """Take the right; `tell` is called with a line if the previous holder has to be watched first.

        Raises UserError that names the holder if another process has it, or if the directory may not be written.
        """
        with _refusals(self._place):
            self._lock(fcntl.LOCK_EX)
            try:
                self.lease = self._make_lease()
                self.lease.take(tell)
            except BaseException:
                self._unlock()
                raise
        self._beats = _Beats(self.lease, self._means.terms.beat_s)

    def await_free(self, tell: Tell) -> None:
        """Return once `acquire` need not wait, unless another process is faster. Raises UserError as it does."""
        if not is_there(self._place.lock) and not is_there(self._place.lease):
            return
        with _refusals(self._place):
            self._lock(fcntl.LOCK_SH)
            self._unlock()
            self.lease.await_free(tell)

    def release(self) -> None:
        """Give the right back; a second call does nothing."""
        if self._beats is not None and self._beats.stop():
            self.lease.release()
        self._beats = None
        self._unlock()

    def prune(self) -> None:
        """Remove the files of much earlier holders; called once something is written."""
        self.lease.prune()

    def withdraw(self) -> None:
        """Give the right back where nothing was written under it: the directory is as it was before `acquire`."""
        if self._beats is not None and self._beats.stop():
            self.lease.withdraw()
            with contextlib.suppress(OSError):
                self._place.lease.rmdir()
                if self._made:
                    self._place.lock.unlink()
        self._beats = None
        self._unlock()

    def _make_lease(self) -> Lease:
        return Lease(self._place.files, self._place.run, self._means)

    def _lock(self, kind: int) -> None:
        self._made |= not is_there(self._place.lock)
        self._descriptor = os.open(self._place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):  # a device: one lock for the whole machine
            self._unlock()
            raise OSError(errno.EINVAL, "it is no file", str(self._place.lock))
        if not _try_lock(self._descriptor, kind):
            self._unlock()
            standing = _survey(self._place)
            if not _is_left(standing):
                known = None if standing is None or standing.given_up else standing.claim
                raise UserError(render_held(self._place.run, render_holder(known)))

    def _unlock(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # the server went away meanwhile, and the lock with it
                os.close(descriptor)


class _Beats:
    """A thread that writes heartbeats until it is stopped or its lease is lost."""

    def __init__(self, lease: Lease, every_s: float) -> None:
        self._lease = lease
        self._every_s = every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Stop the thread; False where a file system still blocks it."""
        self._done.set()
        self._thread.join(LEAVE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._done.wait(self._every_s):
            with contextlib.suppress(OSError):  # tried again; the lease counts how long there was no heartbeat
                try:
                    self._lease.beat()
                except Fenced:  # the next write reports it
                    return


# --- for readers


def find_holder(place: LockPaths, *, by_hand: bool = False) -> str | None:
    """The holder ("process 4711 on host n1 since ..."), or None for none; with `by_hand` a job counts as none.

    For a holder whose lock is not visible here, it includes when its last heartbeat came, by the file system's clock.
    """
    sight = _see(place)
    if sight is None or (by_hand and sight.claim is not None and sight.claim.attempt):
        return None
    seen = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(sight.beaten)) if sight.beaten else ""
    return render_holder(sight.claim) + (f", last seen {seen}" if seen else "")


def find_holder_host(place: LockPaths) -> str:
    """The host of the holder; empty for none, or while it is not yet written."""
    sight = _see(place)
    return sight.claim.who.host if sight is not None and sight.claim is not None else ""


def signal_holder(place: LockPaths, number: int) -> bool:
    """Send a signal to the holder; returns whether it is visible from here and may be signalled."""
    sight = _see(place)
    who = sight.claim.who if sight is not None and sight.claim is not None else None
    if who is None or not is_seen_here(who) or is_gone(who):
        return False
    try:
        os.kill(who.pid, number)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class _Sight:
    """A holder, if known; `beaten` is the date of its last heartbeat (Unix seconds), 0 where its lock is visible."""

    claim: Claim | None
    beaten: float = 0.0


def _see(place: LockPaths) -> _Sight | None:
    """The holder as it can be seen without a watch.

    Where no lock is visible, the date of the last heartbeat is compared with this host's: good enough for display.
    """
    standing = _survey(place)
    if _is_locked(place.lock) and not _is_left(standing):
        return _Sight(None if standing is None or standing.given_up else standing.claim)
    if standing is None or standing.given_up or is_gone(standing.claim.who):
        return None
    try:
        beaten = (place.lease / beat_name(standing.claim.epoch)).stat().st_mtime
    except OSError:
        return None
    return _Sight(standing.claim, beaten) if time.time() - beaten < SHOWN_S else None


def _is_left(standing: ClaimState | None) -> bool:
    """Whether a visible lock is held only by children of a dead holder, which inherited its open file."""
    return standing is not None and not standing.given_up and is_gone(standing.claim.who)


def _survey(place: LockPaths) -> ClaimState | None:
    try:
        return survey(place.files)
    except OSError:
        return None


def _is_locked(path: Path) -> bool:
    """Whether a lock of another process is visible from here."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _try_lock(descriptor: int, kind: int) -> bool:
    """Take the lock, with a few retries: a reader that checks for a holder holds it for an instant itself.

    Also True where the file system has no locks (ENOSYS of a Lustre mounted without, ENOLCK of an NFS).
    """
    for _ in range(TRIES):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PAUSE_S)
        except OSError:
            return True
        else:
            return True
    return False


_NO_FILE = "move away what stands there where it is no file"


@contextlib.contextmanager
def _refusals(place: LockPaths) -> Iterator[None]:
    """Turn errors of the file system into a UserError with a remedy."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the run directory {place.run} cannot be locked: {error.strerror} ({error.filename or place.lease}).\n"
            f"  To do: {find_remedy(error, 'choose a directory that you may write to with --dir', _NO_FILE)}."
        ) from None


# --- folders held while their process lives


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a folder while entered, where the file system has locks. Raises OSError where it is not a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def take_left_folder(folder: Path) -> Iterator[int]:
    """Hold a folder that no process holds, as an open descriptor. Raises OSError where one does, or none exists."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)
