"""What a snapshot of a project will consist of.

Invariant: nothing that is ignored by git, secret by its name, or part of a run directory is ever copied. This module
must not change anything.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from dataclasses import replace
from pathlib import Path

from shardway.errors import UserError
from shardway.launch.snapshot.folder import list_folder
from shardway.launch.snapshot.git import GitUnusable, find_repository, list_repository
from shardway.launch.snapshot.listing import Listing
from shardway.launch.snapshot.sort import Sorter, list_parents
from shardway.launch.snapshot.values import CopiedFile, ExcludedPath, LinkedPath, SnapshotLimits, SnapshotPlan
from shardway.places import find_home
from shardway.units import render_bytes

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
    """Why git's rule does not apply, where somebody would expect it to."""
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
    told = "\n".join(f"    {name}: {counts[name]} files, {sizes[name] / 2**20:.1f} MiB" for name, _ in largest)
    raise UserError(
        f"the code of {top} is too large for a snapshot: {len(files)} files, {total / 2**20:.1f} MiB.\n"
        f"  Allowed: {limits.files} files, {render_bytes(limits.total_bytes)}. The largest folders:\n{told}\n"
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
