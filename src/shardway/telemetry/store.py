"""Samples of a node's hardware as a file: `telemetry/<host>` in the run directory.

Invariant: reading never raises for what a file may hold; a torn end or a damaged block costs the samples in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DeviceInfo:
    """An accelerator that the job may use; `index` as the node counts them, `maker` is "nvidia" or "amd"."""

    index: int
    name: str
    uuid: str
    memory_bytes: int | None
    power_limit_w: float | None
    maker: str


@dataclass(frozen=True)
class NodeInfo:
    """What one sampler knew at its start. `missing`: series, or a pattern of them, -> why they are not sampled."""

    host: str
    node: int
    job: str
    attempt: int
    started: float
    every_s: float
    cores: int
    allowed_cores: tuple[int, ...]
    memory_bytes: int | None
    memory_limit_bytes: int | None
    devices: tuple[DeviceInfo, ...]
    missing: Mapping[str, str]


@dataclass(frozen=True)
class HostTelemetry:
    """All samples of one host. `times`: Unix seconds, float64, increasing. `series`: name -> float32 array of the same
    length, NaN where there is no value. `infos`: one a sampler, the newest last."""

    host: str
    infos: tuple[NodeInfo, ...]
    times: Any
    series: Mapping[str, Any]

    @property
    def info(self) -> NodeInfo:
        return self.infos[-1]


def read_telemetry(folder: Path) -> list[HostTelemetry]:
    """The samples of every host, sorted by its name; none where there are none."""
    return []
