"""Which files of a project belong to a snapshot: copied, linked or excluded, by git or by their names.

Invariants:
- A path is in at most one of files, links and excluded paths. It is relative to the root of its listing, with "/"
  between names.
- What a file is (secret, cache, source) is decided by its name; no file is opened.
- No file is copied through a symbolic link, so a snapshot never refers back to the folder it was taken of.
- A folder with more entries than the limit is not walked.
- git: nothing in the repository changes, not even its index.

Formats: git-status(1) "Porcelain Format Version 2" with -z, git-ls-files(1) --stage -z; git 2.16 and later.
"""

from __future__ import annotations

import itertools
import os
import posixpath
import re
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardway.rundir.directory import RunDir
from shardway.units import render_bytes

# --- the parts of a snapshot

FORMAT = 1
_MOST_TOLD = 1000
"""Most entries of a kind that a record lists; of further ones it has only the count."""


@dataclass(frozen=True)
class SnapshotLimits:
    """How large a snapshot may grow; sizes in bytes.

    A larger file is linked instead. More than `total_bytes` or `files` is an error. `entries`: a folder without git
    with more entries is taken for data. `links`: further ones are excluded."""

    file_bytes: int = 8 << 20
    total_bytes: int = 256 << 20
    files: int = 20_000
    diff_bytes: int = 1 << 20
    entries: int = 1_000
    links: int = 2_000


@dataclass(frozen=True)
class CopiedFile:
    """A plain file, or a symbolic link that stays within the project (0 bytes)."""

    path: str
    bytes: int


@dataclass(frozen=True)
class LinkedPath:
    """A file or folder that stays where it is; the snapshot has a symbolic link to `target` in its place."""

    path: str
    target: str
    reason: str


@dataclass(frozen=True)
class ExcludedPath:
    """A file or folder that is missing in the snapshot."""

    path: str
    reason: str


@dataclass(frozen=True)
class Submodule:
    """A repository inside the repository: a submodule or a clone."""

    path: str
    commit: str
    dirty: bool


@dataclass(frozen=True)
class Revision:
    """The state of the code in git.

    `commit` is empty before the first one, `branch` if none is checked out. `dirty`: the commit alone does not give
    this code, since files are changed or untracked. `diff`: changes of tracked text against the commit, truncated if
    `diff_cut`, without secrets."""

    commit: str
    branch: str
    dirty: bool
    untracked: int
    diff: str
    diff_cut: bool
    submodules: tuple[Submodule, ...] = ()


@dataclass(frozen=True)
class SnapshotPlan:
    """What a snapshot will consist of.

    `root`: the project, which is the top of the git repository or the folder itself. `below`: the requested folder,
    relative to it ("" for the root). `notes`: sentences for the user."""

    root: Path
    below: str
    revision: Revision | None
    files: tuple[CopiedFile, ...]
    links: tuple[LinkedPath, ...]
    left_out: tuple[ExcludedPath, ...]
    notes: tuple[str, ...]
    folders: tuple[str, ...] = ()
    """Empty folders, relative to `root`."""

    @property
    def bytes(self) -> int:
        """Total size of the copied files."""
        return sum(file.bytes for file in self.files)

    def start_folder(self, target: Path) -> Path:
        """The requested folder in a snapshot at `target`."""
        return target / self.below if self.below else target


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was taken: its plan and its result. `taken` in Unix seconds."""

    plan: SnapshotPlan
    files: int
    bytes: int
    left_out: tuple[ExcludedPath, ...]
    taken: float

    def as_json(self) -> dict[str, Any]:
        """Its record; lists are cut to a thousand entries, with their full lengths beside them."""
        plan, revision = self.plan, self.plan.revision
        return {
            "format": FORMAT,
            "root": str(plan.root),
            "below": plan.below,
            "taken": self.taken,
            "git": revision is not None,
            "commit": revision.commit if revision else "",
            "branch": revision.branch if revision else "",
            "dirty": revision.dirty if revision else None,
            "untracked": revision.untracked if revision else None,
            "diff_cut": revision.diff_cut if revision else False,
            "submodules": [vars(entry) for entry in revision.submodules] if revision else [],
            "files": self.files,
            "bytes": self.bytes,
            "links_count": len(plan.links),
            "links": [vars(entry) for entry in plan.links[:_MOST_TOLD]],
            "left_out_count": len(self.left_out),
            "left_out": [vars(entry) for entry in self.left_out[:_MOST_TOLD]],
            "notes": list(plan.notes),
        }


# --- what a file name means: secret, cache or source

_CODE = frozenset((".py", ".pyi", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".js", ".ts"))
_SOURCE = _CODE | frozenset(
    (
        *(".toml", ".yaml", ".yml", ".json", ".cfg", ".ini", ".conf", ".txt", ".md", ".rst", ".sh", ".bash", ".ipynb"),
        *(".cxx", ".hip", ".jinja", ".j2", ".sbatch", ".slurm", ".pbs", ".def", ".patch", ".gin", ".proto", ".sql"),
    )
)
_SOURCE_NAMES = frozenset(("Makefile", "Dockerfile", "Containerfile", "LICENSE", "README"))
_CACHES = frozenset(("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".ipynb_checkpoints"))

_SECRET_NAME = re.compile(
    r"\.env(\..+)?|.+\.(pem|p12|pfx|kdbx)|id_\w+|\.netrc|\.pypirc|\.pgpass|\.git-credentials|credentials?(\..*)?"
    r"|\.?secrets?(\..*)?",
    re.IGNORECASE,
)
# Only as the last word of a name: "hf_token.txt" is a secret, "token-counts.txt" and "train_tokens.txt" are not.
_SECRET_WORD = re.compile(r"(^|[._\- ])(api[._-]?key|token|credentials?)(\.[a-z0-9]+)?$", re.IGNORECASE)
_EXAMPLE = re.compile(r"\.(example|sample|template|dist)$", re.IGNORECASE)
_PLAIN_TOKEN = frozenset((".bin", ".npy", ".npz", ".pt", ".safetensors", ".idx", ".md"))
"""Suffixes with which "token" means text for a model."""


def is_secret(name: str) -> bool:
    """Whether a file name stands for a key, a password or a token.

    `tokenizer.json`, `tokens.bin`, code about tokens and `.env.example` are no secrets."""
    ending = _ending(name)
    if ending in _CODE or _EXAMPLE.search(name):
        return False
    return bool(_SECRET_NAME.fullmatch(name) or (ending not in _PLAIN_TOKEN and _SECRET_WORD.search(name)))


def is_cache(name: str) -> bool:
    """Whether a file or folder is a cache that programs make again; a snapshot does not list it."""
    return name in _CACHES or name.endswith((".pyc", ".pyo"))


def is_source(name: str) -> bool:
    """Whether a file name is that of source code or other hand-written text."""
    return _ending(name) in _SOURCE or name in _SOURCE_NAMES or name.startswith("Dockerfile.")


def _ending(name: str) -> str:
    stem, dot, ending = name.rpartition(".")
    return f".{ending}".lower() if dot and stem else ""


# --- listings of a project


@dataclass(frozen=True)
class Outside:
    """A file or folder that is not copied, but linked if that makes sense."""

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
    """Empty folders, into which a program may want to write."""


def nest(listing: Listing, path: str) -> Listing:
    """The same listing with `path` before each path."""
    return replace(
        listing,
        files=tuple(f"{path}/{file}" for file in listing.files),
        outside=tuple(replace(entry, path=f"{path}/{entry.path}") for entry in listing.outside),
        left_out=tuple(replace(entry, path=f"{path}/{entry.path}") for entry in listing.left_out),
        folders=tuple(f"{path}/{folder}" for folder in listing.folders),
    )


def join(outer: Listing, inner: Listing, path: str) -> Listing:
    """Merge a listing with that of a repository inside it; `path` is the inner repository."""
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


# --- sort paths: copied, linked or excluded


class Sorter:
    """Sorts the paths of one listing into `files`, `links`, `left_out` and `notes`; `large` has the files that are
    linked because of their size."""

    def __init__(self, root: Path, limits: SnapshotLimits) -> None:
        self.files: list[CopiedFile] = []
        self.links: list[LinkedPath] = []
        self.large: list[CopiedFile] = []
        self.left_out: list[ExcludedPath] = []
        self.notes: list[str] = []
        self._root = str(root)
        self._limits = limits
        self._stops: dict[str, str] = {"": ""}

    def sort(self, listing: Listing) -> None:
        """Sort every path of a listing, each once."""
        self.left_out += listing.left_out
        for path in dict.fromkeys(listing.files):
            self._sort_file(path)
        inside = {parent for file in self.files for parent in list_parents(file.path)}
        copied = {file.path for file in self.files}
        for entry in listing.outside:
            self._sort_outside(entry.path, entry.reason, inside, copied)

    def _sort_file(self, path: str) -> None:
        if self._stop(posixpath.dirname(path)):
            return
        name = posixpath.basename(path)
        if is_secret(name):
            self.left_out.append(ExcludedPath(path, "secret by its name"))
            return
        try:
            state = os.lstat(f"{self._root}/{path}")
        except FileNotFoundError:  # deleted, but still tracked by git
            return
        except OSError as error:
            self.left_out.append(ExcludedPath(path, f"cannot be read: {error.strerror}"))
            return
        if stat.S_ISLNK(state.st_mode):
            self._sort_symlink(path)
        elif not stat.S_ISREG(state.st_mode):
            self.left_out.append(ExcludedPath(path, "not a plain file"))
        elif state.st_size > self._limits.file_bytes:
            size = f"{state.st_size / 2**20:.1f} MiB, more than {render_bytes(self._limits.file_bytes)}"
            self._link(path, size)
            self.large.append(CopiedFile(path, state.st_size))
        else:
            self.files.append(CopiedFile(path, state.st_size))

    def _sort_symlink(self, path: str) -> None:
        """Copy a symbolic link; one that leads out of the project keeps its target."""
        target = os.readlink(f"{self._root}/{path}")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if posixpath.isabs(target) or place == ".." or place.startswith("../"):
            absolute = posixpath.normpath(posixpath.join(self._root, posixpath.dirname(path), target))
            self.links.append(LinkedPath(path, absolute, "symbolic link that leads out of the project"))
        else:
            self.files.append(CopiedFile(path, 0))

    def _sort_outside(self, path: str, reason: str, inside: set[str], copied: set[str]) -> None:
        """Link a file or a folder; in a folder with copied files, link each of the other entries."""
        name = posixpath.basename(path)
        if path in copied or is_cache(name) or self._stop(posixpath.dirname(path)):
            return
        whole = f"{self._root}/{path}"
        if path not in inside:
            if is_secret(name) and not os.path.isdir(whole):
                self.left_out.append(ExcludedPath(path, "secret by its name"))
            elif os.path.lexists(whole):
                self._link(path, reason)
            return
        with os.scandir(whole) as scan:
            entries = sorted(entry.name for entry in itertools.islice(scan, self._limits.entries + 1))
        if len(entries) > self._limits.entries:
            self.left_out.append(ExcludedPath(path, f"{reason}; more than {self._limits.entries} entries beside code"))
            return
        for entry in entries:
            self._sort_outside(f"{path}/{entry}", reason, inside, copied)

    def _link(self, path: str, reason: str) -> None:
        self.links.append(LinkedPath(path, f"{self._root}/{path}", reason))

    def _stop(self, folder: str) -> str:
        """Why nothing below a folder is copied; empty if it may be. A run directory is linked as a whole."""
        known = self._stops.get(folder)
        if known is not None:
            return known
        reason = self._stop(posixpath.dirname(folder)) or self._look(folder)
        self._stops[folder] = reason
        return reason

    def _look(self, folder: str) -> str:
        path = Path(self._root, folder)
        if path.is_symlink():
            return "behind a symbolic link"
        run = RunDir(path)
        if os.path.isfile(run.resolved_path) or run.attempts():
            self._link(folder, "run directory")
            return "run directory"
        return ""


def list_parents(path: str) -> list[str]:
    """Every folder above a path, relative as the path is."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: number + 1]) for number in range(len(parts))]


# --- a project without git: what looks like source

_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
_INSTALLED = frozenset(("node_modules", "site-packages"))


@dataclass
class _WalkResult:
    """What a walk collects."""

    files: list[str] = field(default_factory=list)
    outside: list[Outside] = field(default_factory=list)
    left_out: list[ExcludedPath] = field(default_factory=list)


def list_folder(root: Path, limits: SnapshotLimits) -> Listing:
    """Source-like files are copied. Folders without any, environments and other files stay outside; hidden ones are
    excluded."""
    found = _walk(str(root), "", limits.entries)
    if isinstance(found, str):
        return Listing((), notes=(f"{root} {found}: none of it is copied.",))
    return Listing(tuple(found.files), tuple(found.outside), tuple(found.left_out))


def _walk(root: str, below: str, most: int) -> _WalkResult | str:
    """The contents of a folder, or why it is treated as a whole."""
    try:
        with os.scandir(os.path.join(root, below)) as scan:
            entries = sorted(itertools.islice(scan, most + 1), key=lambda entry: entry.name)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(entries) > most:
        return f"holds more than {most} entries"
    names = {entry.name for entry in entries}
    if names.intersection(_ENVIRONMENT_MARKS):
        return "is an environment"
    found = _WalkResult()
    for entry in entries:
        _sort(root, below, entry, most, found)
    return found


def _sort(root: str, below: str, entry: os.DirEntry[str], most: int, found: _WalkResult) -> None:
    path = f"{below}/{entry.name}" if below else entry.name
    if is_cache(entry.name):
        return
    if entry.is_dir(follow_symlinks=False):
        _sort_folder(root, path, most, found)
    elif is_secret(entry.name):
        found.files.append(path)  # the sorter reports why it is excluded
    elif entry.name.startswith("."):
        found.left_out.append(ExcludedPath(path, "hidden"))
    elif is_source(entry.name) or entry.is_symlink():
        found.files.append(path)
    else:
        found.outside.append(Outside(path, "not source code"))


def _sort_folder(root: str, path: str, most: int, found: _WalkResult) -> None:
    name = path.rpartition("/")[2]
    inner = "holds installed packages" if name in _INSTALLED else _walk(root, path, most)
    hidden = name.startswith(".")
    if isinstance(inner, str):
        found.outside.append(Outside(path, f"folder that {inner}"))
    elif hidden:
        found.left_out.append(ExcludedPath(path, "hidden"))
    elif not inner.files:
        found.outside.append(Outside(path, "folder without source code"))
    else:
        found.files += inner.files
        found.outside += inner.outside
        found.left_out += inner.left_out


# --- a project with git

IGNORED = "ignored by git"
_TIMEOUT_S = 120.0
_SUBMODULE = "160000"
_FOREIGN = frozenset(("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY"))
"""Variables with which a git hook points at another repository."""


class GitUnusable(Exception):
    """git is missing, or does not answer for this folder. The message is the reason, empty if there is no
    repository."""


@dataclass(frozen=True)
class Repository:
    """A repository's top folder, and the requested folder below it ("" for the top)."""

    top: Path
    below: str


@dataclass(frozen=True)
class Status:
    """The output of `git status`; folders end with "/"."""

    commit: str
    branch: str
    changed: bool
    untracked: tuple[str, ...]
    ignored: tuple[str, ...]


def find_repository(folder: Path) -> Repository:
    """The repository that contains a folder. Raises GitUnusable."""
    top = os.fsdecode(_git(folder, "rev-parse", "--show-toplevel")).removesuffix("\n")
    below = os.fsdecode(_git(folder, "rev-parse", "--show-prefix")).removesuffix("\n").removesuffix("/")
    return Repository(Path(top), below)


def list_repository(top: Path, limits: SnapshotLimits) -> Listing:
    """Tracked files and untracked ones that are not ignored, also those of inner repositories. Raises GitUnusable."""
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
    """Tracked files and submodules from `git ls-files --stage -z`; a path in conflict appears once."""
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
    """The listing with an inner repository added; one that is not checked out or does not answer gives a note."""
    if not (top / path / ".git").exists():
        reason = "submodule that is not checked out"
    else:
        try:
            return join(listing, list_repository(top / path, limits), path)
        except GitUnusable as error:
            reason = f"repository that git cannot read: {error}"
    return replace(listing, left_out=(*listing.left_out, ExcludedPath(path, reason)))


def _read_diff(top: Path, most: int) -> tuple[str, bool]:
    """Changes of tracked text against the commit, at most `most` bytes, and whether there is more."""
    plain = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
    names = os.fsdecode(_git(top, *plain, "--name-only", "-z", "HEAD", "--")).split("\0")
    # A secret that was once committed appears in a diff when it changes or is deleted.
    hidden = [f":(top,exclude,literal){name}" for name in names if is_secret(name.rpartition("/")[2])]
    words = _words(top, *plain, "HEAD", "--", ":(top)", *hidden)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()) as process:
        text = process.stdout.read(most + 1) if process.stdout else b""
        process.kill()
    # git takes a file for text if its first NUL is far from the start; a text that is sent elsewhere cannot contain
    # one.
    return text[:most].decode("utf-8", "replace").replace("\0", "\ufffd"), len(text) > most


def _git(folder: Path, *arguments: str) -> bytes:
    """The output of a git command. Raises GitUnusable."""
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
    message = done.stderr.decode("utf-8", "replace").strip()
    if "not a git repository" in message or "must be run in a work tree" in message:
        raise GitUnusable("")
    raise GitUnusable(
        message.splitlines()[0].removeprefix("fatal: ") if message else f"git ended with {done.returncode}"
    )


def _words(folder: Path, *arguments: str) -> Sequence[str]:
    return ["git", "--no-optional-locks", "-C", str(folder), *arguments]


def _environment() -> dict[str, str]:
    """The caller's environment without pointers at another repository, and with git's messages in English."""
    return {**{name: value for name, value in os.environ.items() if name not in _FOREIGN}, "LC_ALL": "C"}
