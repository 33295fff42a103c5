"""Files that appear whole or not at all.

Invariant: after `write_whole` returns, the file has the new content even across a power cut (unless it need not be
durable); if it raises, the file has the old content. This module must not know what it writes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems without links say: FAT, some of FUSE and SMB."""


def write_whole(path: Path, text: str, *, durable: bool = True) -> None:
    """Write `text` to a temporary neighbour, fsync it, rename it over `path` and fsync the folder.

    Not `durable`, it is not fsynced, which takes a disk milliseconds: readers find the old or the new content, and
    after a power cut perhaps none.
    """
    with _written_beside(path, text, durable=durable) as temporary:
        os.replace(temporary, path)
    if durable:
        fsync_folder(path.parent)


def write_new(path: Path, text: str) -> bool:
    """Write a whole file under a name that nobody has taken; whether it was free.

    Where the file system has no links, readers may find it empty for an instant.
    """
    with _written_beside(path, text, durable=True) as temporary:
        try:
            os.link(temporary, path)  # unlike a rename, refuses to take another's place
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not _write_exclusively(path, text):
                return False
    fsync_folder(path.parent)
    return True


def why_refused(folder: Path) -> str:
    """Why nothing can be written into a folder now, in the words of the system; empty where something can."""
    try:
        with _written_beside(folder / "probe", " " * 4096, durable=True):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__


def _write_exclusively(path: Path, text: str) -> bool:
    try:
        with open(path, "x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


@contextlib.contextmanager
def _written_beside(path: Path, text: str, *, durable: bool) -> Iterator[Path]:
    """A temporary neighbour of `path` that holds `text`; gone afterwards, unless it was renamed."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path: Path, content: Mapping[str, Any], *, durable: bool = True) -> None:
    """`content` as strict JSON, written whole."""
    write_whole(path, render_json(content, indent=1) + "\n", durable=durable)


def render_json(content: Any, **form: Any) -> str:
    """JSON that every reader takes; a number that is not finite, which has no form there (RFC 8259), is null."""
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
    """Remove a folder and what is in it, as far as the file system lets: what is left is no file of anybody's.

    `shutil.rmtree` raises in spite of `ignore_errors` where a file system goes away while a folder is open.
    """
    with contextlib.suppress(OSError):
        shutil.rmtree(folder, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` durable; file systems that cannot fsync a folder are left alone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
