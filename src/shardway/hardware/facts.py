"""Machines and accelerators as labelled text, for reports and for people who read a terminal.

Invariant: what is not known shows as "n/a". This module must not print, nor look anything up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardway.hardware.catalogue import DTYPES, Accelerator
from shardway.hardware.probe import Device, Machine

UNKNOWN = "n/a"


@dataclass(frozen=True)
class Fact:
    """One line of a report."""

    label: str
    value: str


def render_machine(machine: Machine) -> tuple[Fact, ...]:
    """The machine, most telling facts first."""
    return (
        Fact("host", machine.hostname),
        Fact("accelerators", _render_devices(machine.accelerators)),
        Fact("cpu", machine.cpu_model or UNKNOWN),
        Fact("cores", f"{machine.usable_cores} usable, {_or_unknown(machine.physical_cores)} physical"),
        Fact("memory", _render_gib(machine.memory_bytes)),
        Fact("os", machine.os),
        Fact("python", machine.python),
    )


def render_accelerator(accelerator: Accelerator) -> tuple[Fact, ...]:
    """The catalogue's row, one fact per dtype."""
    peaks = tuple(Fact(f"peak {dtype}", _render_scaled(accelerator.peak(dtype), 1e12, "TFLOP/s")) for dtype in DTYPES)
    return (
        Fact("name", accelerator.name),
        *peaks,
        Fact("memory", _render_gib(accelerator.memory_bytes)),
        Fact("memory bandwidth", _render_scaled(accelerator.memory_bandwidth_bytes_per_s, 1e9, "GB/s")),
        Fact("link", _or_unknown(accelerator.link)),
        Fact("power", _render_scaled(accelerator.power_w, 1, "W")),
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
