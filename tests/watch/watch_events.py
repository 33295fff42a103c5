"""Events as a trainer writes them, for the tests of `shardway.watch`."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event

BEGIN = 1_700_000_000.0


def started(step: int = 0, at: float = 0.0, **facts: Any) -> Event:
    """The start of an attempt, `at` seconds after BEGIN."""
    usual = {
        "format": 1,
        "pid": 4711,
        "host": "n1",
        "world": 2,
        "launcher": "local",
        "device": "cpu",
        "torch": "2.13.0",
        "python": "3.11.2",
        "step": step,
        "total_steps": 1000,
        "tokens_per_step": 4096,
        "samples_per_step": 32,
        "bytes_per_token": 1.0,
        "parameters": 1_264_512,
        "checkpoint": f"step-{step:09d}" if step else None,
        "machine": {"CPU": "2 cores", "memory": "8 GiB"},
    }
    return {"event": "started", **usual, **facts, "time": BEGIN + at}


def step(number: int, at: float, **facts: Any) -> Event:
    """One optimizer step; its loss falls as 10 / (number + 1) unless `facts` say otherwise."""
    usual = {
        "step": number,
        "position": 32 * (number - 1),
        "loss": 10 / (number + 1),
        "grad_norm": 0.9,
        "lr": 1e-3,
        "tokens_per_s": 51234.5,
        "samples_per_s": 400.25,
        "seconds": 0.08,
    }
    return {"event": "step", **usual, **facts, "time": BEGIN + at}


def event(name: str, number: int, at: float, /, **facts: Any) -> Event:
    """Any other event."""
    return {"event": name, "step": number, **facts, "time": BEGIN + at}


def write_events(monkeypatch: pytest.MonkeyPatch, run: RunDir, events: Iterable[Event]) -> None:
    """Append events to the first rank's file through its writer, each at the time that it carries."""
    clock = SimpleNamespace(now=BEGIN)
    monkeypatch.setattr("shardway.rundir.events.time", SimpleNamespace(time=lambda: clock.now))
    run.create()
    with run.event_writer(0) as writer:
        for each in events:
            clock.now = each["time"]
            writer.write(each["event"], **{key: value for key, value in each.items() if key not in ("event", "time")})
