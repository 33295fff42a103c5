"""The loop: an explicit state machine that yields batches and does everything that happens between two steps.

Invariant: the only loop of the project. Recipes and scripts that own their loop walk through the same states; a
user extends it by passing functions or by what stands between two batches. It must not run a model in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardway.checkpoint.savable import check_collects
from shardway.data.loader import Batch
from shardway.errors import Bug, UserError
from shardway.parallel.axes.replicate import average_buffers
from shardway.parallel.formats.float8 import compute_scales
from shardway.ranks.progress import Activity
from shardway.rundir.attempts import Ending
from shardway.rundir.left_out import LeftOut
from shardway.rundir.line import LOCAL
from shardway.train.before import Before, find_changeable, find_generators
from shardway.train.counters import Counters
from shardway.train.ending import End
from shardway.train.guard import BackPlan, Guard
from shardway.train.loop_plan import LoopParts, LoopPlan
from shardway.train.machine import Facts, Phase, next_phase
from shardway.train.saves.back import Spiked, all_skips, as_numbers, decide_back, set_undone_aside
from shardway.train.saves.restore import Restored, restore, set_damaged_aside, settle_restored
from shardway.train.saves.saving import Point, Saver
from shardway.train.saves.tiers import open_tier
from shardway.train.schedule import lr_factor
from shardway.train.session import Session, machine_facts
from shardway.train.skipping import tell_late_spans, tell_skipped
from shardway.train.step import Moment, StepResult
from shardway.train.stops.stopping import Stopping
from shardway.train.stops.waiting import TrainingStream
from shardway.train.validate import validate
from shardway.train.validated import Validated, recall_validations

_ACTIVITIES = {
    Phase.RESTORE: Activity.LOAD,
    Phase.STEP: Activity.DATA,
    Phase.GO_BACK: Activity.LOAD,
    Phase.VALIDATE: Activity.VALIDATE,
    Phase.SAVE: Activity.SAVE,
    Phase.STOP: Activity.END,
    Phase.FINISH: Activity.END,
}
"""What a rank does first in a phase; a step goes on once its batch is there."""


@dataclass(frozen=True)
class _OpenStep:
    """A batch that was handed out, the learning rate of its step, and when (perf_counter)."""

    batch: Batch
    lr: float
    started: float


class Loop:
    """One walk through the states, from restoring to the end."""

    def __init__(self, session: Session, plan: LoopPlan, parts: LoopParts) -> None:
        self._session = session
        self._plan = plan
        self._parts = parts
        self._counters = Counters()
        self._stopping = Stopping(session)
        self._loss_scale = plan.loss_scale
        self._result: StepResult | None = None
        self._stream: TrainingStream | None = None
        self._peak_lrs: list[float] = []
        self._tier = open_tier(session, plan.local)
        local = (self._tier, plan.local.every_s) if self._tier is not None and plan.local is not None else None
        self._saver = Saver(session, plan.save_every_s, plan.keep, self._took_save, tier=local)
        self._guard = Guard(session, plan.guard, parts.engine.passes.parallel, self._saver.settle)
        self._phase = Phase.RESTORE
        self._open_step: _OpenStep | None = None
        self._owes_validation, self._has_validated, self._began = False, False, 0
        self._rests = False
        """Whether there is nothing to do: the run was finished before."""
        self._left_out: tuple[LeftOut, ...] = ()
        self._untrained: Before | None = None
        self._actions: dict[Phase, Callable[[], None]] = {
            Phase.RESTORE: self._restore,
            Phase.GO_BACK: self._go_back,
            Phase.VALIDATE: self._validate,
            Phase.SAVE: self._save,
            Phase.STOP: self._stop,
            Phase.FINISH: self._finish,
        }

    @property
    def counters(self) -> Counters:
        """How far the run is."""
        return self._counters

    def batches(self) -> Iterator[Any]:
        """Yield the batch of each step that is left; what happens between two steps happens in here."""
        while self._phase is not Phase.END:
            self._session.progress.enter(_ACTIVITIES[self._phase], self._counters.step)
            if self._phase is Phase.STEP:
                yield from self._step()
            else:
                self._actions[self._phase]()
            self._phase = Phase.END if self._rests else next_phase(self._phase, self._facts())

    def check_awaits_step(self) -> None:
        """Raise UserError unless a batch waits for its one step."""
        if self._open_step is None:
            raise UserError("run.step was called outside `for batch in run.steps(loader)`.")
        if self._result is not None:
            raise UserError(
                f"run.step was called twice for the batch of step {self._counters.step + 1}.\n"
                "  To do: call it once for each batch; it takes the micro-batches and the update together."
            )

    def note(self, result: StepResult) -> None:
        """Take the result of the step under way."""
        self._result = result
        self._session.progress.enter(Activity.SCRIPT, self._counters.step)

    def leave(self) -> None:
        """End a walk that the script broke off: count the step that it took, save, and say so."""
        if self._phase in (Phase.RESTORE, Phase.END):
            return
        if self._open_step is not None and self._result is not None:
            self._close_step(self._open_step, self._result)
        self._session.progress.enter(Activity.SAVE, self._counters.step)
        self._save_point(last=True)
        self._end("stopped", End(Ending.STOPPED, "the script left its loop"))
        self._phase = Phase.END

    def moment(self) -> Moment:
        """What the step to come needs to know of where the run stands."""
        watch = self._guard.watch(self._counters.step + 1, scales_loss=self._loss_scale is not None)
        missed = self._stream is not None and self._stream.missed
        wishes = self._stopping.wishes(save=self._saver.is_due(), void=missed)
        rows = len(self._open_step.batch.ids) if self._open_step is not None and not missed else None
        return Moment(self._counters.position, wishes, self._loss_scale, watch, rows)

    def _agree(self, *, void: bool = False) -> bool:
        """Whether all ranks stop between two steps; the clock is obeyed once this attempt has taken a step."""
        return self._stopping.agree(void=void, obeys_clock=void or self._counters.step > self._began)

    def _facts(self) -> Facts:
        step, plan = self._counters.step, self._plan
        done, stop = step >= plan.total_steps, bool(self._stopping.decision.stop_reason)
        return Facts(
            done=done,
            stop=stop,
            validate_due=self._owes_validation,
            goes_back=self._guard.must_go_back,
            save_owed=self._save_owed,
            save_due=stop or self._stopping.decision.save or self._is_save_due(done=done),
        )

    def _is_save_due(self, *, done: bool) -> bool:
        """By the plan; and before a script's own loss sees its first validation, so that an error costs no step."""
        first = self._session.own_model and self._owes_validation and not self._has_validated
        return ((done or first) and self._plan.save_at_end) or self._plan.saves_after(self._counters.step)

    @property
    def _save_owed(self) -> bool:
        """Whether the run is where it went on from, and its directory has no checkpoint of that."""
        return self._tier is not None and self._tier.is_base and self._counters.step == self._began

    def _validates_here(self) -> bool:
        step, every = self._counters.step, self._plan.validate_every
        due = every is not None and (step >= self._plan.total_steps or step % every == 0)
        return due and self._parts.validation is not None

    # --- states

    def _restore(self) -> None:
        session, engine = self._session, self._parts.engine
        self._peak_lrs = [float(group["lr"]) for group in engine.groups]
        if self._plan.guard.back is not None:
            self._untrained = find_changeable(engine.passes.parallel).remember(None)
        restored = self._take_up()
        if self._is_done_already(restored):
            return
        loaded, parameters = restored.loaded, self._count_parameters()
        session.begin()
        restored = self._settle(restored)
        session.recorder.begin(
            self._counters.step,
            format=1,
            total_steps=self._plan.total_steps,
            samples_per_step=self._plan.global_batch,
            tokens_per_step=self._plan.global_batch * self._plan.tokens_per_sample,
            bytes_per_token=self._parts.validation.bytes_per_token if self._parts.validation else None,
            parameters=parameters,
            checkpoint=loaded.name if loaded else None,
            checkpoint_tier=loaded.tier if loaded else None,
            checkpoint_world=loaded.world if loaded else None,
            random_restored=loaded.random_restored if loaded else None,
            changed=session.changes if loaded else {},
            **machine_facts(session.ranks),
            agent=session.agent or None,
        )
        set_damaged_aside(session, restored)
        tell_late_spans(session, self._counters)
        self._stopping.set_deadline(self._plan.stop_margin_s, self._counters.step, parameters)
        session.recorder.status(
            now=True, state="running", reason="", step=self._counters.step, total_steps=self._plan.total_steps
        )
        self._open_stream()
        self._agree()

    def _take_up(self) -> Restored:
        """Go on from the newest checkpoint that holds, or from the start."""
        restored = restore(self._session, self._plan, self._parts.engine.state, self._tier)
        self._counters, self._loss_scale = restored.counters, restored.loss_scale
        self._guard.restore(restored.loaded.numbers if restored.loaded is not None else {})
        self._began = self._counters.step
        past = recall_validations(self._session, self._counters.step) if restored.loaded is not None else Validated()
        self._owes_validation = restored.owes_validation and self._validates_here() and not past.tried_last
        if self._parts.validation is not None:
            self._parts.validation.recall(past.results)
        return restored

    def _settle(self, restored: Restored) -> Restored:
        """The run goes on from there: its directory says so from now on."""
        restored = settle_restored(self._session, restored, self._tier)
        self._left_out = restored.left_out
        return restored

    def _is_done_already(self, restored: Restored) -> bool:
        """Whether an earlier attempt has finished the run as it is asked for: then nothing is written once more."""
        step, session = self._counters.step, self._session
        if restored.loaded is None or step < self._plan.total_steps or self._owes_validation or self._save_owed:
            return False

        def is_finished() -> bool:
            status = session.directory.read_status()
            return (status.get("state"), status.get("step")) == ("finished", step)

        if restored.loaded.passed_over or restored.loaded.tier == LOCAL or not session.ranks.ask_first(is_finished):
            return False
        if session.ranks.is_first:
            session.directory.clear_stop()
        session.recorder.keep(step=step)
        session.recorder.end("finished", End(Ending.FINISHED, f"all {self._plan.total_steps} steps are done"))
        self._rests = True
        return True

    def _open_stream(self) -> None:
        device, can_void = self._session.ranks.device, self._parts.engine.can_void
        stream = self._parts.batches_from(self._counters.position, all_skips(self._session, self._left_out))
        self._stream = TrainingStream(
            stream, self._stopping.waits, device, lambda ready: self._agree(void=not ready), can_void=can_void
        )

    def _go_back(self) -> None:
        """To a checkpoint from before a spike, in this process as a new one would; a run that stops only decides."""
        plan, session, engine = self._plan.guard.back, self._session, self._parts.engine
        if plan is None or self._untrained is None or self._stream is None:
            raise Bug("the run goes back before it has begun")
        self._saver.settle()
        back = decide_back(session, plan, self._spiked(plan))
        self._stream.close()
        stops = bool(self._stopping.decision.stop_reason)
        if stops:
            restored = Restored(None, back.counters, None, back.left_out, set_undone_aside(session))
            self._counters, self._owes_validation = back.counters, False
        else:
            self._untrained.put_back()
            restored = self._settle(self._take_up())
            compute_scales(engine.passes.parallel.module, engine.passes.precision.float8)
        facts = back.left_out[-1].as_json()
        session.recorder.go_back(self._counters.step, roll_backs=len(back.left_out), **facts)
        set_damaged_aside(session, restored)
        if not stops:
            self._open_stream()
            self._agree()

    def _spiked(self, plan: BackPlan) -> Spiked:
        last, resolved = self._counters.step, self._session.resolved
        limit = f"guard.max_roll_backs = {plan.max_roll_backs}, {resolved.origins['guard.max_roll_backs']}"
        return Spiked(self._guard.spikes.first, last, self._counters.position, self._left_out, limit)

    def _step(self) -> Iterator[Any]:
        self._saver.poll()
        started = time.perf_counter()
        batch = self._stream.next() if self._stream is not None else None
        if batch is None:
            return  # all ranks stop before the first step of this attempt
        self._session.progress.enter(Activity.SCRIPT, self._counters.step)
        lr = self._set_lr()
        self._result = None
        self._open_step = _OpenStep(batch, lr, started)
        yield batch.data
        self._session.progress.enter(Activity.DATA, self._counters.step)
        if self._result is None:
            raise UserError(
                f"the loop went on without run.step for the batch of step {self._counters.step + 1}, so nothing was "
                "learnt from it.\n  To do: call run.step(model, batch, loss_fn) once for each batch of run.steps."
            )
        self._close_step(self._open_step, self._result)

    def _count_parameters(self) -> int:
        """Of the whole model, whatever part of it this rank holds."""
        ranks, count = self._session.ranks, self._parts.engine.count_parameters()
        return int(ranks.sum(torch.tensor(count, dtype=torch.int64, device=ranks.device)))

    def _validate(self) -> None:
        session, started = self._session, time.perf_counter()
        if self._parts.validation is None:
            raise Bug("validation is due and there is nothing to validate on")
        if self._stopping.skips_validation(self._counters.step):
            return
        passes, generators = self._parts.engine.passes, find_generators()
        breaks, deadline = self._stopping.breaks(), self._stopping.deadline
        self._has_validated = True
        with session.recorder.failure_noted("validation_failed", self._counters.step):
            metrics = validate(passes.parallel.call, self._parts.validation, passes, session.ranks, breaks)
        generators.put_back()  # its step is saved already; and one that was broken off is made again
        seconds = time.perf_counter() - started
        if deadline is not None:
            deadline.took_validation(seconds)
        if metrics is None:
            self._stopping.obey(breaks.decision)
            facts = {"batches": breaks.batches, "seconds": seconds, "reason": breaks.decision.stop_reason}
            session.recorder.event("validation_stopped", step=self._counters.step, **facts)
            return
        self._owes_validation = False
        self._parts.validation.results[self._counters.step] = metrics
        session.recorder.event("validation", step=self._counters.step, **metrics, seconds=seconds)
        session.recorder.status(validation=metrics, validation_seconds=seconds)
        self._agree()

    def _save(self) -> None:
        facts = self._facts()
        if facts.stop and self._counters.step == self._began and not facts.save_owed:
            return  # nothing was learnt since the checkpoint that was loaded, or at all
        last = facts.done or facts.stop
        self._save_point(last=last)
        if not last and self._agree():
            self._save_point(last=True)  # waits for the one that is under way, and makes it where that failed

    def _save_point(self, *, last: bool) -> None:
        engine = self._parts.engine
        average_buffers(engine.passes.parallel.module, self._session.mesh)
        numbers = {
            **self._counters.as_numbers(),
            "data": self._plan.data_fingerprint,
            **self._guard.as_numbers(),
            **as_numbers(self._left_out),
        }
        if self._owes_validation:
            numbers["validation_owed"] = True
        if self._loss_scale is not None:
            numbers["loss_scale"] = self._loss_scale.as_numbers()
        step, plan = self._counters.step, self._plan
        asks = plan.saves_shared_after(step), plan.saves_local_after(step)
        self._saver.save(Point(engine.state, step, numbers, last, self._guard.in_spike, *asks))

    def _took_save(self, seconds: float) -> None:
        if self._stopping.deadline is not None:
            self._stopping.deadline.took_save(seconds)

    def _stop(self) -> None:
        self._end("stopped", self._stopping.find_end())

    def _finish(self) -> None:
        self._saver.finish()
        self._end("finished", End(Ending.FINISHED, f"all {self._plan.total_steps} steps are done"))

    # --- parts of states

    def _end(self, event: str, end: End) -> None:
        if self._stream is not None:
            self._stream.close()
        self._saver.settle()
        self._session.recorder.end(event, end)
        if self._session.ranks.is_first:
            self._session.directory.clear_stop()
        self._session.ranks.barrier()

    def _set_lr(self) -> float:
        groups = self._parts.engine.groups
        factor = lr_factor(self._plan.schedule, self._plan.course, self._counters.step)
        for group, peak in zip(groups, self._peak_lrs, strict=True):
            group["lr"] = peak * factor
        return float(groups[0]["lr"])

    def _close_step(self, step: _OpenStep, result: StepResult) -> None:
        self._open_step = None
        self._stopping.obey(result.decision)
        if result.decision.void and self._stream is not None:
            self._stream.put_back()
            self._session.recorder.event("step_voided", step=self._counters.step, reason=result.decision.stop_reason)
            return
        self._loss_scale = result.loss_scale
        if self._counters.step == self._began:
            self._session.ranks.together(lambda: check_collects(self._parts.engine.state.collect))
        before = self._counters
        self._counters = before.after(self._plan.global_batch, result.targets, step.batch.next_position)
        self._owes_validation = self._validates_here()
        seconds = time.perf_counter() - step.started
        if self._stopping.deadline is not None:
            self._stopping.deadline.took_step(seconds)
        self._record(result, step.batch, step.lr, seconds)
        tell_skipped(self._session, before, self._counters, self._left_out)
        self._guard.look_at(self._counters.step, result, step.batch)

    def _record(self, result: StepResult, batch: Batch, lr: float, seconds: float) -> None:
        plan, step = self._plan, self._counters.step
        facts: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens_per_s": plan.global_batch * plan.tokens_per_sample / seconds,
            "samples_per_s": plan.global_batch / seconds,
            "seconds": seconds,
        }
        if result.loss_scale is not None:
            facts["loss_scale"] = result.loss_scale.scale
        if result.skipped or result.loss_scale is not None:
            facts["skipped"] = result.skipped
        record_ids = self._session.resolved.values.data.record_ids
        self._session.recorder.step(facts, [int(i) for i in batch.ids] if record_ids else None)
        self._session.recorder.status(step=step, loss=result.loss)
        if self._parts.on_step is not None:
            self._parts.on_step(step, facts)
