"""The state of the loop: counters, schedule, phases, what it works with, and what validations ask for.

Invariants:
- Counters: the position is where the next step begins in the order of samples, whatever was skipped before it, so it
  means the same on any world size and under any `data.skip`.
- Schedule: the factor depends on the step and the lengths alone, so a resumed run needs no state for it.
- Phases: all ranks enter the same phases, since the facts they follow from are agreed.
- Learning rate: one that a script has set is never overwritten. If run file and script both set it, the run ends with
  an error.
- Validations: what they ask for follows from the results that hold and the steps that are saved. Nothing of it is
  written down, so a resumed run finds the same. All ranks get what rank 0 found.

RESTORE ─► STEP ─► SAVE ─► VALIDATE ─► STEP ...        (SAVE and VALIDATE only when due)
       └─────────┴───────┴─────────┴─► STOP ─► END         (asked to stop: save first, do not validate)
                                   └─► FINISH ─► END       (the last step: save and validate first)

VALIDATE ─► SAVE ─► STEP ...                           (the result asks for a checkpoint: it is one of the best)

... ─► SAMPLE ─► STEP or FINISH                        (after all else of a step; a stop breaks it off)

STEP or RESTORE ─► GO_BACK ─► as after RESTORE         (a spike: nothing of it is validated or saved)

A save comes before the validation of its step, so that an error in a validation costs no work. A validation that a stop
broke off is followed by the save of the stop. One that a stop left out is due again after RESTORE; a run that owes one
stops rather than finishes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from shardway.checkpoint.manager import LeastCost, LocalPlan, RetentionPolicy
from shardway.errors import UserError, list_some
from shardway.plan.economy import GPU_MTBF_SECONDS
from shardway.resolve import DataFacts, scale_of
from shardway.train.blended import Blended
from shardway.train.engines import Engine
from shardway.train.held import Holdings
from shardway.train.loss import LossScale
from shardway.train.session import Session
from shardway.train.validate import Validation
from shardway.units import Results, Span, render_plural

# --- counters


@dataclass(frozen=True)
class Counters:
    """Finished steps, samples that were trained on, targets that counted in the loss, and the position in the data.

    If nothing was skipped, the position is the number of samples.
    """

    step: int = 0
    samples: int = 0
    targets: int = 0
    position: int = 0

    def after(self, samples: int, targets: float, next_position: int) -> Counters:
        return Counters(self.step + 1, self.samples + samples, self.targets + round(targets), next_position)

    def as_numbers(self) -> dict[str, Any]:
        return {"step": self.step, "samples": self.samples, "targets": self.targets, "position": self.position}


def read_counters(numbers: Mapping[str, Any]) -> Counters:
    """The counters of a manifest; one without a position was written before skips existed."""
    samples = int(numbers["samples"])
    return Counters(int(numbers["step"]), samples, int(numbers["targets"]), int(numbers.get("position", samples)))


# --- the learning-rate schedule


@dataclass(frozen=True)
class LRSchedule:
    """Lengths in steps, and the factor at the end as a fraction of the peak."""

    total: int
    warmup: int
    decay: int
    final: float


def lr_factor(name: str, lr_schedule: LRSchedule, step: int) -> float:
    """The factor on the peak learning rate for the step that follows `step` finished ones (0 is the first).

    Linear warm-up over `warmup` steps, the first of which has 1/warmup of the peak; then the named course.
    """
    if step < lr_schedule.warmup:
        return (step + 1) / lr_schedule.warmup
    return LR_SCHEDULES[name](lr_schedule, min(step, lr_schedule.total))


def _cosine(lr_schedule: LRSchedule, step: int) -> float:
    """Half a cosine from 1 to `final` (Loshchilov and Hutter, arXiv:1608.03983)."""
    progress = _progress(lr_schedule, step, lr_schedule.warmup)
    return lr_schedule.final + (1 - lr_schedule.final) * 0.5 * (1 + math.cos(math.pi * progress))


def _progress(lr_schedule: LRSchedule, step: int, start: int) -> float:
    """From 0 at `start` to 1 at the end."""
    return min(1.0, max(0.0, (step - start) / max(1, lr_schedule.total - start)))


LR_SCHEDULES: dict[str, Callable[[LRSchedule, int], float]] = {
    "cosine": _cosine,
    "linear": lambda lr, step: 1 + (lr.final - 1) * _progress(lr, step, lr.warmup),
    "constant": lambda lr, step: 1.0,
    # Constant until `decay` steps before the end, then linear to `final` (Hu et al., arXiv:2404.06395).
    "wsd": lambda lr, step: 1 + (lr.final - 1) * _progress(lr, step, lr.total - lr.decay),
}
"""Name in the run file -> factor after the warm-up."""


# --- phases and their order


class LoopPhase(Enum):
    """What the loop does now."""

    RESTORE = auto()
    STEP = auto()
    GO_BACK = auto()
    VALIDATE = auto()
    SAVE = auto()
    SAMPLE = auto()
    STOP = auto()
    FINISH = auto()
    END = auto()


@dataclass(frozen=True)
class Facts:
    """The facts that the next phase follows from; the same on every rank.

    `validate_due`: a validation belongs after the last step, and was not made. `goes_back`: the last steps were a spike
    that the run goes back before. `save_owed`: the run directory lacks the step where the run resumed.
    `result_save_due`: the validation of this step asks for a checkpoint of it in the run directory. `sample_due`:
    samples belong after the last step, and were not generated.
    """

    done: bool
    stop: bool
    validate_due: bool
    save_due: bool
    goes_back: bool = False
    save_owed: bool = False
    result_save_due: bool = False
    sample_due: bool = False


def next_phase(phase: LoopPhase, facts: Facts) -> LoopPhase:
    """The phase after `phase`."""
    if phase in (LoopPhase.STOP, LoopPhase.FINISH, LoopPhase.END):
        return LoopPhase.END
    if phase in (LoopPhase.RESTORE, LoopPhase.STEP) and facts.goes_back:
        return LoopPhase.GO_BACK
    breakable = (LoopPhase.VALIDATE, LoopPhase.SAMPLE)
    if (phase is LoopPhase.STEP or (phase in breakable and facts.stop)) and facts.save_due:
        return LoopPhase.SAVE
    if phase in (LoopPhase.RESTORE, LoopPhase.GO_BACK, LoopPhase.VALIDATE) and facts.result_save_due:
        return LoopPhase.SAVE
    if phase is LoopPhase.RESTORE and facts.save_owed and (facts.done or facts.stop):
        return LoopPhase.SAVE
    if phase not in breakable and facts.validate_due and not facts.stop:
        return LoopPhase.VALIDATE
    if facts.stop and not (facts.done and not facts.validate_due):
        return LoopPhase.STOP
    if phase is not LoopPhase.SAMPLE and facts.sample_due and not facts.stop:
        return LoopPhase.SAMPLE
    return LoopPhase.FINISH if facts.done else LoopPhase.STEP


# --- lengths, cadences and what the loop works with


class LoopPlan:
    """Lengths and cadences of a run from its resolved values, in steps unless named otherwise; None: never."""

    def __init__(
        self, session: Session, facts: DataFacts, fingerprint: str, blend: Blended | None = None, base: str = ""
    ) -> None:
        """`fingerprint`: of the data; `base`: of frozen weights that are in no checkpoint."""
        values, derived = session.resolved.values, session.resolved.derived
        saves, precision, margin = values.checkpoint, values.precision, values.run.stop_margin
        self.scale = scale = scale_of(session.resolved, facts)

        def in_steps(span: Any) -> int | None:
            return None if span == "off" else max(1, span.in_last_steps(scale))

        def cadence(every: Any) -> tuple[int | None, float | LeastCost | None]:
            """A key of [checkpoint] in steps, or in seconds of the clock."""
            if every == "auto":
                return None, LeastCost(GPU_MTBF_SECONDS / session.ranks.world)
            return (in_steps(every), None) if isinstance(every, Span) else (None, None if every == "off" else every)

        self.total_steps, self.batch = derived.total_steps, values.train.batch
        self.tokens_per_sample, self.data_fingerprint, self.blend = facts.tokens_per_sample, fingerprint, blend
        self.base_fingerprint = base
        self.validate_every = in_steps(values.train.validate_every)
        self.sample_every = in_steps(values.train.sample_every)
        self.save_every, self.save_every_s = cadence(saves.every)
        self.save_at_end = saves.every != "off" or saves.local_every != "off"
        self.keep = RetentionPolicy(saves.keep, in_steps(saves.keep_every), saves.keep_best)
        self.local: LocalPlan | None = None
        if saves.local_every != "off":
            self.local = LocalPlan(*cadence(saves.local_every), saves.local_dir)
        # Each step sets the learning rate by the schedule, unless it is the script's own.
        self.writes_lr = not session.leaves_alone("optim.schedule")
        self.schedule = values.optim.schedule if self.writes_lr else "constant"
        warmup = derived.warmup_steps if self.writes_lr else 0
        self.lr_schedule = LRSchedule(derived.total_steps, warmup, derived.decay_steps, values.optim.final_lr)
        rules = precision.loss_scale_growth, precision.loss_scale_backoff, precision.loss_scale_interval
        self.loss_scale = LossScale(precision.loss_scale, *rules) if session.precision.scales_loss else None
        self.stop_margin_s = None if margin == "auto" else float(margin)
        self.monitor = saves.monitor
        # How many validations without a better `monitor` finish the run.
        self.patience = None if values.train.patience == "off" else values.train.patience

    def saves_shared_after(self, step: int) -> bool:
        """Whether a save into the run directory is due; one that is kept forever is made whatever the cadence."""
        return any(every is not None and step % every == 0 for every in (self.save_every, self.keep.every))

    def saves_local_after(self, step: int) -> bool:
        return self.local is not None and self.local.every is not None and step % self.local.every == 0


# --- the learning rate that the loop writes


class ScheduledLR:
    """The learning rates of all groups of a run; `held` is what a script holds (None: a recipe)."""

    def __init__(self, session: Session, plan: LoopPlan, engines: Sequence[Engine], held: Holdings | None) -> None:
        self._session, self._plan, self._engines, self._held = session, plan, engines, held
        self._peaks: list[float] = []
        self._written: list[float] = []

    def begin(self) -> None:
        """Take the current rates of the groups as their peaks. Raises UserError if the script also has schedulers."""
        if not self._plan.writes_lr:
            return
        self._peaks = [float(group["lr"]) for group in self._groups()]
        if self._held is not None and self._held.schedulers:
            raise UserError(
                f"{self._describe_key()} sets the learning rate at each step, and the script has made a scheduler for "
                f"it ({list_some(list(self._held.schedulers), 6)}).\n"
                "  To do: leave one of the two out: the scheduler of the script, or optim.schedule."
            )

    def write(self, step: int) -> None:
        """Set the learning rate of the step that follows `step` finished ones; nothing if it is the script's."""
        if not self._plan.writes_lr:
            return
        self.check()
        factor = lr_factor(self._plan.schedule, self._plan.lr_schedule, step)
        self._written = [peak * factor for peak in self._peaks]
        for group, lr in zip(self._groups(), self._written, strict=True):
            group["lr"] = lr

    def check(self) -> None:
        """Raise UserError if the script has changed what was written."""
        if self._held is None or not self._written:
            return
        found = [group["lr"] for group in self._groups()]
        if found == self._written:
            return
        changed = [pair for pair in zip(found, self._written, strict=False) if pair[0] != pair[1]]
        what, instead = "added a parameter group, whose lr", ""
        if changed:
            what, instead = f"set lr to {float(changed[0][0]):g}, and", f" (to {changed[0][1]:g} the last time)"
        raise UserError(
            f"the script has {what} {self._describe_key()} sets it at each step{instead}.\n"
            "  To do: leave one of the two out: the schedule of the script, or optim.schedule."
        )

    def _groups(self) -> list[dict[str, Any]]:
        return [group for engine in self._engines for group in engine.groups]

    def _describe_key(self) -> str:
        resolved = self._session.resolved
        return f"optim.schedule = {resolved.values.optim.schedule!r} ({resolved.origins['optim.schedule']})"


# --- what validations ask for


class Monitoring:
    """Evaluates the results of one run; without a validation there are none.

    `save_due`: the step is one of the best or the last, and the run directory lacks it. `finish_reason`: why
    `train.patience` finishes the run; empty if it does not. `unknown`: a message that no result has the metric of
    `checkpoint.monitor`.
    """

    def __init__(self, session: Session, plan: LoopPlan, validation: Validation | None) -> None:
        self._session = session
        self._plan = plan
        self._validation = validation
        self.save_due, self.finish_reason, self.unknown = False, "", ""

    @property
    def ranking(self) -> tuple[int, ...]:
        """The validated steps, the best first, if checkpoints are kept by it."""
        return tuple(self._plan.monitor.rank(self._results)) if self._plan.keep.best else ()

    def look(self, step: int, *, finished: bool) -> None:
        """Find what the results up to this step ask for, of a run that is finished anyway or not; on all ranks
        together."""
        if self._validation is None:
            return
        done, keep = finished or step >= self._plan.total_steps, self._plan.keep

        def judge() -> tuple[bool, str, str]:
            finish_reason = "" if done else self._find_finish()
            saved = self._session.directory.checkpoint_steps() if keep.best or finish_reason else []
            is_best = step in keep.find_best([*saved, step], self.ranking)
            return (is_best or bool(finish_reason)) and step not in saved, finish_reason, self._find_unknown()

        self.save_due, self.finish_reason, self.unknown = self._session.ranks.ask_first(judge)
        if self.finish_reason and self._session.own_model and self._session.ranks.is_first:
            note = f"this run is finished ({self.finish_reason}); with a higher train.patience it goes on."
            logging.getLogger("shardway").warning(note)

    @property
    def _results(self) -> Results:
        return self._validation.results if self._validation is not None else {}

    def _find_finish(self) -> str:
        """Why the run is finished, if enough validations in a row were no better."""
        monitor, patience, results = self._plan.monitor, self._plan.patience, self._results
        count = monitor.count_since_best(results)
        if patience is None or count < patience:
            return ""
        best = monitor.find_best(results)
        of_best = f"{best.metrics[monitor.metric]:.4g} at step {best.step} is the best" if best else "none was a number"
        return f"no better {monitor.metric} for {render_plural(count, 'validation')}: {of_best}"

    def _find_unknown(self) -> str:
        metric, results = self._plan.monitor.metric, self._results
        origin = self._session.resolved.origins["checkpoint.monitor"]
        if not results or any(metric in metrics for metrics in results.values()):
            return ""
        there = ", ".join(dict.fromkeys(name for metrics in results.values() for name in metrics))
        return (
            f'checkpoint.monitor is "{self._plan.monitor}" ({origin}), and the results of the validation hold no '
            f"{metric}.\n"
            f"      allowed: {there}; a name other than loss, accuracy and bits_per_byte with max or min before it\n"
            "  Nothing is lost: what was trained is saved. To do: name one of these, or let the loss function give "
            f"{metric} in LossSum(metrics=...); then run the same command again."
        )
