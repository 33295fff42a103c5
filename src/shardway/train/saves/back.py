"""Back to a checkpoint from before a spike, and what of the data is left out then.

The decision is one small file (`rundir.left_out`), written before anything else happens. A checkpoint knows which of
these decisions it was saved after; one that lies in what a later decision undid is set aside whenever a run looks for
where to go on. So it makes no difference whether the process that decided goes on, or another one later.

Invariant: the decision is durable before training goes on, and everything else follows from it. This module must not
judge what a spike is, nor load.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardway.checkpoint.corrupt import CorruptCheckpoint, set_aside
from shardway.checkpoint.find import PassedOver
from shardway.checkpoint.manifest import Damaged
from shardway.checkpoint.verify import manifest_of_step
from shardway.data.skips import Skips
from shardway.errors import JobError
from shardway.rundir.directory import RunDir
from shardway.rundir.left_out import SkippedRange, read_left_out
from shardway.runfile.skips import read_skips
from shardway.train.counters import Counters, read_counters
from shardway.train.guard import BackPlan
from shardway.train.session import Session


@dataclass(frozen=True)
class Spiked:
    """A run that goes back: the steps of the spike, the position after it, and what it has left out by itself before.

    `limit` says how `guard.max_roll_backs` was set.
    """

    first: int
    last: int
    end: int
    known: tuple[SkippedRange, ...]
    limit: str


@dataclass(frozen=True)
class Back:
    """Where the run goes on: the counters of that checkpoint, and all that it leaves out by itself from now on."""

    counters: Counters
    left_out: tuple[SkippedRange, ...]


def decide_back(session: Session, plan: BackPlan, spiked: Spiked) -> Back:
    """Choose the checkpoint and the span, and write them down; on all ranks together.

    Raises JobError on every rank where the run has gone back often enough, or has nothing to go back to.
    """
    if len(spiked.known) >= plan.max_roll_backs:
        raise _often_enough(session.directory, spiked)
    return session.ranks.ask_first(lambda: _write_down(session, plan, spiked))


def all_skips(session: Session, left_out: Sequence[SkippedRange]) -> list[list[int]]:
    """The spans of `data.skip` and those that the run left out by itself, as one list."""
    return read_skips([*session.resolved.values.data.skip, *(each.span for each in left_out)])


def find_undone(session: Session) -> list[int]:
    """Steps that were saved before a decision that undid them; on all ranks together. Raises JobError."""
    if session.starts_over:
        return []
    return session.ranks.ask_first(lambda: [each.step for each in _find_undone(session.directory)])


def set_undone_aside(session: Session) -> list[CorruptCheckpoint]:
    """Set aside what was saved before a decision that undid it; on all ranks together. Raises JobError."""

    def act() -> list[CorruptCheckpoint]:
        if not session.ranks.is_first or not (undone := _find_undone(session.directory)):
            return []
        session.directory.confirm_writer()
        return set_aside(session.directory, undone, "undone")

    return session.ranks.gather(session.ranks.together(act))[0]


def know_left_out(session: Session, numbers: Mapping[str, Any]) -> tuple[SkippedRange, ...]:
    """All that the run leaves out by itself, once a checkpoint with these numbers was loaded; on all ranks together.

    A file that was lost is written again from what the checkpoint says. Raises JobError.
    """

    def look() -> tuple[SkippedRange, ...]:
        if not session.ranks.is_first:
            return ()
        written, saved = session.directory.left_out.read(), _of_numbers(numbers)
        if len(written) >= len(saved):
            return written
        session.directory.confirm_writer()
        session.directory.left_out.write(saved)
        return saved

    return session.ranks.gather(session.ranks.together(look))[0]


def as_numbers(left_out: Sequence[SkippedRange]) -> dict[str, Any]:
    """For a checkpoint's manifest: the decisions that it was saved after."""
    return {"left_out": [each.as_json() for each in left_out]} if left_out else {}


def _of_numbers(numbers: Mapping[str, Any]) -> tuple[SkippedRange, ...]:
    return read_left_out(numbers.get("left_out", []))


def _write_down(session: Session, plan: BackPlan, spiked: Spiked) -> Back:
    """On rank 0."""
    counters = _find_base(session.directory, plan, spiked)
    values = session.resolved.values
    skips = Skips(all_skips(session, spiked.known))
    before, end = skips.count_kept(counters.position), skips.count_kept(spiked.end)
    first = max(before, end - plan.max_left_out * values.train.global_batch)
    start = int(skips.find_kept(np.array([first]))[0]) if first > before else counters.position
    steps = f"step {spiked.first}" if spiked.first == spiked.last else f"steps {spiked.first} to {spiked.last}"
    left_out = SkippedRange(
        start, spiked.end, end - first, counters.step, spiked.first, spiked.last, f"a spike in {steps}", time.time()
    )
    session.directory.confirm_writer()
    session.directory.left_out.write((*spiked.known, left_out))
    return Back(counters, (*spiked.known, left_out))


def _find_base(directory: RunDir, plan: BackPlan, spiked: Spiked) -> Counters:
    """The counters of the newest checkpoint from before the spike and its margin whose manifest can be read; where
    none is so old, of the oldest. Raises JobError."""
    before = [step for step in directory.checkpoint_steps() if step < spiked.first]
    old = [step for step in before if step < spiked.first - plan.spike_margin]
    for step in [*reversed(old), *(step for step in before if step not in old)]:
        with contextlib.suppress(Damaged):
            return read_counters(manifest_of_step(directory, step).numbers)
    raise JobError(
        f"{_describe(spiked)}, and there is no checkpoint from before it that the run could go back to; the run ends "
        "here.\n"
        f'  To do: save more often (checkpoint.every) or keep more (checkpoint.keep), or set guard.on_spike = "warn"; '
        "then run the same command again."
    )


def _find_undone(directory: RunDir) -> list[PassedOver]:
    """Checkpoints of steps that a decision undid which they know nothing of, the newest first."""
    left_out = directory.left_out.read()
    oldest = min((each.back_to for each in left_out), default=None)
    undone = []
    for step in reversed(directory.checkpoint_steps()):
        if oldest is None or step <= oldest:
            break
        with contextlib.suppress(Damaged):  # what is damaged is passed over when it is loaded
            reason = why_undone(manifest_of_step(directory, step).numbers, step, left_out)
            undone += [PassedOver(step, reason)] if reason else []
    return undone


def why_undone(numbers: Mapping[str, Any], step: int, left_out: Sequence[SkippedRange]) -> str:
    """Which decision undid a checkpoint with these numbers, of all that there are; empty for none."""
    reasons = [each.reason for each in left_out[len(_of_numbers(numbers)) :] if each.back_to < step]
    return f"the run went back before it after {reasons[0]}" if reasons else ""


def _describe(spiked: Spiked) -> str:
    steps = f"step {spiked.first} is" if spiked.first == spiked.last else f"steps {spiked.first} to {spiked.last} are"
    return f"{steps} a spike (guard.spike)"


def _often_enough(directory: RunDir, spiked: Spiked) -> JobError:
    times = "once" if len(spiked.known) == 1 else f"{len(spiked.known)} times"
    spans = ", ".join(str(each.span) for each in spiked.known)
    return JobError(
        f"{_describe(spiked)}, and the run has gone back {times} already; it ends here ({spiked.limit}).\n"
        f"  It has left out the positions {spans} ({directory.left_out.path}). To do: look at the samples of these "
        "steps, lower optim.lr, or set optim.clip; then run the same command again, with a higher "
        'guard.max_roll_backs or guard.on_spike = "warn".'
    )
