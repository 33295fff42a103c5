"""The cache of prepared token files.

Invariant: a file in the cache is whole under its final name; it is written beside it and renamed. This module
must not know what the tokens mean.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from shardway.data.sources.base import DataPath, data_error
from shardway.data.sources.tokens import TokenFile, read_npy
from shardway.errors import Bug, JobError, UserError
from shardway.places import expand_place, find_own_folder
from shardway.refusals import FULL, find_remedy

STALE_S = 86400.0
"""A temporary file older than this was left by a kill and is removed."""

Tokens = npt.NDArray[Any]

_PREFIX = ".preparing-"


def cache_folder(configured: str) -> Path:
    """data.cache, where "auto" is shardway in the user's cache folder. Raises UserError where there is none."""
    if configured != "auto":
        return expand_place(configured)
    folder = find_own_folder("CACHE")
    if folder is None:
        what = '"auto" needs a home folder, and this account has none'
        raise data_error("data.cache", what, remedy="set data.cache to a folder")
    return folder


def prepare_tokens(folder: Path, name: str, dtype: np.dtype[Any], tokens: Callable[[], Iterator[Tokens]]) -> TokenFile:
    """The token file `name` of a cache folder; where it is missing or damaged, `tokens()` is written to it.

    `tokens` gives pieces of `dtype` and turns its own reading errors into Shardway's: an OSError here is the cache's.
    Safe for many processes at once: each writes a file of its own and the last rename stands, with equal content.
    Raises UserError where the folder may not be written, JobError where there is no space.
    """
    target = folder / f"{name}.npy"
    if not _is_whole(target):
        with _cache_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_stale(folder)
            _write_tokens(target, dtype, tokens())
    return read_npy(DataPath("data.cache", str(target)))


def _is_whole(target: Path) -> bool:
    try:
        return target.is_file() and read_npy(DataPath("data.cache", str(target))).tokens >= 0
    except UserError:
        return False


def _write_tokens(target: Path, dtype: np.dtype[Any], tokens: Iterator[Tokens]) -> None:
    temporary = target.parent / f"{_PREFIX}{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as stream:
            _write_npy(stream, dtype, tokens)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _write_npy(stream: IO[bytes], dtype: np.dtype[Any], tokens: Iterator[Tokens]) -> None:
    """A NumPy file whose length is known only at the end: the header is written twice, NumPy pads it for that."""
    count, start = 0, _write_header(stream, dtype, 0)
    for piece in tokens:
        stream.write(piece.data)
        count += piece.size
    stream.seek(0)
    if _write_header(stream, dtype, count) != start:
        raise Bug(f"the header of a token file grew with its length of {count} tokens; please report this")
    stream.flush()
    os.fsync(stream.fileno())


def _write_header(stream: IO[bytes], dtype: np.dtype[Any], count: int) -> int:
    header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.tell()


def _remove_stale(folder: Path) -> None:
    for left in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_S:
                left.unlink()


@contextlib.contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Say which folder could not be written, and what to do."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in FULL:
            raise JobError(
                f"no space for prepared data in {folder} ({reason})\n"
                f"  To do: {find_remedy(error, 'set data.cache to a folder with room')}."
            ) from error
        raise data_error(
            "data.cache", f'"{folder}" cannot be written: {reason}', remedy="set data.cache to a folder of yours"
        ) from error
