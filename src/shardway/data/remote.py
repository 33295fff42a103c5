"""Data behind an address (s3://, https://, gs://), copied to this machine before they are prepared.

Invariants:
- A file has its final name only when it is whole; what was copied of one before a kill is gone on with, not again.
- Nothing is read from an address while a run trains: compute nodes seldom have a network.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardway.data.content import DataPath, fingerprint
from shardway.data.formats.base import expand_braces, need_library
from shardway.errors import JobError, UserError, list_some
from shardway.refusals import FULL, find_remedy
from shardway.units import render_plural
from shardway.watch.words import render_size

PIECE_BYTES = 2**23


@contextlib.contextmanager
def fetched(source: str, out: Path, tell: Callable[[str], object]) -> Iterator[str]:
    """The path at which the data of `source` lie on this machine: itself, or a copy beside `out` that is removed
    when the block ends without an error.

    Raises UserError for an address that cannot be opened, JobError if copying fails.
    """
    if "://" not in source:
        yield source
        return
    place = DataPath("SOURCE", source)
    system, sizes, version = _look_up(place)
    base = os.path.commonpath([os.path.dirname(path) for path in sizes])
    names = {path: os.path.relpath(path, base) for path in sizes}
    folder = out.parent / f".{out.name}.fetched-{version[:12]}"
    try:
        for other in out.parent.glob(f".{glob.escape(out.name)}.fetched-*"):
            if other != folder:  # of another address, or of files that have changed since
                shutil.rmtree(other)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataPath("OUT", str(out)).error(
            f"cannot be written: {error.strerror}", remedy=find_remedy(error, "choose another folder")
        ) from error
    size = render_size(sum(sizes.values()))
    tell(f"copying {render_plural(len(sizes), 'file')}, {size}, from {source} to {folder}")
    for path, name in names.items():
        _copy(system, path, folder / name, sizes[path])
    yield str(folder / next(iter(names.values()))) if len(names) == 1 else str(folder)
    shutil.rmtree(folder, ignore_errors=True)


_LOOK = "look at the address, and whether this machine reaches it"
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "updated", "mtime", "created")
"""What file systems say of a file that changes with its content."""


def _look_up(place: DataPath) -> tuple[Any, dict[str, int], str]:
    """The file system of an address, the size of each file there, and what changes if one of them does."""
    library = need_library("fsspec", place, "remote", "remote")
    try:
        system, root = library.core.url_to_fs(place.text)
        facts = {path: system.info(path) for path in _find_files(system, root, place)}
    except UserError:
        raise
    except ImportError as error:
        raise place.error(
            f"needs a further Python package: {error}", remedy='pip install "shardway[remote]"'
        ) from error
    except FileNotFoundError as error:
        raise place.error("does not exist", remedy=_LOOK) from error
    except Exception as error:  # each file system raises errors of its own
        raise place.error(f"cannot be opened: {str(error) or type(error).__name__}", remedy=_LOOK) from error
    unknown = [path for path, fact in facts.items() if fact.get("size") is None]
    if unknown:
        raise place.error(f"has a file whose size is not known: {unknown[0]}", remedy="copy it by other means")
    versions = (fact.get(name, "") for fact in facts.values() for name in ("name", "size", *_VERSIONS))
    return system, {path: int(fact["size"]) for path, fact in facts.items()}, fingerprint(place.text, *versions)


def _find_files(system: Any, root: str, place: DataPath) -> list[str]:
    """The files at an address, sorted. Raises UserError if there is none, or one that a pattern names is missing."""
    patterns = list(expand_braces(root))
    if any(sign in root for sign in "*?["):
        found = {path for pattern in patterns for path in system.glob(pattern) if system.isfile(path)}
    elif len(patterns) > 1:
        found = set(patterns)
        missing = sorted(os.path.basename(path) for path in found if not system.exists(path))
        if missing:
            raise place.error(f"names files that are missing: {list_some(missing, 5)}", remedy="name fewer")
    elif "http" in system.protocol and not root.endswith("/"):
        found = {root}  # any page with links would be a folder
    else:
        found = set(system.find(root)) if system.isdir(root) else {root}
    if not found:
        raise place.error("has no file", remedy=_LOOK)
    return sorted(found)


def _copy(system: Any, path: str, target: Path, size: int) -> None:
    part = target.with_name(f".{target.name}.part")
    try:
        if target.is_file() and target.stat().st_size == size:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as local:
            if local.tell() > size:
                local.truncate(0)
                local.seek(0)
            try:
                _append(system, path, local, cache_type="none")
            except ValueError:  # a server that gives no parts of files: the whole, as one stream
                local.truncate(0)
                local.seek(0)
                _append(system, path, local, block_size=0)
            local.flush()
            os.fsync(local.fileno())
            copied = local.tell()
    except Exception as error:  # each file system raises errors of its own
        if isinstance(error, OSError) and error.errno in FULL:
            raise JobError(
                f"no space for {path} in {target.parent} ({error.strerror})\n"
                "  To do: write OUT to a folder with room; what was copied stays, and the same command goes on."
            ) from error
        raise JobError(
            f"{path} could not be copied: {str(error) or type(error).__name__}\n"
            "  To do: run the same command again to go on."
        ) from error
    if copied != size:
        part.unlink()
        raise JobError(f"{path} has {size} bytes and {copied} were copied\n  To do: run the same command again.")
    os.replace(part, target)


def _append(system: Any, path: str, local: Any, **options: Any) -> None:
    """Append what a file has behind the bytes that are there."""
    with system.open(path, "rb", **options) as remote:
        if local.tell():
            remote.seek(local.tell())
        while piece := remote.read(PIECE_BYTES):
            local.write(piece)
