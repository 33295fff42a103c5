"""Files of a run directory: written whole, read with types, looked up without hanging, errors with a remedy.

Invariants:
- After `write_whole` returns, the file has the new content even across a power cut (if `durable`); if it raises, the
  file has the old content.
- `write_named` replaces regular files alone: a link stays, and a device or a pipe takes the text itself.
- "Absent" means that the file system answered so. A file system that does not answer (a server that is gone, a lost
  mount) is a JobError: what counts as absent may be made anew, and what counts as damaged set aside.
- `refusals` turns an OSError into a JobError with a remedy, and passes every other error on.
- `read_fields` returns no value of another type and no number that is not finite.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from shardway.errors import JobError
from shardway.refusals import AWAY, find_remedy


class PathBelow:
    """A name below the `path` of an object, as an attribute of its class."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> Path:
        folder: Path = owner.path
        return folder / self._name


# --- files written whole or not at all

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without links: FAT, some of FUSE and SMB."""


def write_whole(path: Path, text: str, *, durable: bool = True) -> None:
    """Write `text` to a temporary neighbour, fsync it, rename it over `path` and fsync the folder. Without `durable`
    there is no fsync, which takes a disk milliseconds: readers find the old or the new content, and after a power cut
    perhaps none."""
    with _written_beside(path, text, durable=durable) as temporary:
        os.replace(temporary, path)
    if durable:
        fsync_folder(path.parent)


_OPEN_FILES = ("/dev/std", "/dev/fd/", "/proc/")
"""How names of files begin that are open already: another file in their place would be written in vain."""


def write_named(path: Path, text: str) -> None:
    """Write a file that a user has named: whole, where it is a regular file or none yet. Raises OSError."""
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        is_regular = True
    if is_regular and not str(path).startswith(_OPEN_FILES):
        write_whole(Path(os.path.realpath(path)), text, durable=False)
    else:
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)


def write_new(path: Path, text: str) -> bool:
    """Write a whole file under a free name; returns whether the name was free. Where the file system has no links,
    readers may find the file empty for an instant."""
    try:
        with _written_beside(path, text, durable=True) as temporary:
            try:
                os.link(temporary, path)  # unlike a rename, refuses to take another's place
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _write_file(path, text, durable=True)
    except FileExistsError:
        return False
    fsync_folder(path.parent)
    return True


def why_refused(folder: Path) -> str:
    """The system's reason why nothing can be written into a folder now; empty where something can."""
    try:
        with _written_beside(folder / "probe", " " * 4096, durable=True):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__


@contextlib.contextmanager
def _written_beside(path: Path, text: str, *, durable: bool) -> Iterator[Path]:
    """A temporary neighbour of `path` with `text` in it; removed afterwards unless it was renamed."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        _write_file(temporary, text, durable=durable)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _write_file(path: Path, text: str, *, durable: bool) -> None:
    with open(path, "x", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def write_json(path: Path, content: Mapping[str, Any], *, durable: bool = True) -> None:
    """`content` as strict JSON, written whole."""
    write_whole(path, render_json(content, indent=1) + "\n", durable=durable)


def render_json(content: Any, **form: Any) -> str:
    """JSON that every reader accepts; a number that is not finite, which JSON lacks (RFC 8259), is null."""
    try:
        return json.dumps(content, allow_nan=False, **form)
    except ValueError:
        return json.dumps(_without_nan(content), allow_nan=False, **form)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return value


def remove_folder(folder: Path) -> None:
    """Remove a folder and its content as far as the file system allows; what is left is of no use. `shutil.rmtree`
    raises despite `ignore_errors` where a file system goes away while a folder is open."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` durable; file systems that cannot fsync a folder are ignored."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- existence on a file system that may not answer

ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG))
"""Errors that mean: nothing exists at the path, or nothing can."""

UNREADABLE = AWAY | {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EIO}
"""Errors that do not tell whether the file exists: it may not, or cannot, be looked at from here."""


def is_there(path: Path) -> bool:
    """Whether something exists there. Raises JobError where the file system does not answer."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise unanswered(path, error) from error
    return True


def is_seen(path: Path) -> bool:
    """The same, with False where the file system does not answer: for repeated looks."""
    with contextlib.suppress(JobError):
        return is_there(path)
    return False


def list_names(folder: Path) -> list[str]:
    """The names in a folder, unordered; none where there is no folder. Raises JobError as `is_there` does."""
    try:
        return os.listdir(folder)
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise unanswered(folder, error) from error


def list_missing(path: Path) -> tuple[Path, ...]:
    """Of a path and the folders above it, those that do not exist, innermost first. Raises JobError."""
    return tuple(takewhile(lambda folder: not is_there(folder), (path, *path.parents)))


def answers(folder: Path) -> bool:
    """Whether the file system of a folder answers now; asks for a name that no cache holds."""
    try:
        os.stat(folder / f".shardway-{uuid.uuid4().hex}")
    except OSError as error:
        return error.errno not in AWAY
    return True


def check_answers(path: Path, error: Exception) -> None:
    """Raise JobError where this error of reading a file is no evidence about the file."""
    if isinstance(error, OSError) and error.errno in AWAY:
        raise unanswered(path, error) from error


def unanswered(path: Path, error: OSError) -> JobError:
    """The JobError for a file system that did not answer a question."""
    return JobError(
        f"{path} cannot be looked at: {error.strerror}.\n"
        f"  Nothing that was saved has changed. To do: {find_remedy(error)}; then run the same command again. A run "
        "goes on from its last checkpoint."
    )


# --- errors of the file system with a remedy


@contextlib.contextmanager
def refusals(run: Path) -> Iterator[None]:
    """While entered, errors of writing into a run directory become a JobError with a remedy."""
    try:
        yield
    except OSError as error:
        raise refused(run, error) from error


def refused(run: Path, error: OSError) -> JobError:
    """The JobError for an error of the file system."""
    target = error.filename2 or error.filename
    where = f" ({target})" if target else ""
    return JobError(
        f"the run directory {run} does not take more writing: {error.strerror}{where}.\n"
        f"  What was saved before is unchanged. To do: {find_remedy(error)}; then run the same command again: it goes "
        "on from the last checkpoint."
    )


# --- from a table to a typed dataclass

T = TypeVar("T")
_WRONG = object()


def read_fields(kind: type[T], table: Any) -> T | None:
    """The dataclass in a table: unknown keys, and values of another type, count as absent. None where a field without a
    default stays unset, or `table` is not a table."""
    if not isinstance(table, Mapping):
        return None
    hints, found = get_type_hints(kind), {}
    for each in fields(kind):  # type: ignore[arg-type]
        value = _read(hints[each.name], table[each.name]) if each.name in table else _WRONG
        if value is not _WRONG:
            found[each.name] = value
        elif each.default is MISSING and each.default_factory is MISSING:
            return None
    return kind(**found)


def _read(hint: Any, value: Any) -> Any:
    """The value as that type, or _WRONG. An integer also counts as a float."""
    origin = get_origin(hint)
    if origin is tuple:
        entries = [_read(get_args(hint)[0], entry) for entry in value] if isinstance(value, list) else [_WRONG]
        return _WRONG if _WRONG in entries else tuple(entries)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return value if isinstance(value, Mapping) else _WRONG
    for kind in get_args(hint) if origin is not None else (hint,):
        if isinstance(value, bool) or kind in (bool, NoneType):
            if type(value) is kind:
                return value
        elif kind is float and isinstance(value, int | float):
            with contextlib.suppress(OverflowError):
                if math.isfinite(float(value)):
                    return float(value)
        elif isinstance(value, str) and issubclass(kind, str):
            # Text that can be printed and passed to a program: no lone surrogate, no NUL.
            with contextlib.suppress(UnicodeEncodeError):
                value.encode()
                if "\0" not in value:
                    return value
        elif isinstance(value, kind):
            return value
    return _WRONG
