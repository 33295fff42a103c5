"""Flipped bits in data of every format: which are found, with file and offset, by what `shardway data verify` runs.

    python bench/data/flips.py [--flips 1000] [--cases webdataset mds+sums ...] [--seed 0]

Each data set is written small by our writers, or by those of the format, and gets what `shardway data index --checksum`
makes where the name ends in "+sums". One bit of one byte of any of its files is flipped (a third anywhere, by the sizes
of the files; a third anywhere in a file, with equal chance for each; a third in the first or last 2,000 bytes of such a
file, where headers and indexes lie), all is verified, and the bit is restored. Every other time the file keeps its time
of change, as after decay of a disk, else it has a new one, as after a bad copy. "placed": the damage that is named has
the file, and an offset at most 1 MiB before the bit, or, of checksums of a format, before it within what they cover (a
page, chunk, array, shard or gzip member). Indexes of Shardway are made anew from the data when they are damaged, so of
its own files only checksums are flipped.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardway.data.convert import WRITERS
from shardway.data.detect import open_records, place_of
from shardway.data.formats.base import BLOCK_BYTES
from shardway.data.verification import make_checksums, verify_data
from shardway.errors import UserError

Make = Callable[[Path, np.random.Generator], None]


def blobs(drawn: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Records of bytes that are no image, 1.5 MiB in all."""
    for number in range(60):
        yield {"x": drawn.bytes(26_000 + number), "n": b"%d" % number}


def texts(drawn: np.random.Generator) -> Iterator[dict[str, Any]]:
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8)
    for number in range(60):
        yield {"text": letters[drawn.integers(0, len(letters), 20_000)].tobytes().decode(), "n": number}


def rows(drawn: np.random.Generator) -> Iterator[dict[str, Any]]:
    for number in range(300):
        yield {"x": drawn.integers(0, 256, (64, 64), np.uint8), "y": float(number)}


def documents(drawn: np.random.Generator) -> Iterator[dict[str, Any]]:
    for _ in range(200):
        yield {"tokens": drawn.integers(0, 50_000, int(drawn.integers(1, 5000)))}


def pictures(drawn: np.random.Generator) -> Iterator[dict[str, Any]]:
    for number in range(40):
        yield {"image": b"\x89PNG\r\n\x1a\n" + drawn.bytes(30_000), "label": number % 4}


def digits(drawn: np.random.Generator) -> Iterator[dict[str, Any]]:
    for number in range(300):
        yield {"image": drawn.integers(0, 256, (64, 64), np.uint8), "label": number % 10}


def converted(to: str, records: Callable[[np.random.Generator], Iterator[dict[str, Any]]], name: str = "") -> Make:
    """A data set that `shardway data convert` writes."""

    def make(folder: Path, drawn: np.random.Generator) -> None:
        WRITERS[to](records(drawn), folder / (name or "d"))

    return make


def make_gzip(folder: Path, drawn: np.random.Generator) -> None:
    lines = "".join(json.dumps(each) + "\n" for each in texts(drawn))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 6))


def make_zstd(folder: Path, drawn: np.random.Generator) -> None:
    import zstandard

    lines = "".join(json.dumps(each) + "\n" for each in texts(drawn))
    (folder / "d.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))


def make_npz(folder: Path, drawn: np.random.Generator) -> None:
    np.savez(folder / "d.npz", x=drawn.integers(0, 256, (300, 64, 64), np.uint8), y=np.arange(300))


def make_raw_tokens(folder: Path, drawn: np.random.Generator) -> None:
    np.save(folder / "d.npy", drawn.integers(0, 50_000, 700_000).astype(np.uint16))


CASES: dict[str, tuple[str, Make]] = {
    "shards": ("shards", converted("shards", blobs)),
    "tokens": ("tokens", converted("tokens", documents)),
    "tokens, a .npy file": ("tokens", make_raw_tokens),
    "megatron": ("megatron", converted("megatron", documents)),
    "text": ("text", converted("text", texts)),
    "jsonl": ("jsonl", converted("jsonl", texts, "d.jsonl")),
    "jsonl.gz": ("jsonl", make_gzip),
    "jsonl.zst": ("jsonl", make_zstd),
    "parquet": ("parquet", converted("parquet", blobs)),
    "arrow": ("arrow", converted("arrow", blobs)),
    "webdataset": ("webdataset", converted("webdataset", blobs)),
    "energon": ("energon", converted("energon", blobs)),
    "mds": ("mds", converted("mds", blobs)),
    "hdf5": ("hdf5", converted("hdf5", rows)),
    "hdf5, bytes of any length": ("hdf5", converted("hdf5", blobs)),
    "lmdb": ("lmdb", converted("lmdb", blobs)),
    "arrays": ("arrays", converted("arrays", rows)),
    "arrays, a .npz file": ("arrays", make_npz),
    "images": ("images", converted("images", pictures)),
    "idx": ("idx", converted("idx", digits)),
}
"""Data set -> its value of data.kind, and what writes it into a folder."""


def list_data(folder: Path) -> list[Path]:
    """All files of a data set: those of the format, and Shardway's checksums beside them."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if path.parent.name != ".shardway" or path.name.startswith("sums")]


def flip(path: Path, byte: int, bit: int, keeps_time: bool) -> None:
    """Change a bit in place."""
    stat = path.stat()
    with path.open("r+b") as stream:
        stream.seek(byte)
        old = stream.read(1)[0]
        stream.seek(byte)
        stream.write(bytes([old ^ (1 << bit)]))
    times = (stat.st_atime_ns, stat.st_mtime_ns if keeps_time else stat.st_mtime_ns + 10**9)
    os.utime(path, ns=times)


def verify(place: Path) -> list[str]:
    """What is said of each damage; of data that are refused for it, the error."""
    said: list[str] = []
    try:
        verify_data(place_of(place), "", said.append)
    except UserError as error:
        said.append(f"refused: {error}")
    return said


def is_placed(said: str, path: Path, byte: int, block: int) -> bool:
    """Whether a sentence names the file, and an offset before the byte by less than a block."""
    offsets = [int(each) for each in re.findall(r"byte (\d+)", said)]
    return path.name in said and any(offset <= byte < offset + block for offset in offsets)


def judge(said: list[str], path: Path, byte: int, block: int) -> str:
    """ "placed", "named" (the file, with another offset or none), "elsewhere" or "missed"."""
    if any(is_placed(each, path, byte, block) for each in said):
        return "placed"
    if any(path.name in each for each in said):
        return "named"
    return "elsewhere" if said else "missed"


def measure(name: str, kind: str, make: Make, flips: int, seed: int, with_sums: bool) -> dict[str, Any]:
    """What became of the flips in one data set."""
    found: Counter[str] = Counter()
    examples: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        make(folder, np.random.default_rng(seed))
        place = next(path for path in folder.iterdir())
        if with_sums:
            make_checksums(open_records(place_of(place), kind))
        checks = open_records(place_of(place), kind).describe_checks()
        gc.collect()  # HDF5 would give what it has read to others in this process that open the file
        whole = verify(place)
        if whole:
            raise SystemExit(f"{name}: whole data are damaged: {whole}")
        drawn = random.Random(seed)
        paths = [path for path in list_data(folder) if path.stat().st_size]
        sizes = [path.stat().st_size for path in paths]
        kept = {path: (path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in paths}
        for number in range(flips):
            path = drawn.choices(paths, sizes)[0] if number % 3 == 0 else drawn.choice(paths)
            size = path.stat().st_size
            byte, bit = drawn.randrange(size if number % 3 < 2 else min(size, 2000)), drawn.randrange(8)
            if number % 3 == 2 and drawn.randrange(2):
                byte = size - 1 - byte
            keeps_time = bool(number % 2)
            flip(path, byte, bit, keeps_time)
            said = verify(place)
            flip(path, byte, bit, True)
            os.utime(path, ns=kept[path])
            how = judge(said, path, byte, BLOCK_BYTES if with_sums else 2**40)
            found[how] += 1
            example = f"{path.relative_to(folder)} byte {byte} bit {bit} time {'kept' if keeps_time else 'new'}"
            examples.setdefault(how, f"{example}: {said[:1]}")
    return {"checks": checks, "found": dict(found), "examples": examples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--cases", nargs="*", default=[*(f"{name}+sums" for name in CASES), *CASES])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("| data | checksums | placed | file named | other | not found |\n|---|---|---|---|---|---|")
    for case in given.cases:
        name, plus, _ = case.partition("+sums")
        kind, make = CASES[name]
        found = measure(name, kind, make, given.flips, given.seed, bool(plus))
        for how, example in found["examples"].items():
            if how != "placed":
                print(case, how, example, file=sys.stderr)
        counts = [found["found"].get(how, 0) for how in ("placed", "named", "elsewhere", "missed")]
        print(f"| {case} | {found['checks'].partition(';')[0]} | {' | '.join(map(str, counts))} |", flush=True)


if __name__ == "__main__":
    main()
