"""Takes a snapshot: its plan, its folder on disk, and the working folder of a rehearsal.

Invariants:
- Files that git ignores, that are secrets by name, or that belong to a run directory are never copied.
- A snapshot is complete or absent. Nothing is written through a symbolic link.
- Rehearsal: each run directory gets one copy, which its attempts share.
"""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shardway.errors import UserError
from shardway.launch.snapshot_files import (
    CopiedFile,
    ExcludedPath,
    GitUnusable,
    LinkedPath,
    Listing,
    Snapshot,
    SnapshotLimits,
    SnapshotPlan,
    Sorter,
    find_repository,
    list_folder,
    list_parents,
    list_repository,
)
from shardway.places import find_home
from shardway.refusals import ANOTHER_FOLDER, find_remedy
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import write_json, write_whole
from shardway.units import render_bytes

# --- the plan of a snapshot

_FOLDERS_TOLD = 5


def plan_snapshot(root: Path, limits: SnapshotLimits | None = None, *, links: bool = True) -> SnapshotPlan:
    """What a snapshot of the project around `root` consists of: its git repository, else the folder itself.

    Without `links`, for another host, what would be linked is left out. Raises UserError for a folder that is no
    project (a home folder, "/", one that is not there), and where what is to be copied exceeds the limits.
    """
    limits = limits or SnapshotLimits()
    try:
        folder = root.resolve(strict=True)
    except OSError as error:
        raise UserError(f"the project folder {root} cannot be read: {error.strerror}.") from None
    top, below, listing = _list(folder, limits)
    sorter = Sorter(top, limits)
    sorter.sort(listing)
    _check_size(top, sorter.files, limits)
    linked, left_out = _bound_links(sorter.links, sorter.left_out, limits.links if links else 0, links)
    return SnapshotPlan(
        root=top,
        below=below,
        revision=listing.revision,
        files=tuple(sorter.files),
        links=linked,
        left_out=left_out,
        folders=tuple(folder for folder in listing.folders if folder not in {link.path for link in linked}),
        notes=(*listing.notes, *sorter.notes, *_describe_large(sorter.large, left_out, limits, links)),
    )


def _list(folder: Path, limits: SnapshotLimits) -> tuple[Path, str, Listing]:
    """The project's top, the folder asked for below it, and its files by the rule that applies."""
    try:
        found = find_repository(folder)
        if not _is_too_wide(found.top):
            return found.top, found.below, list_repository(found.top, limits)
        notes = [f"The git repository at {found.top} is a home folder's and is left aside."]
    except GitUnusable as error:
        notes = _describe_unusable(folder, str(error))
    if _is_too_wide(folder):
        raise UserError(
            f"{folder} is no project folder: a snapshot of it would hold far more than the code of one run.\n"
            "  To do: go to the folder of your project, or put the code into a git repository."
        )
    listing = list_folder(folder, limits)
    return folder, "", replace(listing, notes=(*notes, *listing.notes))


def _is_too_wide(folder: Path) -> bool:
    """Whether a folder is a home folder, or one above."""
    home = find_home() or Path("/")
    return folder in (home.resolve(), *home.resolve().parents)


def _describe_unusable(folder: Path, why: str) -> list[str]:
    """Why git's rule does not apply, if the user may expect it to."""
    repository = next((place for place in (folder, *folder.parents) if (place / ".git").exists()), None)
    if repository is None:
        return []
    if "ownership" in why or "safe.directory" in why:
        why = f"{why}; to do: `git config --global --add safe.directory {repository}`"
    return [
        f"{repository} is a git repository that git does not read ({why or 'no work tree'}): files that look like "
        "source code are copied, and no commit is recorded."
    ]


def _describe_large(
    large: list[CopiedFile], left_out: tuple[ExcludedPath, ...], limits: SnapshotLimits, linked: bool
) -> list[str]:
    """Which files are too large to be copied: the job sees them as they are when it runs, or not at all."""
    if linked:
        gone = {entry.path for entry in left_out}
        large = [file for file in large if file.path not in gone]
    if not large:
        return []
    first, total = max(large, key=lambda file: file.bytes), sum(file.bytes for file in large)
    which = f"{len(large)} file{'s' if len(large) > 1 else ''} over {render_bytes(limits.file_bytes)}"
    sizes = f"{total / 2**20:.1f} MiB, the largest {first.path} with {first.bytes / 2**20:.1f} MiB"
    if linked:
        return [f"linked, not copied: {which} ({sizes}); to edit them while the job waits changes what it sees."]
    return [f"not carried to the other host: {which} ({sizes})."]


def _check_size(top: Path, files: list[CopiedFile], limits: SnapshotLimits) -> None:
    total = sum(file.bytes for file in files)
    if total <= limits.total_bytes and len(files) <= limits.files:
        return
    counts, sizes = Counter[str](), Counter[str]()
    for file in files:
        counts[_folder_of(file.path)] += 1
        sizes[_folder_of(file.path)] += file.bytes
    largest = (sizes if total > limits.total_bytes else counts).most_common(_FOLDERS_TOLD)
    listed = "\n".join(f"    {name}: {counts[name]} files, {sizes[name] / 2**20:.1f} MiB" for name, _ in largest)
    raise UserError(
        f"the code of {top} is too large for a snapshot: {len(files)} files, {total / 2**20:.1f} MiB.\n"
        f"  Allowed: {limits.files} files, {render_bytes(limits.total_bytes)}. The largest folders:\n{listed}\n"
        "  To do: name what is no code in .gitignore (it is then linked, not copied)."
    )


def _folder_of(path: str) -> str:
    """The first two folders of a path, "." for a file at the top."""
    return "/".join(posixpath.dirname(path).split("/")[:2]) or "."


def _bound_links(
    links: list[LinkedPath], left_out: list[ExcludedPath], most: int, wanted: bool
) -> tuple[tuple[LinkedPath, ...], tuple[ExcludedPath, ...]]:
    """As many links as are allowed, those nearest to the top first; the others are left out.

    What lies in a folder that is linked needs none: it would be made in the place that the link leads to.
    """
    kept: dict[str, LinkedPath] = {}
    for link in sorted(links, key=lambda link: (link.path.count("/"), link.path)):
        if not any(parent in kept for parent in list_parents(link.path)):
            kept[link.path] = link
    links = list(kept.values())
    why = f"more than {most} links" if wanted else "not carried to another host"
    dropped = [ExcludedPath(link.path, f"{link.reason}; {why}") for link in links[most:]]
    return tuple(links[:most]), tuple(sorted([*left_out, *dropped], key=lambda entry: entry.path))


# --- a snapshot on disk

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EISDIR, errno.ELOOP)
"""What reading a file fails with that was deleted, replaced or closed to us since the plan was made."""
_CANNOT_SHARE = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)
"""What copy_file_range(2) fails with where two files cannot share bytes."""
_MOST_AT_ONCE = 1 << 30


def take_snapshot(plan: SnapshotPlan, target: Path) -> Snapshot:
    """Copy what the plan says into `target`, the code folder of an attempt, and write its record and diff beside it.

    A file that vanished since is left out and listed. Raises UserError where the target exists or cannot be written.
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
        f"  To do: {find_remedy(error, ANOTHER_FOLDER)}."
    )


# --- working copies for the rehearsal of a command


def work_in_copies(plan: SnapshotPlan) -> Callable[[Path], Path]:
    """For a run directory, the folder in which its attempts work: made of this snapshot the first time."""

    def place(path: Path) -> Path:
        run = RunDir(path)
        if not run.work.exists():
            taken = path.with_name(f"{path.name}-code") / "code"  # beside it: a snapshot's record is no part of a run
            take_snapshot(plan, taken)
            run.path.mkdir(parents=True, exist_ok=True)
            taken.rename(run.work)
        folder = plan.start_folder(run.work)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    return place
