"""One writer a run directory: a lease on disk, and `flock` where the file system has it.

Invariants:
- While a `WriterLock` is held, nobody else's `acquire` returns before the lease of this one was found silent for its
  time. The lock file is removed only with a lease that nobody has ever held: unlinking a locked file lets two writers
  hold two locks of the same name, and then the lease alone decides.
- The kernel frees a folder with its holder, in whichever namespace that is; where the file system knows no locks,
  nobody is taken for gone.

A lock that is held proves that its holder lives, at once; one that is free proves nothing, since not every file system
shows it to other hosts. So the lease decides, and the lock saves the wait for it.
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
"""How long a release waits for a beat under way: a file system that hangs shall not keep a run from ending."""

SHOWN_S = 120.0
"""For how long a holder that only its lease speaks for is shown as one, after its last beat."""


@dataclass(frozen=True)
class LockPaths:
    """Where a run directory keeps its lock and its lease."""

    lock: Path
    lease: Path

    @property
    def files(self) -> DiskFiles:
        """The files of the lease."""
        return DiskFiles(self.lease)

    @property
    def run(self) -> str:
        """What messages call the run directory."""
        return str(self.lock.parent)


class WriterLock:
    """The right to write one run directory, until `release` or the end of the process."""

    def __init__(self, place: LockPaths, means: Means | None = None) -> None:
        self._place = place
        self._means = means or Means()
        self._descriptor = -1
        self._made = False
        """Whether this made the lock file."""
        self._beats: _Beats | None = None
        self.lease = self._make_lease()

    def acquire(self, tell: Tell = lambda line: None) -> None:
        """Take the right; `tell` is told in a line where somebody has to be watched first.

        Raises UserError that names the holder where another process has it, or where the directory may not be written.
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
        """Return once `acquire` will not have to wait, unless somebody is faster. Raises UserError as it does."""
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
        """Remove what is left of holders long before this one; called once something is written."""
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
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):  # a device, whose lock is one for the whole machine
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
            with contextlib.suppress(OSError):  # of a server that went away meanwhile: the lock went with it
                os.close(descriptor)


class _Beats:
    """A thread that beats until it is stopped, or its lease was lost."""

    def __init__(self, lease: Lease, every_s: float) -> None:
        self._lease = lease
        self._every_s = every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Whether the thread has ended; False where a file system holds it."""
        self._done.set()
        self._thread.join(LEAVE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._done.wait(self._every_s):
            with contextlib.suppress(OSError):  # tried again; the lease knows how long it has not beaten
                try:
                    self._lease.beat()
                except Fenced:  # told by whoever writes next
                    return


# --- for those who only look


def find_holder(place: LockPaths, *, by_hand: bool = False) -> str | None:
    """Who holds the run ("process 4711 on host n1 since ..."), or None where nobody does, or a job does and only who
    trains `by_hand` is asked for.

    Of a holder whose lock is not seen here: when its last beat came, by the clock of the file system.
    """
    sight = _see(place)
    if sight is None or (by_hand and sight.claim is not None and sight.claim.attempt):
        return None
    seen = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(sight.beaten)) if sight.beaten else ""
    return render_holder(sight.claim) + (f", last seen {seen}" if seen else "")


def find_holder_host(place: LockPaths) -> str:
    """The host of whoever holds the run; empty where nobody does, or has not said so yet."""
    sight = _see(place)
    return sight.claim.who.host if sight is not None and sight.claim is not None else ""


def signal_holder(place: LockPaths, number: int) -> bool:
    """Send a signal to the process that holds the run; whether it is seen from here and may be signalled."""
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
    """A holder, where it is known who; `beaten` is the date of its last beat (Unix seconds), 0 where it has a lock."""

    claim: Claim | None
    beaten: float = 0.0


def _see(place: LockPaths) -> _Sight | None:
    """The holder as it can be seen without a watch.

    Where no lock is seen, the date of the last beat is compared with this host's: good enough for words alone.
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
    """Whether a lock that is seen is what the children of a dead holder have left: they have its open file."""
    return standing is not None and not standing.given_up and is_gone(standing.claim.who)


def _survey(place: LockPaths) -> ClaimState | None:
    try:
        return survey(place.files)
    except OSError:
        return None


def _is_locked(path: Path) -> bool:
    """Whether somebody's lock is seen from here."""
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
    """Take the lock, with a little patience: a reader that looks who holds it holds it for an instant itself.

    True as well where the file system knows no locks (ENOSYS of a Lustre that is mounted without, ENOLCK of an NFS).
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
    """Turn what the file system refuses into a UserError with what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the run directory {place.run} cannot be locked: {error.strerror} ({error.filename or place.lease}).\n"
            f"  To do: {find_remedy(error, 'choose a directory that you may write to with --dir', _NO_FILE)}."
        ) from None


# --- A folder that a process holds for as long as it lives, so that others know what was left by one that was
# killed


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a folder while entered, where the file system knows locks. Raises OSError where it is no folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def take_left_folder(folder: Path) -> Iterator[int]:
    """Hold a folder that nobody holds, as an open descriptor. Raises OSError where somebody does, or none is there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)
