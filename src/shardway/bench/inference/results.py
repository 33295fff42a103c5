"""What is measured of inference: requests and batches with their times, the figures that follow, and the row of each
measurement.

Definitions, by the names that SGLang (one_batch, offline_throughput) and vLLM (`vllm bench serve`) have for them:

- TTFT: from sending a request to its first output. E2EL: to its last output. TPOT: (E2EL - TTFT) / (output tokens - 1);
  undefined for one token. ITL: every gap between two pieces of output of a request.
- prefill latency: to the first token of a whole batch. Decode latency: of each later step of the batch; the median of
  them is reported. Total latency: their sum. A throughput is tokens over such a latency.
- request goodput: requests a second that keep every limit (SLO); of one with a single token TPOT counts as 0.

Invariants:
- Functions of numbers alone: no clock, no device. What is undefined is None, never 0.
- A row is a flat table of JSON values with `format` and `kind`; a name never changes its meaning within a format.
- Rows are appended, each by one write; a line that was cut off before is closed first.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardway.version import __version__

FORMAT = 1

Row = Mapping[str, Any]

ONE_BATCH, THROUGHPUT, SERVE = "one-batch", "throughput", "serve"

LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""The latencies of a request, as vLLM names them in the fields of its results."""

FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        ONE_BATCH: (
            *("batch_size", "input_len", "output_len", "prefill_latency", "prefill_throughput"),
            *("median_decode_latency", "median_decode_throughput", "total_latency", "overall_throughput"),
        ),
        THROUGHPUT: (
            *("successful_requests", "total_latency", "total_input_tokens", "total_output_tokens"),
            *("request_throughput", "input_throughput", "output_throughput", "total_throughput"),
        ),
        SERVE: (
            *("request_rate", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
            *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
            "total_token_throughput",
            *(f"{part}_{name}_ms" for name in LATENCIES for part in ("mean", "median", "std", "p90", "p99")),
        ),
    }
)
"""The figures of each kind of result, which results of SGLang and vLLM are given too."""


# --- numbers


def interpolate(values: Sequence[float], percent: float) -> float:
    """The percentile of values, linear between neighbours, as numpy.percentile (which SGLang and vLLM use). Raises
    ValueError for no values."""
    if not values:
        raise ValueError("there is no percentile of no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def divide(count: float, seconds: float | None) -> float | None:
    """A rate; None where the time is unknown or 0."""
    return count / seconds if seconds else None


def summarize_latency(name: str, seconds: Sequence[float], percents: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation (of the population) and percentiles in milliseconds: "mean_ttft_ms" ..."""
    parts: dict[str, float | None] = dict.fromkeys(("mean", "median", "std", *map(_name_percentile, percents)))
    if seconds:
        parts |= {"mean": statistics.fmean(seconds), "median": statistics.median(seconds)}
        parts |= {"std": statistics.pstdev(seconds)}
        parts |= {_name_percentile(each): interpolate(seconds, each) for each in percents}
    return {f"{part}_{name}_ms": None if value is None else 1e3 * value for part, value in parts.items()}


def _name_percentile(percent: float) -> str:
    return f"p{percent:g}"


# --- a static batch


@dataclass(frozen=True)
class BatchTimes:
    """Seconds of a static batch: to its first tokens, and of each decode step after them (output_len - 1)."""

    prefill_s: float
    decode_s: tuple[float, ...]


def measure_one_batch(batch_size: int, input_len: int, output_len: int, times: BatchTimes) -> dict[str, Any]:
    """The figures of a static batch, by SGLang's names: latencies in seconds, throughputs in tokens a second."""
    decode = statistics.median(times.decode_s) if times.decode_s else None
    total = times.prefill_s + sum(times.decode_s)
    return {
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "prefill_latency": times.prefill_s,
        "prefill_throughput": divide(batch_size * input_len, times.prefill_s),
        "median_decode_latency": decode,
        "median_decode_throughput": divide(batch_size, decode),
        "total_latency": total,
        "overall_throughput": divide(batch_size * (input_len + output_len), total),
        **summarize_latency("decode", times.decode_s, (90, 99)),
    }


# --- requests


@dataclass(frozen=True)
class ServedRequest:
    """One request as its sender saw it. Times are seconds of one clock, whatever its zero; `arrivals_s` has one for
    each piece of output. `error` is why it failed, "" where it did not."""

    sent_s: float
    arrivals_s: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first output. Only of a request that succeeded, as all below."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """Seconds to the last output."""
        return self.arrivals_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None where there is none."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between pieces of output."""
        return tuple(after - before for before, after in itertools.pairwise(self.arrivals_s))


def count_most_at_once(requests: Iterable[ServedRequest]) -> int:
    """The most requests that were under way at one time; one that ends as another begins is not with it."""
    marks = sorted(
        mark for each in requests if each.arrivals_s for mark in ((each.sent_s, 1), (each.arrivals_s[-1], -1))
    )
    now = most = 0
    for _, change in marks:
        now += change
        most = max(most, now)
    return most


def keeps_limits(request: ServedRequest, limits_ms: Mapping[str, float]) -> bool:
    """Whether a request that succeeded keeps every limit: milliseconds of ttft, tpot, e2el."""
    found = {"ttft": request.ttft_s, "tpot": request.tpot_s or 0.0, "e2el": request.e2el_s}
    return all(1e3 * found[name] <= limit for name, limit in limits_ms.items())


def measure_requests(
    requests: Sequence[ServedRequest],
    duration_s: float,
    limits_ms: Mapping[str, float] = MappingProxyType({}),
    percents: Sequence[float] = (50, 90, 99),
) -> dict[str, Any]:
    """The figures of requests that were sent to a server, by vLLM's names: rates over the whole duration, latencies of
    the requests that succeeded, in milliseconds."""
    done = [each for each in requests if not each.error and each.arrivals_s]
    read, written = sum(each.input_tokens for each in done), sum(each.output_tokens for each in done)
    good = sum(keeps_limits(each, limits_ms) for each in done)
    seconds: dict[str, list[float]] = {
        "ttft": [each.ttft_s for each in done],
        "tpot": [each.tpot_s for each in done if each.tpot_s is not None],
        "itl": [gap for each in done for gap in each.itl_s],
        "e2el": [each.e2el_s for each in done],
    }
    percents = tuple(dict.fromkeys((*percents, 90, 99)))
    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(requests) - len(done),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": divide(len(done), duration_s),
        "request_goodput": divide(good, duration_s) if limits_ms else None,
        "slo_attainment": good / len(requests) if limits_ms and requests else None,
        "input_throughput": divide(read, duration_s),
        "output_throughput": divide(written, duration_s),
        "total_token_throughput": divide(read + written, duration_s),
        "max_concurrent_requests": count_most_at_once(done),
        **{key: value for name in LATENCIES for key, value in summarize_latency(name, seconds[name], percents).items()},
    }


def measure_throughput(requests: Sequence[ServedRequest], latency_s: float) -> dict[str, Any]:
    """The figures of requests that an engine answered offline, by SGLang's names: rates over the time of all of them.
    The latencies of a request are among all the others, so they describe the batch and no service."""
    found = measure_requests(requests, latency_s)
    kept = (key for key in found if key.endswith("_ms") or key in ("max_concurrent_requests", "failed"))
    return {
        "successful_requests": found["completed"],
        "total_latency": latency_s,
        "total_input_tokens": found["total_input_tokens"],
        "total_output_tokens": found["total_output_tokens"],
        "request_throughput": found["request_throughput"],
        "input_throughput": found["input_throughput"],
        "output_throughput": found["output_throughput"],
        "total_throughput": found["total_token_throughput"],
        **{key: found[key] for key in kept},
    }


# --- rows


@dataclass(frozen=True)
class BenchConditions:
    """What a figure depends on beside the engine: results that differ in these are not comparable.

    `engine` is its package and version, `load` the weights ("dummy": random). `others` has settings of the backend.
    """

    backend: str
    engine: str
    model: str
    run_name: str = "default"
    device: str = "n/a"
    dtype: str = "n/a"
    load: str = "n/a"
    ignore_eos: bool | None = True
    prefix_caching: bool | None = None
    warmup: str = ""
    prompts: str = "random ids"
    seed: int = 0
    others: Row = field(default_factory=dict)


def make_row(kind: str, conditions: BenchConditions, figures: Row, date: datetime.datetime | None = None) -> Row:
    """The row of a measurement: format, kind, when, under what conditions, figures."""
    now = date or datetime.datetime.now(datetime.UTC)
    return {
        "format": FORMAT,
        "kind": kind,
        "shardway": __version__,
        "date": now.isoformat(timespec="seconds"),
        "run_name": conditions.run_name,
        "backend": conditions.backend,
        "engine": conditions.engine,
        "model": conditions.model,
        "device": conditions.device,
        "dtype": conditions.dtype,
        "load_format": conditions.load,
        "ignore_eos": conditions.ignore_eos,
        "prefix_caching": conditions.prefix_caching,
        "warmup": conditions.warmup,
        "prompts": conditions.prompts,
        "seed": conditions.seed,
        "settings": dict(conditions.others),
        **figures,
    }


def append_row(path: Path, row: Row) -> None:
    """Add a row to a file of rows, which is made if it is not there. Raises OSError where it cannot be written."""
    line = json.dumps(row, allow_nan=False, ensure_ascii=False).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        end = os.fstat(descriptor).st_size
        cut = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
        written = memoryview(b"\n" + line if cut else line)
        while written:
            written = written[os.write(descriptor, written) :]
    finally:
        os.close(descriptor)
