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

from shardway.data.loader import Batch
from shardway.errors import Bug, UserError
from shardway.parallel.axes.replicate import average_buffers
from shardway.ranks.agreement import Decision, Wishes
from shardway.ranks.progress import Activity
from shardway.rundir.attempts import Ending
from shardway.train.counters import Counters
from shardway.train.deadline import Deadline, find_deadline, read_pace
from shardway.train.ending import End, find_end
from shardway.train.guard import Guard
from shardway.train.loop_plan import LoopParts, LoopPlan
from shardway.train.machine import Facts, Phase, next_phase
from shardway.train.restore import restore, set_damaged_aside
from shardway.train.saving import Point, Saver
from shardway.train.schedule import lr_factor
from shardway.train.session import Session, machine_facts
from shardway.train.skipping import tell_late_spans, tell_skipped
from shardway.train.step import Moment, StepResult
from shardway.train.validate import validate

LOOK_EVERY_S = 0.5
"""How often rank 0 looks for the stop file: a look costs a millisecond on a busy parallel file system."""


_ACTIVITIES = {
    Phase.RESTORE: Activity.LOAD,
    Phase.STEP: Activity.DATA,
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
        self._decision = Decision()
        self._loss_scale = plan.loss_scale
        self._result: StepResult | None = None
        self._stream: Iterator[Batch] = iter(())
        self._peak_lrs: list[float] = []
        self._saver = Saver(session, plan.save_every_s, plan.keep, self._took_save)
        self._guard = Guard(session, plan.guard, parts.engine.passes.parallel, self._saver.settle)
        self._looked_at = time.monotonic()
        self._phase = Phase.RESTORE
        self._open_step: _OpenStep | None = None
        self._stop_file: str | None = None
        self._deadline: Deadline | None = None
        self._has_deadline = False
        self._actions: dict[Phase, Callable[[], None]] = {
            Phase.RESTORE: self._restore,
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
            self._phase = next_phase(self._phase, self._facts())

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
        return Moment(self._counters.position, self.wishes(), self._loss_scale, watch)

    def wishes(self) -> Wishes:
        """What this rank wants to happen after the current step."""
        now = time.monotonic()
        if self._session.ranks.is_first and now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._look_for_stop_file()
        return Wishes(
            stop_signal=self._session.signals.received is not None,
            stop_file=self._stop_file is not None,
            save=self._saver.is_due(),
            deadline=self._deadline is not None and self._deadline.is_near(),
        )

    def _look_for_stop_file(self) -> None:
        if self._session.directory.stop_requested():
            self._stop_file = self._session.directory.stop_reason()

    def _facts(self) -> Facts:
        step, plan = self._counters.step, self._plan
        done, stop = step >= plan.total_steps, bool(self._decision.stop_reason)
        validates = plan.validate_every is not None and self._parts.validation is not None
        return Facts(
            done=done,
            stop=stop,
            validate_due=validates and (done or step % (plan.validate_every or 1) == 0),
            save_due=stop or self._decision.save or (done and plan.save_at_end) or plan.saves_after(step),
        )

    # --- states

    def _restore(self) -> None:
        session, engine = self._session, self._parts.engine
        self._peak_lrs = [float(group["lr"]) for group in engine.groups]
        restored = restore(session, self._plan, engine.state)
        loaded, self._counters, self._loss_scale = restored.loaded, restored.counters, restored.loss_scale
        self._guard.restore(loaded.numbers if loaded is not None else {})
        parameters = self._count_parameters()
        session.recorder.begin(
            self._counters.step,
            format=1,
            total_steps=self._plan.total_steps,
            samples_per_step=self._plan.global_batch,
            tokens_per_step=self._plan.global_batch * self._plan.tokens_per_sample,
            bytes_per_token=self._parts.validation.bytes_per_token if self._parts.validation else None,
            parameters=parameters,
            checkpoint=loaded.name if loaded else None,
            checkpoint_world=loaded.world if loaded else None,
            random_restored=loaded.random_restored if loaded else None,
            changed=session.changes if loaded else {},
            **machine_facts(session.ranks),
        )
        if loaded is not None and loaded.passed_over:
            set_damaged_aside(session, restored)
        tell_late_spans(session, self._counters)
        self._set_deadline(parameters)
        session.recorder.status(
            now=True, state="running", reason="", step=self._counters.step, total_steps=self._plan.total_steps
        )
        self._stream = self._parts.batches_from(self._counters.position)

    def _set_deadline(self, parameters: int) -> None:
        """Rank 0 reads when the wall-time ends and tells of it; the others know that there is an end."""
        session = self._session
        if session.ranks.is_first:
            pace = read_pace(session.directory.read_status())
            self._deadline = find_deadline(session.attempt, self._plan.stop_margin_s, pace)
            session.recorder.keep(**pace.as_facts())
        self._has_deadline = session.ranks.gather(self._deadline is not None)[0]
        if self._deadline is not None:
            self._deadline.expect_save_of(parameters / session.ranks.world)
            session.recorder.event("deadline", step=self._counters.step, **self._deadline.facts())

    def _step(self) -> Iterator[Any]:
        self._saver.poll()
        started = time.perf_counter()
        batch = next(self._stream)
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
        if self._skips_validation():
            return
        passes = self._parts.engine.passes
        metrics = validate(passes.parallel.call, self._parts.validation, passes, session.ranks)
        seconds = time.perf_counter() - started
        session.recorder.event("validation", step=self._counters.step, **metrics, seconds=seconds)
        session.recorder.status(validation=metrics, validation_seconds=seconds)
        if self._deadline is not None:
            self._deadline.took_validation(seconds)

    def _skips_validation(self) -> bool:
        """Whether the validation that is due would not end before the deadline: rank 0's clock, for all."""
        if not self._has_deadline:
            return False
        late = self._deadline is not None and not self._deadline.fits_validation()
        skips = self._session.ranks.gather(late)[0]
        if skips and self._deadline is not None:
            self._session.recorder.event("validation_skipped", step=self._counters.step, **self._deadline.facts())
        return skips

    def _save(self) -> None:
        facts = self._facts()
        self._save_point(last=facts.done or facts.stop)

    def _save_point(self, *, last: bool) -> None:
        engine = self._parts.engine
        average_buffers(engine.passes.parallel.module, self._session.mesh)
        numbers = {
            **self._counters.as_numbers(),
            "data": self._plan.data_fingerprint,
            "guard": self._guard.as_numbers(),
        }
        if self._loss_scale is not None:
            numbers["loss_scale"] = self._loss_scale.as_numbers()
        self._saver.save(Point(engine.state, self._counters.step, numbers, last))

    def _took_save(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.took_save(seconds)

    def _stop(self) -> None:
        if self._session.ranks.is_first:
            self._look_for_stop_file()  # a person's request wins over the clock up to the last moment
        clock = self._deadline.describe() if self._deadline is not None else ""
        self._end("stopped", find_end(self._decision, self._stop_file, clock))

    def _finish(self) -> None:
        self._end("finished", End(Ending.FINISHED, f"all {self._plan.total_steps} steps are done"))

    # --- parts of states

    def _end(self, event: str, end: End) -> None:
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()
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
        self._decision = result.decision
        self._loss_scale = result.loss_scale
        before = self._counters
        self._counters = before.after(self._plan.global_batch, result.targets, step.batch.next_position)
        seconds = time.perf_counter() - step.started
        if self._deadline is not None:
            self._deadline.took_step(seconds)
        self._record(result, step.batch, step.lr, seconds)
        tell_skipped(self._session, before, self._counters)
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
