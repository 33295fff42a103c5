"""The loop: an explicit state machine that yields batches and does everything that happens between two steps.

Invariant: this is the only loop of the project. Recipes and scripts that own their loop walk through the same states; a
user extends it by passing functions or by code between two batches. It must not run a model in training.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardway.checkpoint.catalog import BASE
from shardway.checkpoint.manager import CheckpointManager, SavePoint
from shardway.checkpoint.state import CheckpointState, Together, Trained
from shardway.checkpoint.writer import check_collects
from shardway.data.loader import Batch
from shardway.data.order import Skips
from shardway.errors import Bug, UserError
from shardway.parallel.apply import ParallelModel
from shardway.parallel.axes.replicate import average_buffers
from shardway.parallel.precision import compute_scales
from shardway.ranks.failure import AttemptEnd
from shardway.ranks.stop import Interrupts
from shardway.rundir.attempts import Ending
from shardway.rundir.names import LOCAL, SkippedRange
from shardway.telemetry.activity import Activity
from shardway.train.blended import NUMBERS
from shardway.train.by_hand import BackwardCall, GradientsByHand
from shardway.train.cuda_graphs import GraphedPasses
from shardway.train.damaged_data import report_all_damage, report_damage
from shardway.train.dataloader import report_late_spans, report_skipped
from shardway.train.engines import Engine, OpenStep, StepCall, TakenStep, lr_of
from shardway.train.guard import Guard
from shardway.train.held import Holdings, ScriptState, average_kept_buffers, describe_unlike
from shardway.train.loop_state import (
    Counters,
    Facts,
    LoopPhase,
    LoopPlan,
    Monitoring,
    ScheduledLR,
    next_phase,
)
from shardway.train.passes import evaluating, let_go
from shardway.train.profiling import FINISHED, Profiling
from shardway.train.record import find_early_end
from shardway.train.restore import (
    Restored,
    all_skips,
    decide_back,
    quarantine_damaged,
    quarantine_undone,
    restore,
    settle_restored,
)
from shardway.train.samples import continue_prompts, read_prompts
from shardway.train.session import Session, describe_numerics, machine_facts
from shardway.train.step import Generators, MutableParts, RngAndBufferSnapshot, StepContext
from shardway.train.stops import StopAgreement, TrainingStream
from shardway.train.validate import MetricLog, Validation, recall_validations, validate

SEARCH_PACE = 100
"""How many times as long as the last search for what a script has made the time to the next one is."""


class Loop:
    """One walk through the states, from restoring to the end; `counters` is how far the run is."""

    def __init__(
        self,
        session: Session,
        plan: LoopPlan,
        engines: Sequence[Engine],
        batches_from: Callable[[int, Sequence[Sequence[int]]], Iterator[Batch]],
        *,
        validation: Validation | None,
        on_step: Callable[[int, dict[str, Any]], None] | None,
        held: Holdings | None,
        by_hand: GradientsByHand | None,
        data: CheckpointState | None,
        reading_draws: bool,
    ) -> None:
        """An engine for each optimizer, and the batches from a data position without some spans. `held` is what a
        script holds, `by_hand` the state of its run.backward; both None for a recipe. `data`: the state of its data
        beyond the position. `reading_draws`: whether reading a batch may draw random numbers."""
        self._session, self._ranks, self._recorder, self._plan = session, session.ranks, session.recorder, plan
        self._engines, self._engine, self._batches_from = engines, engines[0], batches_from
        self._validation, self._on_step, self._reading_draws = validation, on_step, reading_draws
        # Every model that is trained, each once.
        models = [each.parallel for each in held.models] if held is not None else [self._engine.passes.parallel]
        self._parallels: Sequence[ParallelModel] = models
        self.counters = Counters()
        self._stopping = StopAgreement(session)
        self._loss_scale = plan.loss_scale
        self._stream: TrainingStream | None = None
        self._lrs = ScheduledLR(session, plan, engines, held)
        # None for a recipe.
        self._script = ScriptState(held, session.mesh, writes_lr=plan.writes_lr) if held is not None else None
        self._by_hand = by_hand
        of_script = (self._script, held.kept if held is not None else None, by_hand)
        self._kept = Together([each for each in of_script if each is not None])
        own = self._engine.state
        self._trained: CheckpointState = held.trained() if held is not None and isinstance(own, Trained) else own
        self._state: CheckpointState = Together([self._trained, self._kept, *([data] if data is not None else [])])
        self._finish_reason, self._finishes = "", False
        self._next_search_s, self._has_saved = 0.0, False
        self._last_call: StepCall | None = None
        self._tier, local = None, None
        if plan.local is not None:
            from shardway.checkpoint.local_tier import open_tier

            self._tier = open_tier(session, plan.local.folder)
            local = self._tier, plan.local.every_s

        def took_save(seconds: float) -> None:
            if self._stopping.deadline is not None:
                self._stopping.deadline.took_save(seconds)

        self._checkpoints = CheckpointManager(session, plan.save_every_s, plan.keep, took_save, tier=local)
        self._metrics = MetricLog(
            session.ranks, lambda step, values: self._recorder.event("logged", step=step, values=values)
        )
        self._monitoring = Monitoring(session, plan, validation)
        self._guard = Guard(session, plan.scale, models, self._checkpoints.settle)
        passes = [getattr(each, "passes", None) for each in engines]
        self._profiling = Profiling(
            session,
            session.resolved.values.train.profile or None,
            [each.replays for each in passes if each is not None and isinstance(each.replays, GraphedPasses)],
            self._stopping.profile_file_read,
            lambda: [each for engine in engines for group in engine.groups for each in group["params"]],
        )
        self._phase = LoopPhase.RESTORE
        self._open_step: OpenStep | None = None
        self._interrupts, self._is_broken = Interrupts(), False
        self._owes_validation, self._has_validated, self._began = False, False, 0
        self._prompts = read_prompts(session) if plan.sample_every is not None else None
        self._owes_samples = False
        self._rests = False  # the run was finished before: there is nothing to do
        self._left_out: tuple[SkippedRange, ...] = ()
        self._samples: int | None = None  # of the last step, over all ranks
        self._untrained: RngAndBufferSnapshot | None = None
        # What a rank does first in a phase, for the heartbeat, and the work; that of a step is what the script does.
        self._phases: dict[LoopPhase, tuple[Activity, Callable[[], object]]] = {
            LoopPhase.RESTORE: (Activity.LOAD, self._restore),
            LoopPhase.STEP: (Activity.DATA, lambda: None),
            LoopPhase.GO_BACK: (Activity.LOAD, self._go_back),
            LoopPhase.VALIDATE: (Activity.VALIDATE, self._validate),
            LoopPhase.SAVE: (Activity.SAVE, self._save),
            LoopPhase.SAMPLE: (Activity.SAMPLE, self._sample),
            LoopPhase.STOP: (Activity.END, lambda: self._end("stopped", self._stopping.find_end())),
            LoopPhase.FINISH: (Activity.END, self._finish),
        }

    def batches(self) -> Iterator[Any]:
        """Yield the batch of each step that is left; all work between two steps happens in here."""
        while self._phase is not LoopPhase.END:
            activity, act = self._phases[self._phase]
            self._session.progress.enter(activity, self.counters.step)
            if self._phase is LoopPhase.STEP:
                yield from self._step()
            if self._phase is LoopPhase.END:
                return  # the script has closed the run
            # Slow work, which an interrupt may break off.
            is_repeated = self._phase in (LoopPhase.VALIDATE, LoopPhase.SAMPLE)
            with contextlib.nullcontext() if is_repeated else self._interrupts.held():
                act()
                self._phase = LoopPhase.END if self._rests else next_phase(self._phase, self._facts())

    @property
    def has_begun(self) -> bool:
        """Whether the step where the run resumes has been found."""
        return self._phase is not LoopPhase.RESTORE

    @property
    def has_ended(self) -> bool:
        """Whether there is no further batch."""
        return self._phase is LoopPhase.END

    # --- what the script calls

    def step(self, call: StepCall, batch: Any, look: Callable[[int | None], None]) -> float:
        """The update that the script asks for with its batch; returns the loss.

        `look` is called with the rows of the batch once an update counts. Raises UserError unless a batch waits for a
        step: for its only step, if the run has one optimizer.
        """
        with self._interrupts.held():
            opened, number = self._open_step, self.counters.step + 1
            if opened is None:
                raise UserError("run.step was called outside `for batch in run.steps(loader)`.")
            if opened.by_hand:
                raise _refuse_mixture("run.step", "run.backward", number)
            if opened.taken and len(self._engines) == 1:
                raise UserError(
                    f"run.step was called twice for the batch of step {number}.\n"
                    "  To do: call it once for each batch; it takes the micro-batches and the update together."
                )
            if opened.taken and opened.decision.void:
                return math.nan  # nothing of this batch counts
            self._lrs.check()
            lr, context = lr_of(call.engine), self._context()  # it reads the stop file, outside of the step's time
            self._session.progress.take_step(self.counters.step)
            try:
                result = call.engine.step(call.model, batch, call.loss_fn, context)
            except BaseException:  # until the update begins, an error leaves the model as it was
                self._is_broken = context.has_begun or not call.engine.can_void
                raise
            opened.taken.append(TakenStep(call.name, lr, result))
            self._last_call = call if len(opened.taken) == 1 else self._last_call
            if result.decision.void:
                self._kept.freeze()  # what the script does next belongs to a step that does not count
            else:
                self._loss_scale = result.loss_scale
                look(context.rows)
            self._session.progress.enter(Activity.SCRIPT, self.counters.step)
            return result.loss

    def backward(self, call: BackwardCall) -> float:
        """The gradients of a loss that the script has computed from its batch; returns the loss. Raises UserError if no
        batch waits for a gradient."""
        opened = self._open_step
        if self._by_hand is None or opened is None:
            raise UserError("run.backward was called outside `for batch in run.steps(loader)`.")
        if opened.taken and not opened.by_hand:
            raise _refuse_mixture("run.backward", "run.step", self.counters.step + 1)
        self._lrs.check()
        lr, context = lr_of(call.engine), self._context(void=opened.finishing)
        self._session.progress.take_step(self.counters.step)
        loss = self._by_hand.take(opened, call, lr, context, self._kept.freeze)
        self._last_call = None
        self._session.progress.enter(Activity.SCRIPT, self.counters.step)
        return loss

    def is_broken(self) -> bool:
        """Whether an update was broken off on any rank; called on all of them."""
        return any(self._ranks.gather(self._is_broken))

    def finish_early(self, reason: str) -> None:
        """Finish the run after the current step; any rank of the script may call it."""
        self._finish_reason = self._finish_reason or str(reason).strip() or "the script ended it"

    def log(self, values: Mapping[str, Any], way: str) -> None:
        """Log values of the current step, for this rank's samples in its batch."""
        if not self.has_begun:
            raise UserError(
                "run.log was called before the first batch.\n  To do: call it within `for batch in run.steps(loader)`."
            )
        step, samples = self.counters.step, 1
        if self._open_step is not None:
            step, samples = step + 1, len(self._open_step.batch.ids)
        self._metrics.add(step, samples, values, way)

    def resume_scheduler(self, name: str, scheduler: Any) -> None:
        """Load a scheduler that was made during the run from the checkpoint."""
        if self._script is not None and self.has_begun:
            self._script.take_waiting(name, scheduler)

    def leave(self) -> None:
        """End a loop that the script left: count the step that it took, save, and record the stop."""
        if self._phase in (LoopPhase.RESTORE, LoopPhase.END):
            return
        with self._interrupts.held():
            if self.is_broken():
                step = self.counters.step + 1
                reason = f"the update of step {step} was broken off, and nothing of it is saved"
                self._end("stopped", AttemptEnd(Ending.STOPPED, reason))
                self._phase = LoopPhase.END
                return
            if self._open_step is not None and self._open_step.taken:
                self._close_step(self._open_step)
            elif self._open_step is not None and self._stream is not None:
                self._stream.put_back()  # the batch was read, and no step has taken it
            self._finishes = self._finishes or any(self._ranks.gather(bool(self._finish_reason)))
            self._session.progress.enter(Activity.SAVE, self.counters.step)
            self.save()
            if self._finishes:
                self._finish()
            else:
                self._end("stopped", AttemptEnd(Ending.STOPPED, "the script left its loop"))
            self._phase = LoopPhase.END

    # --- what the next phase and the next step follow from

    def _context(self, *, void: bool = False) -> StepContext:
        watch = self._guard.watch(self.counters.step + 1, scales_loss=self._loss_scale is not None)
        missed = self._stream is not None and self._stream.missed
        requests = self._stopping.requests(
            save=self._checkpoints.is_due(),
            void=missed or void,
            finish=bool(self._finish_reason),
            log=self._metrics.is_waiting,
        )
        rows = len(self._open_step.batch.ids) if self._open_step is not None and not missed else None
        samples = self._open_step.batch.samples if self._open_step is not None else None
        return StepContext(self.counters.position, requests, self._loss_scale, watch, rows, samples)

    def _agree(self, *, void: bool = False) -> bool:
        """Whether all ranks stop between two steps; the clock is obeyed once this attempt has taken a step."""
        return self._stopping.agree(void=void, obeys_clock=void or self.counters.step > self._began)

    @property
    def _is_done(self) -> bool:
        return self.counters.step >= self._plan.total_steps or self._finishes

    @property
    def _save_owed(self) -> bool:
        """Whether the run is at the step where it resumed, and its directory has no checkpoint of it."""
        return self._tier is not None and self._tier.is_base and self.counters.step == self._began

    def _facts(self) -> Facts:
        step, done, stop = self.counters.step, self._is_done, bool(self._stopping.decision.stop_reason)
        # A script's own loss is saved before its first validation too, so that an error there costs no step.
        first = self._script is not None and self._owes_validation and not self._has_validated
        asked = self._plan.saves_shared_after(step) or self._plan.saves_local_after(step)
        asked = asked or ((done or first) and self._plan.save_at_end)
        ends_early = self._finishes and not self._profiling.has_finished
        return Facts(
            done=done,
            stop=stop,
            validate_due=self._owes_validation,
            goes_back=self._guard.must_go_back,
            save_owed=self._save_owed,
            result_save_due=self._monitoring.save_due,
            sample_due=self._owes_samples,
            save_due=stop or self._stopping.decision.save or asked or (ends_early and step > self._began),
        )

    def _validates_here(self) -> bool:
        step, every = self.counters.step, self._plan.validate_every
        due, validation = every is not None and (self._is_done or step % every == 0), self._validation
        return due and validation is not None and step not in validation.results

    def _samples_here(self) -> bool:
        every = self._plan.sample_every
        return every is not None and (self._is_done or self.counters.step % every == 0)

    # --- states

    def _restore(self) -> None:
        session = self._session
        if self._guard.goes_back:
            self._untrained = MutableParts(*self._parallels).remember(None)
        if self._script is not None:
            self._script.holdings.adopt()
            self._script.begin()
        self._lrs.begin()
        restored = self._resume()
        if self._is_done_already(restored):
            self._rests = True
            return
        own = torch.tensor(self._engine.count_parameters(), dtype=torch.int64, device=self._ranks.device)
        loaded, parameters = restored.loaded, int(self._ranks.sum(own))  # of the whole model
        session.begin()
        restored = self._settle(restored)
        samples = self._count_samples(self.counters.position)
        self._recorder.begin(
            self.counters.step,
            format=1,
            total_steps=self._plan.total_steps,
            samples_per_step=samples,
            tokens_per_step=samples * self._plan.tokens_per_sample,
            bytes_per_token=self._validation.bytes_per_token if self._validation else None,
            parameters=parameters,
            monitor=str(self._plan.monitor),
            checkpoint=loaded.name if loaded else None,
            checkpoint_tier=loaded.tier if loaded else None,
            checkpoint_world=loaded.world if loaded else None,
            random_restored=loaded.random_restored if loaded else None,
            changed=session.changes if loaded else {},
            **machine_facts(self._ranks),
            numerics=describe_numerics(session.resolved),
            agent=session.agent or None,
        )
        if session.tuned is not None:
            self._recorder.event("tuned", step=self.counters.step, **session.tuned)
        if self._plan.blend is not None:
            facts = self._plan.blend.as_facts(self.counters.position)
            self._recorder.event("blend", step=self.counters.step, **facts)
        if not self._plan.batch.is_constant:
            ramp = [list(pair) for pair in self._plan.batch.pairs]
            self._recorder.event(
                "batch_ramp", step=self.counters.step, ramp=ramp, reason=f"a step has {self._plan.batch}"
            )
        quarantine_damaged(session, restored)
        report_late_spans(session, self.counters)
        self._stopping.set_deadline(self._plan.stop_margin_s, self.counters.step, parameters)
        self._recorder.status(
            now=True, state="running", reason="", step=self.counters.step, total_steps=self._plan.total_steps
        )
        self._open_stream()
        self._agree()

    def _resume(self) -> Restored:
        """Resume from the newest checkpoint that holds, or start from the beginning."""
        session, validation, tried_last = self._session, self._validation, False
        restored = restore(session, self._plan, self._state, self._tier)
        self.counters, self._loss_scale = restored.counters, restored.loss_scale
        step = self._began = self.counters.step
        numbers = restored.loaded.numbers if restored.loaded is not None else {}
        self._guard.restore(numbers)
        if validation is not None:
            validation.results.clear()
        if restored.loaded is not None:
            known = str(numbers.get("finished", ""))
            self._finish_reason = known or self._ranks.ask_first(lambda: find_early_end(session.directory, step))
            self._finishes = bool(self._finish_reason)
            if self._script is not None:  # how the script differs from the checkpoint
                session.changes.update(self._script.changes)
                kept, name = self._script.holdings.kept, restored.loaded.name
                for line in self._script.list_notes(name, kept.waiting, kept.missing, self._finish_reason):
                    if self._ranks.is_first:
                        logging.getLogger("shardway").warning(line)
            if validation is not None:
                results, tried_last = recall_validations(session, step)
                validation.results.update(results)
        # A stop may have left out the validation after the step that was loaded.
        self._owes_validation = bool(numbers.get("validation_owed")) and self._validates_here() and not tried_last
        if not self._owes_validation:
            self._heed_results()
        return restored

    def _settle(self, restored: Restored) -> Restored:
        """Record in the run directory where the run resumes."""
        restored = settle_restored(self._session, restored, self._tier)
        self._left_out = restored.left_out
        return restored

    def _is_done_already(self, restored: Restored) -> bool:
        """Whether an earlier attempt has finished the run as it is asked for: then nothing is written again."""
        step, loaded, directory = self.counters.step, restored.loaded, self._session.directory
        if loaded is None or not self._is_done or self._owes_validation or self._save_owed:
            return False

        if loaded.passed_over or loaded.tier == LOCAL:
            return False
        status = self._ranks.ask_first(directory.read_status)
        if (status.get("state"), status.get("step")) != ("finished", step):
            return False
        if self._ranks.is_first:
            directory.clear_stop()
        self._recorder.keep(step=step)
        reason = self._finish_reason or f"all {self._plan.total_steps} steps are done"
        self._recorder.end("finished", AttemptEnd(Ending.FINISHED, reason))
        return True

    def _open_stream(self) -> None:
        self._stream = TrainingStream(
            self._batches_from(self.counters.position, all_skips(self._session, self._left_out)),
            self._stopping.fetch,
            self._ranks.device,
            lambda ready: self._agree(void=not ready),
            self._count_samples,
            can_void=self._engine.can_void and len(self._engines) == 1,
            draws=self._reading_draws,
        )

    def _count_samples(self, position: int) -> int:
        """How many samples over all ranks the step after a position has."""
        skips = Skips(all_skips(self._session, self._left_out))
        return skips.number_ramp(self._plan.batch).size_at(skips.count_kept(position))

    def _go_back(self) -> None:
        """Go back to a checkpoint from before a spike, in this process as in a new one; a run that stops only
        decides."""
        session = self._session
        if self._untrained is None or self._stream is None:
            raise Bug("the run goes back before it has begun")
        self._checkpoints.settle()
        counters, left_out = decide_back(session, self._guard.spikes.first, self.counters, self._left_out)
        self._stream.close()
        stops = bool(self._stopping.decision.stop_reason)
        if stops:
            restored = Restored(None, counters, None, left_out, quarantine_undone(session))
            self.counters, self._owes_validation = counters, False
        else:
            self._untrained.put_back()
            restored = self._settle(self._resume())
            for parallel in self._parallels:
                compute_scales(parallel.module, self._engine.passes.precision.float8)
        self._recorder.go_back(self.counters.step, roll_backs=len(left_out), **left_out[-1].as_json())
        quarantine_damaged(session, restored)
        if not stops:
            self._open_stream()
            self._agree()

    def _step(self) -> Iterator[Any]:
        self._checkpoints.poll()
        self._profiling.begin_step(self.counters.step)
        started = time.perf_counter()
        batch = self._stream.next() if self._stream is not None else None
        if batch is None:
            return  # all ranks stop before the first step of this attempt
        step = self._open_step = OpenStep(batch, started, finishing=bool(self._finish_reason))
        if self._finish_reason and self._last_call is not None:
            self._agree_to_finish(self._last_call, step)
        else:
            self._session.progress.enter(Activity.SCRIPT, self.counters.step)
            self._lrs.write(self.counters.step)
            if self._by_hand is not None:
                self._by_hand.begin(batch, self.counters.position)
            yield batch.data
            if self._phase is LoopPhase.END:
                return
        self._session.progress.enter(Activity.DATA, self.counters.step)
        if self._finish_reason and not step.taken and self._stream is not None:
            # The script has ended the run in place of a step; other ranks may wait for this one in that step.
            if self._ranks.world == 1:
                self._open_step, self._finishes = None, True
                self._stream.put_back()
                self._owes_validation = self._validates_here()
                return
            if self._last_call is not None:
                self._agree_to_finish(self._last_call, step)
        if not step.taken:
            raise UserError(
                f"the loop went on without run.step for the batch of step {self.counters.step + 1}, so nothing was "
                "learnt from it.\n"
                "  To do: call run.step(model, batch, loss_fn) once for each batch of run.steps; or run.backward(loss) "
                "in place of loss.backward(), and run.stop after it."
            )
        with self._interrupts.held():
            self._close_step(step)

    def _agree_to_finish(self, call: StepCall, step: OpenStep) -> None:
        """Agree with ranks that may wait for this one in the next step, after its script has ended the run.

        It takes part in that step and votes to discard it, by which all ranks learn of the end.
        """
        self._lrs.write(self.counters.step)
        lr, context = lr_of(call.engine), self._context(void=call.engine.can_void)
        self._session.progress.take_step(self.counters.step)
        if call.engine.can_void:
            self._kept.freeze()
        result = call.engine.step(call.model, step.batch.data, call.loss_fn, context)
        step.taken.append(TakenStep(call.name, lr, result))

    def _validate(self) -> None:
        validation, step, started = self._validation, self.counters.step, time.perf_counter()
        if validation is None:
            raise Bug("validation is due and there is nothing to validate on")
        if self._stopping.skips_validation(step):
            return
        passes, generators = self._engine.passes, Generators()
        breaks, deadline = self._stopping.breaks(), self._stopping.deadline
        self._has_validated = True
        others = [each for each in self._parallels if each is not passes.parallel]
        with self._recorder.failure_noted("validation_failed", step), evaluating(*(each.call for each in others)):
            for each in others:
                average_buffers(each.module, each.mesh)
            try:
                metrics = validate(passes.parallel.call, validation, passes, self._ranks, breaks)
            finally:
                generators.put_back()  # its step is saved already; and one that was broken off is made again
        for parallel in self._parallels if self._script is not None else ():
            let_go(parallel)
        seconds = time.perf_counter() - started
        if deadline is not None:
            deadline.took_validation(seconds)
        if metrics is None:
            self._stopping.obey(breaks.decision)
            facts = {"batches": breaks.batches, "seconds": seconds, "reason": breaks.decision.stop_reason}
            self._recorder.event("validation_stopped", step=step, **facts)
            return
        self._owes_validation = False
        validation.results[step] = metrics
        self._recorder.event("validation", step=step, **metrics, seconds=seconds)
        self._recorder.status(validation=metrics, validation_seconds=seconds)
        self._agree()
        self._heed_results()
        if self._monitoring.unknown:
            self.save()
            raise UserError(self._monitoring.unknown)

    def _sample(self) -> None:
        """Write how the model continues the prompts into the events, unless a stop breaks it off; training state is
        left as it was."""
        self._owes_samples = False
        if self._prompts is None:
            raise Bug("samples are due and there are no prompts")
        started, passes, generators = time.perf_counter(), self._engine.passes, Generators()
        with self._recorder.failure_noted("samples_failed", self.counters.step), evaluating(passes.parallel.call):
            try:
                texts = continue_prompts(passes, self._prompts, self._agree)
            finally:
                generators.put_back()
        let_go(passes.parallel)
        if texts is None:
            return  # all ranks stop
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(self._prompts.texts, texts, strict=True)]
        self._recorder.event("sampled", step=self.counters.step, samples=samples, seconds=time.perf_counter() - started)

    def _heed_results(self) -> None:
        """Do next what the results up to this step ask for."""
        self._monitoring.look(self.counters.step, finished=self._finishes)
        self._finish_reason = self._finish_reason or self._monitoring.finish_reason
        self._finishes = self._finishes or bool(self._monitoring.finish_reason)

    def _save(self) -> None:
        facts = self._facts()
        if facts.stop and self.counters.step == self._began and not facts.save_owed:
            return  # nothing was learnt since the checkpoint that was loaded, or at all
        last = facts.done or facts.stop
        self._checkpoints.save(self._save_point(last=last))
        if not last and self._agree():
            self.save()  # waits for the one that is under way, and makes it where that failed

    def save(self) -> None:
        """Save where the loop stands, before it ends or afterwards."""
        self._checkpoints.save(self._save_point(last=True))

    def _save_point(self, *, last: bool) -> SavePoint:
        is_first, self._has_saved = not self._has_saved, True
        if self._script is not None and self._ranks.ask_first(lambda: time.monotonic() >= self._next_search_s):
            began = time.monotonic()
            try:  # what the script has made since the last search
                self._script.holdings.adopt(late=True, waiting=self._script.unknown)
            except UserError as error:  # an ambiguous name must not prevent a save
                self._session.note_once("script_noted", f"not saved: {error}")
            self._next_search_s = time.monotonic() + SEARCH_PACE * (time.monotonic() - began)
        for parallel in self._parallels:
            average_buffers(parallel.module, self._session.mesh)
        if self._script is not None:
            self._metrics.flush()
            average_kept_buffers(self._script.holdings.kept.objects, self._ranks, self._session.mesh)
            self._note_unlike(is_first=is_first)
        step, plan = self.counters.step, self._plan
        numbers = {**self.counters.as_numbers(), "data": plan.data_fingerprint, **self._guard.as_numbers()}
        if plan.blend is not None:
            numbers[NUMBERS] = plan.blend.as_numbers()
        if plan.base_fingerprint:
            numbers[BASE] = plan.base_fingerprint
        if self._left_out:
            numbers["left_out"] = [each.as_json() for each in self._left_out]
        if self._finishes and not self._monitoring.finish_reason:  # the results give that reason
            numbers["finished"] = self._agree_on_reason()
        if self._owes_validation:
            numbers["validation_owed"] = True
        if self._loss_scale is not None:
            numbers["loss_scale"] = self._loss_scale.as_numbers()
        best, self._monitoring.save_due = self._monitoring.save_due, False
        return SavePoint(
            self._state,
            step,
            numbers,
            last,
            in_doubt=self._guard.in_spike,
            shared=plan.saves_shared_after(step),
            local=plan.saves_local_after(step),
            best=best,
            ranking=self._monitoring.ranking,
        )

    def _note_unlike(self, *, is_first: bool) -> None:
        """Report once what of a script is not saved, and what ranks have not alike. Raises UserError for what lets
        their weights drift apart."""
        if self._script is None:
            return
        for unsaved in self._script.describe_unsaved():
            self._session.note_once("script_noted", unsaved)
        found = [describe_unlike(self._script.holdings.kept, self._ranks)] if is_first else []
        for unlike in filter(None, (*found, self._script.describe_unlike(self._ranks))):
            self._session.note_once("script_noted", f"{unlike}. To do: let every rank do the same.")

    def _agree_on_reason(self) -> str:
        """Why the script has finished the run, in the words of the first rank that did."""
        reasons = filter(None, self._ranks.gather(self._finish_reason))
        self._finish_reason = next(reasons, "the script ended it")
        return self._finish_reason

    def _finish(self) -> None:
        self._checkpoints.finish()
        reason = f"all {self._plan.total_steps} steps are done"
        if self._finishes:
            reason = self._agree_on_reason()
            by_key = bool(self._monitoring.finish_reason)
            self._recorder.keep(**({"finished_by": "train.patience"} if by_key else {"finished_early": reason}))
        self._end("finished", AttemptEnd(Ending.FINISHED, reason))

    def _end(self, event: str, end: AttemptEnd) -> None:
        self._profiling.close(self.counters.step)
        if self._stream is not None:
            self._stream.close()
        self._checkpoints.settle()
        if self._script is not None:
            self._metrics.flush()
        self._checkpoints.prune(self._monitoring.ranking, in_doubt=self._guard.in_spike)
        if self._plan.blend is not None:
            taken = self._plan.blend.count(self.counters.position, all_skips(self._session, self._left_out))
            self._recorder.event("blend_epochs", step=self.counters.step, **taken)
        if self._session.resolved.values.guard.damaged_data == "skip":
            report_all_damage(self._session)
        self._recorder.end(event, end)
        if self._ranks.is_first:
            self._session.directory.clear_stop()
        self._ranks.barrier()

    # --- the end of a step

    def _close_step(self, step: OpenStep) -> None:
        self._open_step = None
        decision, result = step.decision, step.taken[0].result
        self._stopping.obey(decision)
        alone = self._ranks.world == 1  # no other rank to agree with
        self._finishes = self._finishes or decision.finish or (alone and bool(self._finish_reason))
        if decision.void and self._stream is not None:
            self._stream.put_back()
            self._metrics.drop_after(self.counters.step)
            if decision.stop_reason:
                self._recorder.event("step_discarded", step=self.counters.step, reason=decision.stop_reason)
            elif self._finishes:
                self._owes_validation = self._validates_here()
            return
        if self.counters.step == self._began:  # before there is much to lose
            self._ranks.together(lambda: check_collects(self._trained.collect))
        if self._by_hand is not None:
            self._by_hand.close(step, self.counters.step + 1)
        before = self.counters
        self.counters = before.after(step.batch.samples, result.targets, step.batch.next_position)
        self._owes_validation, self._owes_samples = self._validates_here(), self._samples_here()
        seconds = time.perf_counter() - step.started
        if self._stopping.deadline is not None:
            self._stopping.deadline.took_step(seconds)
        self._report_size(step.batch)
        self._record(step, seconds)
        if decision.log or (self._metrics.is_waiting and alone):
            self._metrics.flush()
        report_skipped(self._session, before, self.counters, self._left_out)
        if step.batch.left_out:
            report_damage(self._session, step.batch.left_out, self.counters.step)
        for taken in step.taken:
            self._guard.look_at(self.counters.step, taken.result, step.batch)
        if self._profiling.end_step(self.counters.step, seconds, file_seen=decision.profile):
            self._finish_reason, self._finishes = self._finish_reason or FINISHED, True
            self._owes_validation = False

    def _report_size(self, batch: Batch) -> None:
        """An event if this step has another number of samples than the one before it in this attempt."""
        before, self._samples = self._samples, batch.samples
        if before is not None and before != batch.samples:
            facts = {"samples": batch.samples, "before": before, "position": batch.position}
            reason = f"steps have {batch.samples} samples from position {batch.position} on, {before} before"
            self._recorder.event("batch_changed", step=self.counters.step, **facts, reason=reason)

    def _record(self, opened: OpenStep, seconds: float) -> None:
        plan, step, result = self._plan, self.counters.step, opened.taken[0].result
        facts: dict[str, Any] = {
            "step": step,
            "position": opened.batch.position,
            "samples": opened.batch.samples,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": opened.taken[0].lr,
            "tokens_per_s": opened.batch.samples * plan.tokens_per_sample / seconds,
            "samples_per_s": opened.batch.samples / seconds,
            "seconds": seconds,
        }
        if len(opened.taken) > 1:
            facts["losses"] = {each.name: each.result.loss for each in opened.taken}
        if result.loss_scale is not None:
            facts["loss_scale"] = result.loss_scale.scale
        if result.skipped or result.loss_scale is not None:
            facts["skipped"] = result.skipped
        record_ids = self._session.resolved.values.data.record_ids
        self._recorder.step(facts, [int(i) for i in opened.batch.ids] if record_ids else None)
        self._recorder.status(step=step, loss=result.loss)
        if self._on_step is not None:
            self._on_step(step, facts)


def _refuse_mixture(now: str, before: str, number: int) -> UserError:
    """The error for a batch with calls of both kinds."""
    return UserError(
        f"{now} was called after {before} for the batch of step {number}.\n"
        "  To do: use one of the two for all models of a batch: run.step drops gradients that run.backward has left."
    )
