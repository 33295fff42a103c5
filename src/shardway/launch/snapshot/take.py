"""A snapshot on disk.

Invariant: a snapshot is complete, or not there. Nothing is ever written through a symbolic link. This module must
not decide what belongs into a snapshot.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from pathlib import Path

from shardway.errors import UserError
from shardway.launch.snapshot.values import CopiedFile, ExcludedPath, Snapshot, SnapshotPlan
from shardway.refusals import find_remedy
from shardway.rundir.atomic import write_json, write_whole
from shardway.rundir.attempts import Attempt

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EISDIR, errno.ELOOP)
"""What reading a file fails with that was deleted, replaced or closed to us since the plan was made."""
_CANNOT_SHARE = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)
"""What copy_file_range(2) fails with where two files cannot share bytes."""
_MOST_AT_ONCE = 1 << 30


def take_snapshot(plan: SnapshotPlan, target: Path) -> Snapshot:
    """Copy what the plan says into `target`, the code folder of an attempt, and write its record and diff beside it.

    A file that vanished since is left out and told. Raises UserError where the target exists or cannot be written.
    """
    attempt = Attempt(target.parent)
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        raise UserError(
            f"{target} holds a snapshot already.\n  Nothing in it was changed. To do: submit a new attempt."
        ) from None
    except OSError as error:
        raise _refused(target, error) from None
    try:
        copied, lost = _copy_all(plan, target)
        _link_all(plan, target)
        total = sum(file.bytes for file in copied)
        snapshot = Snapshot(plan, len(copied), total, (*plan.left_out, *lost), time.time())
        if plan.revision:
            write_whole(attempt.diff_path, plan.revision.diff)
        write_json(attempt.snapshot_path, snapshot.as_json())
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise _refused(target, error) from None
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return snapshot


def _copy_all(plan: SnapshotPlan, target: Path) -> tuple[list[CopiedFile], list[ExcludedPath]]:
    """Copy every file; those that were, and those that could not be read."""
    source, there = str(plan.root), str(target)
    folders = {*plan.folders, *(os.path.dirname(file.path) for file in plan.files)}
    for folder in sorted(folders):
        os.makedirs(f"{there}/{folder}", exist_ok=True)
    copied, lost = [], []
    for file in plan.files:
        why = _copy(f"{source}/{file.path}", f"{there}/{file.path}")
        if why:
            lost.append(ExcludedPath(file.path, why))
        else:
            copied.append(file)
    return copied, lost


def _copy(source: str, target: str) -> str:
    """Copy a file or a link with its mode and time; why it could not be read, empty where it was.

    Raises OSError where the target cannot be written.
    """
    try:
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
            return ""
        # Without O_NONBLOCK a file that became a pipe since would wait for a writer.
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _GONE:
            return f"could not be read when it was copied: {error.strerror}"
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return "not a plain file any more"
        _write_like(descriptor, target)
    finally:
        os.close(descriptor)
    return ""


def _write_like(source: int, target: str) -> None:
    """A new file with the bytes, mode and time of an open one."""
    state = os.fstat(source)
    with open(target, "xb", buffering=0) as writer:
        _pump(source, writer.fileno())
        os.fchmod(writer.fileno(), state.st_mode & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
    os.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))


def _pump(source: int, target: int) -> None:
    """Copy all bytes; file systems that can share them do."""
    if hasattr(os, "copy_file_range"):
        try:
            while os.copy_file_range(source, target, _MOST_AT_ONCE):
                pass
        except OSError as error:
            if error.errno not in _CANNOT_SHARE:
                raise
    # What is left: all where bytes cannot be shared, nothing but the end elsewhere.
    while data := os.read(source, 1 << 20):
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]


def _link_all(plan: SnapshotPlan, target: Path) -> None:
    for link in plan.links:
        place = target / link.path
        place.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(place):
            os.symlink(link.target, place)


def _refused(target: Path, error: OSError) -> UserError:
    return UserError(
        f"the snapshot of the code cannot be written to {target}: {error.strerror or error}.\n"
        f"  To do: {find_remedy(error, 'choose another folder with --dir or run.root')}."
    )
