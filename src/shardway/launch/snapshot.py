"""The snapshot of a project's code: which files are copied, linked or excluded, by git or by their names; the copy on
disk; and the working folder of a rehearsal.

Invariants:
- A path is in at most one of files, links and excluded paths. It is relative to the root of its listing, with "/"
  between names.
- What a file is (secret, cache, source) is decided by its name. Files that git ignores, that are secrets by name, or
  that belong to a run directory are never copied.
- No file is copied through a symbolic link, and nothing is written through one.
- A folder with more entries than the limit is not walked. Nothing in a git repository changes, not even its index.
- A snapshot is complete or absent. Rehearsal: each run directory gets one copy, which its attempts share.

Formats: git-status(1) "Porcelain Format Version 2" with -z, git-ls-files(1) --stage -z; git 2.16 and later.
"""

from __future__ import annotations

import errno
import itertools
import os
import posixpath
import re
import shutil
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardway.errors import UserError
from shardway.places import find_home
from shardway.refusals import ANOTHER_FOLDER, find_remedy
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import write_json, write_whole
from shardway.units import render_bytes

# --- the parts of a snapshot


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
class LinkedPath:
    """A file or folder that stays where it is; the snapshot has a symbolic link to `target` in its place."""

    path: str
    target: str
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
    relative to it ("" for the root). `files`: path -> bytes of a plain file, 0 of a symbolic link that stays within the
    project. `left_out`: path -> why it is missing. `folders`: empty ones. `notes`: sentences for the user."""

    root: Path
    below: str
    revision: Revision | None
    files: Mapping[str, int]
    links: tuple[LinkedPath, ...]
    left_out: Mapping[str, str]
    notes: tuple[str, ...]
    folders: tuple[str, ...] = ()

    def start_folder(self, target: Path) -> Path:
        """The requested folder in a snapshot at `target`."""
        return target / self.below if self.below else target


@dataclass
class _Listing:
    """The paths of a project by one rule. `outside` is not copied, but linked if that makes sense (path -> reason), as
    opposed to `left_out`; `folders` are empty ones, into which a program may want to write."""

    files: list[str] = field(default_factory=list)
    outside: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)


# --- the plan of a snapshot


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
    top, below, revision, notes, listing = _list_project(folder, limits)
    sorter = _Sorter(str(top), limits)
    sorter.sort(listing)
    _check_size(top, sorter.files, limits)
    # Links nearest to the top first. What lies in a linked folder needs none: it would be made where that one leads.
    kept: dict[str, LinkedPath] = {}
    for link in sorted(sorter.links, key=lambda link: (link.path.count("/"), link.path)):
        if not any(parent in kept for parent in _list_parents(link.path)):
            kept[link.path] = link
    most = limits.links if links else 0
    why = f"more than {most} links" if links else "not carried to another host"
    left_out = sorter.left_out | {link.path: f"{link.reason}; {why}" for link in list(kept.values())[most:]}
    large = {path: size for path, size in sorter.large.items() if not links or path not in left_out}
    if large:  # the job sees these as they are when it runs, or not at all
        first, total = max(large, key=lambda path: large[path]), sum(large.values())
        which = f"{len(large)} file{'s' if len(large) > 1 else ''} over {render_bytes(limits.file_bytes)}"
        which += f" ({total / 2**20:.1f} MiB, the largest {first} with {large[first] / 2**20:.1f} MiB)"
        told = f"linked, not copied: {which}; to edit them while the job waits changes what it sees."
        notes = [*notes, told if links else f"not carried to the other host: {which}."]
    linked = tuple(kept.values())[:most]
    return SnapshotPlan(
        root=top,
        below=below,
        revision=revision,
        files=sorter.files,
        links=linked,
        left_out=dict(sorted(left_out.items())),
        notes=tuple(notes),
        folders=tuple(folder for folder in listing.folders if folder not in {link.path for link in linked}),
    )


def _list_project(folder: Path, limits: SnapshotLimits) -> tuple[Path, str, Revision | None, list[str], _Listing]:
    """The project's top, the folder asked for below it, its revision, notes, and its files by the rule that applies."""
    listing, notes = _Listing(), list[str]()
    try:
        top = Path(_git(folder, "rev-parse", "--show-toplevel").removesuffix("\n"))
        below = _git(folder, "rev-parse", "--show-prefix").removesuffix("\n").removesuffix("/")
        if not _is_too_wide(top):
            return top, below, _list_repository(top, limits, listing), [], listing
        notes.append(f"The git repository at {top} is a home folder's and is left aside.")
    except _GitUnusable as error:
        repository = next((place for place in (folder, *folder.parents) if (place / ".git").exists()), None)
        if repository is not None:  # the user may expect git's rule
            why = str(error) or "no work tree"
            if "ownership" in why or "safe.directory" in why:
                why = f"{why}; to do: `git config --global --add safe.directory {repository}`"
            notes.append(
                f"{repository} is a git repository that git does not read ({why}): files that look like source code "
                "are copied, and no commit is recorded."
            )
    if _is_too_wide(folder):
        raise UserError(
            f"{folder} is no project folder: a snapshot of it would hold far more than the code of one run.\n"
            "  To do: go to the folder of your project, or put the code into a git repository."
        )
    found = _walk(str(folder), "", limits.entries)
    if isinstance(found, str):
        return folder, "", None, [*notes, f"{folder} {found}: none of it is copied."], _Listing()
    return folder, "", None, notes, found


def _is_too_wide(folder: Path) -> bool:
    """Whether a folder is a home folder, or one above."""
    home = (find_home() or Path("/")).resolve()
    return folder in (home, *home.parents)


def _check_size(top: Path, files: Mapping[str, int], limits: SnapshotLimits) -> None:
    total = sum(files.values())
    if total <= limits.total_bytes and len(files) <= limits.files:
        return
    counts, sizes = Counter[str](), Counter[str]()
    for path, size in files.items():
        folder = "/".join(posixpath.dirname(path).split("/")[:2]) or "."
        counts[folder] += 1
        sizes[folder] += size
    largest = (sizes if total > limits.total_bytes else counts).most_common(5)
    listed = "\n".join(f"    {name}: {counts[name]} files, {sizes[name] / 2**20:.1f} MiB" for name, _ in largest)
    raise UserError(
        f"the code of {top} is too large for a snapshot: {len(files)} files, {total / 2**20:.1f} MiB.\n"
        f"  Allowed: {limits.files} files, {render_bytes(limits.total_bytes)}. The largest folders:\n{listed}\n"
        "  To do: name what is no code in .gitignore (it is then linked, not copied)."
    )


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

_SECRET_NAME = (
    r"(?i)\.env(\..+)?|.+\.(pem|p12|pfx|kdbx)|id_\w+|\.netrc|\.pypirc|\.pgpass|\.git-credentials|credentials?(\..*)?"
    r"|\.?secrets?(\..*)?"
)
# Only as the last word of a name: "hf_token.txt" is a secret, "token-counts.txt" and "train_tokens.txt" are not.
_SECRET_WORD = r"(?i)(^|[._\- ])(api[._-]?key|token|credentials?)(\.[a-z0-9]+)?$"
_EXAMPLE = r"(?i)\.(example|sample|template|dist)$"
# Suffixes with which "token" means text for a model.
_PLAIN_TOKEN = frozenset((".bin", ".npy", ".npz", ".pt", ".safetensors", ".idx", ".md"))


def is_secret(name: str) -> bool:
    """Whether a file name stands for a key, a password or a token.

    `tokenizer.json`, `tokens.bin`, code about tokens and `.env.example` are no secrets."""
    ending = posixpath.splitext(name)[1].lower()
    if ending in _CODE or re.search(_EXAMPLE, name):
        return False
    return bool(re.fullmatch(_SECRET_NAME, name) or (ending not in _PLAIN_TOKEN and re.search(_SECRET_WORD, name)))


def _is_cache(name: str) -> bool:
    """Whether a file or folder is a cache that programs make again; a snapshot does not list it."""
    return name in _CACHES or name.endswith((".pyc", ".pyo"))


def is_source(name: str) -> bool:
    """Whether a file name is that of source code or other hand-written text."""
    ending = posixpath.splitext(name)[1].lower()
    return ending in _SOURCE or name in _SOURCE_NAMES or name.startswith("Dockerfile.")


# --- sort paths: copied, linked or excluded


class _Sorter:
    """Sorts the paths of one listing into `files`, `links` and `left_out`; `large` has the files that are linked
    because of their size."""

    def __init__(self, root: str, limits: SnapshotLimits) -> None:
        self.files: dict[str, int] = {}
        self.links: list[LinkedPath] = []
        self.large: dict[str, int] = {}
        self.left_out: dict[str, str] = {}
        self._root = root
        self._limits = limits
        self._stops: dict[str, bool] = {"": False}

    def sort(self, listing: _Listing) -> None:
        """Sort every path of a listing, each once."""
        self.left_out |= listing.left_out
        for path in dict.fromkeys(listing.files):
            self._sort_file(path)
        inside = {parent for path in self.files for parent in _list_parents(path)}
        for path, reason in listing.outside.items():
            self._sort_outside(path, reason, inside)

    def _sort_file(self, path: str) -> None:
        if self._is_stopped(posixpath.dirname(path)):
            return
        if is_secret(posixpath.basename(path)):
            self.left_out[path] = "secret by its name"
            return
        try:
            state = os.lstat(f"{self._root}/{path}")
        except FileNotFoundError:  # deleted, but still tracked by git
            return
        except OSError as error:
            self.left_out[path] = f"cannot be read: {error.strerror}"
            return
        if stat.S_ISLNK(state.st_mode):
            target, folder = os.readlink(f"{self._root}/{path}"), posixpath.dirname(path)
            place = posixpath.normpath(posixpath.join(folder, target))
            if posixpath.isabs(target) or place == ".." or place.startswith("../"):  # it keeps its target
                absolute = posixpath.normpath(posixpath.join(self._root, folder, target))
                self.links.append(LinkedPath(path, absolute, "symbolic link that leads out of the project"))
            else:
                self.files[path] = 0
        elif not stat.S_ISREG(state.st_mode):
            self.left_out[path] = "not a plain file"
        elif state.st_size > self._limits.file_bytes:
            size = f"{state.st_size / 2**20:.1f} MiB, more than {render_bytes(self._limits.file_bytes)}"
            self._link(path, size)
            self.large[path] = state.st_size
        else:
            self.files[path] = state.st_size

    def _sort_outside(self, path: str, reason: str, inside: set[str]) -> None:
        """Link a file or a folder; in a folder with copied files, link each of the other entries."""
        name, whole = posixpath.basename(path), f"{self._root}/{path}"
        if path in self.files or _is_cache(name) or self._is_stopped(posixpath.dirname(path)):
            return
        if path not in inside:
            if is_secret(name) and not os.path.isdir(whole):
                self.left_out[path] = "secret by its name"
            elif os.path.lexists(whole):
                self._link(path, reason)
            return
        with os.scandir(whole) as scan:
            entries = sorted(entry.name for entry in itertools.islice(scan, self._limits.entries + 1))
        if len(entries) > self._limits.entries:
            self.left_out[path] = f"{reason}; more than {self._limits.entries} entries beside code"
            return
        for entry in entries:
            self._sort_outside(f"{path}/{entry}", reason, inside)

    def _link(self, path: str, reason: str) -> None:
        self.links.append(LinkedPath(path, f"{self._root}/{path}", reason))

    def _is_stopped(self, folder: str) -> bool:
        """Whether nothing below a folder is copied. A run directory is linked as a whole."""
        if folder not in self._stops:
            path = Path(self._root, folder)
            stopped = self._is_stopped(posixpath.dirname(folder)) or path.is_symlink()
            run = RunDir(path)
            if not stopped and (os.path.isfile(run.resolved_path) or run.attempts() or run.has_shells()):
                self._link(folder, "run directory")
                stopped = True
            self._stops[folder] = stopped
        return self._stops[folder]


def _list_parents(path: str) -> list[str]:
    """Every folder above a path, relative as the path is."""
    return list(itertools.accumulate(path.split("/")[:-1], "{}/{}".format))


# --- a project without git: what looks like source


def _walk(root: str, below: str, most: int) -> _Listing | str:
    """The contents of a folder, or why it is treated as a whole.

    Source-like files are copied. Folders without any, environments and other files stay outside; hidden ones are
    excluded."""
    try:
        with os.scandir(os.path.join(root, below)) as scan:
            entries = sorted(itertools.islice(scan, most + 1), key=lambda entry: entry.name)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(entries) > most:
        return f"holds more than {most} entries"
    if any(entry.name in ("pyvenv.cfg", "conda-meta") for entry in entries):
        return "is an environment"
    found = _Listing()
    for entry in entries:
        name, path = entry.name, posixpath.join(below, entry.name)
        if _is_cache(name):
            continue
        if entry.is_dir(follow_symlinks=False):
            installed = name in ("node_modules", "site-packages")
            inner = "holds installed packages" if installed else _walk(root, path, most)
            if isinstance(inner, str):
                found.outside[path] = f"folder that {inner}"
            elif name.startswith("."):
                found.left_out[path] = "hidden"
            elif not inner.files:
                found.outside[path] = "folder without source code"
            else:
                found.files += inner.files
                found.outside |= inner.outside
                found.left_out |= inner.left_out
        elif is_secret(name):
            found.files.append(path)  # the sorter reports why it is excluded
        elif name.startswith("."):
            found.left_out[path] = "hidden"
        elif is_source(name) or entry.is_symlink():
            found.files.append(path)
        else:
            found.outside[path] = "not source code"
    return found


# --- a project with git

_TIMEOUT_S = 120.0
# Variables with which a git hook points at another repository.
_FOREIGN = frozenset(("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY"))


class _GitUnusable(Exception):
    """git is missing, or does not answer for this folder. The message is the reason, empty if there is no
    repository."""


@dataclass(frozen=True)
class Status:
    """The output of `git status`; folders end with "/"."""

    commit: str
    branch: str
    changed: bool
    untracked: tuple[str, ...]
    ignored: tuple[str, ...]


def _list_repository(top: Path, limits: SnapshotLimits, listing: _Listing, prefix: str = "") -> Revision:
    """Add tracked files and untracked ones that are not ignored to the listing, with `prefix` before each, also those
    of inner repositories. Raises _GitUnusable before anything is added."""
    tracked, inner = parse_stage(_git(top, "ls-files", "--stage", "-z"))
    status = parse_status(
        _git(top, "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=all", "--ignored=matching")
    )
    diff, cut = _read_diff(top, limits.diff_bytes) if status.changed and status.commit else ("", False)
    others = _git(top, "ls-files", "--others", "--directory", "-z").split("\0")
    untracked = [path for path in status.untracked if not path.endswith("/")]
    clones = [path.rstrip("/") for path in status.untracked if path.endswith("/")]
    listing.files += [prefix + path for path in (*tracked, *untracked)]
    ignored = [path.rstrip("/") for path in status.ignored]
    listing.outside |= {prefix + path: "ignored by git" for path in ignored if not _is_cache(posixpath.basename(path))}
    listing.folders += [prefix + path.rstrip("/") for path in others if path.endswith("/") and _is_empty(top / path)]
    dirty, submodules = status.changed or bool(status.untracked), list[Submodule]()
    for path in (*inner, *clones):
        place = prefix + path
        if not (top / path / ".git").exists():
            listing.left_out[place] = "submodule that is not checked out"
            continue
        try:
            found = _list_repository(top / path, limits, listing, f"{place}/")
        except _GitUnusable as error:
            listing.left_out[place] = f"repository that git cannot read: {error}"
        else:
            submodules += [Submodule(place, found.commit, found.dirty), *found.submodules]
            dirty = dirty or found.dirty
    return Revision(status.commit, status.branch, dirty, len(untracked), diff, cut, tuple(submodules))


def _is_empty(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except OSError:
        return False


def parse_stage(output: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tracked files and submodules from `git ls-files --stage -z`; a path in conflict appears once."""
    files: dict[str, None] = {}
    submodules: dict[str, None] = {}
    for entry in output.split("\0"):
        meta, tab, path = entry.partition("\t")
        if tab:
            (submodules if meta.startswith("160000") else files)[path] = None
    return tuple(files), tuple(submodules)


def parse_status(output: str) -> Status:
    """The status from `git status --porcelain=v2 --branch -z`."""
    commit, branch, changed = "", "", False
    untracked, ignored = [], []
    entries = iter(output.split("\0"))
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


def _read_diff(top: Path, most: int) -> tuple[str, bool]:
    """Changes of tracked text against the commit, at most `most` bytes, and whether there is more."""
    plain = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
    names = _git(top, *plain, "--name-only", "-z", "HEAD", "--").split("\0")
    # A secret that was once committed appears in a diff when it changes or is deleted.
    hidden = [f":(top,exclude,literal){name}" for name in names if is_secret(posixpath.basename(name))]
    words, environ = _command(top, *plain, "HEAD", "--", ":(top)", *hidden)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ) as process:
        text = process.stdout.read(most + 1) if process.stdout else b""
        process.kill()
    # git takes a file for text if its first NUL is far from the start; a text that is sent elsewhere cannot hold one.
    return text[:most].decode("utf-8", "replace").replace("\0", "\ufffd"), len(text) > most


def _git(folder: Path, *arguments: str) -> str:
    """The output of a git command. Raises _GitUnusable."""
    words, environ = _command(folder, *arguments)
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, env=environ)
    except FileNotFoundError:
        raise _GitUnusable("git is not installed") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _GitUnusable(str(error)) from None
    if done.returncode == 0:
        return os.fsdecode(done.stdout)
    message = done.stderr.decode("utf-8", "replace").strip()
    if "not a git repository" in message or "must be run in a work tree" in message:
        raise _GitUnusable("")
    first = message.splitlines()[0].removeprefix("fatal: ") if message else f"git ended with {done.returncode}"
    raise _GitUnusable(first)


def _command(folder: Path, *arguments: str) -> tuple[Sequence[str], dict[str, str]]:
    """A git command and its environment, without pointers at another repository and with messages in English."""
    environ = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    return ["git", "--no-optional-locks", "-C", str(folder), *arguments], {**environ, "LC_ALL": "C"}


# --- a snapshot on disk

FORMAT = 1
_MOST_TOLD = 1000
"""Most entries of a kind that a record lists; of further ones it has only the count."""
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EISDIR, errno.ELOOP)
"""What reading a file fails with that was deleted, replaced or closed to us since the plan was made."""
_CANNOT_SHARE = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)
"""What copy_file_range(2) fails with where two files cannot share bytes."""


def take_snapshot(plan: SnapshotPlan, target: Path) -> None:
    """Copy what the plan says into `target`, the code folder of an attempt, and write its record and diff beside it.

    A file that vanished since is left out and listed. Raises UserError where the target exists or cannot be written.
    """
    attempt, revision = Attempt(target.parent), plan.revision
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        raise UserError(
            f"{target} holds a snapshot already.\n  Nothing in it was changed. To do: submit a new attempt."
        ) from None
    except OSError as error:
        raise _refused(target, error) from None
    try:
        for folder in sorted({*plan.folders, *map(posixpath.dirname, plan.files)}):
            os.makedirs(f"{target}/{folder}", exist_ok=True)
        why = {path: _copy(f"{plan.root}/{path}", f"{target}/{path}") for path in plan.files}
        for link in plan.links:
            place = target / link.path
            place.parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(place):
                os.symlink(link.target, place)
        copied = [size for path, size in plan.files.items() if not why[path]]
        left_out = {**plan.left_out, **{path: reason for path, reason in why.items() if reason}}
        if revision:
            write_whole(attempt.diff_path, revision.diff)
        record = {
            "format": FORMAT,
            "root": str(plan.root),
            "below": plan.below,
            "taken": time.time(),
            "git": revision is not None,
            "commit": revision.commit if revision else "",
            "branch": revision.branch if revision else "",
            "dirty": revision.dirty if revision else None,
            "untracked": revision.untracked if revision else None,
            "diff_cut": revision.diff_cut if revision else False,
            "submodules": [vars(entry) for entry in revision.submodules] if revision else [],
            "files": len(copied),
            "bytes": sum(copied),
            "links_count": len(plan.links),
            "links": [vars(entry) for entry in plan.links[:_MOST_TOLD]],
            "left_out_count": len(left_out),
            "left_out": [{"path": path, "reason": left_out[path]} for path in list(left_out)[:_MOST_TOLD]],
            "notes": list(plan.notes),
        }
        write_json(attempt.snapshot_path, record)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise _refused(target, error) from None
        raise


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
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            return "not a plain file any more"
        with open(target, "xb", buffering=0) as writer:
            _pump(descriptor, writer.fileno())
            os.fchmod(writer.fileno(), state.st_mode & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
        os.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))
    finally:
        os.close(descriptor)
    return ""


def _pump(source: int, target: int) -> None:
    """Copy all bytes; file systems that can share them do."""
    if hasattr(os, "copy_file_range"):
        try:
            while os.copy_file_range(source, target, 1 << 30):
                pass
        except OSError as error:
            if error.errno not in _CANNOT_SHARE:
                raise
    # What is left: all where bytes cannot be shared, nothing but the end elsewhere.
    while data := os.read(source, 1 << 20):
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]


def _refused(target: Path, error: OSError) -> UserError:
    return UserError(
        f"the snapshot of the code cannot be written to {target}: {error.strerror or error}.\n"
        f"  To do: {find_remedy(error, ANOTHER_FOLDER)}."
    )


def work_in_copies(plan: SnapshotPlan) -> Callable[[Path], Path]:
    """For the rehearsal of a command: the folder in which the attempts of a run directory work, made of this snapshot
    the first time."""

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
