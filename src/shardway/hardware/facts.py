"""Machines and accelerators as labelled text, for reports and for people who read a terminal.

Invariant: what is not known shows as "n/a". This module must not print, nor look anything up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardway.hardware.catalogue import DTYPES, Accelerator
from shardway.hardware.probe import Device, LocalMachine

UNKNOWN = "n/a"


@dataclass(frozen=True)
class ReportFact:
    """One line of a report."""

    label: str
    value: str


def render_machine(machine: LocalMachine) -> tuple[ReportFact, ...]:
    """The machine, most telling facts first."""
    return (
        ReportFact("host", machine.hostname),
        ReportFact("accelerators", _render_devices(machine.accelerators)),
        ReportFact("cpu", machine.cpu_model or UNKNOWN),
        ReportFact("cores", f"{machine.usable_cores} usable, {_or_unknown(machine.physical_cores)} physical"),
        ReportFact("memory", _render_gib(machine.memory_bytes)),
        ReportFact("os", machine.os),
        ReportFact("python", machine.python),
    )


def render_accelerator(accelerator: Accelerator) -> tuple[ReportFact, ...]:
    """The catalogue's row, one fact per dtype."""
    peaks = tuple(
        ReportFact(f"peak {dtype}", _render_scaled(accelerator.peak(dtype), 1e12, "TFLOP/s")) for dtype in DTYPES
    )
    return (
        ReportFact("name", accelerator.name),
        *peaks,
        ReportFact("memory", _render_gib(accelerator.memory_bytes)),
        ReportFact("memory bandwidth", _render_scaled(accelerator.memory_bandwidth_bytes_per_s, 1e9, "GB/s")),
        ReportFact("link", _or_unknown(accelerator.link)),
        ReportFact("power", _render_scaled(accelerator.power_w, 1, "W")),
    )


def _render_devices(devices: tuple[Device, ...]) -> str:
    counts = Counter(f"{device.name} ({_render_gib(device.memory_bytes)})" for device in devices)
    return ", ".join(f"{count} x {text}" for text, count in counts.items()) or "none"


def _render_gib(count_bytes: int | None) -> str:
    return UNKNOWN if count_bytes is None else f"{count_bytes / 2**30:.1f} GiB"


def _render_scaled(value: float | None, unit: float, label: str) -> str:
    return UNKNOWN if value is None else f"{value / unit:g} {label}"


def _or_unknown(value: object) -> str:
    return UNKNOWN if value is None else str(value)
