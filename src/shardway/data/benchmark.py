"""How fast data come on this machine, layer by layer, and which layer limits.

Invariant: a figure is of samples that were read in a random order here and now; what was not measured is None. Nothing
is written.

Layers: "disk" reads the bytes of samples that are not in memory, "read" gives records or rows of tokens, "decode" makes
arrays of them, "transform" is data.transform, "copy" hands them over as tensors on the device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardway.data.content import DataPath
from shardway.data.formats.base import Records
from shardway.data.kinds import DataKind
from shardway.data.sources.base import DataRequest, DataSource
from shardway.data.sources.decoded import DecodedSamples
from shardway.plugins import load_plugin
from shardway.runfile.schema import DataSection

BATCH = 64
DISK_BYTES = 2**28
"""So many bytes are read from the disk at most."""


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
    layers: dict[str, LayerRate] = {"disk": _measure_disk(records, np.random.default_rng(1))}
    kind: DataKind = load_plugin("data_sources", section.kind)()
    request = DataRequest(section, 0, "tokens" if wants == "tokens" else "images", classes=2**31)
    source = kind.open(DataPath("PATH", section.path), request)
    order = _draw(len(source), np.random.default_rng(2))
    whole = _measure(lambda: source.batch(next(order)), seconds)
    bounds: dict[str, float] = {}
    if wants == "tokens":
        layers["read"] = whole
        bounds["gather"] = _bound_of_gather(section.seq_len)
    else:
        fields = (source.inputs, source.targets) if isinstance(source, DecodedSamples) else ()
        layers["read"] = _measure(lambda: records.read(next(drawn).tolist(), fields), seconds)
        plain = (
            source
            if not section.transform
            else kind.open(
                DataPath("PATH", section.path), replace(request, section=section.model_copy(update={"transform": ""}))
            )
        )
        decoded = whole if plain is source else _measure(lambda: plain.batch(next(order)), seconds)
        layers["decode"] = _without(decoded, layers["read"])
        if plain is not source:
            layers["transform"] = _without(whole, decoded)
    layers["copy"] = _measure_copy(source, next(order))
    known = {name: rate.per_s for name, rate in layers.items() if rate.per_s}
    return DataRates(layers, whole, min(known, key=lambda name: known[name] or 0.0), bounds)


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
    while time.perf_counter() - began < seconds:
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


def _measure_disk(records: Records, drawn: np.random.Generator) -> LayerRate:
    """Bytes of samples at random places, of pages that the kernel was asked to drop. What it keeps comes from memory,
    and so do all of a file system without posix_fadvise(2)."""
    parts = records.parts
    if not len(records) or not parts.size:
        return _NONE
    mean = max(1, parts.size // len(records))
    open_files: dict[Path, int] = {}
    try:
        read, began, done = 0, time.perf_counter(), 0
        while read < DISK_BYTES and time.perf_counter() - began < 2.0:
            number = int(drawn.integers(0, len(records)))
            extent = records.extent(number)
            if extent.path not in open_files:
                if len(open_files) >= 32:
                    os.close(open_files.pop(next(iter(open_files))))
                open_files[extent.path] = os.open(extent.path, os.O_RDONLY)
                os.posix_fadvise(open_files[extent.path], 0, 0, os.POSIX_FADV_DONTNEED)
            read += len(os.pread(open_files[extent.path], extent.size or mean, extent.offset))
            done += 1
        return LayerRate(None, done / (time.perf_counter() - began))
    except OSError:
        return _NONE
    finally:
        for descriptor in open_files.values():
            os.close(descriptor)


def _measure_copy(source: DataSource, ids: Any) -> LayerRate:
    """Arrays to tensors on the device of this machine; None without torch."""
    try:
        import torch
    except ImportError:
        return _NONE
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = source.batch(ids)

    def work() -> Any:
        moved = {name: torch.from_numpy(array).to(device, copy=True) for name, array in batch.items()}
        if device.type == "cuda":
            torch.cuda.synchronize()
        return moved

    return _measure(work, 0.5)


def _bound_of_gather(seq_len: int) -> float:
    """Rows of int64 that NumPy gathers from memory per CPU second."""
    table = np.zeros((max(BATCH, 2**24 // (seq_len + 1)), seq_len + 1), np.uint16)
    drawn = np.random.default_rng(3)

    def work() -> Any:
        rows = table[drawn.integers(0, len(table), BATCH)].astype(np.int64)
        return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}

    return _measure(work, 0.5).per_cpu_s or 0.0
