"""The guard: what is checked in a step, losses far above the last ones, and what follows if numbers are not sound.

Invariants:
- Spikes: what is found follows from the values alone, so the same values give the same spikes.
- Errors: each names the step, the finding, the newest checkpoint that can be trusted, and what to do.
- Decisions follow from numbers that are the same on every rank, so that all ranks skip, continue or end together.
  Weights that a rank could not verify are never saved.

A value is compared with the median of the last ones in units of their spread, which is 1.4826 times the median absolute
deviation: the standard deviation where values are normal, and hardly moved by single outliers (Hampel, "The influence
curve and its role in robust estimation", JASA 69, 1974).
"""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from shardway.data.loader import Batch
from shardway.errors import JobError, list_some
from shardway.parallel.apply import ParallelModel
from shardway.parallel.axes.replicate import ReplicaDifference, compare_replicas
from shardway.runfile.schema import GuardSection
from shardway.train.session import Session
from shardway.train.step import Corruption, GuardChecks, StepResult, Watched
from shardway.units import Scale

# --- spikes of loss and gradient norm

WINDOW = 100
"""Values that the next is compared with."""
LEAST = 20
"""Values that are needed before spikes are found."""
SMALLEST_SPREAD = 1e-3
"""The least spread, relative to the median: if a loss hardly moves, a tiny change is not a spike."""


@dataclass(frozen=True)
class Spike:
    """A value that is `deviations` above the `median` of those before it."""

    value: float
    median: float
    deviations: float


@dataclass(frozen=True)
class Recent:
    """The last finite values of one number of a run, oldest first."""

    values: tuple[float, ...] = ()

    def after(self, value: float) -> Recent:
        """With one more value; one that is not finite is left out."""
        return Recent((*self.values, value)[-WINDOW:]) if math.isfinite(value) else self

    def find_spike(self, value: float, threshold: float) -> Spike | None:
        """The spike, if the next value lies more than `threshold` deviations above the last ones; else None."""
        if len(self.values) < LEAST or not math.isfinite(value):
            return None
        median = statistics.median(self.values)
        spread = 1.4826 * statistics.median(abs(each - median) for each in self.values)
        deviations = (value - median) / max(spread, SMALLEST_SPREAD * abs(median), math.ulp(0.0))
        return Spike(value, median, deviations) if deviations > threshold else None


@dataclass(frozen=True)
class Spikes:
    """The last values of each watched number, how many steps in a row up to now held a spike, and the first of them (0:
    none)."""

    recent: Mapping[str, Recent] = field(default_factory=lambda: MappingProxyType({}))
    in_a_row: int = 0
    first: int = 0

    def find(self, values: Mapping[str, float], threshold: float) -> dict[str, Spike]:
        """The spikes among the numbers of the next step, by name."""
        found = {name: self._recent(name).find_spike(value, threshold) for name, value in values.items()}
        return {name: spike for name, spike in found.items() if spike is not None}

    def after(self, step: int, values: Mapping[str, float], found: Mapping[str, Spike]) -> Spikes:
        """With one more step. A step with numbers that are not finite neither extends nor ends a row."""
        recent = {name: self._recent(name).after(value) for name, value in values.items()}
        if not found and not all(map(math.isfinite, values.values())):
            return replace(self, recent=recent)
        return Spikes(recent, self.in_a_row + 1, self.first or step) if found else Spikes(recent)

    def as_numbers(self) -> dict[str, Any]:
        """For a checkpoint's manifest, so that a resumed run finds the same spikes."""
        recent = {name: list(each.values) for name, each in self.recent.items()}
        return {"recent": recent, "in_a_row": self.in_a_row, "first": self.first}

    def _recent(self, name: str) -> Recent:
        return self.recent.get(name, Recent())


def read_spikes(numbers: Mapping[str, Any]) -> Spikes:
    """Those of a manifest; a new window if it has none."""
    recent = {name: Recent(tuple(map(float, values))) for name, values in numbers.get("recent", {}).items()}
    return Spikes(recent, int(numbers.get("in_a_row", 0)), int(numbers.get("first", 0)))


# --- errors that end a run

SHOWN = 6
"""How many samples, ranks or parameters a message lists."""


def refuse_weights(step: int, result: StepResult, saved: Sequence[int]) -> JobError:
    """The error for a step without a guard: its weights must not replace good checkpoints."""
    what = f"loss of step {step} is {result.loss}"
    if math.isfinite(result.loss):
        what = f"gradient of step {step} has the norm {result.grad_norm}"
    return JobError(
        f"the {what}, so the weights after it are of no use; the run ends here.\n"
        f"  No checkpoint was made of them ({_name_last(saved)}). To do: look for values in the data that are not "
        "finite, lower optim.lr, or set optim.clip; then run the same command again."
    )


def refuse_skips(
    step: int, result: StepResult, counters: GuardCounters, samples: Sequence[int], limit: str, saved: Sequence[int]
) -> JobError:
    """The error for the last skipped step that a run may have. `limit` is the key that allows this many, and its
    origin; `samples` are those of the step over all ranks."""
    what = f"loss is {result.loss}"
    if math.isfinite(result.loss):
        what = f"norm of its gradient is {result.grad_norm}"
    steps = f"step {step}"
    if counters.in_a_row > 1:
        steps = f"steps {step - counters.in_a_row + 1} to {step}"
    again = "and the passes wrote into their batch, so that they could not be repeated"
    if result.watched is not None and result.watched.repeated:
        again = "also when its passes were repeated"
    return JobError(
        f"the {what} in step {step}, {again}; {steps} changed no weights, and the run ends here ({limit}).\n"
        f"  Samples of step {step}: {list_some([str(each) for each in samples], SHOWN)}; all of them "
        f"are in the events named step_skipped. {_name_checkpoint(saved)}. To do: look for values in these "
        "samples that are not finite, lower optim.lr, or set optim.clip; then run the same command again."
    )


def refuse_machine(step: int, corruption: Corruption, saved: Sequence[int]) -> JobError:
    """The error for three runs of the same passes with three results."""
    where = list_some([str(rank) for rank in corruption.ranks], SHOWN)
    hosts = list_some(list(corruption.hosts), SHOWN)
    return JobError(
        f"the passes of step {step} were run three times and gave three different results (rank {where} on {hosts}); "
        "no rank changed its weights, and the run ends here.\n"
        f"  Either operations of this model have no fixed result, or a machine computes wrongly. "
        f"{_name_checkpoint(saved)}. To do: set train.deterministic = true; if it comes again with that, leave these "
        "hosts out and have them tested."
    )


def refuse_replicas(
    step: int,
    differences: Sequence[ReplicaDifference],
    hosts: Sequence[str],
    equal_at: int | None,
    saved: Sequence[int],
) -> JobError:
    """The error for copies of a weight that differ; `hosts` are those of the named ranks, `equal_at` is the last step
    at which all were equal."""
    names = list_some([each.parameter for each in differences], SHOWN)
    ranks = list_some([str(rank) for rank in sorted({rank for each in differences for rank in each.ranks})], SHOWN)
    where = f"{ranks} ({list_some(list(hosts), SHOWN)})"
    what = f"differ on rank {where} from those of the other ranks"
    if not all(each.decided for each in differences):
        what = f"differ between ranks {where}, and no majority says which are right"
    return JobError(
        f"after step {step} the copies of {names} {what}; the run ends here, and nothing was saved after it.\n"
        f"  {_name_trusted(equal_at, saved)} To do: leave the named hosts out and have them tested; then run "
        "the same command again."
    )


def _name_trusted(equal_at: int | None, saved: Sequence[int]) -> str:
    """Which checkpoint was made of copies that were compared and equal, and which were made later."""
    good = [step for step in saved if equal_at is not None and step <= equal_at]
    later = [step for step in saved if step not in good]
    compared = f"All copies were equal at step {equal_at}"
    if equal_at is None:
        compared = "No comparison was made before"
    text = f"{compared}, and no checkpoint is from then or before."
    if good:
        text = f"{compared}; the newest checkpoint from then or before is that of step {good[-1]}."
    if later:
        steps = list_some([str(step) for step in later], SHOWN)
        text += (
            f" Checkpoints from after it (step {steps}) may hold wrong weights: move them away to go on before them."
        )
    return text


def _name_last(saved: Sequence[int]) -> str:
    return f"step {saved[-1]} is the last one" if saved else "none was saved yet"


def _name_checkpoint(saved: Sequence[int]) -> str:
    return f"The last checkpoint is that of step {saved[-1]}" if saved else "No checkpoint was saved yet"


# --- the guard


@dataclass(frozen=True)
class BackPlan:
    """How a run goes back before a spike, from [guard]: in steps, global batches, and times per run."""

    spike_steps: int
    spike_margin: int
    max_left_out: int
    max_roll_backs: int


@dataclass(frozen=True)
class GuardPlan:
    """What a run asks of its guard, in steps (None: never). `repeats`: numbers that are not finite change no weights.

    `back`: how a run goes back before a spike; None if a spike is only reported.
    """

    repeats: bool = False
    stops: bool = False
    max_skips: int = 3
    spike: float | None = None
    back: BackPlan | None = None
    probe_every: int | None = None
    compare_every: int | None = None


def plan_guard(session: Session, scale: Scale) -> GuardPlan:
    """The plan of a run; a script that owns its loop has its passes run once, unless it asks for more."""
    section, torch_steps = session.resolved.values.guard, session.resolved.values.train.engine == "torch"
    repeats = section.non_finite != "off" and not session.leaves_alone("guard.non_finite")
    return GuardPlan(
        repeats=repeats and torch_steps,
        stops=section.non_finite == "stop",
        max_skips=section.max_skips,
        spike=None if section.spike == "off" else float(section.spike),
        back=BackPlan(section.spike_steps, section.spike_margin, section.max_left_out, section.max_roll_backs)
        if section.on_spike == "roll_back"
        else None,
        probe_every=_in_steps(section, "probe_every", scale),
        compare_every=_in_steps(section, "compare_every", scale),
    )


def _in_steps(section: GuardSection, name: str, scale: Scale) -> int | None:
    every = getattr(section, name)
    return None if every == "off" else max(1, every.in_steps(scale))


@dataclass(frozen=True)
class GuardCounters:
    """Skipped steps, how many of them in a row now, and the last step after which all copies of the weights were
    compared and equal (-1: none)."""

    skipped: int = 0
    in_a_row: int = 0
    equal_at: int = -1


@dataclass
class Guard:
    """One rank's view of the guard; `is_new`: no step was taken in this process yet.

    `settle` waits for a save that is under way, so that an error names the last checkpoint.
    """

    session: Session
    plan: GuardPlan
    parallels: Sequence[ParallelModel]
    settle: Callable[[], None] = lambda: None
    counters: GuardCounters = field(default_factory=GuardCounters)
    is_new: bool = True
    spikes: Spikes = field(default_factory=Spikes)

    @property
    def in_spike(self) -> bool:
        """Whether the last step may be a part of a spike that the run goes back before."""
        return self.plan.back is not None and self.spikes.in_a_row > 0

    @property
    def must_go_back(self) -> bool:
        """Whether the run goes back now; the same on every rank."""
        return self.plan.back is not None and self.spikes.in_a_row >= self.plan.back.spike_steps

    def as_numbers(self) -> dict[str, Any]:
        """For a checkpoint's manifest."""
        known = {"spikes": self.spikes.as_numbers()} if self.plan.back is not None else {}
        return {"guard": asdict(self.counters), **known}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """Continue with the counters of a manifest; an old one has none."""
        self.counters = GuardCounters(**{name: int(number) for name, number in numbers.get("guard", {}).items()})
        self.spikes = read_spikes(numbers.get("spikes", {}) if self.plan.back is not None else {})

    def watch(self, step: int, *, scales_loss: bool) -> GuardChecks | None:
        """The checks of the next step. fp16 handles gradients that overflow by itself.

        The first passes of a process are not probed: in them DDP fixes the order in which it adds up.
        """
        probe = _is_due(self.plan.probe_every, step) and not self.is_new
        repeat = self.plan.repeats and not scales_loss
        return GuardChecks(repeat, probe) if repeat or probe else None

    def look_at(self, step: int, result: StepResult, batch: Batch) -> None:
        """Check a finished step. Raises JobError on every rank if the run cannot go on."""
        self.is_new = False
        watched = result.watched
        if watched is not None and watched.corruption is not None:
            self._report_corruption(step, watched.corruption)
        if watched is not None and watched.first is not None:
            self._report_first(step, result, watched, batch)
        elif result.targets and not result.skipped and not _is_finite(result):
            raise refuse_weights(step, result, self._saved())
        elif not result.skipped:
            self.counters = replace(self.counters, in_a_row=0)
        if self.plan.spike is not None:
            self._look_for_spikes(step, result, self.plan.spike)
        if _is_due(self.plan.compare_every, step):
            self._compare(step)

    def _report_corruption(self, step: int, corruption: Corruption) -> None:
        self._event("corruption", step, **asdict(corruption))
        if not corruption.decided:
            raise refuse_machine(step, corruption, self._saved())

    def _report_first(self, step: int, result: StepResult, watched: Watched, batch: Batch) -> None:
        """Report passes that were not finite: a transient fault, or a step without an update."""
        first = watched.first
        if watched.finite and first is not None:
            per_target = 1 / first.targets if first.targets else math.nan
            norm = math.sqrt(first.squares) * self.session.resolved.values.train.global_batch * per_target
            self._event("transient", step, loss=first.total * per_target, grad_norm=norm)
            self.counters = replace(self.counters, in_a_row=0)
            return
        before = self.counters
        self.counters = replace(before, skipped=before.skipped + 1, in_a_row=before.in_a_row + 1)
        samples = self._gather_ids(batch)
        self._event(
            "step_skipped",
            step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            repeated=watched.repeated,
            in_a_row=self.counters.in_a_row,
            skipped=self.counters.skipped,
            position=batch.position,
            ids=samples,
        )
        if self.plan.stops or self.counters.in_a_row >= self.plan.max_skips:
            everyone = [sample for share in samples for sample in share]
            raise refuse_skips(step, result, self.counters, everyone, self._describe_limit(), self._saved())

    def _gather_ids(self, batch: Batch) -> list[list[int]]:
        """The samples of the step, one list for each share of the global batch."""
        shares = dict(self.session.ranks.gather((self.session.mesh.data_rank, [int(each) for each in batch.ids])))
        return [shares[share] for share in sorted(shares)]

    def _describe_limit(self) -> str:
        name = "guard.non_finite" if self.plan.stops else "guard.max_skips"
        value = '"stop"' if self.plan.stops else str(self.plan.max_skips)
        return f"{name} = {value}, {self.session.resolved.origins[name]}"

    def _look_for_spikes(self, step: int, result: StepResult, threshold: float) -> None:
        """Find spikes in numbers that all ranks have; rank 0 reports them."""
        values = {"loss": result.loss, "grad_norm": result.grad_norm}
        found = self.spikes.find(values, threshold)
        self.spikes = self.spikes.after(step, values, found)
        for name, spike in found.items():
            self._event("spike", step, of=name, **asdict(spike))

    def _compare(self, step: int) -> None:
        """Compare copies after a step and before its save, so that its checkpoint holds what was compared."""
        ranks = self.session.ranks
        with ranks.contact("while the copies of weights were compared"):
            found = (compare_replicas(each.module, self.session.mesh, ranks) for each in self.parallels)
            differences = [difference for each in found for difference in each]
        if not differences:
            self.counters = replace(self.counters, equal_at=step)
            return
        hosts = ranks.gather(socket.gethostname())
        equal_at = self.counters.equal_at if self.counters.equal_at >= 0 else None
        named = sorted({rank for each in differences for rank in each.ranks})
        of_named = list(dict.fromkeys(hosts[rank] for rank in named))
        self._event(
            "replica_differs",
            step,
            parameters=[each.parameter for each in differences],
            ranks=named,
            hosts=of_named,
            decided=all(each.decided for each in differences),
            equal_at=equal_at,
        )
        raise refuse_replicas(step, differences, of_named, equal_at, self._saved())

    def _saved(self) -> Sequence[int]:
        self.settle()
        return self.session.directory.checkpoint_steps()

    def _event(self, name: str, step: int, **facts: Any) -> None:
        self.session.recorder.event(name, step=step, **facts)


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _is_finite(result: StepResult) -> bool:
    return math.isfinite(result.loss) and math.isfinite(result.grad_norm)
