"""Where a run resumes: the newest complete checkpoint, one on the disks of the nodes, or one from before a spike.

Invariants:
- A decision to go back is durable before training continues, and everything else follows from it.
- Only checkpoints that are on the lineage of the run, and were not undone by going back before a spike, are loaded. A
  local checkpoint that two starts in a row have begun from is left out, with all others there.
- The restored counters belong to the installed state, and the position to the data of today.

The decision is one small file (`rundir.lineage`), written before anything else happens. Each checkpoint records which
of these decisions came before it. A checkpoint that a later decision undid is quarantined whenever a run looks for
where to resume. So it makes no difference whether the process that decided continues, or a later one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardway.checkpoint.catalog import CorruptCheckpoint, PassedOver, manifest_of_step, set_aside
from shardway.checkpoint.file_format import Damaged, Manifest
from shardway.checkpoint.local_tier import Survey, list_held, open_local_stock, survey
from shardway.checkpoint.reader import LoadedCheckpoint, load_from, load_latest
from shardway.checkpoint.state import CheckpointState
from shardway.data.order import Skips
from shardway.errors import JobError, UserError
from shardway.rundir.directory import START_OVER, START_OVER_IN_SCRIPT, RunDir
from shardway.rundir.lineage import LOCAL, SHARED, Lineage, SkippedRange, read_left_out, read_line
from shardway.rundir.names import step_name
from shardway.runfile.types import read_skips
from shardway.train.guard import BackPlan
from shardway.train.local_tier import LocalTier, line_kept, line_of, note_descent
from shardway.train.loop_state import Counters, LoopPlan, read_counters
from shardway.train.loss import LossScale
from shardway.train.session import Session

# --- back before a spike


@dataclass(frozen=True)
class Spiked:
    """A run that goes back: the steps of the spike, the position after it, and the spans it has left out before.

    `limit` describes how `guard.max_roll_backs` was set.
    """

    first: int
    last: int
    end: int
    known: tuple[SkippedRange, ...]
    limit: str


@dataclass(frozen=True)
class Back:
    """Where the run resumes: the counters of that checkpoint, and all spans that it leaves out by itself from now
    on."""

    counters: Counters
    left_out: tuple[SkippedRange, ...]


def decide_back(session: Session, plan: BackPlan, spiked: Spiked) -> Back:
    """Choose the checkpoint and the span, and write them down; on all ranks together.

    Raises JobError on every rank if the run has gone back often enough, or has no checkpoint to go back to.
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
    """Quarantine checkpoints that a decision undid; on all ranks together. Raises JobError."""

    def act() -> list[CorruptCheckpoint]:
        if not session.ranks.is_first or not (undone := _find_undone(session.directory)):
            return []
        session.directory.confirm_writer()
        return set_aside(session.directory, undone, "undone")

    return session.ranks.gather(session.ranks.together(act))[0]


def know_left_out(session: Session, numbers: Mapping[str, Any]) -> tuple[SkippedRange, ...]:
    """All spans that the run leaves out by itself, after a checkpoint with these numbers was loaded; on all ranks
    together.

    A lost file is written again from the checkpoint. Raises JobError.
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
    """For a checkpoint's manifest: the decisions made before it."""
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
    """The counters of the newest checkpoint from before the spike and its margin whose manifest can be read; if none is
    so old, of the oldest. Raises JobError."""
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
    """Checkpoints of undone steps that do not record the decision that undid them, the newest first."""
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
    """The decision that undid a checkpoint with these numbers; empty for none."""
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


# --- resuming from the disks of the nodes


@dataclass(frozen=True)
class Nearest:
    """What was loaded (None: nothing), what was skipped, and the step for which all of it was left out."""

    loaded: LoadedCheckpoint | None = None
    passed_over: tuple[PassedOver, ...] = ()
    dropped: int | None = None


@dataclass(frozen=True)
class _Known:
    """What rank 0 reads of the run: its lineage, decisions that undid steps, its newest checkpoint, its id."""

    line: Lineage
    left_out: tuple[SkippedRange, ...]
    saved_step: int
    run: str

    def why_not(self, manifest: Manifest) -> str:
        """Why the run must not resume from this checkpoint; empty if it may."""
        off = self.line.why_off(line_of(manifest.numbers), manifest.step)
        return off or why_undone(manifest.numbers, manifest.step, self.left_out)


def load_nearest(session: Session, tier: LocalTier, state: CheckpointState) -> Nearest:
    """Restore the newest checkpoint on the disks of the nodes that holds, on all ranks together.

    Raises JobError if it does not fit the state.
    """
    known = _ask(session)
    tier.remove_partials()
    found = _survey(session, tier, known)
    if found.nearby and known.line.failed_twice(found.nearby[0].step):
        return Nearest(passed_over=found.passed_over, dropped=found.nearby[0].step)
    passed_over = list(found.passed_over)
    for nearby in found.nearby:
        tier.begin(nearby.step, LOCAL)
        with open_local_stock(tier.place, session.ranks, nearby, tier.nodes, tier.apart) as stock:
            loaded = load_from(stock, session.ranks, state)
        if isinstance(loaded, LoadedCheckpoint):
            return Nearest(replace(loaded, tier=LOCAL), tuple(passed_over))
        passed_over.append(loaded)
    return Nearest(None, tuple(passed_over))


def _ask(session: Session) -> _Known:
    def read() -> _Known:
        directory = session.directory
        newest = max(directory.checkpoint_steps(), default=0)
        return _Known(read_line(directory.path), directory.left_out.read(), newest, session.run_id)

    return session.ranks.ask_first(read)


def _survey(session: Session, tier: LocalTier, known: _Known) -> Survey:
    held = session.ranks.together(
        lambda: list_held(tier.files, known.run, known.saved_step, known.why_not) if tier.leads else []
    )
    return survey(session.ranks.gather(held), session.ranks.rank)


# --- where a run resumes


@dataclass(frozen=True)
class Restored:
    """The checkpoint that was loaded (None: the run begins), and its numbers.

    `left_out` are the spans that the run leaves out by itself, `undone` what was quarantined before anything was
    loaded, `nearest` the result for the checkpoints on the disks of the nodes.
    """

    loaded: LoadedCheckpoint | None
    counters: Counters
    loss_scale: LossScale | None
    left_out: tuple[SkippedRange, ...] = ()
    undone: Sequence[CorruptCheckpoint] = ()
    nearest: Nearest = field(default_factory=Nearest)

    @property
    def owes_validation(self) -> bool:
        """Whether a stop left out the validation after the step that was loaded."""
        return self.loaded is not None and bool(self.loaded.numbers.get("validation_owed"))


def restore(session: Session, plan: LoopPlan, state: CheckpointState, tier: LocalTier | None = None) -> Restored:
    """Install the newest complete checkpoint that holds, on all ranks together; also from a `tier`.

    `settle_restored` changes the run directory afterwards, once the run goes on. Raises JobError if none is complete,
    UserError if it belongs to other data or is past what is asked for.
    """
    if session.starts_over:
        session.begin()  # nothing here to resume from, or to be refused for
    undone = find_undone(session)
    with line_kept(session, tier):
        nearest = load_nearest(session, tier, state) if tier is not None else Nearest()
        loaded = nearest.loaded or load_latest(session.directory, session.ranks, state, without=undone)
        if loaded is None:
            return Restored(None, Counters(), plan.loss_scale, nearest=nearest)
        scale = plan.loss_scale
        if scale is not None and "loss_scale" in loaded.numbers:
            scale = scale.with_numbers(loaded.numbers["loss_scale"])
        counters = read_counters(loaded.numbers)
        _check_goes_on(session, plan, counters.step, str(loaded.numbers.get("data", "")))
    return Restored(loaded, counters, scale, nearest=nearest)


def settle_restored(session: Session, restored: Restored, tier: LocalTier | None) -> Restored:
    """Write down where the run resumes, and quarantine undone checkpoints; returns `restored` with the spans that the
    run leaves out by itself. On all ranks together, after `session.begin`. Raises JobError."""
    undone = set_undone_aside(session)
    _settle_tier(session, tier, restored.loaded)
    left_out = know_left_out(session, restored.loaded.numbers if restored.loaded is not None else {})
    return replace(restored, left_out=left_out, undone=undone)


def _settle_tier(session: Session, tier: LocalTier | None, loaded: LoadedCheckpoint | None) -> None:
    """Write down where the run resumes, unless that was done; newer checkpoints on disks of nodes are removed."""
    step, where = (loaded.step, loaded.tier) if loaded is not None else (0, SHARED)
    if tier is None:
        note_descent(session, step, where)
        return
    if where == SHARED:
        tier.begin(step, where)
    tier.settle(step, is_here=where == LOCAL)


def set_damaged_aside(session: Session, restored: Restored) -> None:
    """Quarantine damaged checkpoints, since this run will save the same steps again. Reports undone ones too."""
    _report_nearest(session, restored)
    damaged = restored.loaded.passed_over if restored.loaded is not None else ()
    if not damaged and not restored.undone:
        return
    if damaged:
        session.directory.confirm_writer()
    done = session.ranks.together(lambda: set_aside(session.directory, damaged) if session.ranks.is_first else [])
    for each in (*restored.undone, *done):
        session.recorder.event(
            "checkpoint_quarantined",
            step=restored.counters.step,
            name=each.name,
            kept_as=each.kept_as,
            reason=each.reason,
        )


def _report_nearest(session: Session, restored: Restored) -> None:
    """Report the unused checkpoints on the disks of the nodes, which are gone by now."""
    step, recorder = restored.counters.step, session.recorder
    for each in restored.nearest.passed_over:
        name, reason = step_name(each.step), each.reason
        recorder.event("checkpoint_quarantined", step=step, tier=LOCAL, name=name, kept_as="", reason=reason)
    dropped = restored.nearest.dropped
    if dropped is not None:
        reason = f"two starts in a row from step {dropped} on the disks of the nodes have failed"
        recorder.event("local_checkpoints_ignored", step=step, dropped=dropped, reason=reason)
        recorder.status(local_checkpoints_ignored=dropped)


def _check_goes_on(session: Session, plan: LoopPlan, step: int, saved_data: str) -> None:
    """Raise UserError if the checkpoint belongs to other data, or is past what is asked for."""
    own = session.own_model
    start_over = START_OVER_IN_SCRIPT if own else START_OVER
    if saved_data and plan.data_fingerprint and saved_data != plan.data_fingerprint:
        what = "run.loader was given" if own else "the fingerprint of data.path is"
        elsewhere = "give these a run of their own (shardway.start(directory=...)), " if own else ""
        raise UserError(
            f"the training data is not what the first {step} steps were trained on: {what} {plan.data_fingerprint}, "
            f"the checkpoint says {saved_data}.\n"
            "  The position in the data would mean other samples, so nothing was trained. To do: restore the data, "
            f"{elsewhere}or {start_over}."
        )
    if step > plan.total_steps:
        raise UserError(
            f"{step} steps are done, and train.steps asks for {plan.total_steps}.\n"
            f"  Nothing was changed. To do: ask for more steps, or {start_over}."
        )
