"""The newest numbers of a run as a text file of metrics, which a Prometheus node exporter or a script reads.

Invariant: the file is replaced whole, so that no reader sees half of it; a value that stands in it is the newest one.

The form is Prometheus' text format 0.0.4, without times, which the textfile collector of node_exporter does not take;
it ends as OpenMetrics asks for. Sources: prometheus.io/docs/instrumenting/exposition_formats, and the collector's page
in github.com/prometheus/node_exporter.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardway.places import expand_place
from shardway.watch.trackers.base import HARDWARE, Tracker

NAME = "metrics.prom"  # the file in the run directory, where the settings name no folder


class OpenMetricsFile(Tracker):
    """`folder` is that of the collector (--collector.textfile.directory), in which each run has a file of its own."""

    settings = {"folder": "", "every": 1.0}  # noqa: RUF012

    def start(self, name: str, directory: Path, configuration: Mapping[str, Any], id: str | None) -> str:
        safe = "".join(char if char.isalnum() or char in "-_" else "_" for char in name)
        folder = expand_place(self.given["folder"]) if self.given["folder"] else directory
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / (f"shardway_{safe}.prom" if self.given["folder"] else NAME)
        self._name, self._values, self._step, self._written_at = name, dict[str, float](), 0, 0.0
        return str(self._path)

    def rewind(self, step: int) -> None:
        self._step = step
        self._write(running=True)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._step, self._values = step, {**self._values, **values}
        self._write(running=True)

    def finish(self, state: str) -> None:
        self._written_at = 0.0
        self._write(running=False)

    def _write(self, *, running: bool) -> None:
        """Replace the file, at most so often."""
        if time.monotonic() - self._written_at < self.given["every"] and self._written_at:
            return
        self._written_at = time.monotonic()
        text = render_metrics(self._name, self._step, self._values, running=running)
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.chmod(0o644)  # the collector is another user's
        partial.replace(self._path)


def render_metrics(run: str, step: int, values: Mapping[str, float], *, running: bool) -> str:
    """The text of the file. What a series of the hardware is of stands in labels: its host, and its device as gpu="0",
    core="3", rank="7", net="eth0"; other values keep their name in a label, since a metric's name has fewer letters."""
    families: dict[str, dict[str, float]] = {"step": {"": step}, "running": {"": int(running)}}
    for name, value in sorted(values.items()):
        family, labels = _split(name)
        families.setdefault(family, {})["".join(f',{key}="{_escape(text)}"' for key, text in labels.items())] = value
    lines = []
    for family, samples in families.items():
        lines += [f"# HELP shardway_{family} The newest value of a run.", f"# TYPE shardway_{family} gauge"]
        lines += [f'shardway_{family}{{run="{_escape(run)}"{more}}} {_render(each)}' for more, each in samples.items()]
    return "\n".join((*lines, "# EOF", ""))


def _split(name: str) -> tuple[str, dict[str, str]]:
    """The family that a value belongs to, and its labels: "hardware/n1/gpu/0/use_percent" is hardware_gpu_use_percent
    with host and gpu."""
    start, *parts = name.split("/")
    if start == HARDWARE and 3 <= len(parts) <= 4:
        host, kind, *device, quantity = parts
        if kind.isascii() and kind.isidentifier() and kind not in ("run", "host"):  # as those of the sampler are
            return _family(f"{start}_{kind}_{quantity}"), {"host": host, **({kind: device[0]} if device else {})}
    return _family(name), {"name": name}


def _family(name: str) -> str:
    """A name of letters, digits and underscores, which is never one of our own two."""
    safe = "".join(char if char.isascii() and char.isalnum() else "_" for char in name)
    return f"{safe}_" if safe in ("step", "running") else safe


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _render(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(value)
