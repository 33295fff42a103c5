"""Writes records in another format: every record with its fields, in the same order.

Invariants:
- What is written has its final name only when it is whole; a kill leaves a folder whose name begins with a dot.
- A value that a format cannot hold is refused with its field and record, never changed silently. What is held in
  another type is said with each writer. Names that begin with "__" are no fields (keys of a source).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardway.data.content import DataPath
from shardway.data.formats.base import RECORDS_AT_ONCE, Record, Records
from shardway.data.formats.shard_file import ShardFacts
from shardway.data.record_writers import (
    ROOM_BYTES,
    SHARD_BYTES,
    count_bytes,
    fields_of,
    find_image_suffix,
    refuse_value,
    write_arrays,
    write_arrow,
    write_hdf5,
    write_idx,
    write_jsonl,
    write_lmdb,
    write_mds,
    write_parquet,
)
from shardway.data.tar_writers import write_energon, write_webdataset
from shardway.errors import JobError, UserError
from shardway.refusals import find_remedy

Writer = Callable[[Iterator[Record], Path], None]


def convert_records(
    records: Records, out: Path, to: str, fields: Sequence[str], advance: Callable[[int, int], object]
) -> dict[str, int]:
    """Write all records at a path in the format `to`; returns samples, bytes and files.

    `fields`: these alone, or all. `advance` is called with records done and their number. Raises UserError if the path
    is taken, the format cannot be written, or it cannot hold a value.
    """
    writer = WRITERS.get(to)
    if writer is None:
        raise DataPath("--to", to).error("cannot be written", allowed=", ".join(sorted((*WRITERS, "squashfs"))))
    known = [name for name in records.fields if not name.startswith("__")]
    missing = [name for name in fields if name not in known]
    if missing:
        raise DataPath("--field", missing[0]).error("is no field of these records", allowed=", ".join(known))
    with _written(out) as temporary:
        writer(_walk(records, fields, advance), temporary)
    files = [path for path in out.rglob("*") if path.is_file()] if out.is_dir() else [out]
    return {"samples": len(records), "bytes": sum(path.stat().st_size for path in files), "files": len(files)}


def pack_squashfs(source: Path, out: Path) -> dict[str, int]:
    """Pack a folder, with all small files in it, into one file system image that a container mounts.

    By `mksquashfs` of squashfs-tools with zstd. Raises UserError if the source is no folder or the path is taken,
    JobError if the tool is missing or fails.
    """
    if not source.is_dir():
        raise DataPath("SOURCE", str(source)).error("is no folder", allowed="a folder, which squashfs packs")
    tool = shutil.which("mksquashfs")
    if tool is None:
        raise JobError("mksquashfs is not there\n  To do: install squashfs-tools, or ask the support of your centre.")
    with _written(out) as temporary:
        command = [tool, str(source), str(temporary), "-comp", "zstd", "-no-progress", "-quiet", "-no-xattrs"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            said = (ran.stderr or ran.stdout).strip().splitlines()
            raise JobError(
                f"mksquashfs failed with exit code {ran.returncode}: {said[-1] if said else 'no reason given'}"
            )
    samples = sum(len(names) for _, _, names in os.walk(source))
    return {"samples": samples, "bytes": out.stat().st_size, "files": 1}


@contextlib.contextmanager
def _written(out: Path) -> Iterator[Path]:
    """A path to write to, which gets its name at the end; nothing is left of it after an error.

    Raises UserError if the name is taken or cannot be had, JobError if the file system refuses what is written.
    """
    place = DataPath("OUT", str(out))
    if os.path.lexists(out):
        raise place.error("is there already", remedy="name another path, or move it away")
    temporary = out.parent / f".{out.stem}.writing{out.suffix}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
    except OSError as error:
        raise place.error(
            f"cannot be written: {error.strerror}", remedy=find_remedy(error, "choose another path")
        ) from error
    try:
        yield temporary
        os.replace(temporary, out)
    except BaseException as error:
        reason = _find_refusal(error, out.parent)
        _remove(temporary)
        if reason:
            raise JobError(
                f"{out} cannot be written: {reason}; nothing of it is left\n"
                f"  To do: {find_remedy(reason, 'choose another path')}; then run the same command again."
            ) from error
        raise


def _find_refusal(error: BaseException, folder: Path) -> str:
    """Why the file system refused to be written, as LMDB, SQLite and HDF5 say it too; "" for any other error."""
    if type(error).__module__ in ("lmdb", "sqlite3") and shutil.disk_usage(folder).free < ROOM_BYTES:
        return os.strerror(errno.ENOSPC)  # they call it an input/output error
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if found := re.search(r"error message = '([^']+)'", str(error)):
        return found[1]
    return str(error) if isinstance(error, OSError) or type(error).__module__ in ("lmdb", "sqlite3") else ""


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _walk(records: Records, fields: Sequence[str], advance: Callable[[int, int], object]) -> Iterator[Record]:
    for first in range(0, len(records), RECORDS_AT_ONCE):
        numbers = range(first, min(first + RECORDS_AT_ONCE, len(records)))
        try:
            found = records.read(numbers, fields)
        except OSError as error:
            raise JobError(f"{records.parts.root} cannot be read: {error.strerror or error}") from error
        yield from found
        advance(numbers.stop, len(records))


# --- tokens, images, texts


def _tokens_of(record: Record, number: int) -> Any:
    for name in ("tokens", "input_ids"):
        value = record.get(name)
        if isinstance(value, np.ndarray | list):
            array = np.asarray(value)
            if array.size and (array.ndim != 1 or array.dtype.kind not in "iu" or int(array.min()) < 0):
                raise refuse_value(number, name, array, "a row of tokens", "give one row of integers from 0 on")
            return array if array.size else np.zeros(0, np.int64)
    raise UserError(
        f"record {number} has no field of tokens (tokens or input_ids), but {', '.join(fields_of(record))}\n"
        "  to do: make tokens of texts: `shardway data prepare SOURCE OUT --tokenizer T`"
    )


def write_megatron(records: Iterator[Record], out: Path) -> None:
    """A folder with data.bin and data.idx, as Megatron-LM's indexed data set has them (version 1)."""
    from shardway.data.formats.megatron import write_megatron_files

    out.mkdir()
    write_megatron_files(out / "data", (_tokens_of(record, number) for number, record in enumerate(records)))


def write_tokens(records: Iterator[Record], out: Path) -> None:
    """A folder of token shards with checksums."""
    from shardway.data.formats.shard_file import write_token_shard
    from shardway.data.formats.shard_manifest import write_manifest

    out.mkdir()
    vocab = 0

    def documents() -> Iterator[tuple[Any, Any]]:
        nonlocal vocab
        for number, record in enumerate(records):
            tokens = _tokens_of(record, number)
            vocab = max(vocab, int(tokens.max()) + 1 if tokens.size else 0)
            yield tokens, record.get("counted")

    facts = [write_token_shard(out / "00000.shard", documents(), "uint32")]
    write_manifest(out, "tokens", facts, {"vocab": vocab})


def write_shards(records: Iterator[Record], out: Path) -> None:
    """A folder of shards with checksums."""
    from shardway.data.formats.shard_file import write_record_shard
    from shardway.data.formats.shard_manifest import write_manifest

    out.mkdir()
    facts: list[ShardFacts] = []
    held = _Held(records)
    while not held.ended:
        facts.append(write_record_shard(out / f"{len(facts):05d}.shard", held.take(SHARD_BYTES)))
    write_manifest(out, "records", facts, {})


class _Held:
    """An iterator of records that is taken in portions of about so many bytes."""

    def __init__(self, records: Iterator[Record]) -> None:
        self._records, self._next = records, next(records, None)

    @property
    def ended(self) -> bool:
        return self._next is None

    def take(self, most: int) -> Iterator[Record]:
        taken = 0
        while self._next is not None and taken < most:
            record = self._next
            taken += count_bytes(record)
            yield record
            self._next = next(self._records, None)


def write_images(records: Iterator[Record], out: Path) -> None:
    """A folder for each class with its images, as they are; of other fields nothing is kept.

    A class that is a number, or the digits of one, has a folder of five digits, so that its place among the sorted
    folders is that number again.
    """
    out.mkdir()
    numbers: dict[int, int] = {}
    for number, record in enumerate(records):
        image = next((value for value in record.values() if find_image_suffix(value)), None)
        label = next(
            (
                record[name]
                for name in ("label", "cls", "class", "y", "target", "labels")
                if isinstance(record.get(name), int | str | bytes | np.integer)
            ),
            None,
        )
        if image is None or label is None:
            missing = "image" if image is None else "class (label, cls, class, y, target)"
            raise UserError(
                f"record {number} has no {missing} among its fields {', '.join(fields_of(record))}\n"
                "  to do: choose another format"
            )
        name = (label.decode(errors="replace") if isinstance(label, bytes) else str(label)).strip()
        if name.isdecimal():
            numbers.setdefault(int(name), number)
            name = f"{int(name):05d}"
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise UserError(f'record {number} has the class "{name}", which cannot be the name of a folder')
        folder = out / name
        folder.mkdir(exist_ok=True)
        content = image["bytes"] if isinstance(image, dict) else image
        (folder / f"{number:09d}.{find_image_suffix(image)}").write_bytes(content)
    if numbers and sorted(numbers) != list(range(len(numbers))):
        wrong = next(number for at, number in enumerate(sorted(numbers)) if at != number)
        raise UserError(
            f"there is class {wrong} (record {numbers[wrong]}) and none of the class before it, so a folder of images "
            "would give it another number\n  to do: choose another format"
        )


def write_text(records: Iterator[Record], out: Path) -> None:
    """A folder with a text file for each record."""
    out.mkdir()
    for number, record in enumerate(records):
        text = next(
            (record[name] for name in ("text", "content", "txt") if isinstance(record.get(name), str | bytes)), None
        )
        if text is None:
            raise UserError(
                f"record {number} has no text (text, content, txt) among its fields {', '.join(fields_of(record))}\n"
                "  to do: choose another format"
            )
        (out / f"{number:09d}.txt").write_bytes(text.encode(errors="surrogatepass") if isinstance(text, str) else text)


WRITERS: dict[str, Writer] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "webdataset": write_webdataset,
    "energon": write_energon,
    "mds": write_mds,
    "lmdb": write_lmdb,
    "hdf5": write_hdf5,
    "arrays": write_arrays,
    "megatron": write_megatron,
    "tokens": write_tokens,
    "shards": write_shards,
    "images": write_images,
    "idx": write_idx,
    "text": write_text,
}
"""The formats that can be written."""
