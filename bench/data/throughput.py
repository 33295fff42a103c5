"""Samples per CPU second of every format, against bounds of this machine and the loaders that the formats came with.

    python bench/data/throughput.py [--samples 20000] [--peers]

One process, no workers, warm page cache; figures are per second of process time, since the cores of a shared machine
move wall times, and each bound is measured in turns with what it bounds. Peers (webdataset, mosaicml-streaming) are
measured where they are installed. Bounds: a Python loop that copies the blobs out of one mapped file; PIL's decode and
resize of the same images from memory; NumPy's gather and cast of the same rows of tokens.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from shardway.data.convert import WRITERS
from shardway.data.detect import open_records, place_of
from shardway.data.formats.base import Records
from shardway.data.formats.token_store import TokenFile, TokenStore
from shardway.data.sources.base import DataRequest
from shardway.runfile.schema import DataSection

BATCH = 64
FORMATS = ("shards", "webdataset", "mds", "arrow", "parquet", "lmdb", "hdf5", "images")


def make_images(count: int, drawn: np.random.Generator) -> Iterator[dict[str, Any]]:
    """JPEG of 32 to 224 pixels, about 6 kB each."""
    from PIL import Image

    for number in range(count):
        width, height = drawn.integers(32, 225, 2)
        coarse = drawn.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(coarse).resize((int(width), int(height))).save(stream, "JPEG", quality=90)
        yield {"jpg": stream.getvalue(), "cls": number % 10}


def measure(work: Callable[[], int], least_s: float = 1.0) -> float:
    """Samples per CPU second of repeated work that returns how many it did; the best of three."""
    return max(measure_once(work, least_s / 3) for _ in range(3))


def compare(work: Callable[[], int], bound: Callable[[], int], turns: int = 9, turn_s: float = 0.4) -> dict[str, float]:
    """Samples per CPU second of work, and of the bound that is measured in turns with it; the medians of the rates, and
    of the ratio of a turn, which what else the cores do moves least."""
    rates: list[tuple[float, float]] = []
    for _ in range(turns):
        pair = [measure_once(each, turn_s) for each in (work, bound)]
        rates.append((pair[0], pair[1]))
    ratios = [work_rate / bound_rate for work_rate, bound_rate in rates]
    return {
        "rate": median(rate for rate, _ in rates),
        "bound": median(rate for _, rate in rates),
        "ratio": median(ratios),
        "lowest ratio": min(ratios),
        "highest ratio": max(ratios),
    }


def measure_once(work: Callable[[], int], least_s: float) -> float:
    done, began = 0, time.process_time()
    while time.process_time() - began < least_s:
        done += work()
    return done / (time.process_time() - began)


def batches_of(count: int, drawn: np.random.Generator) -> Callable[[], Sequence[int]]:
    """Endless batches of a random order."""
    state: dict[str, Any] = {"order": drawn.permutation(count), "at": 0}

    def take() -> Sequence[int]:
        if state["at"] + BATCH > count:
            state["order"], state["at"] = drawn.permutation(count), 0
        ids = state["order"][state["at"] : state["at"] + BATCH]
        state["at"] += BATCH
        return ids.tolist()  # type: ignore[no-any-return]

    return take


def reading(records: Records, fields: Sequence[str]) -> Callable[[], int]:
    """Raw records in random order."""
    take = batches_of(len(records), np.random.default_rng(0))
    return lambda: len(records.read(take(), fields))


def decoding(records: Records, image: str, label: str) -> Callable[[], int]:
    """Decoded samples of 64 x 64 in random order."""
    from shardway.data.sources.decoded import open_decoded

    section = DataSection(inputs=image, targets=label, shape=[3, 64, 64])
    source = open_decoded(records, place_of("bench"), DataRequest(section, 0, "images", classes=10))
    take = batches_of(len(records), np.random.default_rng(0))
    return lambda: len(source.batch(np.array(take()))["targets"])


def copying(blobs: Sequence[bytes], folder: Path) -> Callable[[], int]:
    """Slices of one mapped file, copied in a Python loop in random order."""
    ends = np.cumsum([0, *map(len, blobs)])
    (folder / "blobs").write_bytes(b"".join(blobs))
    mapped = np.memmap(folder / "blobs", np.uint8, "r")
    take = batches_of(len(blobs), np.random.default_rng(0))
    return lambda: len([mapped[ends[number] : ends[number + 1]].tobytes() for number in take()])


def decoding_alone(blobs: Sequence[bytes]) -> Callable[[], int]:
    """PIL alone, from memory."""
    from PIL import Image

    take = batches_of(len(blobs), np.random.default_rng(0))

    def decode(blob: bytes) -> Any:
        image = Image.open(io.BytesIO(blob))
        image.draft("RGB", (64, 64))
        return np.asarray(image.convert("RGB").resize((64, 64), Image.Resampling.BILINEAR))

    return lambda: len([decode(blobs[number]) for number in take()])


def measure_peers(folder: Path, count: int) -> dict[str, float]:
    """The own loaders of tar shards and of MDS, reading all in their own order, as they do it fastest."""
    found: dict[str, float] = {}
    try:
        import webdataset

        urls = [str(path) for path in sorted((folder / "webdataset").glob("*.tar"))]

        def read_tars() -> int:
            return sum(1 for _ in webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))

        if urls:
            found["webdataset"] = measure(read_tars, 3.0)
    except ImportError as error:
        print(f"webdataset: n/a ({error})", file=sys.stderr)
    try:
        from streaming import StreamingDataset

        dataset = StreamingDataset(local=str(folder / "mds"), shuffle=False, batch_size=1)
        found["mosaicml-streaming"] = measure(lambda: sum(1 for _ in (dataset[i] for i in range(count))), 3.0)
    except Exception as error:  # it needs 18 packages and shared memory
        print(f"mosaicml-streaming: n/a ({error})", file=sys.stderr)
    return found


def measure_tokens(folder: Path) -> dict[str, float]:
    """Rows of 1,024 tokens in batches of 32 against NumPy's gather and cast."""
    rows, length = 48 * 1024, 1024
    tokens = np.random.default_rng(0).integers(0, 50257, rows * length + 1).astype(np.uint16)
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    from shardway.data.kinds import TokensKind

    section = DataSection(kind="tokens", seq_len=length, token_dtype="uint16")
    source = TokensKind().open(place_of(folder / "tokens.bin"), DataRequest(section, 0, "tokens", vocab=50257))
    drawn = np.random.default_rng(1)
    table = tokens[:-1].reshape(rows, length)

    def gather() -> int:
        ids = drawn.integers(0, rows - 1, 32)
        table[ids].astype(np.int64)
        return 32

    def take() -> int:
        return len(source.batch(drawn.integers(0, rows - 1, 32))["inputs"])

    return compare(take, gather)


def measure_start() -> dict[str, float]:
    """Seconds to the first batch of 10^12 samples at position 10^12, and of opening documents against indexing them."""
    from shardway.data.loader import Share, StepSampler
    from shardway.data.order import SampleOrder

    began = time.perf_counter()
    next(iter(StepSampler(SampleOrder(10**12, 0), Share(1024), 10**12)))
    return {"first ids at 10^12": time.perf_counter() - began}


def measure_megatron(folder: Path, sequences: int = 5_000_000, seq_len: int = 2048) -> dict[str, float]:
    """Seconds to open the documents of a .bin/.idx, and to build an index of samples as Megatron-LM does: a shuffled
    list of documents, the document and offset at which each sample begins, and a shuffled list of samples."""
    from shardway.data.formats.megatron import open_megatron_store

    lengths = np.random.default_rng(0).integers(1, 60, sequences).astype(np.int32)
    write_documents(folder / "documents", lengths)
    began = time.process_time()
    drawn = np.random.default_rng(1)
    shuffled = lengths[drawn.permutation(len(lengths))]
    ends = np.cumsum(shuffled, dtype=np.int64)
    firsts = np.arange(0, ends[-1] - 1, seq_len)
    documents = np.searchsorted(ends, firsts, side="right")
    np.stack([documents, firsts - (ends - shuffled)[documents]])
    drawn.permutation(len(firsts))
    build = time.process_time() - began
    began = time.process_time()
    store: TokenStore = open_megatron_store(place_of(folder / "documents.bin"))
    opened = time.process_time() - began
    if len(store) != int(lengths.sum()) or not isinstance(store.files[0], TokenFile):
        raise SystemExit("the documents were read wrong")
    return {"open": opened, "index build": build, "ratio": build / opened}


def write_documents(prefix: Path, lengths: np.ndarray) -> None:
    """A .bin of zeros, sparse, and its .idx of version 1."""
    ends = np.cumsum(lengths, dtype=np.int64)
    head = b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + bytes([8])
    counts = np.array([len(lengths), len(lengths) + 1], "<u8").tobytes()
    columns = (lengths.astype("<i4"), ((ends - lengths) * 2).astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8"))
    prefix.with_suffix(".idx").write_bytes(head + counts + b"".join(column.tobytes() for column in columns))
    with prefix.with_suffix(".bin").open("wb") as stream:
        stream.truncate(int(ends[-1]) * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--peers", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = list(make_images(given.samples, np.random.default_rng(0)))
        blobs = [each["jpg"] for each in made]
        found["samples"], found["mean bytes"] = len(blobs), float(np.mean([len(blob) for blob in blobs]))
        copies, decodes = copying(blobs, folder), decoding_alone(blobs)
        for kind in given.formats:
            out = folder / kind
            WRITERS[kind](iter(made), out)
            records = open_records(place_of(out), kind)
            image, label = ("image", "label") if kind == "images" else ("jpg", "cls")
            found[kind] = {
                "raw": compare(reading(records, (image,)), copies),
                "decoded": compare(decoding(records, image, label), decodes),
            }
            print(kind, json.dumps(found[kind]), file=sys.stderr)
        if given.peers:
            peers = measure_peers(folder, given.samples)
            found["peers"] = peers
            for peer, kind in (("webdataset", "webdataset"), ("mosaicml-streaming", "mds")):
                if peer in peers and kind in found:
                    found[f"{kind} / {peer}"] = found[kind]["raw"]["rate"] / peers[peer]
        found["tokens"] = measure_tokens(folder)
        found["start"] = measure_start()
        found["megatron"] = measure_megatron(folder)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
