"""The guard: what is looked at in a step, and what follows where numbers or machine are not sound.

Invariant: decided from numbers that are the same on every rank, so that all ranks skip, go on or end together; weights
that a rank could not vouch for are never saved. This module must not run passes (that is `train.guards.repeat`) nor
change weights.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardway.data.loader import Batch
from shardway.parallel.apply import ParallelModel
from shardway.parallel.replicas import compare_replicas
from shardway.runfile.guard import GuardSection
from shardway.train.guards.repeat import Corruption, GuardChecks, Watched
from shardway.train.guards.spike import Spikes, read_spikes
from shardway.train.guards.words import (
    Mismatch,
    Skipped,
    refuse_machine,
    refuse_replicas,
    refuse_skips,
    refuse_weights,
)
from shardway.train.session import Session
from shardway.train.step import StepResult
from shardway.units import Scale


@dataclass(frozen=True)
class BackPlan:
    """How a run goes back before a spike, as [guard] has it: in steps, global batches, and times in a run."""

    spike_steps: int
    spike_margin: int
    max_left_out: int
    max_roll_backs: int


@dataclass(frozen=True)
class GuardPlan:
    """What a run asks of its guard; steps, None: never. `repeats`: numbers that are not finite change no weights.

    `back`: how a run goes back before a spike, None where a spike is only told.
    """

    repeats: bool = False
    stops: bool = False
    max_skips: int = 3
    spike: float | None = None
    back: BackPlan | None = None
    probe_every: int | None = None
    compare_every: int | None = None


def plan_guard(session: Session, scale: Scale) -> GuardPlan:
    """That of a run; a script that owns its loop has its passes run once, unless it asks for more."""
    section, torch_steps = session.resolved.values.guard, session.resolved.values.train.engine == "torch"
    repeats = section.non_finite != "off" and not session.leaves_alone("guard.non_finite")
    return GuardPlan(
        repeats=repeats and torch_steps,
        stops=section.non_finite == "stop",
        max_skips=section.max_skips,
        spike=None if section.spike == "off" else float(section.spike),
        back=_plan_back(section) if section.on_spike == "roll_back" else None,
        probe_every=_in_steps(section, "probe_every", scale),
        compare_every=_in_steps(section, "compare_every", scale),
    )


def _plan_back(section: GuardSection) -> BackPlan:
    return BackPlan(section.spike_steps, section.spike_margin, section.max_left_out, section.max_roll_backs)


def _in_steps(section: GuardSection, name: str, scale: Scale) -> int | None:
    every = getattr(section, name)
    return None if every == "off" else max(1, every.in_steps(scale))


@dataclass(frozen=True)
class GuardCounters:
    """Steps that were skipped, those among them since the last that was not, and the last step after which all copies
    of the weights were compared and equal (-1: none)."""

    skipped: int = 0
    in_a_row: int = 0
    equal_at: int = -1


@dataclass
class Guard:
    """One rank's view of the guard; `is_new`: no step was taken in this process yet.

    `settle` waits for a save that is under way, so that an error names the last checkpoint there will be.
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
        """Go on with the counters of a manifest; one of before the guard has none."""
        self.counters = GuardCounters(**{name: int(number) for name, number in numbers.get("guard", {}).items()})
        self.spikes = read_spikes(numbers.get("spikes", {}) if self.plan.back is not None else {})

    def watch(self, step: int, *, scales_loss: bool) -> GuardChecks | None:
        """What to look at in the step to come. fp16 has a way of its own with gradients that overflow.

        The first passes of a process are not probed: they settle in which order DDP adds up.
        """
        probe = _is_due(self.plan.probe_every, step) and not self.is_new
        repeat = self.plan.repeats and not scales_loss
        return GuardChecks(repeat, probe) if repeat or probe else None

    def look_at(self, step: int, result: StepResult, batch: Batch) -> None:
        """What a finished step says. Raises JobError on every rank where the run cannot go on."""
        self.is_new = False
        watched = result.watched
        if watched is not None and watched.corruption is not None:
            self._tell_corruption(step, watched.corruption)
        if watched is not None and watched.first is not None:
            self._tell_first(step, result, watched, batch)
        elif result.targets and not result.skipped and not _is_finite(result):
            raise refuse_weights(step, result, self._saved())
        elif not result.skipped:
            self.counters = replace(self.counters, in_a_row=0)
        if self.plan.spike is not None:
            self._look_for_spikes(step, result, self.plan.spike)
        if _is_due(self.plan.compare_every, step):
            self._compare(step)

    def _tell_corruption(self, step: int, corruption: Corruption) -> None:
        self._event("corruption", step, **asdict(corruption))
        if not corruption.decided:
            raise refuse_machine(step, corruption, self._saved())

    def _tell_first(self, step: int, result: StepResult, watched: Watched, batch: Batch) -> None:
        """Passes that were not finite: a fault that has passed, or a step without an update."""
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
            skipped = Skipped(step, everyone, watched.repeated, self.counters.in_a_row)
            raise refuse_skips(skipped, result, self._describe_limit(), self._saved())

    def _gather_ids(self, batch: Batch) -> list[list[int]]:
        """The samples of the step, one list for each share of the global batch."""
        shares = dict(self.session.ranks.gather((self.session.mesh.data_rank, [int(each) for each in batch.ids])))
        return [shares[share] for share in sorted(shares)]

    def _describe_limit(self) -> str:
        name = "guard.non_finite" if self.plan.stops else "guard.max_skips"
        value = '"stop"' if self.plan.stops else str(self.plan.max_skips)
        return f"{name} = {value}, {self.session.resolved.origins[name]}"

    def _look_for_spikes(self, step: int, result: StepResult, threshold: float) -> None:
        """Told by rank 0 from numbers that all ranks have."""
        values = {"loss": result.loss, "grad_norm": result.grad_norm}
        found = self.spikes.find(values, threshold)
        self.spikes = self.spikes.after(step, values, found)
        for name, spike in found.items():
            self._event("spike", step, of=name, **asdict(spike))

    def _compare(self, step: int) -> None:
        """Right after a step and so before its save: a checkpoint of the same step holds what was compared."""
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
        mismatch = Mismatch(step, differences, list(dict.fromkeys(hosts[rank] for rank in named)), equal_at)
        self._event(
            "replica_differs",
            step,
            parameters=[each.parameter for each in differences],
            ranks=mismatch.ranks,
            hosts=mismatch.hosts,
            decided=all(each.decided for each in differences),
            equal_at=equal_at,
        )
        raise refuse_replicas(mismatch, self._saved())

    def _saved(self) -> Sequence[int]:
        self.settle()
        return self.session.directory.checkpoint_steps()

    def _event(self, name: str, step: int, **facts: Any) -> None:
        self.session.recorder.event(name, step=step, **facts)


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _is_finite(result: StepResult) -> bool:
    return math.isfinite(result.loss) and math.isfinite(result.grad_norm)
