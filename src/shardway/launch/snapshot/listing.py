"""What a rule found in a project: which files to copy, and what stays outside.

Invariant: paths are relative to the root of the listing. This module must not touch a disk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardway.launch.snapshot.values import ExcludedPath, Revision, Submodule


@dataclass(frozen=True)
class Outside:
    """A file or folder that is not copied, but is linked where that makes sense."""

    path: str
    reason: str


@dataclass(frozen=True)
class Listing:
    """The files of a project by one rule."""

    files: tuple[str, ...]
    outside: tuple[Outside, ...] = ()
    left_out: tuple[ExcludedPath, ...] = ()
    revision: Revision | None = None
    notes: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    """Folders with nothing in them, which a program may want to write into."""


def nest(listing: Listing, path: str) -> Listing:
    """The same listing as seen from above: each path with `path` before it."""
    return replace(
        listing,
        files=tuple(f"{path}/{file}" for file in listing.files),
        outside=tuple(replace(entry, path=f"{path}/{entry.path}") for entry in listing.outside),
        left_out=tuple(replace(entry, path=f"{path}/{entry.path}") for entry in listing.left_out),
        folders=tuple(f"{path}/{folder}" for folder in listing.folders),
    )


def join(outer: Listing, inner: Listing, path: str) -> Listing:
    """A listing with that of a repository inside of it; `path` is where that lies."""
    nested = nest(inner, path)
    revision, found = outer.revision, inner.revision
    if revision and found:
        below = (replace(entry, path=f"{path}/{entry.path}") for entry in found.submodules)
        submodules = (*revision.submodules, Submodule(path, found.commit, found.dirty), *below)
        revision = replace(revision, submodules=submodules, dirty=revision.dirty or found.dirty)
    return Listing(
        outer.files + nested.files,
        outer.outside + nested.outside,
        outer.left_out + nested.left_out,
        revision,
        outer.notes + nested.notes,
        outer.folders + nested.folders,
    )
