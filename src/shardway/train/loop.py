"""The loop: an explicit state machine that yields batches and does everything that happens between two steps.

Invariant: this is the only loop of the project. Recipes and scripts that own their loop walk through the same states; a
user extends it by passing functions or by code between two batches. It must not run a model in training.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shardway.checkpoint.local_tier import open_tier
from shardway.checkpoint.manager import CheckpointManager, SavePoint
from shardway.checkpoint.state import CheckpointState, Together, Trained
from shardway.checkpoint.writer import check_collects
from shardway.errors import Bug, UserError
from shardway.parallel.axes.replicate import average_buffers
from shardway.parallel.precision import compute_scales
from shardway.ranks.failure import AttemptEnd
from shardway.ranks.heartbeat import Activity
from shardway.rundir.attempts import Ending
from shardway.rundir.lineage import LOCAL, SkippedRange
from shardway.train.by_hand import BackwardCall, check_awaits_backward, refuse_mixture
from shardway.train.dataloader import report_late_spans, report_skipped
from shardway.train.engines.base import OpenStep, StepCall, TakenStep, check_taken, lr_of
from shardway.train.guard import Guard
from shardway.train.held import Intact, average_kept_buffers
from shardway.train.loop_state import (
    Counters,
    Facts,
    LoopParts,
    LoopPhase,
    LoopPlan,
    Monitoring,
    ScheduledLR,
    next_phase,
)
from shardway.train.metrics import MetricLog
from shardway.train.passes import evaluating, let_go
from shardway.train.record import find_early_end
from shardway.train.restore import (
    Restored,
    all_skips,
    as_numbers,
    decide_back,
    quarantine_damaged,
    quarantine_undone,
    restore,
    settle_restored,
)
from shardway.train.script_state import ScriptState
from shardway.train.session import Session, describe_numerics, machine_facts
from shardway.train.step import RngAndBufferSnapshot, StepContext, find_generators, find_mutable_parts
from shardway.train.stops import StopAgreement, TrainingStream
from shardway.train.validate import Validated, recall_validations, validate

_ACTIVITIES = {
    LoopPhase.RESTORE: Activity.LOAD,
    LoopPhase.STEP: Activity.DATA,
    LoopPhase.GO_BACK: Activity.LOAD,
    LoopPhase.VALIDATE: Activity.VALIDATE,
    LoopPhase.SAVE: Activity.SAVE,
    LoopPhase.STOP: Activity.END,
    LoopPhase.FINISH: Activity.END,
}
"""What a rank does first in a phase; a step goes on once its batch is there."""


class Loop:
    """One walk through the states, from restoring to the end."""

    def __init__(self, session: Session, plan: LoopPlan, parts: LoopParts) -> None:
        self._session = session
        self._plan = plan
        self._parts = parts
        self._counters = Counters()
        self._stopping = StopAgreement(session)
        self._loss_scale = plan.loss_scale
        self._stream: TrainingStream | None = None
        self._lrs = ScheduledLR(session, plan, parts)
        held = parts.held
        self._script = ScriptState(held, session.mesh, writes_lr=plan.writes_lr) if held is not None else None
        self._by_hand = parts.by_hand
        of_script = (self._script, held.kept if held is not None else None, self._by_hand)
        self._kept = Together([each for each in of_script if each is not None])
        own = parts.engine.state
        self._trained: CheckpointState = held.trained() if held is not None and isinstance(own, Trained) else own
        self._state: CheckpointState = Together([self._trained, self._kept, *([parts.data] if parts.data else [])])
        self._finish_reason, self._finishes, self._adopts = "", False, held is not None
        self._last_call: StepCall | None = None
        self._tier = open_tier(session, plan.local.folder) if plan.local is not None else None
        local = (self._tier, plan.local.every_s) if self._tier is not None and plan.local is not None else None
        self._checkpoints = CheckpointManager(session, plan.save_every_s, plan.keep, self._took_save, tier=local)
        self._metrics = MetricLog(
            session.ranks, lambda step, values: session.recorder.event("logged", step=step, values=values)
        )
        self._monitoring = Monitoring(session, plan, parts.validation)
        self._guard = Guard(session, plan.guard, parts.parallels, self._checkpoints.settle)
        self._phase = LoopPhase.RESTORE
        self._open_step: OpenStep | None = None
        self.intact = Intact(session.ranks)
        self._owes_validation, self._has_validated, self._began = False, False, 0
        self._rests = False
        """Whether there is nothing to do: the run was finished before."""
        self._left_out: tuple[SkippedRange, ...] = ()
        self._untrained: RngAndBufferSnapshot | None = None
        self._actions: dict[LoopPhase, Callable[[], None]] = {
            LoopPhase.RESTORE: self._restore,
            LoopPhase.GO_BACK: self._go_back,
            LoopPhase.VALIDATE: self._validate,
            LoopPhase.SAVE: self._save,
            LoopPhase.STOP: self._stop,
            LoopPhase.FINISH: self._finish,
        }

    @property
    def counters(self) -> Counters:
        """How far the run is."""
        return self._counters

    def batches(self) -> Iterator[Any]:
        """Yield the batch of each step that is left; all work between two steps happens in here."""
        while self._phase is not LoopPhase.END:
            self._session.progress.enter(_ACTIVITIES[self._phase], self._counters.step)
            if self._phase is LoopPhase.STEP:
                yield from self._step()
            if self._phase is LoopPhase.END:
                return  # the script has closed the run
            with self.intact.held(apply=self._phase is not LoopPhase.VALIDATE):
                if self._phase is not LoopPhase.STEP:
                    self._actions[self._phase]()
                self._phase = LoopPhase.END if self._rests else next_phase(self._phase, self._facts())

    @property
    def has_begun(self) -> bool:
        """Whether the step where the run resumes has been found."""
        return self._phase is not LoopPhase.RESTORE

    @property
    def has_ended(self) -> bool:
        """Whether there is no further batch."""
        return self._phase is LoopPhase.END

    def step(self, call: StepCall, batch: Any, look: Callable[[int | None], None]) -> float:
        """The update that the script asks for with its batch; returns the loss.

        `look` is called with the rows of the batch once an update counts.
        """
        with self.intact.held():
            self._check_awaits_step()
            if self._open_step is not None and self._open_step.taken and self._open_step.decision.void:
                return math.nan  # nothing of this batch counts
            self._lrs.check()
            lr, context = lr_of(call.engine), self._moment()  # it reads the stop file, outside of the step's time
            self._session.progress.take_step(self._counters.step)
            with self.intact.update(call.engine, context):
                result = call.engine.step(call.model, batch, call.loss_fn, context)
                if self._open_step is not None:
                    self._open_step.taken.append(TakenStep(call.name, lr, result))
                    self._last_call = call if len(self._open_step.taken) == 1 else self._last_call
            if result.decision.void:
                self._kept.freeze()  # what the script does next belongs to a step that does not count
            else:
                self._loss_scale = result.loss_scale
                look(context.rows)
            self._session.progress.enter(Activity.SCRIPT, self._counters.step)
            return result.loss

    def backward(self, call: BackwardCall) -> float:
        """The gradients of a loss that the script has computed from its batch; returns the loss."""
        by_hand, step = check_awaits_backward(self._by_hand, self._open_step, self._counters.step + 1)
        self._lrs.check()
        lr, context = lr_of(call.engine), self._moment(void=step.finishing)
        self._session.progress.take_step(self._counters.step)
        loss = by_hand.take(step, call, lr, context, self._kept.freeze)
        self._last_call = None
        self._session.progress.enter(Activity.SCRIPT, self._counters.step)
        return loss

    def finish_early(self, reason: str) -> None:
        """Finish the run after the current step; any rank of the script may call it."""
        self._finish_reason = self._finish_reason or str(reason).strip() or "the script ended it"

    def log(self, values: Mapping[str, Any], way: str) -> None:
        """Log values of the current step, for this rank's samples in its batch."""
        if not self.has_begun:
            raise UserError(
                "run.log was called before the first batch.\n  To do: call it within `for batch in run.steps(loader)`."
            )
        step, samples = self._counters.step, 1
        if self._open_step is not None:
            step, samples = step + 1, len(self._open_step.batch.ids)
        self._metrics.add(step, samples, values, way)

    def resume_scheduler(self, name: str, scheduler: Any) -> None:
        """Load a scheduler that was made during the run from the checkpoint."""
        if self._script is not None and self.has_begun:
            self._script.take_waiting(name, scheduler)

    def _check_awaits_step(self) -> None:
        """Raise UserError unless a batch waits for a step: for its only step, if the run has one optimizer."""
        if self._open_step is None:
            raise UserError("run.step was called outside `for batch in run.steps(loader)`.")
        if self._open_step.by_hand:
            raise refuse_mixture("run.step", "run.backward", self._counters.step + 1)
        if self._open_step.taken and len(self._parts.engines) == 1:
            raise UserError(
                f"run.step was called twice for the batch of step {self._counters.step + 1}.\n"
                "  To do: call it once for each batch; it takes the micro-batches and the update together."
            )

    def leave(self) -> None:
        """End a loop that the script left: count the step that it took, save, and record the stop."""
        if self._phase in (LoopPhase.RESTORE, LoopPhase.END):
            return
        with self.intact.held():
            if self.intact.is_broken():
                self._end("stopped", AttemptEnd(Ending.STOPPED, self.intact.describe(self._counters.step)))
            else:
                self._leave()
            self._phase = LoopPhase.END

    def _leave(self) -> None:
        if self._open_step is not None and self._open_step.taken:
            self._close_step(self._open_step)
        self._finishes = self._finishes or any(self._session.ranks.gather(bool(self._finish_reason)))
        self._session.progress.enter(Activity.SAVE, self._counters.step)
        self.save()
        if self._finishes:
            self._finish()
        else:
            self._end("stopped", AttemptEnd(Ending.STOPPED, "the script left its loop"))

    def _moment(self, *, void: bool = False) -> StepContext:
        """The context of the next step."""
        watch = self._guard.watch(self._counters.step + 1, scales_loss=self._loss_scale is not None)
        missed = self._stream is not None and self._stream.missed
        finish = bool(self._finish_reason)
        due, logged = self._checkpoints.is_due(), self._metrics.is_waiting
        wishes = self._stopping.requests(save=due, void=missed or void, finish=finish, log=logged)
        rows = len(self._open_step.batch.ids) if self._open_step is not None and not missed else None
        return StepContext(self._counters.position, wishes, self._loss_scale, watch, rows)

    def _agree(self, *, void: bool = False) -> bool:
        """Whether all ranks stop between two steps; the clock is obeyed once this attempt has taken a step."""
        return self._stopping.agree(void=void, obeys_clock=void or self._counters.step > self._began)

    @property
    def _is_done(self) -> bool:
        return self._counters.step >= self._plan.total_steps or self._finishes

    def _facts(self) -> Facts:
        step, done, stop = self._counters.step, self._is_done, bool(self._stopping.decision.stop_reason)
        return Facts(
            done=done,
            stop=stop,
            validate_due=self._owes_validation,
            goes_back=self._guard.must_go_back,
            save_owed=self._save_owed,
            result_save_due=self._monitoring.save_due,
            save_due=stop
            or self._stopping.decision.save
            or self._is_save_due(done=done)
            or (self._finishes and step > self._began),
        )

    def _is_save_due(self, *, done: bool) -> bool:
        """Whether the plan asks for a save; also before the first validation of a script's own loss, so that an error
        costs no step."""
        first = self._session.own_model and self._owes_validation and not self._has_validated
        return ((done or first) and self._plan.save_at_end) or self._plan.saves_after(self._counters.step)

    @property
    def _save_owed(self) -> bool:
        """Whether the run is at the step where it resumed, and its directory has no checkpoint of it."""
        return self._tier is not None and self._tier.is_base and self._counters.step == self._began

    def _validates_here(self) -> bool:
        step, every = self._counters.step, self._plan.validate_every
        due, validation = every is not None and (self._is_done or step % every == 0), self._parts.validation
        return due and validation is not None and step not in validation.results

    # --- states

    def _restore(self) -> None:
        session = self._session
        if self._plan.guard.back is not None:
            self._untrained = find_mutable_parts(*self._parts.parallels).remember(None)
        if self._parts.held is not None and self._script is not None:
            self._parts.held.adopt()
            self._script.begin()
        self._lrs.begin()
        restored = self._resume()
        if self._is_done_already(restored):
            return
        own = torch.tensor(self._parts.engine.count_parameters(), dtype=torch.int64, device=session.ranks.device)
        loaded, parameters = restored.loaded, int(session.ranks.sum(own))  # of the whole model
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
            monitor=str(self._plan.monitor),
            checkpoint=loaded.name if loaded else None,
            checkpoint_tier=loaded.tier if loaded else None,
            checkpoint_world=loaded.world if loaded else None,
            random_restored=loaded.random_restored if loaded else None,
            changed=session.changes if loaded else {},
            **machine_facts(session.ranks),
            numerics=describe_numerics(session.resolved),
            agent=session.agent or None,
        )
        quarantine_damaged(session, restored)
        report_late_spans(session, self._counters)
        self._stopping.set_deadline(self._plan.stop_margin_s, self._counters.step, parameters)
        session.recorder.status(
            now=True, state="running", reason="", step=self._counters.step, total_steps=self._plan.total_steps
        )
        self._open_stream()
        self._agree()

    def _resume(self) -> Restored:
        """Resume from the newest checkpoint that holds, or start from the beginning."""
        restored = restore(self._session, self._plan, self._state, self._tier)
        self._counters, self._loss_scale = restored.counters, restored.loss_scale
        self._guard.restore(restored.loaded.numbers if restored.loaded is not None else {})
        self._began = self._counters.step
        past = Validated()
        if restored.loaded is not None:
            known, step = str(restored.loaded.numbers.get("finished", "")), self._counters.step
            directory = self._session.directory
            self._finish_reason = known or self._session.ranks.ask_first(lambda: find_early_end(directory, step))
            self._finishes = bool(self._finish_reason)
            self._report_script(restored.loaded.name)
            if self._parts.validation is not None:
                past = recall_validations(self._session, step)
        if self._parts.validation is not None:
            self._parts.validation.recall(past.results)
        self._owes_validation = restored.owes_validation and self._validates_here() and not past.tried_last
        if not self._owes_validation:
            self._heed_results()
        return restored

    def _report_script(self, checkpoint: str) -> None:
        """Report once, on rank 0, how the script differs from the checkpoint."""
        held, script = self._parts.held, self._script
        if held is None or script is None:
            return
        self._session.changes.update(script.changes)
        if self._session.ranks.is_first:
            finished = self._finish_reason if self._finishes else ""
            for line in script.list_notes(checkpoint, held.kept.waiting, held.kept.missing, finished):
                logging.getLogger("shardway").warning(line)

    def _settle(self, restored: Restored) -> Restored:
        """Record in the run directory where the run resumes."""
        restored = settle_restored(self._session, restored, self._tier)
        self._left_out = restored.left_out
        return restored

    def _is_done_already(self, restored: Restored) -> bool:
        """Whether an earlier attempt has finished the run as it is asked for: then nothing is written again."""
        step, session = self._counters.step, self._session
        if restored.loaded is None or not self._is_done or self._owes_validation or self._save_owed:
            return False

        def is_finished() -> bool:
            status = session.directory.read_status()
            return (status.get("state"), status.get("step")) == ("finished", step)

        if restored.loaded.passed_over or restored.loaded.tier == LOCAL or not session.ranks.ask_first(is_finished):
            return False
        if session.ranks.is_first:
            session.directory.clear_stop()
        session.recorder.keep(step=step)
        reason = self._finish_reason or f"all {self._plan.total_steps} steps are done"
        session.recorder.end("finished", AttemptEnd(Ending.FINISHED, reason))
        self._rests = True
        return True

    def _open_stream(self) -> None:
        device, can_void = self._session.ranks.device, self._parts.engine.can_void and not self._parts.others
        stream = self._parts.batches_from(self._counters.position, all_skips(self._session, self._left_out))
        self._stream = TrainingStream(
            stream,
            self._stopping.waits,
            device,
            lambda ready: self._agree(void=not ready),
            can_void=can_void,
            draws=self._parts.reading_draws,
        )

    def _go_back(self) -> None:
        """Go back to a checkpoint from before a spike, in this process as in a new one; a run that stops only
        decides."""
        plan, session = self._plan.guard.back, self._session
        if plan is None or self._untrained is None or self._stream is None:
            raise Bug("the run goes back before it has begun")
        self._checkpoints.settle()
        back = decide_back(session, plan, self._guard.spikes.first, self._counters, self._left_out)
        self._stream.close()
        stops = bool(self._stopping.decision.stop_reason)
        if stops:
            restored = Restored(None, back.counters, None, back.left_out, quarantine_undone(session))
            self._counters, self._owes_validation = back.counters, False
        else:
            self._untrained.put_back()
            restored = self._settle(self._resume())
            for parallel in self._parts.parallels:
                compute_scales(parallel.module, self._parts.engine.passes.precision.float8)
        facts = back.left_out[-1].as_json()
        session.recorder.go_back(self._counters.step, roll_backs=len(back.left_out), **facts)
        quarantine_damaged(session, restored)
        if not stops:
            self._open_stream()
            self._agree()

    def _step(self) -> Iterator[Any]:
        self._checkpoints.poll()
        started = time.perf_counter()
        batch = self._stream.next() if self._stream is not None else None
        if batch is None:
            return  # all ranks stop before the first step of this attempt
        self._open_step = OpenStep(batch, started, finishing=bool(self._finish_reason))
        if self._finish_reason and self._last_call is not None:
            self._agree_to_finish(self._last_call, self._open_step)
        else:
            self._session.progress.enter(Activity.SCRIPT, self._counters.step)
            self._lrs.write(self._counters.step)
            if self._by_hand is not None:
                self._by_hand.begin(batch, self._counters.position)
            yield batch.data
            if self._phase is LoopPhase.END:
                return
        self._session.progress.enter(Activity.DATA, self._counters.step)
        if self._finish_reason and not self._open_step.taken and self._finish_without_step():
            return
        check_taken(self._open_step, self._counters.step + 1)
        with self.intact.held():
            self._close_step(self._open_step)

    def _finish_without_step(self) -> bool:
        """Handle a script that has ended the run in place of a step; returns whether the run is done, or needs a step
        to agree."""
        if self._open_step is None or self._stream is None:
            return False
        if self._session.ranks.world > 1:
            if self._last_call is not None:
                self._agree_to_finish(self._last_call, self._open_step)
            return False
        self._open_step, self._finishes = None, True
        self._stream.put_back()
        self._owes_validation = self._validates_here()
        return True

    def _agree_to_finish(self, call: StepCall, step: OpenStep) -> None:
        """Agree with ranks that may wait for this one in the next step, after its script has ended the run.

        It takes part in that step and votes to discard it, by which all ranks learn of the end.
        """
        self._lrs.write(self._counters.step)
        lr, context = lr_of(call.engine), self._moment(void=call.engine.can_void)
        self._session.progress.take_step(self._counters.step)
        if call.engine.can_void:
            self._kept.freeze()
        result = call.engine.step(call.model, step.batch.data, call.loss_fn, context)
        step.taken.append(TakenStep(call.name, lr, result))

    def _validate(self) -> None:
        session, started = self._session, time.perf_counter()
        if self._parts.validation is None:
            raise Bug("validation is due and there is nothing to validate on")
        if self._stopping.skips_validation(self._counters.step):
            return
        passes, generators = self._parts.engine.passes, find_generators()
        breaks, deadline = self._stopping.breaks(), self._stopping.deadline
        self._has_validated = True
        with (
            session.recorder.failure_noted("validation_failed", self._counters.step),
            evaluating([each for each in self._parts.parallels if each is not passes.parallel]),
        ):
            try:
                metrics = validate(passes.parallel.call, self._parts.validation, passes, session.ranks, breaks)
            finally:
                generators.put_back()  # its step is saved already; and one that was broken off is made again
        for parallel in self._parts.parallels if self._parts.held is not None else ():
            let_go(parallel)
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
        self._heed_results()
        if self._monitoring.unknown:
            self.save()
            raise UserError(self._monitoring.unknown)

    def _heed_results(self) -> None:
        """Do next what the results up to this step ask for."""
        self._monitoring.look(self._counters.step, finished=self._finishes)
        self._finish_reason = self._finish_reason or self._monitoring.finish_reason
        self._finishes = self._finishes or bool(self._monitoring.finish_reason)

    def _save(self) -> None:
        facts = self._facts()
        if facts.stop and self._counters.step == self._began and not facts.save_owed:
            return  # nothing was learnt since the checkpoint that was loaded, or at all
        last = facts.done or facts.stop
        self._checkpoints.save(self._save_point(last=last))
        if not last and self._agree():
            self.save()  # waits for the one that is under way, and makes it where that failed

    def save(self) -> None:
        """Save where the loop stands, before it ends or afterwards."""
        self._checkpoints.save(self._save_point(last=True))

    def _save_point(self, *, last: bool) -> SavePoint:
        self._adopt_late()
        for parallel in self._parts.parallels:
            average_buffers(parallel.module, self._session.mesh)
        if self._parts.held is not None:
            self._metrics.flush()
            average_kept_buffers(self._parts.held.kept.objects, self._session.ranks, self._session.mesh)
        numbers = {
            **self._counters.as_numbers(),
            "data": self._plan.data_fingerprint,
            **self._guard.as_numbers(),
            **as_numbers(self._left_out),
        }
        if self._finishes and not self._monitoring.finish_reason:  # the results give that reason
            numbers["finished"] = self._agree_on_reason()
        if self._owes_validation:
            numbers["validation_owed"] = True
        if self._loss_scale is not None:
            numbers["loss_scale"] = self._loss_scale.as_numbers()
        step, plan = self._counters.step, self._plan
        asked = plan.saves_shared_after(step), plan.saves_local_after(step), *self._monitoring.take_save()
        return SavePoint(self._state, step, numbers, last, self._guard.in_spike, *asked)

    def _adopt_late(self) -> None:
        """Once: hold what the script has made during training. An ambiguous name must not prevent a save."""
        if not self._adopts or self._parts.held is None:
            return
        self._adopts = False
        try:
            self._parts.held.adopt(late=True)
        except UserError as error:
            if self._session.ranks.is_first:
                logging.getLogger("shardway").warning(f"not saved: {error}")

    def _agree_on_reason(self) -> str:
        """Why the script has finished the run, in the words of the first rank that did."""
        reasons = filter(None, self._session.ranks.gather(self._finish_reason))
        self._finish_reason = next(reasons, "the script ended it")
        return self._finish_reason

    def _took_save(self, seconds: float) -> None:
        if self._stopping.deadline is not None:
            self._stopping.deadline.took_save(seconds)

    def _stop(self) -> None:
        self._end("stopped", self._stopping.find_end())

    def _finish(self) -> None:
        self._checkpoints.finish()
        reason = f"all {self._plan.total_steps} steps are done"
        if self._finishes:
            reason = self._agree_on_reason()
            self._session.recorder.keep(**self._monitoring.describe_finish(reason))
        self._end("finished", AttemptEnd(Ending.FINISHED, reason))

    # --- parts of states

    def _end(self, event: str, end: AttemptEnd) -> None:
        if self._stream is not None:
            self._stream.close()
        self._checkpoints.settle()
        if self._parts.held is not None:
            self._metrics.flush()
        self._checkpoints.prune(self._monitoring.ranking, in_doubt=self._guard.in_spike)
        self._session.recorder.end(event, end)
        if self._session.ranks.is_first:
            self._session.directory.clear_stop()
        self._session.ranks.barrier()

    def _close_step(self, step: OpenStep) -> None:
        self._open_step = None
        decision, result = step.decision, step.taken[0].result
        self._stopping.obey(decision)
        alone = self._session.ranks.world == 1  # no other rank to agree with
        self._finishes = self._finishes or decision.finish or (alone and bool(self._finish_reason))
        if decision.void and self._stream is not None:
            self._stream.put_back()
            self._metrics.drop_after(self._counters.step)
            if decision.stop_reason:
                reason = decision.stop_reason
                self._session.recorder.event("step_discarded", step=self._counters.step, reason=reason)
            elif self._finishes:
                self._owes_validation = self._validates_here()
            return
        if self._counters.step == self._began:  # before there is much to lose
            self._session.ranks.together(lambda: check_collects(self._trained.collect))
        if self._by_hand is not None:
            self._by_hand.close(step, self._counters.step + 1)
        before = self._counters
        self._counters = before.after(self._plan.global_batch, result.targets, step.batch.next_position)
        self._owes_validation = self._validates_here()
        seconds = time.perf_counter() - step.started
        if self._stopping.deadline is not None:
            self._stopping.deadline.took_step(seconds)
        self._record(step, seconds)
        if decision.log or (self._metrics.is_waiting and alone):
            self._metrics.flush()
        report_skipped(self._session, before, self._counters, self._left_out)
        for taken in step.taken:
            self._guard.look_at(self._counters.step, taken.result, step.batch)

    def _record(self, taken: OpenStep, seconds: float) -> None:
        plan, step, batch = self._plan, self._counters.step, taken.batch
        result, lr = taken.taken[0].result, taken.taken[0].lr
        facts: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens_per_s": plan.global_batch * plan.tokens_per_sample / seconds,
            "samples_per_s": plan.global_batch / seconds,
            "seconds": seconds,
        }
        if len(taken.taken) > 1:
            facts["losses"] = {each.name: each.result.loss for each in taken.taken}
        if result.loss_scale is not None:
            facts["loss_scale"] = result.loss_scale.scale
        if result.skipped or result.loss_scale is not None:
            facts["skipped"] = result.skipped
        record_ids = self._session.resolved.values.data.record_ids
        self._session.recorder.step(facts, [int(i) for i in batch.ids] if record_ids else None)
        self._session.recorder.status(step=step, loss=result.loss)
        if self._parts.on_step is not None:
            self._parts.on_step(step, facts)
