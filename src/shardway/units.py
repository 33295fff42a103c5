"""Text such as "64GiB", "1h30m", "2e9 tokens", "max f1" <-> typed values.

Invariants:
- `parse_x(render_x(v)) == v` for every value that a run file can hold (a `Monitor` renders by `str`). Errors are
  `ValueError` with a sentence that names the text and what is allowed. No key of a run file is named here.
- A value that is not finite is never the best, and of equal values the earlier one is, so the same results always give
  the same steps.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardway.batch_ramp import BatchRamp

SpanUnit = Literal["steps", "samples", "tokens", "epochs"]
SPAN_UNITS: tuple[SpanUnit, ...] = ("steps", "samples", "tokens", "epochs")

UNKNOWN = "n/a"
"""Stands where a number is not known."""

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SECONDS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}
_COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

MAX_BYTES = 2**80
MAX_SECONDS = 3650 * 86400.0
MAX_AMOUNT = 2.0**53
"""Above this a float no longer holds every integer."""

_NUMBER = r"(?P<number>\d+(?:_\d+)*(?:\.\d+)?(?:[eE][+-]?\d+)?)"
_BYTES_PATTERN = re.compile(rf"{_NUMBER}\s*(?P<unit>[A-Za-z]*)")
_SPAN_PATTERN = re.compile(rf"{_NUMBER}\s*(?P<scale>[kKMBT]?)\s+(?P<unit>[a-z]+)")
_TIME_PATTERN = re.compile(rf"{_NUMBER}\s*(?P<unit>ms|min|d|h|m|s)\s*")


def parse_bytes(text: str) -> int:
    """Bytes from "64GiB", "1.5 GB", "4096"; an integer count of a binary or decimal unit is exact."""
    match = _BYTES_PATTERN.fullmatch(text.strip())
    units = {**_BINARY, **_DECIMAL, "": 1}
    if match is None or match["unit"] not in units:
        raise ValueError(f'"{text}" is not a size; allowed: a number and one of {", ".join([*_BINARY, *_DECIMAL])}')
    number, unit = match["number"], units[match["unit"]]
    if float(number) * unit > MAX_BYTES:
        raise ValueError(f'"{text}" is too large; allowed: up to {render_bytes(MAX_BYTES)}')
    return int(number) * unit if number.replace("_", "").isdecimal() else round(float(number) * unit)


def render_bytes(count: int) -> str:
    """The shortest exact form, binary if both are as short: 68719476736 -> "64GiB", 480000000000 -> "480GB",
    2049 -> "2049B"."""
    units = (*_BINARY.items(), *((unit, size) for unit, size in _DECIMAL.items() if unit != "KB"))
    exact = [(size, unit) for unit, size in units if count % size == 0]
    size, unit = max(exact, key=lambda each: (-len(str(count // each[0])), each[1].endswith("iB"), each[0]))
    return f"{count // size}{unit}" if count else "0B"


def format_bytes(count: int) -> str:
    """A size for people: `render_bytes`, with the GiB in brackets if that is a long number:
    540016640000 -> "515000MiB (about 502.9GiB)"."""
    exact = render_bytes(count)
    is_long = count >= _BINARY["GiB"] and len(exact.rstrip("BkKMGTPi")) > 4
    return f"{exact} (about {count / _BINARY['GiB']:.4g}GiB)" if is_long else exact


def parse_seconds(text: str) -> float:
    """Seconds from "90s", "1h30m", "2d", "500ms"."""
    rest, total, matched = text.strip(), 0.0, False
    while match := _TIME_PATTERN.match(rest):
        number, unit = float(match["number"]), match["unit"]
        # 1900 / 1000 is 1.9, but 1900 * 0.001 is not.
        total += number / 1000 if unit == "ms" else number * _SECONDS[unit]
        rest, matched = rest[match.end() :], True
    if rest or not matched:
        raise ValueError(f'"{text}" is not a time; allowed: numbers with d, h, min, m, s or ms, such as "1h30m"')
    if total > MAX_SECONDS:
        raise ValueError(f'"{text}" is too long; allowed: up to {render_seconds(MAX_SECONDS)}')
    return total


def render_seconds(seconds: float) -> str:
    """A time that `parse_seconds` reads back to the same value: 5400.0 -> "1h30m", 0.25 -> "250ms"."""
    if seconds < 1.0 or seconds != int(seconds):
        count = round(seconds * 1000)
        return f"{count}ms" if count / 1000 == seconds else f"{seconds!r}s"
    rest, parts = int(seconds), []
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(rest, int(_SECONDS[unit]))
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts)


def render_clock(seconds: float) -> str:
    """A time for a person to glance at: 3725 -> "1:02:05", 65 -> "1:05"."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def render_plural(count: int | None, noun: str, form: str = "") -> str:
    """ "1 rank", "2 ranks", "n/a ranks"; "1,024 ranks" in the form ","."""
    return f"{UNKNOWN if count is None else format(count, form)} {noun if count == 1 else noun + 's'}"


def render_count(count: float) -> str:
    """Three figures and a suffix: 51234.5 -> "51.2k", 999 -> "999"."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 0.9995 * size:
            return f"{count / size:.3g}{suffix}" if abs(count) < 999.5 * size else f"{count / size:.0f}{suffix}"
    return f"{count:.3g}" if abs(count) < 999.5 else f"{count:.0f}"


@dataclass(frozen=True)
class Scale:
    """How units of progress convert: samples of each step, tokens per sample, samples per epoch."""

    batch: BatchRamp
    tokens_per_sample: int
    samples_per_epoch: int


@dataclass(frozen=True)
class Span:
    """An amount of training: "500 steps", "2e9 tokens", "3 epochs", "60000 samples"."""

    amount: float
    unit: SpanUnit

    def __str__(self) -> str:
        amount = int(self.amount) if self.amount == int(self.amount) else self.amount
        return f"{amount} {self.unit}"

    def in_steps(self, scale: Scale) -> int:
        """Whole steps from the beginning of a run that cover this span (rounded up; 0 only for an amount of 0)."""
        return math.ceil(self.amount) if self.unit == "steps" else scale.batch.count_steps(self._in_samples(scale))

    def in_last_steps(self, scale: Scale) -> int:
        """As `in_steps`, at the end of a run or anywhere in it: where the batch grows, in steps of the last size."""
        return self.in_steps(replace(scale, batch=BatchRamp.of(scale.batch.last)))

    def _in_samples(self, scale: Scale) -> float:
        if self.unit == "tokens":
            return self.amount / scale.tokens_per_sample
        return self.amount * (scale.samples_per_epoch if self.unit == "epochs" else 1)


def parse_span(value: str | int) -> Span:
    """A Span from "2e9 tokens", "0.5M tokens" or a bare number of steps."""
    text = f"{value} steps" if isinstance(value, int) else value.strip()
    text = f"{text} steps" if re.fullmatch(_NUMBER, text) else text
    match = _SPAN_PATTERN.fullmatch(text)
    unit = next((u for u in SPAN_UNITS if match and match["unit"] in (u, u[:-1])), None)
    if match is None or unit is None:
        raise ValueError(
            f'"{value}" is not an amount of training; allowed: a number of {", ".join(SPAN_UNITS)}, such as "500 steps"'
        )
    amount = float(match["number"]) * _COUNTS[match["scale"]]
    if amount > MAX_AMOUNT:
        raise ValueError(f'"{value}" is too large; allowed: up to {MAX_AMOUNT:.0f} {unit}')
    if unit == "steps" and amount != int(amount):
        raise ValueError(f'"{value}" is not a whole number of steps')
    return Span(amount, unit)


Cadence = Span | float
"""How often something happens: a Span of training, or seconds of wall time."""


def parse_cadence(value: str | int) -> Cadence:
    """A Span ("200 steps") or a time in seconds ("10min")."""
    readers: tuple[Callable[[Any], Cadence], ...] = (parse_seconds, parse_span)
    for parse in readers if isinstance(value, str) else readers[1:]:
        with contextlib.suppress(ValueError):
            return parse(value)
    raise ValueError(f'"{value}" is neither an amount of training ("200 steps", "1 epochs") nor a time ("10min")')


def render_cadence(cadence: Cadence) -> str:
    """The text that `parse_cadence` reads back."""
    return str(cadence) if isinstance(cadence, Span) else render_seconds(cadence)


# --- which validation of a run is the best, and how many came after it

Results = Mapping[int, Mapping[str, float]]
"""Metrics of validations by their step."""

_IS_HIGHER_BETTER = {"loss": False, "accuracy": True, "bits_per_byte": False}
"""Metrics whose direction is known."""


@dataclass(frozen=True)
class Monitor:
    """A metric of validations, and whether more of it is better: "loss", "accuracy", "max f1", "min rmse"."""

    metric: str
    highest: bool

    def __str__(self) -> str:
        if self.metric in _IS_HIGHER_BETTER:
            return self.metric
        return f"{'max' if self.highest else 'min'} {self.metric}"

    def rank(self, results: Results) -> list[int]:
        """The steps whose value is a finite number, the best first."""
        values = {step: float(metrics.get(self.metric, math.nan)) for step, metrics in results.items()}
        sign, finite = -1 if self.highest else 1, [step for step, value in values.items() if math.isfinite(value)]
        return sorted(finite, key=lambda step: (sign * values[step], step))

    def find_best(self, results: Results) -> BestResult | None:
        """The best validation; None if no value is a finite number."""
        ranked = self.rank(results)
        return BestResult(ranked[0], results[ranked[0]]) if ranked else None

    def count_since_best(self, results: Results) -> int:
        """The number of validations with this metric after the best one; all of them if there is no best."""
        best = self.find_best(results)
        return sum(self.metric in results[step] for step in results if best is None or step > best.step)

    def render(self, metrics: Mapping[str, float]) -> str:
        """The metric and its value: "loss 2.314"."""
        return f"{self.metric} {metrics.get(self.metric, math.nan):.4g}"


@dataclass(frozen=True)
class BestResult:
    """The best validation so far: its step and all metrics of it."""

    step: int
    metrics: Mapping[str, float]


LOSS = Monitor("loss", highest=False)


def parse_monitor(text: str) -> Monitor:
    """A Monitor from "loss", "max f1" or "min rmse"; ValueError with a sentence for anything else."""
    words, directions = text.split(maxsplit=1), {"max": True, "min": False}
    known = ", ".join(f'"{name}"' for name in _IS_HIGHER_BETTER)
    if len(words) == 2 and words[0] in directions:
        metric, highest = words[1].strip(), directions[words[0]]
        if _IS_HIGHER_BETTER.get(metric, highest) is not highest:
            raise ValueError(f'"{text}" would take the worst {metric} for the best; allowed: "{metric}"')
        return Monitor(metric, highest)
    metric = text.strip()
    if metric in _IS_HIGHER_BETTER:
        return Monitor(metric, _IS_HIGHER_BETTER[metric])
    if not metric or metric in directions:
        raise ValueError(f'"{text}" names no metric; allowed: {known}, or any other with its direction: "max f1"')
    raise ValueError(
        f'whether more or less of "{metric}" is better is not known; allowed: "max {metric}" or "min {metric}", or '
        f"{known}"
    )
