"""The two offline measurements of an engine: a static batch (SGLang's one_batch) and a set of requests (SGLang's
offline_throughput, `vllm bench throughput`).

Invariants:
- What is timed is the engine's call alone; prompts are drawn before, figures computed after.
- A combination is yielded as soon as it is measured, so an interrupt loses none that is done.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardway.bench.inference.backends import OpenedEngine
from shardway.bench.inference.load import draw_lengths, draw_prompts
from shardway.bench.inference.results import (
    ONE_BATCH,
    THROUGHPUT,
    BenchConditions,
    Row,
    ServedRequest,
    make_row,
    measure_one_batch,
    measure_throughput,
)
from shardway.bench.inference.utilisation import Peaks, rate_one_batch, rate_throughput
from shardway.errors import JobError, UserError, list_some

_WARMUP_OUTPUT = 32
"""The most tokens that a warm-up writes, as in SGLang's one_batch."""
_WARMUP_REQUESTS = 16


@dataclass(frozen=True)
class BatchSweep:
    """The sizes whose full product is measured, in SGLang's order, and the seed of the ids."""

    batch_sizes: tuple[int, ...]
    input_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    seed: int

    def list_points(self) -> list[tuple[int, int, int]]:
        """(batch size, input length, output length) of each measurement."""
        return list(itertools.product(self.batch_sizes, self.input_lens, self.output_lens))


def measure_batches(
    engine: OpenedEngine,
    sweep: BatchSweep,
    conditions: BenchConditions,
    peaks: Peaks | None,
    skip: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """Measure each point of a sweep once, after a warm-up with the first one and at most 32 outputs. A point that is
    longer than the model's positions is reported to `skip`. Raises UserError where that leaves none."""
    facts, measured = engine.facts, 0
    engine.reset_peak_memory()
    for batch, read, write in sweep.list_points():
        if facts.positions and read + write > facts.positions:
            skip(f"batch {batch}, {read} + {write} tokens: the model has {facts.positions} positions")
            continue
        prompts = draw_prompts([read] * batch, facts.vocabulary, sweep.seed)
        if not measured:
            engine.run_batch(prompts, min(write, _WARMUP_OUTPUT))
        times = engine.run_batch(prompts, write)
        if len(times.decode_s) != write - 1:
            raise JobError(f"{facts.engine} wrote {len(times.decode_s) + 1} tokens where {write} were asked for")
        measured += 1
        figures = measure_one_batch(batch, read, write, times)
        memory, of_what = engine.read_peak_memory()
        yield make_row(
            ONE_BATCH,
            conditions,
            {
                **figures,
                **rate_one_batch(facts.work, peaks, figures),
                "concurrency": batch,
                "peak_memory_bytes": memory,
                "peak_memory_of": of_what,
            },
        )
    if not measured:
        raise UserError(
            f"no combination fits the {facts.positions} positions of {facts.model}.\n"
            "  To do: lower --input-len or --output-len."
        )


@dataclass(frozen=True)
class RequestSet:
    """What is asked for: so many requests, lengths drawn from range_ratio * length to length."""

    count: int
    input_len: int
    output_len: int
    range_ratio: float
    seed: int


def measure_requests_offline(
    engine: OpenedEngine, asked: RequestSet, conditions: BenchConditions, peaks: Peaks | None
) -> Row:
    """Give an engine all requests at once, after a warm-up of at most 16 of them, and time the one call. Raises
    JobError where no request succeeds."""
    facts = engine.facts
    if facts.positions and asked.input_len + asked.output_len > facts.positions:
        raise UserError(
            f"{asked.input_len} + {asked.output_len} tokens are more than the {facts.positions} positions of "
            f"{facts.model}.\n  To do: lower --input-len or --output-len."
        )
    reads = draw_lengths(asked.count, asked.input_len, asked.range_ratio, asked.seed)
    writes = draw_lengths(asked.count, asked.output_len, asked.range_ratio, asked.seed + 1)
    prompts = draw_prompts(reads, facts.vocabulary, asked.seed)
    engine.reset_peak_memory()
    engine.prepare(prompts, writes)
    warm = min(_WARMUP_REQUESTS, asked.count)
    engine.run_requests(prompts[:warm], [min(each, _WARMUP_OUTPUT) for each in writes[:warm]])
    began = time.perf_counter()
    served = engine.run_requests(prompts, writes)
    latency = time.perf_counter() - began
    check_some_succeeded(served, facts.engine)
    done = [(each.input_tokens, each.output_tokens) for each in served if not each.error]
    memory, of_what = engine.read_peak_memory()
    return make_row(
        THROUGHPUT,
        replace(conditions, others=engine.facts.settings),
        {
            **measure_throughput(served, latency),
            **rate_throughput(facts.work, peaks, done, latency),
            "num_prompts": asked.count,
            "input_len": asked.input_len,
            "output_len": asked.output_len,
            "range_ratio": asked.range_ratio,
            "concurrency": "all at once",
            "peak_memory_bytes": memory,
            "peak_memory_of": of_what,
        },
    )


def check_some_succeeded(served: Sequence[ServedRequest], where: str) -> None:
    """Raise JobError with the reasons, most frequent first, where no request succeeded."""
    if any(not each.error for each in served):
        return
    counts: dict[str, int] = {}
    for each in served:
        counts[each.error] = counts.get(each.error, 0) + 1
    reasons = [f"{count} x {error}" for error, count in sorted(counts.items(), key=lambda item: -item[1])]
    raise JobError(f"none of {len(served)} requests to {where} succeeded: {list_some(reasons, 3)}")
