"""All facts of a run that `shardway status` shows.

Invariant: the keys of `as_json` are stable; an unknown value is None. This module does not render for people.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardway.errors import JobError
from shardway.rundir.directory import RunDir
from shardway.rundir.lineage import SkippedRange
from shardway.watch.account import TimeAccount
from shardway.watch.facts import Logged, Save, ValidatedEvent, text, whole
from shardway.watch.progress import RunProgress, read_progress

GONE = "the process is gone (killed?)"
"""Reason of a run whose status is "running" although no process holds its lock."""


@dataclass(frozen=True)
class RunSummary:
    """Where a run stands.

    `state` is "new" (nothing recorded yet), "running", "finished", "stopped" or "failed". Losses are NaN where they
    were not a number. `tokens_per_s` and `samples_per_s` are medians over the last 20 steps; `unit` names the one that
    the run is measured in. `seconds_left` is None unless the run is running. Times are Unix seconds: `started` of the
    first attempt, `updated` of the last event; `wall_s` adds up all attempts. `restarts`: how often ranks restarted in
    place, as part of their attempt. `account` is the time account; None where it was not recorded. `left_out`: the
    data that the run skipped by itself. `best_validation` is the best by the metric `monitor`, `best_checkpoint` the
    best whose step is saved. `local_checkpoints_ignored`: the step from which two starts failed, so that the
    checkpoints on the nodes' disks were ignored.
    """

    name: str
    path: Path
    state: str
    reason: str
    step: int
    total_steps: int | None
    loss: float | None
    smooth_loss: float | None
    grad_norm: float | None
    lr: float | None
    unit: str
    tokens_per_s: float | None
    samples_per_s: float | None
    seconds_left: float | None
    validation: ValidatedEvent | None
    best_validation: ValidatedEvent | None
    last_save: Save | None
    checkpoints: tuple[int, ...]
    world: int | None
    device: str
    host: str
    parameters: int | None
    started: float | None
    updated: float | None
    wall_s: float
    attempts: int
    writer: str | None
    account: TimeAccount | None
    left_out: tuple[SkippedRange, ...] = ()
    local_checkpoints_ignored: int | None = None
    restarts: int = 0
    monitor: str = "loss"
    best_checkpoint: ValidatedEvent | None = None
    logged: Logged | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data for strict JSON: paths as strings, numbers that are not finite as None."""
        account = self.account.as_json() if self.account else None
        plain: dict[str, Any] = _as_plain({**asdict(self), "account": account})
        return plain


def _read_ignored(status: Mapping[str, Any]) -> int | None:
    """The field was called tier_dropped until 2026-11."""
    ignored = whole(status, "local_checkpoints_ignored")
    return ignored if ignored is not None else whole(status, "tier_dropped")


def summarise(run: RunDir) -> RunSummary:
    """The state of the run now. Raises JobError where status.json is damaged."""
    return summarise_progress(run, read_progress(run))


def summarise_progress(run: RunDir, progress: RunProgress) -> RunSummary:
    """The state of the run, for a reader that has read its events already."""
    standing = _standing(run, progress)
    start, saved = progress.start, run.checkpoint_steps()
    return RunSummary(
        name=run.path.resolve().name,
        path=run.path,
        state=standing.state,
        reason=standing.reason,
        step=progress.step if start else standing.step,
        total_steps=progress.total_steps or standing.total_steps,
        loss=progress.loss,
        smooth_loss=progress.smooth_loss,
        grad_norm=progress.last("grad_norm"),
        lr=progress.last("lr"),
        unit="tokens" if start and start.counts_tokens else "samples",
        tokens_per_s=progress.typical("tokens_per_s"),
        samples_per_s=progress.typical("samples_per_s"),
        seconds_left=progress.seconds_left if standing.state == "running" else None,
        validation=progress.validations[-1] if progress.validations else None,
        logged=progress.logged,
        best_validation=progress.best_validation,
        last_save=progress.saves[-1] if progress.saves else None,
        checkpoints=tuple(saved),
        world=start.world if start else None,
        device=start.device if start else "",
        host=start.host if start else "",
        parameters=start.parameters if start else None,
        started=progress.attempts[0].start.time if start else None,
        updated=progress.attempts[-1].last_time if start else None,
        wall_s=progress.wall_s,
        attempts=sum(not attempt.again for attempt in progress.attempts),
        restarts=sum(attempt.again for attempt in progress.attempts),
        writer=standing.writer,
        account=progress.book.account(run.read_status(), time.time() if standing.state == "running" else None),
        left_out=_left_out(run),
        local_checkpoints_ignored=_read_ignored(run.read_status()),
        monitor=progress.monitor.metric,
        best_checkpoint=progress.find_best(saved),
    )


def _left_out(run: RunDir) -> tuple[SkippedRange, ...]:
    """The skipped ranges; none where the file cannot be read, which the run reports when it continues."""
    with contextlib.suppress(JobError):
        return run.left_out.read()
    return ()


def find_runs(root: Path) -> list[RunDir]:
    """The runs directly under `root`, by name; `root` itself where it is a run; none where it is not a folder."""
    if RunDir(root).exists():
        return [RunDir(root)]
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if os.path.isdir(root) else []
    return [run for run in map(RunDir, folders) if run.exists()]


@dataclass(frozen=True)
class _Standing:
    state: str
    reason: str
    step: int
    total_steps: int | None
    writer: str | None


def _standing(run: RunDir, progress: RunProgress) -> _Standing:
    """The state by status.json, or by the events where it is missing, checked against the lock's holder."""
    writer, status = run.find_writer(), run.read_status()
    ending = progress.ending
    open_state = "running" if progress.attempts or writer else "new"
    state = text(status, "state") or (ending.state if ending else open_state)
    reason = text(status, "reason") or (ending.reason if ending else "")
    if state == "running" and writer is None:
        writer = run.find_writer()  # it may have started between the first look and the reading of its status
        state, reason = ("running", reason) if writer else ("failed", GONE)
    return _Standing(state, reason, whole(status, "step") or 0, whole(status, "total_steps"), writer)


def _as_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
