"""Samples of a node's hardware as a file: `telemetry/<host>` in the run directory.

A file is a sequence of blocks, and each block is one `write` at the end of the file, so that several samplers of one
host may share it. A block is a header (its length, its sampler, a checksum) and compressed content: a schema (what the
sampler is, the names of its series) or the samples of some seconds, in columns. A schema is written again at times, so
that a damaged one costs little. Values are stored as whole steps: percent in tenths, bytes and rates with a relative
step of 1/8192, energy in joules (`_find_step`).

Invariants:
- Reading never raises for what a file may hold: a torn end or a damaged block costs the samples in it.
- What was read is held as codes of few bytes, and one series at a time becomes floats: days of a node fit in memory.
- A block that was written is never changed. Its format has a version, and blocks of later versions are skipped.
- Writing needs the standard library alone.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from shardway.plain_arrays import find_arrays

# --- what is read


@dataclass(frozen=True)
class DeviceInfo:
    """An accelerator that the job may use; `index` as the node counts them, `maker` is "nvidia" or "amd"."""

    index: int
    name: str
    uuid: str
    memory_bytes: int | None
    power_limit_w: float | None
    maker: str


@dataclass(frozen=True)
class NodeInfo:
    """What one sampler knew at its start. `missing`: series, or a pattern of them, -> why they are not sampled."""

    host: str
    node: int
    job: str
    attempt: int
    started: float
    every_s: float
    cores: int
    allowed_cores: tuple[int, ...]
    memory_bytes: int | None
    memory_limit_bytes: int | None
    devices: tuple[DeviceInfo, ...]
    missing: Mapping[str, str]


@dataclass(frozen=True)
class HostTelemetry:
    """All samples of one host. `times`: Unix seconds, float64, increasing. `series`: name -> float32 array of the same
    length, NaN where there is no value; of a file it is made anew at each look. `infos`: one a sampler, the newest
    last."""

    host: str
    infos: tuple[NodeInfo, ...]
    times: Any
    series: Mapping[str, Any]

    @property
    def info(self) -> NodeInfo:
        return self.infos[-1]


# --- blocks

_MAGIC = b"\xf5SWT"
_VERSION = 1
_HEAD = struct.Struct("<4sBBHIIqI")
"""Magic, version, kind, number of the schema, sampler, bytes of the content, newest time (Unix ms), CRC-32 of all
before and of the content."""
_SCHEMA, _SAMPLES = 1, 2
_MOST_BYTES = 1 << 26
"""A block that claims to be larger, compressed or not, is damaged."""
_SHAPE = struct.Struct("<HHq")
"""Samples, series, first time (Unix ms). Times as int32 differences (ms), a byte for each series, and values follow."""
_EMPTY, _CONSTANT, _VARIES = 0, 1, 2
_LIMIT = 2**30 - 1
_NONE = -(2**30)
"""The code of no value, in a series with a fixed step."""
_SHIFT = 11
"""Bits of a float32 that are left out, in a series with a relative step."""
_LEVEL = 6


def _find_step(name: str) -> float:
    """The step of a series' values; 0 for a step that is relative to the value."""
    last = name.rpartition("/")[2]
    if name.startswith("core/"):
        return 0.5
    unit = last.rpartition("_")[2]
    if last.endswith("_per_s"):
        return 0.0
    return _STEPS.get(unit, 0.0)


_STEPS = {
    "percent": 0.1,
    "w": 0.1,
    "cores": 0.001,
    "load": 0.01,
    **dict.fromkeys(("c", "mhz", "j", "bits", "errors", "kills", "threads", "processes", "activity"), 1.0),
}


def _pack_block(kind: int, schema: int, sampler: int, newest_ms: int, content: bytes) -> bytes:
    packed = zlib.compress(content, _LEVEL)
    head = _HEAD.pack(_MAGIC, _VERSION, kind, schema, sampler, len(packed), newest_ms, 0)[:-4]
    return b"".join((head, struct.pack("<I", zlib.crc32(packed, zlib.crc32(head))), packed))


def _pack_samples(times_ms: Sequence[int], rows: Sequence[Sequence[float]], steps: Sequence[float]) -> bytes:
    """Columns as differences of whole steps, zigzag, with the bytes of equal weight together."""
    count = len(rows)
    kinds, constants, values = bytearray(), array("i"), array("I")
    for step, column in zip(steps, zip(*rows, strict=True), strict=True):
        if step:
            scale = 1.0 / step
            codes = [_to_code(value * scale) for value in column]
        else:
            bits = memoryview(array("f", column)).cast("B").cast("I")
            codes = [(each + (1 << _SHIFT >> 1)) >> _SHIFT for each in bits]
        first = codes[0]
        if codes.count(first) == count:
            if column[0] != column[0]:
                kinds.append(_EMPTY)
            else:
                kinds.append(_CONSTANT)
                constants.append(first)
            continue
        kinds.append(_VARIES)
        before = 0
        for code in codes:
            change = code - before
            values.append(change + change if change >= 0 else -change - change - 1)
            before = code
    planes = values.tobytes()
    differences = array("i", (time_ms - times_ms[0] for time_ms in times_ms))
    head = _SHAPE.pack(count, len(steps), times_ms[0])
    parts = (head, differences.tobytes(), bytes(kinds), constants.tobytes(), *(planes[at::4] for at in range(4)))
    return b"".join(parts)


def _to_code(value: float) -> int:
    if -_LIMIT < value < _LIMIT:
        return round(value)
    return _NONE if value != value else int(math.copysign(_LIMIT, value))


# --- writing


class TelemetryWriter:
    """Appends the samples of one sampler to the file of its host; not for several threads.

    A sample waits in memory until its block is written: a block has the samples of at most `block_s` seconds, the first
    of a twentieth, and in the first minute of a sixth of that. What the file system refuses raises OSError, and the
    samples are kept for the next try (RETRY_S later), the newest `MOST_KEPT` of them. Nothing is written before
    `may_write` returns True.
    """

    MOST_KEPT, RETRY_S = 4096, 20.0
    SCHEMA_EVERY = 32
    _MOST_ROWS, _FAR_MS = 600, 2**31 - 1

    def __init__(
        self,
        folder: Path,
        info: NodeInfo,
        series: Sequence[str],
        *,
        block_s: float = 20.0,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self.path = folder / name_file(info.host)
        self._sampler = int.from_bytes(os.urandom(4), "little")
        self._block_s, self._begun, self._may_write = block_s, time.monotonic(), may_write
        self._file: int | None = None
        self._times: list[int] = []
        self._rows: list[Sequence[float]] = []
        self._due, self._has_failed = 0.0, False
        self._schema = -1
        self._since_schema = 0
        self._info, self._series, self._steps = info, tuple(series), [_find_step(name) for name in series]
        self._needs_schema = True

    @property
    def is_failing(self) -> bool:
        """Whether samples wait that could not be written."""
        return self._has_failed

    def append(self, unix_s: float, values: Sequence[float]) -> None:
        """One sample, a value for each series, NaN for none. Raises OSError."""
        if len(values) != len(self._series):
            raise ValueError(f"{len(values)} values for {len(self._series)} series")
        now, time_ms = time.monotonic(), round(unix_s * 1000)
        if self._times and abs(time_ms - self._times[0]) > self._FAR_MS:  # the clock was set
            self.flush()
            self._times, self._rows = [], []
        if not self._times:
            share = 20 if self._needs_schema else 6 if now - self._begun < 60 else 1
            self._due = now + self._block_s / share
        self._times.append(time_ms)
        self._rows.append(values)
        if len(self._times) > self.MOST_KEPT:
            del self._times[: -self.MOST_KEPT], self._rows[: -self.MOST_KEPT]
        if now >= self._due or (len(self._rows) >= self._MOST_ROWS and not self._has_failed):
            self.flush()

    def describe(self, info: NodeInfo, series: Sequence[str]) -> None:
        """From now on samples have these series. Raises OSError; samples that could not be written are lost then."""
        try:
            self.flush()
        finally:
            self._times, self._rows = [], []
            self._info, self._series, self._steps = info, tuple(series), [_find_step(name) for name in series]
            self._needs_schema = True

    def flush(self) -> None:
        """Write the samples that wait. Raises OSError."""
        if not self._rows:
            return
        self._has_failed, self._due = True, time.monotonic() + self.RETRY_S
        if not self._may_write():
            self._due += 1.0 - self.RETRY_S
            return
        if self._needs_schema or self._since_schema >= self.SCHEMA_EVERY:
            self._write_schema()
        content = _pack_samples(self._times, self._rows, self._steps)
        self._write(_pack_block(_SAMPLES, self._schema, self._sampler, max(self._times), content))
        self._since_schema += 1
        self._times, self._rows, self._has_failed = [], [], False

    def close(self) -> None:
        """Write what waits, and close the file. Raises OSError."""
        try:
            self.flush()
        finally:
            self._close_file()

    def _write_schema(self) -> None:
        number = self._schema + 1 if self._needs_schema else self._schema
        info = asdict(replace(self._info, missing=dict(self._info.missing)))
        content = {"info": info, "series": self._series, "steps": self._steps}
        written = json.dumps(content, separators=(",", ":")).encode()
        self._write(_pack_block(_SCHEMA, number & 0xFFFF, self._sampler, round(self._info.started * 1000), written))
        self._schema, self._needs_schema, self._since_schema = number & 0xFFFF, False, 0

    def _write(self, block: bytes) -> None:
        """Once more into a file that is opened anew where the open one is refused: its server may have forgotten it."""
        try:
            self._write_once(block)
        except OSError:
            if self._file is None:
                raise
            self._close_file()
            self._write_once(block)

    def _write_once(self, block: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        written = os.write(self._file, block)
        if written < len(block):  # what was written is skipped by readers
            raise OSError(28, "No space left on device", str(self.path))

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")
_MOST_NAME = 200


def name_file(host: str) -> str:
    """The name of a host's file: characters that a path could not have stand as %XX."""
    name = _PLAIN.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "replace")), host)
    if name.startswith(".") or not name:
        name = f"%{ord(name[0]):02X}{name[1:]}" if name else "%00"
    return name if len(name) <= _MOST_NAME else f"{name[:_MOST_NAME]}-{zlib.crc32(name.encode()):08x}"


# --- reading


def read_telemetry(folder: Path, since: float = -math.inf) -> list[HostTelemetry]:
    """The samples of every host, sorted by its name; none where there are none. Hosts without a sample are left out.
    `since` (Unix seconds) leaves out blocks whose samples are all older, which makes reading the newest cheap."""
    try:
        paths = sorted(entry.path for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return []
    found = (_read_host(path, since) for path in paths)
    return sorted((host for host in found if host is not None), key=lambda host: host.host)


@dataclass(frozen=True)
class _Schema:
    info: NodeInfo
    series: tuple[str, ...]
    steps: tuple[float, ...]

    @cached_property
    def places(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self.series)}


def _read_host(path: str, since: float) -> HostTelemetry | None:
    np = find_arrays()

    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return None
    schemas: dict[tuple[int, int], _Schema] = {}
    blocks: list[tuple[tuple[int, int], memoryview]] = []
    since_ms = since * 1000
    for kind, schema, sampler, newest_ms, packed, _ in _list_blocks(content):
        key = (sampler, schema)
        if kind == _SCHEMA and key not in schemas:
            if (read := _read_schema(packed)) is not None:
                schemas[key] = read
        elif kind == _SAMPLES and newest_ms >= since_ms:
            blocks.append((key, packed))
    chunks, times = _read_chunks(blocks, schemas)
    if not chunks:
        return None
    # Of two samples of one time the later one is kept, so that times increase; a clock may have been set back.
    order = None
    if not (times[1:] > times[:-1]).all():
        order = np.argsort(times, kind="stable")
        ordered = times[order]
        order = order[np.append(ordered[1:] != ordered[:-1], True)]
        times = times[order]
    newest: dict[int, NodeInfo] = {}  # of each sampler
    for (sampler, _), known in sorted(schemas.items(), key=lambda item: item[0][1]):
        newest[sampler] = known.info
    infos = tuple(sorted(newest.values(), key=lambda info: info.started))
    return HostTelemetry(infos[-1].host, infos, times, _PackedSeries(chunks, order))


_CHUNK = 2048  # samples that are packed together
_WIDTHS = ("<u1", "<u2", "<u4")


class _Chunk:
    """Consecutive samples of one schema. A series is a row of one of three tables, as codes above its smallest one in
    as few bytes as they need, the largest number for no value; one that is the same all the time is that one code."""

    def __init__(self, schema: _Schema, codes: Any) -> None:
        """`codes`: int64 (series, samples)."""
        np = find_arrays()

        self.schema, self.count = schema, codes.shape[1]
        none = codes == _NONE
        high = np.where(none, _NONE, codes).max(axis=1)
        self._low = low = np.where(none, np.iinfo(np.int64).max, codes).min(axis=1)
        low[none.all(axis=1)] = _NONE
        span = np.where((high == low) & ~none.any(axis=1) | (low == _NONE), -1, high - low)
        self._table = table = np.searchsorted([0, 255, 65535, 2**32 - 1], span, side="right") - 1
        self._row = np.zeros(len(codes), np.int64)
        self._tables = []
        for number, width in enumerate(_WIDTHS):
            rows = np.flatnonzero(table == number)
            self._row[rows] = np.arange(len(rows))
            above = np.where(none[rows], np.iinfo(width).max, codes[rows] - low[rows, None])
            self._tables.append(above.astype(width))

    def unpack(self, name: str) -> Any:
        """A series as float32."""
        np = find_arrays()

        place = self.schema.places.get(name)
        if place is None:
            return np.full(self.count, np.nan, np.float32)
        step, table, low = self.schema.steps[place], int(self._table[place]), int(self._low[place])
        if table < 0:
            return np.full(self.count, _to_values(np.array([low]), step)[0])
        above = self._tables[table][self._row[place]]
        codes = np.where(above == np.iinfo(above.dtype).max, _NONE, above.astype(np.int64) + low)
        return _to_values(codes, step)


class _PackedSeries(Mapping[str, Any]):
    """The series of a host by name, unpacked when they are looked at. `order`: which samples, in which order."""

    def __init__(self, chunks: Sequence[_Chunk], order: Any) -> None:
        self._chunks, self._order = chunks, order
        self._names = dict.fromkeys(name for chunk in chunks for name in chunk.schema.series)

    def __getitem__(self, name: str) -> Any:
        np = find_arrays()

        if name not in self._names:
            raise KeyError(name)
        values = np.concatenate([chunk.unpack(name) for chunk in self._chunks])
        return values if self._order is None else values[self._order]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _read_chunks(
    blocks: Iterable[tuple[tuple[int, int], memoryview]], schemas: Mapping[tuple[int, int], _Schema]
) -> tuple[list[_Chunk], Any]:
    """The samples of blocks, and their times."""
    np = find_arrays()

    chunks: list[_Chunk] = []
    times: list[Any] = []
    waiting: list[Any] = []
    of: _Schema | None = None

    def pack() -> None:
        if of is not None and waiting:
            chunks.append(_Chunk(of, np.concatenate(waiting, axis=1)))
            waiting.clear()

    for key, packed in blocks:
        if (known := schemas.get(key)) is None or (part := _read_codes(packed, known)) is None:
            continue
        if known is not of or sum(codes.shape[1] for codes in waiting) + part[1].shape[1] > _CHUNK:
            pack()
            of = known
        times.append(part[0])
        waiting.append(part[1])
    pack()
    return chunks, np.concatenate(times) if times else np.empty(0)


class TelemetryFollower:
    """Reads what was appended to a host's file since the last call, for views that refresh. The first call reads the
    last `first_bytes` of a longer file, or as many times that as hold a schema and samples."""

    def __init__(self, path: Path, first_bytes: int = 1 << 20) -> None:
        self._path, self._first_bytes = path, first_bytes
        self._offset = -1
        self._inode = 0
        self._rest = b""
        self._schemas: dict[tuple[int, int], _Schema] = {}

    def new_samples(self) -> list[tuple[NodeInfo, Any, dict[str, Any]]]:
        """Of each new block: its sampler, times (Unix seconds) and columns by name. Raises OSError, also where there is
        no file."""
        with open(self._path, "rb") as file:
            found = os.fstat(file.fileno())
            if self._offset < 0 or found.st_ino != self._inode or found.st_size < self._offset:
                return self._read_end(file, found.st_ino, found.st_size)
            if found.st_size == self._offset:
                return []
            file.seek(self._offset)
            content = self._rest + file.read()
            self._offset = file.tell()
        return self._unpack_blocks(content)

    def _read_end(self, file: BinaryIO, inode: int, size: int) -> list[tuple[NodeInfo, Any, dict[str, Any]]]:
        length = self._first_bytes
        while True:
            self._schemas, self._inode = {}, inode
            file.seek(max(0, size - length))
            content = file.read()
            self._offset = file.tell()
            samples = self._unpack_blocks(content)
            if samples or length >= size:
                return samples
            length *= 4

    def _unpack_blocks(self, content: bytes) -> list[tuple[NodeInfo, Any, dict[str, Any]]]:
        samples, end = [], 0
        for kind, schema, sampler, _, packed, end in _list_blocks(content):  # noqa: B007
            key = (sampler, schema)
            if kind == _SCHEMA and (read := _read_schema(packed)) is not None:
                self._schemas[key] = read
            elif kind == _SAMPLES and (known := self._schemas.get(key)) is not None:
                part = _read_codes(packed, known)
                if part is not None:
                    samples.append((known.info, part[0], _name_values(part[1], known)))
        self._rest = content[end:]
        return samples


def _list_blocks(content: bytes) -> Iterator[tuple[int, int, int, int, memoryview, int]]:
    """Kind, number of the schema, sampler, newest time (ms), content and end of each whole block."""
    view, at = memoryview(content), 0
    while (at := content.find(_MAGIC, at)) >= 0 and at + _HEAD.size <= len(content):
        _, version, kind, schema, sampler, size, newest_ms, checksum = _HEAD.unpack_from(content, at)
        start = at + _HEAD.size
        packed = view[start : start + size]
        if size > _MOST_BYTES or len(packed) < size or zlib.crc32(packed, zlib.crc32(view[at : start - 4])) != checksum:
            at += 1
            continue
        if version == _VERSION:
            yield kind, schema, sampler, newest_ms, packed, start + size
        at = start + size


def _unpack(packed: memoryview) -> bytes:
    stream = zlib.decompressobj()
    content = stream.decompress(packed, _MOST_BYTES)
    if not stream.eof:
        raise ValueError("it is too large")
    return content


def _read_schema(packed: memoryview) -> _Schema | None:
    with suppress(zlib.error, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        content = json.loads(_unpack(packed))
        series, steps = tuple(map(str, content["series"])), tuple(map(float, content["steps"]))
        if len(series) == len(steps) and all(step >= 0 and math.isfinite(step) for step in steps):
            return _Schema(_read_info(content["info"]), series, steps)
    return None


_NO_INFO = NodeInfo("", 0, "", 0, 0.0, 1.0, 0, (), None, None, (), MappingProxyType({}))
_NO_DEVICE = DeviceInfo(0, "", "", None, None, "")


def _read_info(given: Mapping[str, Any]) -> NodeInfo:
    """Keys that this version does not know are ignored."""
    known = {field.name: given[field.name] for field in fields(NodeInfo) if field.name in given}
    names = [field.name for field in fields(DeviceInfo)]
    devices = ({name: each[name] for name in names if name in each} for each in known.get("devices", ()))
    known["devices"] = tuple(replace(_NO_DEVICE, **each) for each in devices)
    known["allowed_cores"] = tuple(map(int, known.get("allowed_cores", ())))
    known["missing"] = MappingProxyType({str(name): str(why) for name, why in known.get("missing", {}).items()})
    known["host"], known["started"] = str(known.get("host", "")), float(known.get("started", 0.0))
    return replace(_NO_INFO, **known)


def _read_codes(packed: memoryview, schema: _Schema) -> tuple[Any, Any] | None:
    """Times, and the codes of each series, int64 (series, samples), _NONE where there is no value; None for a block
    that does not fit its schema."""
    np = find_arrays()

    try:
        content = _unpack(packed)
        count, width, first_ms = _SHAPE.unpack_from(content)
        if width != len(schema.series) or not count:
            return None
        at = _SHAPE.size
        times = (first_ms + np.frombuffer(content, "<i4", count, at).astype(np.int64)) / 1000.0
        at += 4 * count
        kinds = np.frombuffer(content, np.uint8, width, at)
        at += width
        constant, varies = kinds == _CONSTANT, kinds == _VARIES
        constants = np.frombuffer(content, "<i4", int(constant.sum()), at)
        at += constants.nbytes
        planes = np.frombuffer(content, np.uint8, 4 * count * int(varies.sum()), at).reshape(4, -1)
    except (zlib.error, ValueError, struct.error):
        return None
    zigzag = np.ascontiguousarray(planes.T).view("<u4").reshape(-1, count).astype(np.int64)
    codes = np.full((width, count), _NONE, np.int64)
    codes[constant] = constants[:, None]
    codes[varies] = np.cumsum((zigzag >> 1) ^ -(zigzag & 1), axis=1)
    return times, codes.clip(_NONE, -_NONE)


def _name_values(codes: Any, schema: _Schema) -> dict[str, Any]:
    """The float32 values of each series."""
    np = find_arrays()

    steps, values = np.array(schema.steps), np.empty(codes.shape, np.float32)
    for step in set(schema.steps):
        values[steps == step] = _to_values(codes[steps == step], step)
    return dict(zip(schema.series, values, strict=True))


def _to_values(codes: Any, step: float) -> Any:
    """The float32 values of codes."""
    np = find_arrays()

    if step:
        return np.where(codes == _NONE, np.nan, codes * step).astype(np.float32)
    values = (codes << _SHIFT).astype(np.uint32).view(np.float32)
    return np.where(codes == _NONE, np.float32(np.nan), values)
