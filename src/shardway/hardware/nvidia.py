"""NVIDIA's GPUs as nvidia-smi describes them, and AMD's as the kernel lists them: no driver library is loaded.

Invariant: a GPU library that hangs costs `limit_s` seconds once and nothing more; a field that the driver does not
know is missing, and voids no other. This module must not judge what it reads.

Sources: nvidia-smi(1), `nvidia-smi --help-query-gpu`, `nvidia-smi --help-query-remapped-rows`; NVML API reference,
"NvmlClocksEventReasons"; Linux, drivers/gpu/drm/amd/amdkfd (topology in sysfs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardway.hardware.command import run_command, run_commands

QUERIES = {
    "driver": ("gpu", "driver_version"),
    "memory_used_mib": ("gpu", "memory.used"),
    "compute_mode": ("gpu", "compute_mode"),
    "mig": ("gpu", "mig.mode.current"),
    "throttle": ("gpu", "clocks_throttle_reasons.active"),
    "throttle_now": ("gpu", "clocks_event_reasons.active"),  # its name since driver 535
    "ecc_volatile": ("gpu", "ecc.errors.uncorrected.volatile.total"),
    "ecc_aggregate": ("gpu", "ecc.errors.uncorrected.aggregate.total"),
    "rows_pending": ("remapped-rows", "remapped_rows.pending"),
    "rows_failed": ("remapped-rows", "remapped_rows.failure"),
}
"""Our name of a column -> option of nvidia-smi (--query-...), and its field. One field a call: an unknown one makes
the whole call fail."""

_LISTED = re.compile(r"^GPU \d+: (?P<name>.+?) \(UUID: \S+\)", re.MULTILINE)
_SLICE = re.compile(r"^\s+MIG ", re.MULTILINE)


@dataclass(frozen=True)
class NvidiaState:
    """What nvidia-smi said. `columns`: name of `QUERIES` -> a text for each GPU; without those it could not say."""

    answer: Literal["absent", "ok", "hung", "failed"]
    said: str = ""
    names: tuple[str, ...] = ()
    slices: int = 0
    """Slices that GPUs are cut into (MIG); a process sees these instead of the GPU."""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def visible(self) -> int:
        """Devices that a process can have: GPUs, or slices of them."""
        return self.slices or len(self.names)

    def numbers(self, column: str) -> list[float]:
        """A column as numbers, those left out that are none ("[N/A]")."""
        return [number for text in self.columns.get(column, ()) if (number := _number(text)) is not None]


def read_nvidia(limit_s: float = 20.0) -> NvidiaState:
    """Ask nvidia-smi: first for its list, then, if that came, for each column. Never raises."""
    listed = run_command(("nvidia-smi", "-L"), limit_s)
    if listed.missing:
        return NvidiaState("absent")
    if listed.hung:
        return NvidiaState("hung", f"nvidia-smi -L did not answer within {limit_s:g} s")
    if not listed.ok:
        return NvidiaState("failed", listed.said or f"nvidia-smi -L ended with {listed.code}")
    names, slices = parse_list(listed.out)
    if not names:
        return NvidiaState("ok", listed.said)
    form = "--format=csv,noheader,nounits"
    answers = run_commands([("nvidia-smi", f"--query-{kind}={name}", form) for kind, name in QUERIES.values()], limit_s)
    hung = [name for name, answer in zip(QUERIES, answers, strict=True) if answer.hung]
    if hung:
        said = f"nvidia-smi lists the GPUs, but did not tell {hung[0]} within {limit_s:g} s"
        return NvidiaState("hung", said, names, slices)
    columns = {
        name: parse_column(answer.out)
        for name, answer in zip(QUERIES, answers, strict=True)
        if answer.ok and answer.out
    }
    return NvidiaState("ok", "", names, slices, columns)


def parse_list(text: str) -> tuple[tuple[str, ...], int]:
    """Names of GPUs, and how many MIG slices there are, from `nvidia-smi -L`."""
    return tuple(match["name"] for match in _LISTED.finditer(text)), len(_SLICE.findall(text))


def parse_column(text: str) -> tuple[str, ...]:
    """One value a line, from a query of one field without header."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _number(text: str) -> float | None:
    try:
        return float(int(text, 16)) if text.lower().startswith("0x") else float(text)
    except ValueError:
        return None


def count_amd(root: Path = Path("/")) -> int:
    """AMD devices that the kernel's compute driver lists; nodes of its topology without SIMD units are CPUs."""
    found = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    return sum(bool(re.search(r"^simd_count [1-9]", _read(path), re.MULTILINE)) for path in found)


def has_device_files(root: Path = Path("/")) -> bool:
    """Whether the kernel shows NVIDIA devices here, whatever nvidia-smi says."""
    return any((root / "dev").glob("nvidia[0-9]*"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
