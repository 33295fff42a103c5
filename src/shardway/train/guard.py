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
from typing import Any

from shardway.data.loader import Batch
from shardway.errors import JobError, list_some
from shardway.parallel.apply import ParallelModel
from shardway.parallel.axes.replicate import ReplicaDifference, compare_replicas
from shardway.train.passes import SUMS
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
class Spikes:
    """The last finite values of each watched number, oldest first; how many steps in a row up to now held a spike, and
    the first of them (0: none)."""

    recent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    in_a_row: int = 0
    first: int = 0

    def find(self, values: Mapping[str, float], threshold: float) -> dict[str, dict[str, float]]:
        """The spikes among the numbers of the next step, by name: values more than `threshold` deviations above the
        median of the last ones."""
        found = {}
        for name, value in values.items():
            before = self.recent.get(name, ())
            if len(before) < LEAST or not math.isfinite(value):
                continue
            median = statistics.median(before)
            spread = 1.4826 * statistics.median(abs(each - median) for each in before)
            deviations = (value - median) / max(spread, SMALLEST_SPREAD * abs(median), math.ulp(0.0))
            if deviations > threshold:
                found[name] = {"value": value, "median": median, "deviations": deviations}
        return found

    def after(self, step: int, values: Mapping[str, float], found: Mapping[str, object]) -> Spikes:
        """With one more step. A step with numbers that are not finite neither extends nor ends a row."""
        recent = {}
        for name, value in values.items():
            before = self.recent.get(name, ())
            recent[name] = (*before, value)[-WINDOW:] if math.isfinite(value) else before
        if not found and not all(map(math.isfinite, values.values())):
            return replace(self, recent=recent)
        return Spikes(recent, self.in_a_row + 1, self.first or step) if found else Spikes(recent)

    def as_numbers(self) -> dict[str, Any]:
        recent = {name: list(values) for name, values in self.recent.items()}
        return {"recent": recent, "in_a_row": self.in_a_row, "first": self.first}


def read_spikes(numbers: Mapping[str, Any]) -> Spikes:
    """Those of a manifest; a new window if it has none."""
    recent = {name: tuple(map(float, values)) for name, values in numbers.get("recent", {}).items()}
    return Spikes(recent, int(numbers.get("in_a_row", 0)), int(numbers.get("first", 0)))


# --- the guard

SHOWN = 6
"""How many samples, ranks or parameters a message lists."""


@dataclass(frozen=True)
class GuardCounters:
    """Skipped steps, how many of them in a row now, and the last step after which all copies of the weights were
    compared and equal (-1: none)."""

    skipped: int = 0
    in_a_row: int = 0
    equal_at: int = -1


class Guard:
    """One rank's view of the guard.

    `settle` waits for a save that is under way, so that an error names the last checkpoint. `goes_back`: a run goes
    back before a spike; else it is only reported.
    """

    def __init__(
        self, session: Session, scale: Scale, parallels: Sequence[ParallelModel], settle: Callable[[], None]
    ) -> None:
        self._session, self._parallels, self._settle = session, parallels, settle
        self._section = section = session.resolved.values.guard
        # A script that owns its loop has its passes run once, unless it asks for more.
        repeats = section.non_finite != "off" and not session.leaves_alone("guard.non_finite")
        self._repeats = repeats and session.resolved.values.train.engine == "torch"
        probe, compare = section.probe_every, section.compare_every
        self._probe_every = None if probe == "off" else max(1, probe.in_last_steps(scale))
        self._compare_every = None if compare == "off" else max(1, compare.in_last_steps(scale))
        self.goes_back = section.on_spike == "roll_back"
        self._is_new = True  # no step was taken in this process yet
        self.counters, self.spikes = GuardCounters(), Spikes()

    @property
    def in_spike(self) -> bool:
        """Whether the last step may be a part of a spike that the run goes back before."""
        return self.goes_back and self.spikes.in_a_row > 0

    @property
    def must_go_back(self) -> bool:
        """Whether the run goes back now; the same on every rank."""
        return self.goes_back and self.spikes.in_a_row >= self._section.spike_steps

    def as_numbers(self) -> dict[str, Any]:
        known = {"spikes": self.spikes.as_numbers()} if self.goes_back else {}
        return {"guard": asdict(self.counters), **known}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """Continue with the counters of a manifest; an old one has none."""
        self.counters = GuardCounters(**{name: int(number) for name, number in numbers.get("guard", {}).items()})
        self.spikes = read_spikes(numbers.get("spikes", {}) if self.goes_back else {})

    def watch(self, step: int, *, scales_loss: bool) -> GuardChecks | None:
        """The checks of the next step. fp16 handles gradients that overflow by itself.

        The first passes of a process are not probed: in them DDP fixes the order in which it adds up.
        """
        probe = _is_due(self._probe_every, step) and not self._is_new
        repeat = self._repeats and not scales_loss
        return GuardChecks(repeat, probe) if repeat or probe else None

    def look_at(self, step: int, result: StepResult, batch: Batch) -> None:
        """Check a finished step. Raises JobError on every rank if the run cannot go on."""
        self._is_new = False
        watched = result.watched
        if watched is not None and watched.corruption is not None:
            self._report_corruption(step, watched.corruption)
        finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        if watched is not None and watched.first is not None:
            self._report_first(step, result, watched, watched.first.numbers, batch)
        elif result.targets and not result.skipped and not finite:  # weights that must not replace good checkpoints
            what = f"loss of step {step} is {result.loss}"
            if math.isfinite(result.loss):
                what = f"gradient of step {step} has the norm {result.grad_norm}"
            saved = self._list_saved()
            last = f"step {saved[-1]} is the last one" if saved else "none was saved yet"
            raise JobError(
                f"the {what}, so the weights after it are of no use; the run ends here.\n"
                f"  No checkpoint was made of them ({last}). To do: look for values in the data that are not "
                "finite, lower optim.lr, or set optim.clip; then run the same command again."
            )
        elif not result.skipped:
            self.counters = replace(self.counters, in_a_row=0)
        if self._section.spike != "off":  # in numbers that all ranks have; rank 0 reports them
            values = {"loss": result.loss, "grad_norm": result.grad_norm}
            found = self.spikes.find(values, float(self._section.spike))
            self.spikes = self.spikes.after(step, values, found)
            for name, spike in found.items():
                self._event("spike", step, of=name, **spike)
        if _is_due(self._compare_every, step):
            self._compare(step)

    def _report_corruption(self, step: int, corruption: Corruption) -> None:
        self._event("corruption", step, **asdict(corruption))
        if not corruption.decided:
            ranks, hosts = (list_some(list(map(str, each)), SHOWN) for each in (corruption.ranks, corruption.hosts))
            raise JobError(
                f"the passes of step {step} were run three times and gave three different results (rank {ranks} on "
                f"{hosts}); no rank changed its weights, and the run ends here.\n"
                f"  Either operations of this model have no fixed result, or a machine computes wrongly. "
                f"{self._name_checkpoint()}. To do: set train.deterministic = true; if it comes again with that, leave "
                "these hosts out and have them tested."
            )

    def _report_first(
        self, step: int, result: StepResult, watched: Watched, first: Sequence[float], batch: Batch
    ) -> None:
        """Report passes whose numbers were not finite: a transient fault, or a step without an update."""
        if watched.finite:
            per_target = 1 / first[1] if first[1] else math.nan
            norm = math.sqrt(first[SUMS]) * self._session.resolved.values.train.batch.largest * per_target
            self._event("transient", step, loss=first[0] * per_target, grad_norm=norm)
            self.counters = replace(self.counters, in_a_row=0)
            return
        in_a_row = self.counters.in_a_row + 1
        self.counters = replace(self.counters, skipped=self.counters.skipped + 1, in_a_row=in_a_row)
        # One list for each share of the global batch.
        shares = dict(self._session.ranks.gather((self._session.mesh.data_rank, [int(each) for each in batch.ids])))
        samples = [shares[share] for share in sorted(shares)]
        self._event(
            "step_skipped",
            step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            repeated=watched.repeated,
            in_a_row=in_a_row,
            skipped=self.counters.skipped,
            position=batch.position,
            ids=samples,
        )
        stops = self._section.non_finite == "stop"
        if not stops and in_a_row < self._section.max_skips:
            return
        key, value = ("non_finite", '"stop"') if stops else ("max_skips", str(self._section.max_skips))
        limit = f"guard.{key} = {value}, {self._session.resolved.origins[f'guard.{key}']}"
        what = f"loss is {result.loss}"
        if math.isfinite(result.loss):
            what = f"norm of its gradient is {result.grad_norm}"
        steps = f"steps {step - in_a_row + 1} to {step}" if in_a_row > 1 else f"step {step}"
        again = "and the passes wrote into their batch, so that they could not be repeated"
        if watched.repeated:
            again = "also when its passes were repeated"
        listed = list_some([str(sample) for share in samples for sample in share], SHOWN)
        raise JobError(
            f"the {what} in step {step}, {again}; {steps} changed no weights, and the run ends here ({limit}).\n"
            f"  Samples of step {step}: {listed}; all of them "
            f"are in the events named step_skipped. {self._name_checkpoint()}. To do: look for values in these "
            "samples that are not finite, lower optim.lr, or set optim.clip; then run the same command again."
        )

    def _compare(self, step: int) -> None:
        """Compare copies after a step and before its save, so that its checkpoint holds what was compared."""
        ranks = self._session.ranks
        with ranks.contact("while the copies of weights were compared"):
            found = (compare_replicas(each.module, self._session.mesh, ranks) for each in self._parallels)
            differences = [difference for each in found for difference in each]
        if not differences:
            self.counters = replace(self.counters, equal_at=step)
            return
        every_host = ranks.gather(socket.gethostname())
        equal_at = self.counters.equal_at if self.counters.equal_at >= 0 else None
        named = sorted({rank for each in differences for rank in each.ranks})
        hosts, decided = list(dict.fromkeys(every_host[rank] for rank in named)), all(d.decided for d in differences)
        self._event(
            "replica_differs",
            step,
            parameters=[each.parameter for each in differences],
            ranks=named,
            hosts=hosts,
            decided=decided,
            equal_at=equal_at,
        )
        raise self._refuse_replicas(step, differences, named, hosts, equal_at)

    def _refuse_replicas(
        self,
        step: int,
        differences: Sequence[ReplicaDifference],
        named: Sequence[int],
        hosts: Sequence[str],
        equal_at: int | None,
    ) -> JobError:
        """The error for copies of a weight that differ; `equal_at` is the last step at which all were equal."""
        names = list_some([each.parameter for each in differences], SHOWN)
        where = f"{list_some([str(rank) for rank in named], SHOWN)} ({list_some(list(hosts), SHOWN)})"
        what = f"differ on rank {where} from those of the other ranks"
        if not all(each.decided for each in differences):
            what = f"differ between ranks {where}, and no majority says which are right"
        saved = self._list_saved()
        good = [each for each in saved if equal_at is not None and each <= equal_at]
        later = [each for each in saved if each not in good]
        compared = "No comparison was made before" if equal_at is None else f"All copies were equal at step {equal_at}"
        trusted = f"{compared}, and no checkpoint is from then or before."
        if good:
            trusted = f"{compared}; the newest checkpoint from then or before is that of step {good[-1]}."
        if later:
            steps = list_some([str(each) for each in later], SHOWN)
            trusted += (
                f" Checkpoints from after it (step {steps}) may hold wrong weights: move them away to go on before "
                "them."
            )
        return JobError(
            f"after step {step} the copies of {names} {what}; the run ends here, and nothing was saved after it.\n"
            f"  {trusted} To do: leave the named hosts out and have them tested; then run "
            "the same command again."
        )

    def _list_saved(self) -> Sequence[int]:
        self._settle()
        return self._session.directory.checkpoint_steps()

    def _name_checkpoint(self) -> str:
        saved = self._list_saved()
        return f"The last checkpoint is that of step {saved[-1]}" if saved else "No checkpoint was saved yet"

    def _event(self, name: str, step: int, **facts: Any) -> None:
        self._session.recorder.event(name, step=step, **facts)


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
