"""Events as typed values.

Invariant: reading never raises; a field that is absent, null or of another type becomes None, "" or (for a measured
loss) NaN. This module does not combine events: that is `shardway.watch.progress`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeVar

from shardway.rundir.names import SHARED
from shardway.units import LOSS, Monitor, parse_monitor

MOST = 2.0**63
MOST_SECONDS = 1e12  # about thirty thousand years, before and after 1970
T = TypeVar("T")
Time = float  # Unix seconds; 0 where unknown
Count = int  # 0 where unknown


def number(event: Mapping[str, Any], key: str) -> float | None:
    """The number under `key` (NaN and infinity included), or None."""
    value = event.get(key)
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def measured(event: Mapping[str, Any], key: str) -> float:
    """A measured number; null stands for NaN, which strict JSON lacks."""
    value = number(event, key)
    return math.nan if value is None else value


def whole(event: Mapping[str, Any], key: str) -> int | None:
    """The number under `key` as an int; None as well for one too large to be a count."""
    value = number(event, key)
    return int(value) if value is not None and abs(value) < MOST else None


def seconds(event: Mapping[str, Any], key: str) -> float | None:
    """The time under `key`; None as well for a value that is no time."""
    value = number(event, key)
    return value if value is not None and abs(value) < MOST_SECONDS else None


def text(event: Mapping[str, Any], key: str) -> str:
    """The string under `key`, or an empty one."""
    value = event.get(key)
    return value if isinstance(value, str) else ""


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], Any]] = {
    "Time": lambda event, key: seconds(event, key) or 0.0,
    "Count": lambda event, key: whole(event, key) or 0,
    "float": measured,
    "float | None": number,
    "int | None": whole,
    "str": text,
}
"""Type of a field -> how it is read."""


@cache
def _find_readers(kind: type) -> Mapping[str, Callable[[Mapping[str, Any], str], Any]]:
    return {each.name: _READERS[each.type] for each in fields(kind) if each.type in _READERS}  # type: ignore[index]


def _read(kind: type[T], event: Mapping[str, Any], /, **more: Any) -> T:
    """Each field of a dataclass from the key of its name; `more` are those that are read otherwise."""
    readers = _find_readers(kind)  # type: ignore[arg-type]
    known = {name: read(event, name) for name, read in readers.items() if name not in more}
    return kind(**known, **more)


@dataclass(frozen=True)
class Start:
    """The start of an attempt: its first step, machine and settings. `changes`: "optim.lr 0.003 -> 0.1" for each key
    whose value differs from the attempt before. `numerics`: number formats and compilation, as key, value, origin of
    the value."""

    step: Count
    total_steps: int | None
    time: Time
    host: str
    launcher: str
    world: int | None
    device: str
    torch: str
    python: str
    parameters: int | None
    tokens_per_step: int | None
    samples_per_step: int | None
    bytes_per_token: float | None
    checkpoint: str
    changes: tuple[str, ...]
    machine: dict[str, str]
    monitor: Monitor
    numerics: tuple[tuple[str, Any, str], ...]

    @property
    def counts_tokens(self) -> bool:
        """Whether this run is measured in tokens: its samples have several, or a token has a size."""
        longer = (self.tokens_per_step or 0) > (self.samples_per_step or 0) > 0
        return longer or self.bytes_per_token is not None


def read_start(event: Mapping[str, Any]) -> Start:
    """The facts of a `started` event."""
    try:
        monitor = parse_monitor(text(event, "monitor"))
    except ValueError:
        monitor = LOSS  # of attempts made before there was a choice
    machine = event.get("machine")
    return _read(
        Start,
        event,
        changes=tuple(f"{key} {before} -> {after}" for key, before, after in _read_pairs(event, "changed")),
        machine={str(label): str(value) for label, value in machine.items()} if isinstance(machine, dict) else {},
        monitor=monitor,
        numerics=tuple((key, value, str(origin)) for key, value, origin in _read_pairs(event, "numerics")),
    )


def _read_pairs(event: Mapping[str, Any], key: str) -> list[tuple[str, Any, Any]]:
    """A name with two values, for each pair in a table."""
    found = event.get(key)
    pairs = found.items() if isinstance(found, dict) else ()
    return [(name, *pair) for name, pair in pairs if isinstance(pair, list) and len(pair) == 2]


_NOT_METRICS = frozenset(("event", "time", "step", "seconds"))
_KNOWN_METRICS = frozenset(("loss", "bits_per_byte", "accuracy"))


@dataclass(frozen=True)
class ValidatedEvent:
    """One validation; `loss` is NaN where it was not a number, the other metrics None where not measured. `metrics` has
    all by name, sums of the loss function too."""

    step: Count
    time: Time
    loss: float
    bits_per_byte: float | None
    accuracy: float | None
    seconds: float | None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def others(self) -> dict[str, float]:
        """Metrics that a script named itself."""
        return {name: value for name, value in self.metrics.items() if name not in _KNOWN_METRICS}


def read_validation(event: Mapping[str, Any]) -> ValidatedEvent:
    """The facts of a `validation` event."""
    names = (name for name in event if name not in _NOT_METRICS)
    metrics = {n: measured(event, n) for n in names if event[n] is None or number(event, n) is not None}
    return _read(ValidatedEvent, event, seconds=seconds(event, "seconds"), metrics=metrics)


@dataclass(frozen=True)
class Logged:
    """Values that a script logged for a step; NaN where a value was not a number."""

    step: int
    values: Mapping[str, float]


def read_logged(event: Mapping[str, Any]) -> Logged:
    """The facts of a `logged` event."""
    values = event.get("values")
    known = values if isinstance(values, dict) else {}
    return Logged(whole(event, "step") or 0, {str(name): measured(known, name) for name in known})


@dataclass(frozen=True)
class SampledEvent:
    """How the model in training continued prompts after a step: pairs (prompt, continuation)."""

    step: int
    samples: tuple[tuple[str, str], ...]


def read_sampled(event: Mapping[str, Any]) -> SampledEvent:
    """The facts of a `sampled` event."""
    found = event.get("samples")
    known = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return SampledEvent(whole(event, "step") or 0, tuple((text(each, "prompt"), text(each, "text")) for each in known))


@dataclass(frozen=True)
class Evaluation:
    """One result of `shardway evaluate` in a run directory: of which kind, on what, and its numbers by name. `step` is
    that of the checkpoint, `time` when it was made; `errors` has standard errors of some numbers. `samples`
    of `seq_len` tokens, or `questions`: of how much of the data it is."""

    step: int
    time: Time
    kind: str
    data: str
    results: Mapping[str, float]
    errors: Mapping[str, float]
    samples: int | None = None
    seq_len: int | None = None
    questions: int | None = None


def read_evaluation(content: Mapping[str, Any]) -> Evaluation:
    """The facts of a file of `RunDir.read_evaluations`."""

    def numbers(key: str) -> dict[str, float]:
        found = content.get(key)
        known = found if isinstance(found, dict) else {}
        return {str(name): measured(known, name) for name in known}

    time = seconds(content, "time") or 0.0
    kind, data = text(content, "kind"), text(content, "data")
    sizes = (whole(content, name) for name in ("samples", "seq_len", "questions"))
    return Evaluation(whole(content, "step") or 0, time, kind, data, numbers("results"), numbers("errors"), *sizes)


@dataclass(frozen=True)
class Save:
    """One complete checkpoint; `tier` is the run directory or the nodes' own disks."""

    step: Count
    time: Time
    name: str
    size_bytes: int | None
    seconds: float | None
    tier: str = SHARED


def read_save(event: Mapping[str, Any]) -> Save:
    """The facts of a `saved` event."""
    tier = text(event, "tier") or SHARED
    return _read(Save, event, size_bytes=whole(event, "bytes"), seconds=seconds(event, "seconds"), tier=tier)


@dataclass(frozen=True)
class FaultEvent:
    """A fault; `kind` is the name of the error class."""

    step: int | None
    time: Time
    kind: str
    message: str
    exit_code: int | None


def read_fault(event: Mapping[str, Any]) -> FaultEvent:
    """The facts of a `fault` event."""
    return _read(FaultEvent, event, kind=text(event, "kind") or "fault")


@dataclass(frozen=True)
class EndedEvent:
    """How an attempt ended, by its own record: `state` is "finished", "stopped" or "failed"."""

    state: str
    step: int | None
    time: Time
    reason: str


def read_ending(event: Mapping[str, Any]) -> EndedEvent:
    """The facts of a `finished`, `stopped` or `failed` event."""
    return _read(EndedEvent, event, state=text(event, "event"))
