"""Data behind an address (s3://, https://, gs://), copied to this machine before they are prepared.

Invariants:
- A file has its final name only when it is whole; what was copied of one before a kill is gone on with, not again.
- Nothing is read from an address while a run trains: compute nodes seldom have a network.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardway.data.content import DataPath, fingerprint
from shardway.data.formats.base import need_library
from shardway.errors import JobError, UserError
from shardway.refusals import FULL

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
    folder = out.parent / f".{out.name}.fetched-{fingerprint(source)[:12]}"
    names = _copy_all(source, folder, tell)
    yield str(folder / names[0]) if len(names) == 1 else str(folder)
    for name in names:
        (folder / name).unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
    folder.rmdir()


def _copy_all(source: str, folder: Path, tell: Callable[[str], object]) -> list[str]:
    """Copy the file at an address, those below it, or those of a pattern; returns their names below `folder`."""
    place = DataPath("SOURCE", source)
    library = need_library("fsspec", place, "remote", "remote")
    try:
        system, root = library.core.url_to_fs(source)
        if any(sign in root for sign in "*?["):
            found = sorted(system.glob(root))
        else:
            found = sorted(system.find(root)) if system.isdir(root) else [root]
        sizes = {path: int(system.info(path)["size"]) for path in found}
    except ImportError as error:
        raise place.error(
            f"needs a further Python package: {error}", remedy='pip install "shardway[remote]"'
        ) from error
    except FileNotFoundError as error:
        raise place.error("does not exist") from error
    except Exception as error:  # each file system raises errors of its own
        raise place.error(f"cannot be opened: {type(error).__name__}: {error}") from error
    if not found:
        raise place.error("has no file")
    base = os.path.commonpath([os.path.dirname(path) for path in found])
    names = [os.path.relpath(path, base) for path in found]
    tell(f"copying {len(found)} files, {sum(sizes.values()) / 1e6:.1f} MB, from {source} to {folder}")
    for path, name in zip(found, names, strict=True):
        _copy(system, path, folder / name, sizes[path])
    return names


def _copy(system: Any, path: str, target: Path, size: int) -> None:
    if target.is_file() and target.stat().st_size == size:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    try:
        with part.open("ab") as local, system.open(path, "rb") as remote:
            if local.tell() > size:
                local.truncate(0)
            if local.tell():
                remote.seek(local.tell())
            while piece := remote.read(PIECE_BYTES):
                local.write(piece)
            local.flush()
            os.fsync(local.fileno())
            copied = local.tell()
    except OSError as error:
        if error.errno in FULL:
            raise JobError(
                f"no space for {path} in {target.parent} ({error.strerror})\n"
                "  To do: write OUT to a folder with room; what was copied stays, and the same command goes on."
            ) from error
        raise JobError(f"{path} could not be copied: {error}\n  To do: run the same command again to go on.") from error
    if copied != size:
        raise JobError(f"{path} has {size} bytes and {copied} were copied\n  To do: run the same command again.")
    os.replace(part, target)


def check_is_local(place: DataPath) -> None:
    """Raise UserError if a path of a run file is an address."""
    if "://" in place.text:
        raise UserError(
            f'{place.key}: "{place.text}" is an address, and a run reads files\n'
            f"  to do: copy it first: `shardway data prepare {place.text} OUT`"
        )
