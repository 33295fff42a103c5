"""What a row measured, in the planner's units: seconds of a step, bytes at the peak, whether it ran.

Invariant: conventions are those that the row names (kind of FLOPs, unit and kind of memory). This module must not
predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rows_standins import read_number

from shardway.plan.case import Case, Machine

UNITS = {"GiB": 2**30, "GB": 10**9}


@dataclass(frozen=True)
class Measured:
    """Seconds, bytes and which bytes; None where the row does not say."""

    step_s: float | None
    memory_bytes: float | None
    memory_kind: str
    out_of_memory: bool


def read_measured(row: Mapping[str, str], case: Case, machine: Machine) -> Measured:
    """The measurement of a row."""
    oom = row.get("status") == "oom"
    memory, kind = _memory(row)
    return Measured(None if oom else _seconds(row, case, machine), None if oom else memory, kind, oom)


def _seconds(row: Mapping[str, str], case: Case, machine: Machine) -> float | None:
    gpus = case.degrees.world
    if seconds := _told(row, "step_time_s"):
        return seconds
    if tokens := _told(row, "tok_s_gpu"):
        return case.tokens_per_step / tokens / gpus
    if tera := _told(row, "tflops_per_gpu"):
        return _flops(case, row.get("tflops_kind") or "") / (tera * 1e12) / gpus
    if percent := _told(row, "mfu_pct"):
        peak = machine.accelerator.peak_flops.get("bf16") or machine.accelerator.peak_flops["fp16"]
        return _flops(case, "model") / (percent / 100 * peak) / gpus
    return None


def _told(row: Mapping[str, str], column: str) -> float:
    """A measurement; 0 where there is none."""
    return max(0.0, read_number(row.get(column) or "") or 0.0)


def _flops(case: Case, kind: str) -> float:
    """Of a step, with all scores counted; "hardware" counts the layers' forward pass twice."""
    forward = case.model.forward_flops_per_token(case.seq_len, causal=False)
    head = case.model.head.flops_per_token
    if "x8 params" in kind:
        return 8 * case.model.parameters * case.tokens_per_step
    if kind.startswith("hardware"):
        return (4 * (forward - head) + 3 * head) * case.tokens_per_step
    return 3 * forward * case.tokens_per_step


def _memory(row: Mapping[str, str]) -> tuple[float | None, str]:
    told = _told(row, "peak_mem")
    if not told:
        return None, ""
    unit = [*(row.get("peak_mem_unit") or "").split(), "GiB"][0]
    return told * UNITS.get(unit, 2**30), memory_kind(row)


def memory_kind(row: Mapping[str, str]) -> str:
    """Which memory a row means: what tensors take, what the allocator holds, or what nvidia-smi shows."""
    text = row.get("peak_mem_kind") or ""
    if "allocated" in text:
        return "allocated"
    return "device" if "node" in text or "nvidia-smi" in (row.get("peak_mem_unit") or "") else "reserved"
