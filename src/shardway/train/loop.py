"""The loop: an explicit state machine that yields batches and does everything that happens between two steps.

Invariant: the only loop of the project. Recipes and scripts that own their loop walk through the same states; a
user extends it by passing functions or by what stands between two batches. It must not run a model in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardway.checkpoint.load import load_latest
from shardway.checkpoint.save import prune_checkpoints, save_checkpoint
from shardway.checkpoint.state import Trained
from shardway.data.loader import Batch
from shardway.errors import Bug, JobError
from shardway.parallel.replicate import average_buffers
from shardway.ranks.agreement import Decision, Wishes, read_decision
from shardway.train.counters import Counters, read_counters
from shardway.train.machine import Facts, Phase, next_phase
from shardway.train.schedule import Course, lr_factor
from shardway.train.session import Session, machine_facts
from shardway.train.step import StepResult
from shardway.train.validate import Validation, validate

LOOK_EVERY_S = 0.5
"""How often rank 0 looks for the stop file: a look costs a millisecond on a busy parallel file system."""


@dataclass(frozen=True)
class LoopPlan:
    """Lengths and cadences of a run, in steps unless named otherwise; None: never."""

    total_steps: int
    global_batch: int
    tokens_per_sample: int
    validate_every: int | None = None
    save_every: int | None = None
    save_every_s: float | None = None
    save_at_end: bool = True
    keep: int = 3
    schedule: str = "constant"
    course: Course = field(default_factory=lambda: Course(1, 0, 0, 1.0))
    data_fingerprint: str = ""


@dataclass(frozen=True)
class LoopParts:
    """What the loop works with: the trained state, a stream of batches from a data position, validation."""

    trained: Trained
    batches_from: Callable[[int], Iterator[Batch]]
    validation: Validation | None = None
    on_step: Callable[[int, dict[str, Any]], None] | None = None


class Loop:
    """One walk through the states, from restoring to the end."""

    def __init__(self, session: Session, plan: LoopPlan, parts: LoopParts) -> None:
        self._session = session
        self._plan = plan
        self._parts = parts
        self._counters = Counters()
        self._decision = Decision()
        self._result: StepResult | None = None
        self._stream: Iterator[Batch] = iter(())
        self._peak_lrs: list[float] = []
        self._saved_at = self._looked_at = time.monotonic()
        self._stop_file_seen = False
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
        phase = Phase.RESTORE
        while phase is not Phase.END:
            if phase is Phase.STEP:
                yield from self._step()
            else:
                self._actions[phase]()
            phase = next_phase(phase, self._facts())

    def note(self, result: StepResult) -> None:
        """Take the result of the step under way."""
        self._result = result

    def wishes(self) -> Wishes:
        """What this rank wants to happen after the current step."""
        now, plan = time.monotonic(), self._plan
        if self._session.ranks.is_first and now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._stop_file_seen = self._session.directory.stop_requested()
        return Wishes(
            stop_signal=self._session.signals.received is not None,
            stop_file=self._stop_file_seen,
            save=plan.save_every_s is not None
            and self._session.ranks.is_first
            and now - self._saved_at >= plan.save_every_s,
        )

    def _facts(self) -> Facts:
        step, plan = self._counters.step, self._plan
        done, stop = step >= plan.total_steps, bool(self._decision.stop_reason)
        validates = plan.validate_every is not None and self._parts.validation is not None
        return Facts(
            done=done,
            stop=stop,
            validate_due=validates and (done or step % (plan.validate_every or 1) == 0),
            save_due=stop
            or self._decision.save
            or (done and plan.save_at_end)
            or (plan.save_every is not None and step % plan.save_every == 0),
        )

    # --- states

    def _restore(self) -> None:
        session, optimizer = self._session, self._parts.trained.optimizer
        if optimizer is not None:
            self._peak_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        loaded = load_latest(session.directory, session.ranks, self._parts.trained)
        if loaded is not None:
            self._counters = read_counters(loaded.numbers)
            self._check_data(str(loaded.numbers.get("data", "")))
        session.recorder.begin(
            self._counters.step,
            format=1,
            total_steps=self._plan.total_steps,
            samples_per_step=self._plan.global_batch,
            tokens_per_step=self._plan.global_batch * self._plan.tokens_per_sample,
            bytes_per_token=self._parts.validation.bytes_per_token if self._parts.validation else None,
            parameters=sum(parameter.numel() for parameter in self._parts.trained.model.parameters()),
            checkpoint=loaded.name if loaded else None,
            checkpoint_world=loaded.world if loaded else None,
            random_restored=loaded.random_restored if loaded else None,
            **machine_facts(session.ranks),
        )
        session.recorder.status(
            now=True, state="running", reason="", step=self._counters.step, total_steps=self._plan.total_steps
        )
        self._stream = self._parts.batches_from(self._counters.samples)

    def _step(self) -> Iterator[Any]:
        started = time.perf_counter()
        batch = next(self._stream)
        lr = self._set_lr()
        self._result = None
        yield batch.data
        result = self._result or self._agree_without_result()
        self._decision = result.decision
        self._counters = self._counters.after(self._plan.global_batch, result.targets)
        self._record(result, batch, lr, time.perf_counter() - started)

    def _validate(self) -> None:
        session, started = self._session, time.perf_counter()
        if self._parts.validation is None:
            raise Bug("validation is due and there is nothing to validate on")
        metrics = validate(
            self._parts.trained.model, self._parts.validation, session.mesh, session.ranks, session.precision
        )
        seconds = time.perf_counter() - started
        session.recorder.event("validation", step=self._counters.step, **metrics, seconds=seconds)
        session.recorder.status(validation=metrics)

    def _save(self) -> None:
        session, started = self._session, time.perf_counter()
        average_buffers(self._parts.trained.model, session.mesh)
        numbers = {**self._counters.as_numbers(), "data": self._plan.data_fingerprint}
        saved = save_checkpoint(session.directory, session.ranks, self._parts.trained, self._counters.step, numbers)
        self._saved_at = time.monotonic()
        if saved is not None:
            seconds = time.perf_counter() - started
            session.recorder.event(
                "saved", step=self._counters.step, name=saved.name, bytes=saved.bytes, seconds=seconds
            )
            session.recorder.status(saved_step=self._counters.step)
            if session.ranks.is_first:
                prune_checkpoints(session.directory, self._plan.keep)

    def _stop(self) -> None:
        self._end("stopped", self._decision.stop_reason)

    def _finish(self) -> None:
        self._end("finished", f"all {self._plan.total_steps} steps are done")

    # --- parts of states

    def _end(self, state: str, reason: str) -> None:
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()
        if self._session.ranks.is_first:
            self._session.directory.clear_stop()
        step = self._counters.step
        self._session.recorder.event(state, step=step, reason=reason)
        self._session.recorder.status(now=True, state=state, step=step, reason=reason)
        self._session.ranks.barrier()

    def _set_lr(self) -> float:
        optimizer = self._parts.trained.optimizer
        if optimizer is None:
            return 0.0
        factor = lr_factor(self._plan.schedule, self._plan.course, self._counters.step)
        for group, peak in zip(optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = peak * factor
        return float(optimizer.param_groups[0]["lr"])

    def _agree_without_result(self) -> StepResult:
        """For a script that took its step by other means than `run.step`: agree, without a loss to record."""
        vector = torch.tensor(self.wishes().as_numbers(), dtype=torch.float64)
        decision = read_decision(self._session.ranks.sum(vector).tolist())
        return StepResult(float("nan"), float("nan"), 0.0, decision)

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
        record_ids = self._session.resolved.values.data.record_ids
        self._session.recorder.step(facts, [int(i) for i in batch.ids] if record_ids else None)
        self._session.recorder.status(step=step, loss=result.loss)
        if self._parts.on_step is not None:
            self._parts.on_step(step, facts)

    def _check_data(self, saved: str) -> None:
        now = self._plan.data_fingerprint
        if saved and now and saved != now:
            raise JobError(
                f"the training data is not what step {self._counters.step} was trained on: its fingerprint is {now}, "
                f"the checkpoint says {saved}.\n"
                "  The position in the data would mean other samples, so nothing was trained. To do: restore the data, "
                "or start over with --fresh."
            )
