"""Results of inference as they are shown: blocks of plain text, and tables that compare files.

Invariants: what is not known reads "n/a"; figures are those of the rows; lines are plain ASCII. Under what conditions a
figure was measured stands with it, since engines differ threefold where these differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardway.bench.inference.readers import ComparedResult
from shardway.bench.inference.results import LATENCIES, ONE_BATCH, SERVE, THROUGHPUT, Row
from shardway.bench.roofline import render_si
from shardway.units import UNKNOWN
from shardway.watch.words import align_cells, fold_line, render_size

WIDTH = 100

# --- one result


def render_conditions(row: Row) -> list[str]:
    """Under what the result was measured, as lines."""
    switch = {True: "on", False: "off", None: UNKNOWN}
    first = f"{row['backend']} ({row['engine']}), model {row['model']}, {row['device']}, {row['dtype']}"
    parts = [
        f"weights: {'random' if row['load_format'] == 'dummy' else row['load_format']}",
        f"prompts: {row['prompts']}",
        f"ignore_eos: {switch[row['ignore_eos']]}",
        f"prefix caching: {switch[row['prefix_caching']]}",
        f"warm-up: {row['warmup']}",
        f"seed: {row['seed']}",
    ]
    settings = ", ".join(f"{name} = {value}" for name, value in row["settings"].items())
    lines = [first, "; ".join(parts), f"settings: {settings}" if settings else ""]
    return [part for each in lines if each for part in fold_line(each, WIDTH)]


def render_result(row: Row) -> str:
    """A result without its conditions, as a block of lines, without a newline at the end."""
    return {ONE_BATCH: _render_one_batch, THROUGHPUT: _render_throughput, SERVE: _render_serve}[row["kind"]](row)


def _render_one_batch(row: Row) -> str:
    """The three lines that SGLang prints, and what else is known."""
    lines = [
        f"Batch size {row['batch_size']}, input {row['input_len']}, output {row['output_len']}",
        f"Prefill. latency: {_number(row['prefill_latency'], '.5f')} s, "
        f"throughput: {_number(row['prefill_throughput'], '.2f')} token/s, MFU {_share(row['prefill_mfu'])}",
        f"Decode.  median latency: {_number(row['median_decode_latency'], '.5f')} s, median throughput: "
        f"{_number(row['median_decode_throughput'], '.2f')} token/s, MBU {_share(row['decode_mbu'])}, "
        f"MFU {_share(row['decode_mfu'])}",
        f"Total. latency: {_number(row['total_latency'], '.3f')} s, "
        f"throughput: {_number(row['overall_throughput'], '.2f')} token/s",
        f"decode p90 {_ms(row['p90_decode_ms'])}, p99 {_ms(row['p99_decode_ms'])}; peak memory "
        f"{render_size(row['peak_memory_bytes'])} ({row['peak_memory_of']})",
    ]
    return "\n".join(lines)


_BLOCK = (
    ("successful_requests", "Successful requests", "d"),
    ("completed", "Successful requests", "d"),
    ("failed", "Failed requests", "d"),
    ("total_latency", "Benchmark duration (s)", ".3f"),
    ("duration", "Benchmark duration (s)", ".3f"),
    ("total_input_tokens", "Total input tokens", "d"),
    ("total_output_tokens", "Total generated tokens", "d"),
    ("request_throughput", "Request throughput (req/s)", ".2f"),
    ("request_goodput", "Request goodput (req/s)", ".2f"),
    ("input_throughput", "Input token throughput (tok/s)", ".2f"),
    ("output_throughput", "Output token throughput (tok/s)", ".2f"),
    ("total_throughput", "Total token throughput (tok/s)", ".2f"),
    ("total_token_throughput", "Total token throughput (tok/s)", ".2f"),
    ("max_concurrent_requests", "Most requests at a time", "d"),
)
"""Field, label as SGLang and vLLM print it, and format."""


def _render_block(row: Row) -> list[str]:
    shown = [each for each in _BLOCK if each[0] in row and (each[0] != "request_goodput" or row.get("goodput"))]
    return align_cells([(f"{label}:", _number(row[name], form)) for name, label, form in shown], to_the_right=True)


def _render_latencies(row: Row) -> list[str]:
    parts = [name.removesuffix("_ttft_ms") for name in row if name.endswith("_ttft_ms")]
    parts = [part for part in parts if part != "p50"]  # it is the median
    table = [("ms", *parts)]
    table += [(name.upper(), *(_number(row[f"{part}_{name}_ms"], ".2f") for part in parts)) for name in LATENCIES]
    return align_cells(table, to_the_right=True)


def _render_throughput(row: Row) -> str:
    memory = f"{render_size(row['peak_memory_bytes'])} ({row['peak_memory_of']})"
    note = "Latencies among all requests at once: they describe the batch, not a service."
    return "\n".join(
        [*_render_block(row), f"MFU {_share(row['mfu'])}; peak memory {memory}", "", *_render_latencies(row), note]
    )


def _render_serve(row: Row) -> str:
    rate = row["request_rate"]
    arrival = "all at once" if rate == "inf" else f"{rate:g} requests/s, burstiness {row['burstiness']:g}"
    most = row["max_concurrency"]
    lines = [f"Arrivals: {arrival}; concurrency: {'any' if most is None else f'at most {most}'}", *_render_block(row)]
    if row.get("goodput"):
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in row["goodput"].items())
        lines.append(f"SLO {limits}: kept by {_share(row['slo_attainment'])} of all requests")
    lines += ["", *_render_latencies(row)]
    cpu, late = _number(row["client_cpu_s"], ".2f"), _number(row["client_lag_p99_ms"], ".2f")
    stamped_by = row.get("arrivals_stamped_by", "client")
    lines.append(f"The client: {cpu} s of CPU, p99 {late} ms late; arrivals are stamped by the {stamped_by}")
    if stamped_by == "client" and (row["client_lag_p99_ms"] or 0.0) > max(
        _LATE_MS, _LATE_SHARE * (row["median_itl_ms"] or 0.0)
    ):
        lines.append("The client could not keep up: TTFT and ITL include its own lateness. To do: a core of its own.")
    if row.get("errors"):
        lines += [f"failed, {count} x {error}" for error, count in row["errors"].items()]
    if row.get("interrupted"):
        lines.append(f"interrupted: {row['completed'] + row['failed']} of {row['num_prompts']} requests had ended")
    return "\n".join(lines)


_LATE_MS, _LATE_SHARE = 2.0, 0.05
"""A client that stamps arrivals itself and is later than this, and than this share of the median ITL, is named."""


def render_peaks(row: Row) -> str:
    """What MBU and MFU are shares of."""
    if row.get("peaks", "n/a") == UNKNOWN:
        return "MBU and MFU are n/a: there is no measured and no rated peak, or no shape of the model."
    flops, memory = render_si(row["peak_flops_per_s"]), render_si(row["peak_bytes_per_s"])
    return f"MBU and MFU of {row['peaks']} peaks: {flops}FLOP/s, {memory}B/s ({row['peaks_source']})"


def _number(value: Any, form: str) -> str:
    return UNKNOWN if value is None else value if isinstance(value, str) else format(value, form)


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def _ms(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f} ms"


# --- several results

_COLUMNS = {
    ONE_BATCH: (
        ("batch_size", "batch", "d"),
        ("input_len", "in", "d"),
        ("output_len", "out", "d"),
        ("prefill_latency", "prefill s", ".4f"),
        ("prefill_throughput", "prefill tok/s", ".1f"),
        ("median_decode_latency", "decode s", ".5f"),
        ("median_decode_throughput", "decode tok/s", ".1f"),
        ("total_latency", "total s", ".3f"),
        ("overall_throughput", "overall tok/s", ".1f"),
    ),
    THROUGHPUT: (
        ("successful_requests", "requests", "d"),
        ("total_latency", "seconds", ".2f"),
        ("total_input_tokens", "in", "d"),
        ("total_output_tokens", "out", "d"),
        ("request_throughput", "req/s", ".2f"),
        ("input_throughput", "in tok/s", ".1f"),
        ("output_throughput", "out tok/s", ".1f"),
        ("total_throughput", "total tok/s", ".1f"),
    ),
    SERVE: (
        ("request_rate", "rate", "g"),
        ("max_concurrency", "most", "d"),
        ("completed", "done", "d"),
        ("failed", "failed", "d"),
        ("request_throughput", "req/s", ".2f"),
        ("output_throughput", "out tok/s", ".1f"),
        ("median_ttft_ms", "TTFT ms", ".1f"),
        ("p99_ttft_ms", "p99", ".1f"),
        ("median_tpot_ms", "TPOT ms", ".2f"),
        ("median_itl_ms", "ITL ms", ".2f"),
        ("p99_itl_ms", "p99", ".2f"),
        ("median_e2el_ms", "E2EL ms", ".1f"),
    ),
}
TITLES = {ONE_BATCH: "Static batches", THROUGHPUT: "Offline throughput", SERVE: "Serving"}


def list_compared(results: Sequence[ComparedResult], kind: str) -> list[tuple[str, ...]]:
    """The table of a kind: its head, and a row for each result."""
    columns = _COLUMNS[kind]
    head = ("result", "from", *(title for _, title, _ in columns))
    rows = [
        (each.label, each.origin, *(_number(each.figures[name], form) for name, _, form in columns))
        for each in results
        if each.kind == kind
    ]
    return [head, *rows]


def render_compared(results: Sequence[ComparedResult]) -> str:
    """A table for each kind of result, without a newline at the end."""
    blocks = []
    for kind, title in TITLES.items():
        table = list_compared(results, kind)
        if len(table) > 1:
            blocks.append("\n".join([title, *align_cells(table, to_the_right=True)]))
    return "\n\n".join(blocks)
