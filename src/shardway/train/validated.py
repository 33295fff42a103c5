"""What a run that goes on knows of the validations that were made before.

Invariant: all ranks know the same, read by rank 0 from the events that still hold. This module must not validate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardway.rundir.directory import RunDir
from shardway.rundir.events import drop_undone
from shardway.train.session import Session
from shardway.watch.facts import read_validation


@dataclass(frozen=True)
class Validated:
    """`results`: metrics by step. `tried_last`: whether the validation after the step that the run goes on from was
    made, or ended in an error, and would again."""

    results: Mapping[int, dict[str, float]] = field(default_factory=dict)
    tried_last: bool = False


def recall_validations(session: Session, step: int) -> Validated:
    """Those up to the step that the run goes on from; called on all ranks together."""
    return session.ranks.ask_first(lambda: _read(session.directory, step))


def _read(run: RunDir, step: int) -> Validated:
    results, tried = dict[int, dict[str, float]](), False
    for rank in run.ranks_with_events():
        names = ("started", "rolled_back", "validation", "validation_failed")
        for event in drop_undone(run.all_events(rank, names)):
            if event["event"] not in names[2:] or event.get("step", 0) > step:
                continue
            tried = tried or event["step"] == step
            if event["event"] == "validation":
                results[event["step"]] = read_validation(event).metrics
    return Validated(results, tried)
