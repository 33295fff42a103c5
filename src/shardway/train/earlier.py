"""What earlier attempts of a run have left that the next one must know for its book of time.

Invariant: it costs the same however long the run was: the end of the event file and status.json are read, no more. What
is damaged or missing counts as nothing left. This module must not write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardway.rundir.directory import RunDir

_KEPT = ("pid", "host", "step", "spent", "time")


@dataclass(frozen=True)
class Earlier:
    """`reached`: the most steps that an attempt has done. `last`: the last status, as far as it tells of times."""

    reached: int = 0
    last: Mapping[str, Any] = field(default_factory=dict)

    def as_facts(self) -> dict[str, Any]:
        """For the event that says that the next attempt starts, since its first status replaces the last one."""
        return ({"reached": self.reached} if self.reached else {}) | ({"before": dict(self.last)} if self.last else {})


def read_earlier(run: RunDir) -> Earlier:
    """What is there before the next attempt has written anything."""
    status = run.read_status()
    last = {key: status[key] for key in _KEPT if key in status} if "spent" in status else {}
    return Earlier(max(_steps_of(run, status)), last)


def _steps_of(run: RunDir, status: Mapping[str, Any]) -> Iterator[int]:
    yield 0
    yield from (value for key in ("step", "reached") if isinstance(value := status.get(key), int))
    for event in run.last_events():
        key = {"step": "step", "started": "reached"}.get(event["event"], "")
        if isinstance(value := event.get(key), int):
            yield value


def find_early_end(directory: RunDir, step: int) -> str:
    """Why the script has finished the run at this step, where its checkpoint was saved before it did; else empty."""
    status = directory.read_status()
    here = status.get("state") == "finished" and status.get("step") == step
    return str(status.get("finished_early", "")) if here else ""
