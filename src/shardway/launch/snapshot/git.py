"""The files of a git repository as they are now, and where it stands.

Invariant: nothing in the repository changes, not even its index. This module must not copy.
Formats: git-status(1) "Porcelain Format Version 2" with -z, git-ls-files(1) --stage -z; git 2.16 and later.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardway.launch.snapshot.listing import Listing, Outside, join
from shardway.launch.snapshot.names import is_cache, is_secret
from shardway.launch.snapshot.values import ExcludedPath, Revision, SnapshotLimits

IGNORED = "ignored by git"
_TIMEOUT_S = 120.0
_SUBMODULE = "160000"
_FOREIGN = frozenset(("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY"))
"""Variables with which a hook of git points at another repository."""


class GitUnusable(Exception):
    """git is not there, or does not answer for this folder; the text says why, empty where there is no repository."""


@dataclass(frozen=True)
class Repository:
    """A repository's top folder, and the folder that was asked for below it ("" for the top)."""

    top: Path
    below: str


@dataclass(frozen=True)
class Status:
    """What `git status` says; folders end with "/"."""

    commit: str
    branch: str
    changed: bool
    untracked: tuple[str, ...]
    ignored: tuple[str, ...]


def find_repository(folder: Path) -> Repository:
    """The repository that a folder is in. Raises GitUnusable."""
    top = os.fsdecode(_git(folder, "rev-parse", "--show-toplevel")).removesuffix("\n")
    below = os.fsdecode(_git(folder, "rev-parse", "--show-prefix")).removesuffix("\n").removesuffix("/")
    return Repository(Path(top), below)


def list_repository(top: Path, limits: SnapshotLimits) -> Listing:
    """Tracked files and untracked ones that are not ignored, of repositories inside too. Raises GitUnusable."""
    tracked, submodules = parse_stage(_git(top, "ls-files", "--stage", "-z"))
    status = parse_status(
        _git(top, "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=all", "--ignored=matching")
    )
    diff, cut = _read_diff(top, limits.diff_bytes) if status.changed and status.commit else ("", False)
    untracked = [path for path in status.untracked if not path.endswith("/")]
    folders = os.fsdecode(_git(top, "ls-files", "--others", "--directory", "-z")).split("\0")
    listing = Listing(
        files=(*tracked, *untracked),
        outside=tuple(
            Outside(path.rstrip("/"), IGNORED)
            for path in status.ignored
            if not is_cache(path.rstrip("/").rpartition("/")[2])
        ),
        revision=Revision(
            status.commit, status.branch, status.changed or bool(status.untracked), len(untracked), diff, cut
        ),
        folders=tuple(path.rstrip("/") for path in folders if path.endswith("/") and _is_empty(top / path)),
    )
    clones = [path.rstrip("/") for path in status.untracked if path.endswith("/")]
    for path in (*submodules, *clones):
        listing = _add_inner(listing, top, path, limits)
    return listing


def _is_empty(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except OSError:
        return False


def parse_stage(output: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tracked files and submodules from `git ls-files --stage -z`; a path in conflict is named once."""
    files: dict[str, None] = {}
    submodules: dict[str, None] = {}
    for entry in os.fsdecode(output).split("\0"):
        meta, tab, path = entry.partition("\t")
        if tab:
            (submodules if meta.startswith(_SUBMODULE) else files)[path] = None
    return tuple(files), tuple(submodules)


def parse_status(output: bytes) -> Status:
    """The status from `git status --porcelain=v2 --branch -z`."""
    commit, branch, changed = "", "", False
    untracked, ignored = [], []
    entries = iter(os.fsdecode(output).split("\0"))
    for entry in entries:
        kind, _, rest = entry.partition(" ")
        if kind == "?":
            untracked.append(rest)
        elif kind == "!":
            ignored.append(rest)
        elif kind in ("1", "2", "u"):
            changed = True
            if kind == "2":
                next(entries, None)  # the name before a rename
        elif rest.startswith("branch.oid "):
            commit = rest.removeprefix("branch.oid ").replace("(initial)", "")
        elif rest.startswith("branch.head "):
            branch = rest.removeprefix("branch.head ").replace("(detached)", "")
    return Status(commit, branch, changed, tuple(untracked), tuple(ignored))


def _add_inner(listing: Listing, top: Path, path: str, limits: SnapshotLimits) -> Listing:
    """The listing with a repository inside; one that is not checked out or does not answer is told."""
    if not (top / path / ".git").exists():
        reason = "submodule that is not checked out"
    else:
        try:
            return join(listing, list_repository(top / path, limits), path)
        except GitUnusable as error:
            reason = f"repository that git cannot read: {error}"
    return replace(listing, left_out=(*listing.left_out, ExcludedPath(path, reason)))


def _read_diff(top: Path, most: int) -> tuple[str, bool]:
    """Changes of tracked text against the commit, at most so many bytes, and whether there is more."""
    plain = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
    names = os.fsdecode(_git(top, *plain, "--name-only", "-z", "HEAD", "--")).split("\0")
    # A secret that was once committed stands in a diff when it changes or goes.
    hidden = [f":(top,exclude,literal){name}" for name in names if is_secret(name.rpartition("/")[2])]
    words = _words(top, *plain, "HEAD", "--", ":(top)", *hidden)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()) as process:
        text = process.stdout.read(most + 1) if process.stdout else b""
        process.kill()
    # git takes a file for text that has a NUL only far from its start; a text that is sent elsewhere cannot hold one.
    return text[:most].decode("utf-8", "replace").replace("\0", "\ufffd"), len(text) > most


def _git(folder: Path, *arguments: str) -> bytes:
    """What a git command prints. Raises GitUnusable."""
    try:
        done = subprocess.run(
            _words(folder, *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            env=_environment(),
        )
    except FileNotFoundError:
        raise GitUnusable("git is not installed") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitUnusable(str(error)) from None
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.decode("utf-8", "replace").strip()
    if "not a git repository" in said or "must be run in a work tree" in said:
        raise GitUnusable("")
    raise GitUnusable(said.splitlines()[0].removeprefix("fatal: ") if said else f"git ended with {done.returncode}")


def _words(folder: Path, *arguments: str) -> Sequence[str]:
    return ["git", "--no-optional-locks", "-C", str(folder), *arguments]


def _environment() -> dict[str, str]:
    """The caller's environment without pointers at another repository, and with git's own words in English."""
    return {**{name: value for name, value in os.environ.items() if name not in _FOREIGN}, "LC_ALL": "C"}
