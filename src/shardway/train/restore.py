"""Where a run resumes: the newest complete checkpoint, one on the disks of the nodes, or one from before a spike.

Invariants:
- A decision to go back is durable before training continues, and everything else follows from it.
- Only checkpoints that are on the lineage of the run, and were not undone by going back before a spike, are loaded. A
  local checkpoint that two starts in a row have begun from is left out, with all others there.
- A run whose checkpoints were all removed is not begun again in the same directory.
- The restored counters belong to the installed state, and the position to the data of today.

The decision is one small file (`rundir.names`), written before anything else happens. Each checkpoint records which
of these decisions came before it. A checkpoint that a later decision undid is quarantined whenever a run looks for
where to resume. So it makes no difference whether the process that decided continues, or a later one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardway.checkpoint.catalog import CorruptCheckpoint, PassedOver, check_base, manifest_of_step, quarantine
from shardway.checkpoint.file_format import Damaged, Manifest
from shardway.checkpoint.reader import LoadedCheckpoint, load_from, load_latest
from shardway.checkpoint.state import CheckpointState
from shardway.data.order import Skips
from shardway.errors import JobError, UserError
from shardway.rundir.directory import START_OVER, START_OVER_IN_SCRIPT, RunDir
from shardway.rundir.events import drop_undone
from shardway.rundir.names import LOCAL, SHARED, SkippedRange, has_line, read_left_out, read_line, step_name
from shardway.runfile.schema import read_skips
from shardway.train.blended import NUMBERS
from shardway.train.loop_state import Counters, LoopPlan, read_counters
from shardway.train.loss import LossScale
from shardway.train.session import Session

if TYPE_CHECKING:
    from shardway.checkpoint.local_tier import LocalTier

# --- where a run resumes


@dataclass(frozen=True)
class Restored:
    """The checkpoint that was loaded (None: the run begins), and its numbers.

    `left_out` are the spans that the run leaves out by itself, `undone` what was quarantined before anything was
    loaded. On the disks of the nodes: checkpoints that were `passed_over`, and the step for which all was `dropped`.
    """

    loaded: LoadedCheckpoint | None
    counters: Counters
    loss_scale: LossScale | None
    left_out: tuple[SkippedRange, ...] = ()
    undone: Sequence[CorruptCheckpoint] = ()
    passed_over: tuple[PassedOver, ...] = ()
    dropped: int | None = None


def restore(session: Session, plan: LoopPlan, state: CheckpointState, tier: LocalTier | None = None) -> Restored:
    """Install the newest complete checkpoint that holds, on all ranks together; also from a `tier`.

    `settle_restored` changes the run directory afterwards, once the run goes on. Raises JobError if none is complete,
    or if all that were saved are gone, UserError if it belongs to other data or is past what is asked for.
    """
    undone: list[int] = []
    if session.starts_over:
        session.begin()  # nothing here to resume from, or to be refused for
    else:
        undone = session.ranks.ask_first(lambda: [each.step for each in _find_undone(session.directory)])
    with contextlib.nullcontext() if tier is None else tier.line_kept():
        begun = Restored(None, Counters(), plan.loss_scale)
        local = _load_local(session, tier, state, begun) if tier is not None else begun
        loaded = local.loaded or load_latest(session.directory, session.ranks, state, without=undone)
        if loaded is None:
            session.ranks.ask_first(lambda: _check_none_is_gone(session))
            return local
        scale = plan.loss_scale
        if scale is not None and "loss_scale" in loaded.numbers:
            scale = scale.with_numbers(loaded.numbers["loss_scale"])
        counters = read_counters(loaded.numbers)
        _check_goes_on(session, plan, counters, loaded.numbers)
    return replace(local, loaded=loaded, counters=counters, loss_scale=scale)


def _check_none_is_gone(session: Session) -> None:
    """Raise JobError if the run has saved checkpoints into its directory, or was made with one, and none is there any
    more: it would begin anew without a word. Called on rank 0 where nothing was loaded."""
    directory = session.directory
    if session.starts_over or directory.checkpoint_steps():  # these were undone, by a decision of the run itself
        return
    events = drop_undone(directory.all_events(names=("started", "rolled_back", "saved")))
    steps = [event["step"] for event in events if event["event"] == "saved" and event.get("tier", SHARED) == SHARED]
    imported = directory.read_import()
    if steps or imported:
        start_over = START_OVER_IN_SCRIPT if session.own_model else START_OVER
        what = f"has saved the checkpoint of step {steps[-1]} (by its events)" if steps else ""
        raise JobError(
            f"the run in {directory.path} {what or f'begins with weights from {imported} (by its imported.json)'}, and "
            f"there is no checkpoint in {directory.checkpoints} any more.\n"
            "  It was not begun again, and nothing was changed. To do: put the folder of checkpoints back, or "
            f"{start_over}."
        )


def _load_local(session: Session, tier: LocalTier, state: CheckpointState, begun: Restored) -> Restored:
    """Install the newest checkpoint on the disks of the nodes that holds, on all ranks together: `begun`, with what was
    loaded. Raises JobError if it does not fit the state."""
    from shardway.checkpoint.local_tier import line_of, list_held, open_local_store, survey  # where there is a tier

    ranks, directory = session.ranks, session.directory
    lineage, left_out, newest = ranks.ask_first(
        lambda: (read_line(directory.path), directory.left_out.read(), max(directory.checkpoint_steps(), default=0))
    )

    def why_not(manifest: Manifest) -> str:
        """Why the run must not resume from this checkpoint; empty if it may."""
        off = lineage.why_off(line_of(manifest.numbers), manifest.step)
        return off or why_undone(manifest.numbers, manifest.step, left_out)

    tier.remove_partials()
    held = ranks.together(lambda: list_held(tier.files, session.run_id, newest, why_not) if tier.leads else [])
    found = survey(ranks.gather(held), ranks.rank)
    if found.local and lineage.failed_twice(found.local[0].step):
        return replace(begun, passed_over=found.passed_over, dropped=found.local[0].step)
    passed_over = found.passed_over
    for local in found.local:
        tier.begin(local.step, LOCAL)
        with open_local_store(tier.place, ranks, local, tier.nodes, tier.apart) as store:
            loaded = load_from(store, ranks, state)
        if isinstance(loaded, LoadedCheckpoint):
            return replace(begun, loaded=replace(loaded, tier=LOCAL), passed_over=passed_over)
        passed_over = (*passed_over, loaded)
    return replace(begun, passed_over=passed_over)


def _check_goes_on(session: Session, plan: LoopPlan, counters: Counters, numbers: Mapping[str, Any]) -> None:
    """Raise UserError if the checkpoint belongs to other data, or is past what is asked for."""
    own, step, saved_data = session.own_model, counters.step, str(numbers.get("data", ""))
    start_over = START_OVER_IN_SCRIPT if own else START_OVER
    if plan.blend is not None and NUMBERS in numbers:
        plan.blend.check_past(numbers[NUMBERS], counters.position, step)
    elif saved_data and plan.data_fingerprint and saved_data != plan.data_fingerprint:
        key = "data.dataset" if session.resolved.values.data.dataset else "data.path"
        key = key if plan.blend is None else "data.blend"
        what = "run.loader was given" if own else f"the fingerprint of {key} is"
        elsewhere = "give these a run of their own (shardway.start(directory=...)), " if own else ""
        raise UserError(
            f"the training data is not what the first {step} steps were trained on: {what} {plan.data_fingerprint}, "
            f"the checkpoint says {saved_data}.\n"
            "  The position in the data would mean other samples, so nothing was trained. To do: restore the data, "
            f"{elsewhere}or {start_over}."
        )
    check_base(numbers, plan.base_fingerprint, session.resolved.values.model.hf, "Nothing was trained", start_over)
    if step > plan.total_steps:
        raise UserError(
            f"{step} steps are done, and train.steps asks for {plan.total_steps}.\n"
            f"  Nothing was changed. To do: ask for more steps, or {start_over}."
        )


def settle_restored(session: Session, restored: Restored, tier: LocalTier | None) -> Restored:
    """Write down where the run resumes, and quarantine undone checkpoints; newer ones on disks of nodes are removed.
    Returns `restored` with the spans that the run leaves out by itself. On all ranks together, after `session.begin`.
    Raises JobError."""
    undone, loaded = quarantine_undone(session), restored.loaded
    step, where = (loaded.step, loaded.tier) if loaded is not None else (0, SHARED)
    if tier is not None:
        if where == SHARED:
            tier.begin(step, where)
        tier.settle(step, is_here=where == LOCAL)
    elif session.ranks.ask_first(lambda: has_line(session.directory.path)):
        # The run no longer saves on disks of nodes but has: what is there may be undone by now.
        from shardway.checkpoint.local_tier import descend

        descend(session, step, where)

    def know_left_out() -> tuple[SkippedRange, ...]:
        if not session.ranks.is_first:
            return ()
        written, saved = session.directory.left_out.read(), _of_numbers(loaded.numbers if loaded is not None else {})
        if len(written) >= len(saved):
            return written
        session.directory.confirm_writer()  # the file was lost: it is written again from the checkpoint
        session.directory.left_out.write(saved)
        return saved

    left_out = session.ranks.gather(session.ranks.together(know_left_out))[0]
    return replace(restored, left_out=left_out, undone=undone)


def quarantine_damaged(session: Session, restored: Restored) -> None:
    """Quarantine damaged checkpoints, since this run will save the same steps again. Reports undone ones too, and those
    on the disks of the nodes, which are gone by now."""
    step, recorder = restored.counters.step, session.recorder
    for each in restored.passed_over:
        name, reason = step_name(each.step), each.reason
        recorder.event("checkpoint_quarantined", step=step, tier=LOCAL, name=name, kept_as="", reason=reason)
    if (dropped := restored.dropped) is not None:
        reason = f"two starts in a row from step {dropped} on the disks of the nodes have failed"
        recorder.event("local_checkpoints_ignored", step=step, dropped=dropped, reason=reason)
        recorder.status(local_checkpoints_ignored=dropped)
    damaged = restored.loaded.passed_over if restored.loaded is not None else ()
    if not damaged and not restored.undone:
        return
    if damaged:
        session.directory.confirm_writer()
    done = session.ranks.together(lambda: quarantine(session.directory, damaged) if session.ranks.is_first else [])
    for corrupt in (*restored.undone, *done):
        name, kept_as, reason = corrupt.name, corrupt.kept_as, corrupt.reason
        recorder.event("checkpoint_quarantined", step=step, name=name, kept_as=kept_as, reason=reason)


# --- back before a spike


def decide_back(
    session: Session, first: int, now: Counters, known: tuple[SkippedRange, ...]
) -> tuple[Counters, tuple[SkippedRange, ...]]:
    """Choose the checkpoint and the span, and write them down; on all ranks together. `first`: the first step of the
    spike, which lasts until `now`; `known`: the spans that the run has left out before.

    Returns the counters of the checkpoint, and all spans that the run leaves out by itself from now on. Raises JobError
    on every rank if the run has gone back often enough, or has no checkpoint to go back to.
    """
    resolved, directory, plan = session.resolved, session.directory, session.resolved.values.guard
    spike = f"step {first} is" if first == now.step else f"steps {first} to {now.step} are"
    if len(known) >= plan.max_roll_backs:
        limit = f"guard.max_roll_backs = {plan.max_roll_backs}, {resolved.origins['guard.max_roll_backs']}"
        times = "once" if len(known) == 1 else f"{len(known)} times"
        raise JobError(
            f"{spike} a spike (guard.spike), and the run has gone back {times} already; it ends here ({limit}).\n"
            f"  It has left out the positions {', '.join(str(each.span) for each in known)} "
            f"({directory.left_out.path}). To do: look at the samples of these steps, lower optim.lr, or set "
            "optim.clip; then run the same command again, with a higher guard.max_roll_backs or "
            'guard.on_spike = "warn".'
        )

    def write_down() -> tuple[Counters, tuple[SkippedRange, ...]]:
        counters = _find_base(directory, first, first - plan.spike_margin)
        if counters is None:
            raise JobError(
                f"{spike} a spike (guard.spike), and there is no checkpoint from before it that the run could go back "
                "to; the run ends here.\n"
                "  To do: save more often (checkpoint.every) or keep more (checkpoint.keep), or set guard.on_spike = "
                '"warn"; then run the same command again.'
            )
        skips = Skips(all_skips(session, known))
        before, end = skips.count_kept(counters.position), skips.count_kept(now.position)
        size = resolved.values.train.batch.size_at(now.position - 1)
        kept = max(before, end - plan.max_left_out * size)
        start = int(skips.find_kept(np.array([kept]))[0]) if kept > before else counters.position
        reason = f"a spike in step {first}" if first == now.step else f"a spike in steps {first} to {now.step}"
        left_out = SkippedRange(start, now.position, end - kept, counters.step, first, now.step, reason, time.time())
        directory.confirm_writer()
        directory.left_out.write((*known, left_out))
        return counters, (*known, left_out)

    return session.ranks.ask_first(write_down)


def _find_base(directory: RunDir, spike: int, margin: int) -> Counters | None:
    """The counters of the newest checkpoint from before the margin of a spike whose manifest can be read; if none is
    so old, of the oldest before the spike; None if there is none."""
    before = [step for step in directory.checkpoint_steps() if step < spike]
    old = [step for step in before if step < margin]
    for step in [*reversed(old), *(step for step in before if step not in old)]:
        with contextlib.suppress(Damaged):
            return read_counters(manifest_of_step(directory, step).numbers)
    return None


def all_skips(session: Session, left_out: Sequence[SkippedRange]) -> list[list[int]]:
    """The spans of `data.skip` and those that the run left out by itself, as one list."""
    return read_skips([*session.resolved.values.data.skip, *(each.span for each in left_out)])


def quarantine_undone(session: Session) -> list[CorruptCheckpoint]:
    """Quarantine checkpoints that a decision undid; on all ranks together. Raises JobError."""

    def act() -> list[CorruptCheckpoint]:
        if not session.ranks.is_first or not (undone := _find_undone(session.directory)):
            return []
        session.directory.confirm_writer()
        return quarantine(session.directory, undone, "undone")

    return session.ranks.gather(session.ranks.together(act))[0]


def _of_numbers(numbers: Mapping[str, Any]) -> tuple[SkippedRange, ...]:
    """The decisions that were made before a checkpoint with these numbers."""
    return read_left_out(numbers.get("left_out", []))


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
