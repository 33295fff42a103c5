"""How fast data come on this machine, layer by layer, and which layer limits.

Invariant: a figure is of samples that were read in a random order here and now; what was not measured is None. Nothing
is written but what a run keeps too: indexes, and tokens of texts in data.cache.

Layers: "disk" reads the bytes of samples that are not in memory, "read" gives records or rows of tokens, "decode" makes
arrays of them, "transform" is data.transform, "copy" hands them over as tensors on the device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardway.data.content import DataPath
from shardway.data.formats.base import OPEN_FILES, Records
from shardway.data.kinds import DataKind
from shardway.data.record_writers import find_image_suffix
from shardway.data.sources.base import DataRequest, DataSource
from shardway.data.sources.decoded import DecodedSamples
from shardway.plugins import load_plugin
from shardway.runfile.schema import DataSection

BATCH = 64
DISK_READS = 2000
"""So many samples are read from the disk."""
LEAST_DISK_BYTES = 2**26
"""Of smaller data so many reads find most in memory, as a run does after its first pass."""


@dataclass(frozen=True)
class LayerRate:
    """Samples per second of one layer alone: of one process's CPU time, and as waited for."""

    per_cpu_s: float | None
    per_s: float | None

    def as_json(self) -> dict[str, float | None]:
        """As `shardway data bench --json` prints it."""
        return {"samples_per_cpu_s": self.per_cpu_s, "samples_per_s": self.per_s}


@dataclass(frozen=True)
class DataRates:
    """The layers by name, the rate of all together, and the layer that takes most of the time. `bounds`: what this
    machine does at best where nothing but the work itself is done."""

    layers: dict[str, LayerRate]
    whole: LayerRate
    limits: str
    bounds: dict[str, float]


def measure_data(records: Records, section: DataSection, wants: str, seconds: float = 2.0) -> DataRates:
    """Measure each layer for about `seconds`. Raises UserError if no samples can be made of the records."""
    drawn = _draw(len(records), np.random.default_rng(0))
    kind: DataKind = load_plugin("data_sources", section.kind)()
    request = DataRequest(section, 0, "tokens" if wants == "tokens" else "images", classes=2**31)

    def open_source(section: DataSection) -> DataSource:
        opened = kind.open(DataPath("PATH", section.path), replace(request, section=section))
        if not isinstance(opened, DataSource):
            raise DataPath("PATH", section.path).error("gives its samples in sequence alone, which is not measured")
        return opened

    source = open_source(section)
    if not len(source):
        raise DataPath("PATH", section.path).error("holds no samples")
    layers: dict[str, LayerRate] = {"disk": _measure_disk(records, len(source), np.random.default_rng(1))}
    order = _draw(len(source), np.random.default_rng(2))
    whole = _measure(lambda: source.batch(next(order)), seconds)
    bounds: dict[str, float] = {}
    if not isinstance(source, DecodedSamples):
        layers["read"] = whole
        bounds |= {"gather": _bound_of_gather(section.seq_len, min(seconds, 0.5))} if wants == "tokens" else {}
    else:
        fields = (source.inputs, source.targets)
        layers["read"] = _measure(lambda: records.read(next(drawn).tolist(), fields), seconds)
        plain = source if not section.transform else open_source(section.model_copy(update={"transform": ""}))
        decoded = whole if plain is source else _measure(lambda: plain.batch(next(order)), seconds)
        layers["decode"] = _without(decoded, layers["read"])
        if plain is not source:
            layers["transform"] = _without(whole, decoded)
    layers["copy"] = _measure_copy(source, next(order), min(seconds, 0.5))
    known = {name: rate.per_s for name, rate in layers.items() if rate.per_s}
    return DataRates(layers, whole, min(known, key=lambda name: known[name] or 0.0), bounds)


def find_wanted(records: Records) -> str:
    """What a model would take these records for: "images" if their kind gives no tokens, or the first has an image or
    an array of several dimensions, else "tokens"."""
    kind: DataKind = load_plugin("data_sources", records.format)()
    if "tokens" not in kind.gives or "images" not in kind.gives:
        return kind.gives[0]
    first = records.read([0])[0].values() if len(records) else ()
    is_image = any(find_image_suffix(value) or (isinstance(value, np.ndarray) and value.ndim > 1) for value in first)
    return "images" if is_image else "tokens"


_NONE = LayerRate(None, None)


def _draw(count: int, drawn: np.random.Generator) -> Iterator[Any]:
    """Batches of ids in a random order, without end."""
    while True:
        order = drawn.permutation(count) if count <= 10**7 else drawn.integers(0, count, 10**6)
        for first in range(0, max(1, len(order) - BATCH + 1), BATCH):
            yield order[first : first + BATCH].astype(np.int64)


def _measure(work: Callable[[], Any], seconds: float) -> LayerRate:
    """The rate of work that does BATCH samples at each call, after one call that does not count."""
    size = _count(work())
    began, began_cpu, done = time.perf_counter(), time.process_time(), 0
    while not done or time.perf_counter() - began < seconds:  # once at least, however long it took to come to it
        work()
        done += size
    wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    return LayerRate(done / max(cpu, 1e-9), done / wall)


def _count(answer: Any) -> int:
    return len(next(iter(answer.values()))) if isinstance(answer, dict) else len(answer)


def _without(whole: LayerRate, part: LayerRate) -> LayerRate:
    """The rate of what `whole` does beside `part`."""

    def rest(both: float | None, one: float | None) -> float | None:
        if not both or not one:
            return None
        left = 1 / both - 1 / one
        return 1 / left if left > 0 else None

    return LayerRate(rest(whole.per_cpu_s, part.per_cpu_s), rest(whole.per_s, part.per_s))


def _measure_disk(records: Records, samples: int, drawn: np.random.Generator) -> LayerRate:
    """Reads of samples at random places, of pages that the kernel was asked to drop, less what the same reads take
    from memory.

    None for small data, and where memory is not much faster: the data did not come from a disk, as on a file system
    without posix_fadvise(2).
    A sample is a record; where there are others (rows of tokens), as many bytes at any place.
    """
    if records.parts.size < LEAST_DISK_BYTES:
        return _NONE
    places = _draw_places(records, samples, drawn)
    open_files: dict[int, int] = {}
    try:
        for number in sorted({number for number, _, _ in places}):
            open_files[number] = os.open(records.parts.path(number), os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(open_files[number], 0, 0, os.POSIX_FADV_DONTNEED)
        found = []
        for _ in ("from the disk", "from memory"):
            began, done = time.perf_counter(), 0
            for number, offset, size in places:
                os.pread(open_files[number], size, offset)
                done += 1
                if time.perf_counter() - began > 2.0:
                    break
            found.append((time.perf_counter() - began) / max(1, done))
            places = places[:done]
        cold, warm = found
        return LayerRate(None, 1 / cold) if places and cold > 2 * warm else _NONE
    except OSError:
        return _NONE
    finally:
        for descriptor in open_files.values():
            os.close(descriptor)


def _draw_places(records: Records, samples: int, drawn: np.random.Generator) -> list[tuple[int, int, int]]:
    """(file, offset, bytes) of samples, of up to OPEN_FILES files."""
    files = {records.parts.path(number): number for number in range(min(OPEN_FILES, len(records.parts.files)))}
    places = []
    for _ in range(DISK_READS):
        if samples == len(records):
            extent = records.extent(int(drawn.integers(0, samples)))
            if extent.path in files:
                size = extent.size or max(1, records.parts.size // samples)
                places.append((files[extent.path], extent.offset, size))
        else:
            number = int(drawn.integers(0, len(files)))
            size = records.parts.files[number].size
            places.append((number, int(drawn.integers(0, max(1, size))), max(1, records.parts.size // samples)))
    return places


def _measure_copy(source: DataSource, ids: Any, seconds: float) -> LayerRate:
    """Arrays to tensors on the device of this machine; None without torch."""
    try:
        import torch
    except ImportError:
        return _NONE
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = source.batch(ids)
    # Groups of documents are arrays of arrays.
    parts = [each for array in batch.values() for each in (array if array.dtype == object else [array])]

    def work() -> Any:
        moved = [torch.from_numpy(each).to(device, copy=True) for each in parts]
        if device.type == "cuda":
            torch.cuda.synchronize()
        del moved
        return batch

    return _measure(work, seconds)


def _bound_of_gather(seq_len: int, seconds: float) -> float:
    """Rows of int64 that NumPy gathers from memory per CPU second."""
    table = np.zeros((max(BATCH, 2**24 // (seq_len + 1)), seq_len + 1), np.uint16)
    drawn = np.random.default_rng(3)

    def work() -> Any:
        rows = table[drawn.integers(0, len(table), BATCH)].astype(np.int64)
        return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}

    return _measure(work, seconds).per_cpu_s or 0.0
