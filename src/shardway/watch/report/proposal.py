"""The table that a proposal for compute time asks for: what each node and GPU was used for, and what it took.

Invariant: totals are of the rows shown; a value that was not sampled is "n/a" in text and null in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardway.units import UNKNOWN
from shardway.watch.report.content import ReportContent
from shardway.watch.report.hardware import GpuTotals
from shardway.watch.words import align_cells, render_time

COLUMNS = (
    "node",
    "GPU",
    "use mean",
    "use max",
    "SM mean",
    "memory mean",
    "memory max",
    "power mean",
    "power max",
    "energy",
)
_GIB = 2.0**30


def _cell(value: float | None, unit: str, scale: float = 1.0, form: str = ".0f") -> str:
    return UNKNOWN if value is None else f"{value * scale:{form}} {unit}"


def list_gpu_rows(gpus: Sequence[GpuTotals]) -> list[tuple[str, ...]]:
    """A row of cells for each GPU, under COLUMNS."""
    return [
        (
            gpu.host,
            str(gpu.index),
            _cell(gpu.use_mean, "%"),
            _cell(gpu.use_max, "%"),
            _cell(gpu.sm_mean, "%"),
            _cell(gpu.memory_mean_bytes, "GiB", 1 / _GIB, ".1f"),
            _cell(gpu.memory_max_bytes, "GiB", 1 / _GIB, ".1f"),
            _cell(gpu.power_mean_w, "W"),
            _cell(gpu.power_max_w, "W"),
            _cell(gpu.energy_kwh, "kWh", form=".3f"),
        )
        for gpu in gpus
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def proposal_facts(content: ReportContent) -> dict[str, Any]:
    """The table as data."""
    gpus = content.gpus
    return {
        "run": str(content.run.path),
        "jobs": [job.job for job in content.jobs if job.job],
        "nodes": len(content.nodes),
        "gpus": [gpu.as_json() for gpu in gpus],
        "gpu_models": sorted({gpu.name for gpu in gpus if gpu.name}),
        "wall_s": content.wall_s,
        "gpu_hours": content.gpu_hours,
        "energy_kwh": content.energy_kwh,
        "energy_from": sorted({gpu.energy_from for gpu in gpus if gpu.energy_from}),
        "use_mean": _mean([gpu.use_mean for gpu in gpus]),
        "sm_mean": _mean([gpu.sm_mean for gpu in gpus]),
        "tensor_mean": _mean([gpu.tensor_mean for gpu in gpus]),
        "power_mean_w": _mean([gpu.power_mean_w for gpu in gpus]),
        "memory_max_bytes": max((gpu.memory_max_bytes or 0.0 for gpu in gpus), default=None),
    }


def render_proposal(content: ReportContent) -> str:
    """The table as plain text."""
    facts, rows = proposal_facts(content), list_gpu_rows(content.gpus)
    lines = [f"run         {content.run.path}"]
    lines += [f"jobs        {', '.join(facts['jobs'])}"] if facts["jobs"] else []
    models = ", ".join(facts["gpu_models"]) or UNKNOWN
    lines += [
        f"nodes       {facts['nodes'] or UNKNOWN}",
        f"GPUs        {len(rows) or UNKNOWN} ({models})",
        f"wall time   {render_time(content.wall_s)}",
        f"GPU-hours   {_cell(content.gpu_hours, '', form='.3f').strip()} (sampled)",
        f"energy      {_cell(content.energy_kwh, 'kWh', form='.3f')}"
        + (f" (GPUs alone: {', '.join(facts['energy_from'])})" if facts["energy_from"] else ""),
        f"GPU use     mean {_cell(facts['use_mean'], '%')}, SM {_cell(facts['sm_mean'], '%')}, "
        f"tensor cores {_cell(facts['tensor_mean'], '%')}",
    ]
    if not rows:
        return "\n".join([*lines, "", "No GPU was sampled, so there is no table of them."])
    return "\n".join([*lines, "", *align_cells([COLUMNS, *rows], to_the_right=True)])
