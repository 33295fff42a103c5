"""Where a run goes on from: the newest whole checkpoint, or its first step.

Invariant: the counters that come back belong to the state that was installed, and the position in the data to the
data of today. This module must not decide which checkpoint is whole (that is `checkpoint.load`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardway.checkpoint.corrupt import CorruptCheckpoint, set_aside
from shardway.checkpoint.load import LoadedCheckpoint, load_latest
from shardway.checkpoint.state import CheckpointState
from shardway.errors import UserError
from shardway.rundir.directory import START_OVER, START_OVER_IN_SCRIPT
from shardway.rundir.left_out import SkippedRange
from shardway.rundir.lineage import LOCAL, SHARED
from shardway.rundir.steps import step_name
from shardway.train.counters import Counters, read_counters
from shardway.train.loop_plan import LoopPlan
from shardway.train.loss_scale import LossScale
from shardway.train.saves.back import find_undone, know_left_out, set_undone_aside
from shardway.train.saves.nearest import Nearest, load_nearest
from shardway.train.saves.tiers import LocalTier, line_kept, note_descent
from shardway.train.session import Session


@dataclass(frozen=True)
class Restored:
    """The checkpoint that was loaded (None: the run begins), and what its numbers say.

    `left_out` is what the run leaves out by itself, `undone` what was set aside before anything was loaded, `nearest`
    what became of the checkpoints on the disks of the nodes.
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
    """Install the newest whole checkpoint that holds, on all ranks together; those of a `tier` as well.

    What follows for the run directory is for `settle_restored`, once the run goes on. Raises JobError where none is
    whole, UserError where it belongs to other data or is past what is asked for.
    """
    if session.starts_over:
        session.begin()  # there is nothing here to go on from, nor to be refused for
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
    """The run goes on from what was restored: write down where from, and set aside what a decision has undone; the same
    with what it leaves out by itself. On all ranks together, after `session.begin`. Raises JobError."""
    undone = set_undone_aside(session)
    _settle_tier(session, tier, restored.loaded)
    left_out = know_left_out(session, restored.loaded.numbers if restored.loaded is not None else {})
    return replace(restored, left_out=left_out, undone=undone)


def _settle_tier(session: Session, tier: LocalTier | None, loaded: LoadedCheckpoint | None) -> None:
    """Write down where the run goes on from, unless that was done; what is newer on disks of nodes goes."""
    step, where = (loaded.step, loaded.tier) if loaded is not None else (0, SHARED)
    if tier is None:
        note_descent(session, step, where)
        return
    if where == SHARED:
        tier.begin(step, where)
    tier.settle(step, is_here=where == LOCAL)


def set_damaged_aside(session: Session, restored: Restored) -> None:
    """A damaged checkpoint must not stand where this run will save the same step again. Tells of undone ones too."""
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
    """What lay on the disks of the nodes and was not used, which is gone by now."""
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
    """Raise UserError where the checkpoint belongs to other data, or is past what is asked for."""
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
