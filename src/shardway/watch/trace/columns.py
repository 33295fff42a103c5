"""Events of a trace as columns: what is read of an event, how its columns grow, and the table that they become.

Invariants: what is kept of an event is one row of numbers, and each text once; whatever an event holds, its row is made
or it is counted in `faults`.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardway.errors import legible

if TYPE_CHECKING:
    import numpy as np

_NO_RAW = msgspec.Raw()


class EventArgs(msgspec.Struct, frozen=True, gc=False):
    """What is read of an event's `args`; profilers write about forty fields more."""

    correlation: int | None = None
    external: int | None = msgspec.field(default=None, name="External id")
    old_external: int | None = msgspec.field(default=None, name="external id")
    device: int | str | None = None
    stream: int | str | None = None
    dims: msgspec.Raw = msgspec.field(default=_NO_RAW, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=_NO_RAW, name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=_NO_RAW, name="Concrete Inputs")
    grid: msgspec.Raw = _NO_RAW
    bytes: float | None = None
    collective: str | None = msgspec.field(default=None, name="Collective name")
    group: str | None = msgspec.field(default=None, name="Process Group Name")
    group_ranks: msgspec.Raw = msgspec.field(default=_NO_RAW, name="Process Group Ranks")
    sequence: int | str | None = msgspec.field(default=None, name="Seq")
    node: int | None = msgspec.field(default=None, name="Sequence number")
    elements: float | None = msgspec.field(default=None, name="In msg nelems")


_NO_ARGS = EventArgs()


class _EventOfFile(msgspec.Struct, gc=False):
    """One event of a file. Times are microseconds; `ph` is its phase, "X" an event with a duration."""

    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = math.nan
    pid: int | str = -1
    tid: int | str = -1


class TraceEvent(_EventOfFile, gc=False):
    """An event with what torch writes about it."""

    args: EventArgs = _NO_ARGS


class BareEvent(_EventOfFile, gc=False):
    """An event whose `args` are not those of torch."""

    @property
    def args(self) -> EventArgs:
        return _NO_ARGS


class Interned(dict[Any, int]):
    """Values by the number of their first occurrence."""

    def __missing__(self, value: Any) -> int:
        self[value] = number = len(self)
        return number

    def list_values(self) -> list[Any]:
        return list(self)


@dataclass
class TraceFaults:
    """What is wrong with a file. `malformed`: events left out, `sample` the first of them."""

    malformed: int = 0
    sample: str = ""
    truncated: str = ""
    unpaired: int = 0
    """Begin and end events, which this reader does not pair."""


OTHER, OP, ANNOTATION, PYTHON, RUNTIME, KERNEL, MEMCPY, MEMSET, OVERHEAD, GPU_ANNOTATION, PROFILER = range(11)

_CATEGORY_WORDS = {
    OP: "cpu_op operator",
    ANNOTATION: "user_annotation",
    PYTHON: "python_function",
    RUNTIME: "cuda_runtime cuda_driver runtime hip_runtime xpu_runtime xpu_driver privateuse1_runtime"
    " privateuse1_driver",
    KERNEL: "kernel concurrent_kernel",
    MEMCPY: "gpu_memcpy memcpy",
    MEMSET: "gpu_memset memset",
    OVERHEAD: "overhead",
    GPU_ANNOTATION: "gpu_user_annotation",
    PROFILER: "trace",
}
"""Each category by the words that releases of Kineto write for it."""

_CATEGORY_OF = {word: category for category, words in _CATEGORY_WORDS.items() for word in words.split()}


class _Categories(Interned):
    def __missing__(self, value: Any) -> int:
        self[value] = number = _CATEGORY_OF.get(value.lower(), OTHER)
        return number


@dataclass(frozen=True)
class Trace:
    """Events with a duration, in columns of one length, in the order of their start. Times are microseconds from
    `origin_us`.

    Columns with a code index a table: `name` names, `process` and `thread` the processes and threads as the file names
    them, `dims` and `types` and `extra` texts of JSON (shapes and types of an operator's inputs; `extra`: concrete
    inputs of a convolution or attention, a kernel's grid, a collective's name, group, ranks and elements). `sequence`
    is a collective's number in its group; `node` the number of the autograd node that a forward operator makes, and
    that its backward operators have. -1 stands for what an event lacks.
    """

    path: str
    start: np.ndarray
    duration: np.ndarray
    name: np.ndarray
    category: np.ndarray
    process: np.ndarray
    thread: np.ndarray
    correlation: np.ndarray
    external: np.ndarray
    device: np.ndarray
    stream: np.ndarray
    dims: np.ndarray
    types: np.ndarray
    extra: np.ndarray
    sequence: np.ndarray
    node: np.ndarray
    bytes: np.ndarray
    names: list[str]
    processes: list[int | str]
    threads: list[int | str]
    texts: list[str]
    """The table of `dims`, `types` and `extra`."""
    properties: Mapping[str, Any]
    json_bytes: int
    origin_us: float
    faults: TraceFaults = field(default_factory=TraceFaults)

    @property
    def end(self) -> np.ndarray:
        return self.start + self.duration

    def of(self, *categories: int) -> np.ndarray:
        """The rows of these categories."""
        import numpy as np

        return np.flatnonzero(np.isin(self.category, categories))


# --- from events to columns

_INT64 = 1 << 63


def _long(value: int) -> int:
    return value if -_INT64 <= value < _INT64 else -1


def _small(value: int) -> int:
    return value if 0 <= value < 1 << 31 else -1


def _old_external(value: int | None) -> int:
    """Until torch 1.13 a kernel has the number under this name."""
    return -1 if value is None else _long(value)


def _ordinal(value: int | str) -> int:
    """A stream, device or sequence number; some releases of ROCm write "0x0"."""
    if isinstance(value, int):
        return _small(value)
    try:
        return _small(int(value, 0))
    except ValueError:
        return -1


_WITH_CONCRETE = ("conv", "attention", "flash", "_fused_adam", "_foreach")


_COLUMNS = {
    **dict.fromkeys(("start", "duration", "bytes"), "d"),
    **dict.fromkeys(("correlation", "external", "node"), "q"),
    **dict.fromkeys(("name", "process", "thread", "device", "stream", "sequence", "dims", "types", "extra"), "i"),
    "category": "b",
}
"""The type of each column, as `array` names it."""


class TraceColumns:
    """Columns while they grow."""

    def __init__(self) -> None:
        self.column = {name: array(code) for name, code in _COLUMNS.items()}
        self.names, self.processes, self.threads, self.texts = Interned(), Interned(), Interned(), Interned()
        self.categories = _Categories()
        self.properties: dict[str, Any] | None = None
        self.is_object = False
        self.faults = TraceFaults()

    @property
    def rows(self) -> int:
        return len(self.column["start"])

    def add(self, events: list[Any]) -> None:
        """Append events with a duration."""
        kept = [each for each in events if each.ph == "X"]
        if len(kept) != len(events):
            for each in events:
                self.faults.unpaired += each.ph in ("B", "E")
        args = [each.args for each in kept]
        text = self._intern_raw
        found: dict[str, list[Any]] = {
            "start": [each.ts for each in kept],
            "duration": [each.dur for each in kept],
            "name": [*map(self.names.__getitem__, [each.name for each in kept])],
            "category": [*map(self.categories.__getitem__, [each.cat for each in kept])],
            "process": [*map(self.processes.__getitem__, [each.pid for each in kept])],
            "thread": [*map(self.threads.__getitem__, [each.tid for each in kept])],
            "correlation": [-1 if (n := each.correlation) is None else _long(n) for each in args],
            "external": [
                _long(n) if (n := each.external) is not None else _old_external(each.old_external) for each in args
            ],
            "device": [-1 if (o := each.device) is None else _ordinal(o) for each in args],
            "stream": [-1 if (o := each.stream) is None else _ordinal(o) for each in args],
            "sequence": [-1 if (n := each.sequence) is None else _ordinal(n) for each in args],
            "node": [-1 if (n := each.node) is None else _long(n) for each in args],
            "bytes": [-1.0 if (size := each.bytes) is None else size for each in args],
            "dims": [-1 if (raw := each.dims) is _NO_RAW else text(raw) for each in args],
            "types": [-1 if (raw := each.types) is _NO_RAW else text(raw) for each in args],
            "extra": [self._extra(each) for each in kept],
        }
        for name, values in found.items():
            self.column[name].fromlist(values)

    def _intern_raw(self, raw: msgspec.Raw) -> int:
        return self.texts[bytes(raw)]

    def _extra(self, event: Any) -> int:
        args = event.args
        if args is _NO_ARGS:
            return -1
        if args.collective is not None:
            ranks = bytes(args.group_ranks).decode(errors="replace").strip('"')
            return self.texts[json.dumps([args.collective, args.group or "", ranks, args.elements or 0.0]).encode()]
        if args.grid is not _NO_RAW:
            return self.texts[bytes(args.grid)]
        if args.concrete is not _NO_RAW and any(part in event.name for part in _WITH_CONCRETE):
            return self.texts[bytes(args.concrete)]
        return -1

    def finish(self, path: Path, json_bytes: int) -> Trace:
        """The table, in the order of start."""
        import numpy as np

        start, duration = np.frombuffer(self.column["start"]), np.frombuffer(self.column["duration"])
        good = np.isfinite(start) & np.isfinite(duration) & (duration >= 0)
        order = np.flatnonzero(good)
        if (bad := len(start) - len(order)) and not self.faults.sample:
            first = int(np.flatnonzero(~good)[0])
            name = self.names.list_values()[self.column["name"][first]]
            self.faults.sample = legible(f"{name[:80]}: start {start[first]:g}, duration {duration[first]:g}")
        self.faults.malformed += bad
        order = order[np.argsort(start[order], kind="stable")]
        origin = float(start[order[0]]) if len(order) else 0.0
        columns: dict[str, Any] = {
            name: np.frombuffer(values, dtype=values.typecode)[order] for name, values in self.column.items()
        }
        columns["start"] -= origin
        return Trace(
            path=str(path),
            **columns,
            names=self.names.list_values(),
            processes=self.processes.list_values(),
            threads=self.threads.list_values(),
            texts=[text.decode(errors="replace") for text in self.texts],
            properties=self.properties or {},
            json_bytes=json_bytes,
            origin_us=origin,
            faults=self.faults,
        )
