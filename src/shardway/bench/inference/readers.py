"""Files of results: ours, SGLang's and vLLM's, each as a row of the same figures.

| file | recognised by |
|---|---|
| ours, one JSON object a line | `format` and `kind` |
| SGLang one_batch, one object a line | `prefill_latency` |
| SGLang offline_throughput, one object a line | `last_gen_throughput`, or `input_throughput` with `total_latency` |
| SGLang bench_serving, one object a line | `mean_ttft_ms` with `mean_e2e_latency_ms` |
| vLLM bench serve, one object | `mean_ttft_ms` |
| vLLM bench throughput, one object | `requests_per_second` |
| vLLM bench latency, one object | `avg_latency` |

Invariants: what a file does not state is None, never derived from other settings; a figure keeps its unit and meaning.
All files that cannot be read are named at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardway.bench.inference.results import FIELDS, FORMAT, ONE_BATCH, SERVE, THROUGHPUT, Row
from shardway.errors import Problem, check_no_problems


@dataclass(frozen=True)
class ComparedResult:
    """A result from a file: `origin` is its program, `label` how it is named, `figures` those of `FIELDS` of its kind,
    `row` all that the file has of it."""

    kind: str
    origin: str
    label: str
    figures: Row
    row: Row


def read_results(paths: Sequence[Path]) -> list[ComparedResult]:
    """The results of files, in their order. Raises UserError that names every file that has none."""
    found: list[ComparedResult] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            found += [recognise_row(row, path.stem) for row in _read_objects(path)]
        except OSError as error:
            problems.append(Problem(str(path), error.strerror or str(error)))
        except ValueError as error:
            allowed = "a file of `bench infer`, of SGLang's benchmarks or of `vllm bench`, as JSON"
            problems.append(Problem(str(path), str(error), allowed=allowed))
    check_no_problems("the files", problems)
    return found


def _read_objects(path: Path) -> list[Row]:
    """One JSON object, or one a line. Raises ValueError with a sentence. A last line that was cut off is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError("is no text of UTF-8") from None
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict):
        rows = whole.get("results")  # of --json
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            return rows
        return [whole]
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    found: list[Row] = []
    for number, line in lines:
        try:
            each = json.loads(line)
        except ValueError:
            if number == lines[-1][0] and found and not text.endswith("\n"):
                break
            raise ValueError(f"line {number} is no JSON") from None
        if not isinstance(each, dict):
            raise ValueError(f"line {number} is no object")
        found.append(each)
    if not found:
        raise ValueError("is empty")
    return found


def recognise_row(row: Row, stem: str = "") -> ComparedResult:
    """The result that an object is; `stem` names one that has no name. Raises ValueError for any other object."""
    if "kind" in row and "shardway" in row:
        if row.get("format") != FORMAT or row["kind"] not in FIELDS:
            raise ValueError(
                f"has a result of format {row.get('format')!r}, kind {row['kind']!r}; this Shardway reads {FORMAT}"
            )
        kind, label = str(row["kind"]), f"{row.get('run_name')} {row.get('backend')}"
        return ComparedResult(kind, f"shardway, {row.get('engine')}", label, _pick(kind, row), row)
    label = str(row.get("run_name") or row.get("label") or row.get("tag") or stem)  # "tag" is bench_serving's
    if "prefill_latency" in row:
        return ComparedResult(ONE_BATCH, "SGLang one_batch", label, _pick(ONE_BATCH, row), row)
    if "mean_ttft_ms" in row:
        names = {f"{part}_e2e_latency_ms": f"{part}_e2el_ms" for part in ("mean", "median", "std", "p90", "p99")}
        names |= {"total_throughput": "total_token_throughput"}
        origin = "SGLang bench_serving" if "mean_e2e_latency_ms" in row else "vLLM bench serve"
        return ComparedResult(SERVE, origin, label, _pick(SERVE, row, names), row)
    if "last_gen_throughput" in row or {"input_throughput", "total_latency"} <= set(row):
        return ComparedResult(THROUGHPUT, "SGLang offline_throughput", label, _pick(THROUGHPUT, row), row)
    if "requests_per_second" in row:
        names = {"elapsed_time": "total_latency", "num_requests": "successful_requests"}
        names |= {"requests_per_second": "request_throughput", "tokens_per_second": "total_throughput"}
        return ComparedResult(THROUGHPUT, "vLLM bench throughput", label, _pick(THROUGHPUT, row, names), row)
    if "avg_latency" in row:
        return ComparedResult(
            ONE_BATCH, "vLLM bench latency", label, _pick(ONE_BATCH, row, {"avg_latency": "total_latency"}), row
        )
    raise ValueError("has an object that is no result of these programs")


def _pick(kind: str, row: Row, names: Mapping[str, str] | None = None) -> Row:
    """The figures of a kind, where `names` has another program's name for one."""
    given = {**row, **{ours: row[theirs] for theirs, ours in (names or {}).items() if theirs in row}}
    return {name: _read_figure(given.get(name)) for name in FIELDS[kind]}


def _read_figure(value: Any) -> float | int | str | None:
    """A number; an infinite rate as "inf", which both programs write in several ways."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return "inf" if math.isinf(value) else None if math.isnan(value) else value
    if isinstance(value, str) and value.lower() in ("inf", "infinity"):
        return "inf"
    return None
