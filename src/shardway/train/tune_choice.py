"""What `train.tune` chooses, from what was measured: the order of the tries, comparisons, words.

Invariants:
- The choice is a function of the measured tries alone, and so are the words that say it. No clock and no device is
  looked at, and nothing is run here.
- Values that are kept have the losses of the first ones on the same weights and batches. A value must win by more than
  `MARGIN` and by more than the times vary; otherwise the one that was tried before it stays. What there was no time for
  stays as it was resolved.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardway.resolve.rules.formats import COMPILE, COMPUTE
from shardway.resolve.rules.tuning import MICRO

Values = Mapping[str, Any]
"""Key of `TUNED` that nothing sets -> a value."""

MARGIN = 0.02
"""How much faster a value must be than the fastest so far."""

CHECKED, NEAR, NEAR_IN_FLOAT8 = 6, 1e-2, 5e-2
"""The first steps whose losses are compared, and by how much they may differ relatively: by the rounding of bf16, and
of float8 (E4M3), which has four bits fewer."""


@dataclass(frozen=True)
class TrialResult:
    """A try: the median seconds of a step on the slowest rank over `steps` steps and how far it is known, as a part of
    it, after `start_s` seconds in which the model was made, compiled and warmed up; the losses of all its steps.
    `failure`: why its values are left out. `untried`: why it was not measured; then its values are as good as unknown.
    """

    values: Values
    seconds: float = 0.0
    spread: float = 0.0
    steps: int = 0
    start_s: float = 0.0
    losses: tuple[float, ...] = ()
    failure: str = ""
    untried: str = ""

    @property
    def counts(self) -> bool:
        return not self.failure and not self.untried

    def as_json(self) -> dict[str, Any]:
        """For the event: times in milliseconds, the losses that are compared."""
        shown = {"failure": self.failure, "untried": self.untried}
        times = {"ms": self.seconds * 1e3, "spread": self.spread, "steps": self.steps, "start_s": self.start_s}
        return {"values": dict(self.values), **times, "losses": list(self.losses[:CHECKED]), **shown}


@dataclass(frozen=True)
class TrialComparison:
    """A try in which `key` has another value than in the fastest so far ("": the first try)."""

    key: str
    tried: TrialResult
    against: TrialResult | None = None

    @property
    def gain(self) -> float:
        """How many times as fast it is; 0 where that is not known."""
        known = self.tried.counts and self.against is not None
        return self.against.seconds / self.tried.seconds if known and self.against is not None else 0.0

    @property
    def won(self) -> bool:
        if self.against is None:
            return self.tried.counts
        return self.gain > 1 + max(MARGIN, self.spread)

    @property
    def spread(self) -> float:
        """How far both times are known, as a part of them."""
        return self.tried.spread + (self.against.spread if self.against is not None else 0.0)

    @property
    def undecided(self) -> bool:
        """Whether it would have won if the times varied less."""
        return not self.won and self.gain > 1 + MARGIN

    def describe_loss(self) -> str:
        """Why it has not won: "0.97 times as fast", "out of memory"."""
        if self.tried.failure:
            return self.tried.failure
        sure = f", which is not sure: the times vary by {100 * self.spread:.0f} %" if self.undecided else ""
        return f"{self.gain:.2f} times as fast{sure}"


@dataclass(frozen=True)
class TuneSpace:
    """What may be tried: the first values, then for each key its other values in one or two directions, each as long as
    they win; a direction that has won is the only one. `usual`: the values without any measurement."""

    first: Values
    axes: Sequence[tuple[str, Sequence[Sequence[Any]]]]
    usual: Values = field(default_factory=dict)


def search(space: TuneSpace) -> Generator[dict[str, Any], TrialResult, TuneChoice]:
    """Yields the values to try, is sent what was measured, and returns the choice."""
    done: list[TrialComparison] = []

    def fastest() -> TrialResult | None:
        return next((each.tried for each in reversed(done) if each.won), None)

    def judge(key: str, tried: TrialResult) -> bool:
        first = next((each.tried for each in done if each.tried.counts), None)
        if tried.counts and (apart := compare_losses(tried, first)):
            tried = replace(tried, failure=apart)
        done.append(TrialComparison(key, tried, fastest()))
        return done[-1].won

    judge("", (yield dict(space.first)))
    for key, directions in space.axes:
        if key == MICRO and fastest() is None:  # more than what has failed would fail too
            directions = directions[1:]
        for direction in directions:
            wins = 0
            for value in direction:
                if not judge(key, (yield {**(fastest() or done[0].tried).values, key: value})):
                    break
                wins += 1
            if wins:
                break
    return TuneChoice(space, tuple(done))


def compare_losses(tried: TrialResult, first: TrialResult | None) -> str:
    """How the losses of a try differ from those of the first that counts; "" if by no more than rounding does."""
    expected = tried.losses if first is None else first.losses
    near = NEAR_IN_FLOAT8 if tried.values.get(COMPUTE) == "float8" else NEAR
    for step, (loss, other) in enumerate(zip(tried.losses[:CHECKED], expected, strict=False), start=1):
        if not math.isfinite(loss):
            return f"the loss of step {step} is not finite"
        if not math.isclose(loss, other, rel_tol=near):
            return f"the loss of step {step} is {loss:.5g} in place of {other:.5g}"
    return ""


_NAMES = {(COMPILE, "off"): "eager", (COMPILE, "blocks"): "compiled blocks"}


@dataclass(frozen=True)
class TuneChoice:
    """What follows from all tries."""

    space: TuneSpace
    comparisons: tuple[TrialComparison, ...]

    @property
    def values(self) -> dict[str, Any]:
        """The fastest values that count; of a key that there was no time for, the usual one."""
        best = next((each.tried.values for each in reversed(self.comparisons) if each.won), self.space.usual)
        return {**self.space.usual, **{key: value for key, value in best.items() if self.of(key)}}

    @property
    def decided(self) -> bool:
        """Whether another start would find the same: there was time for all, and no time varied too much."""
        return not any(each.undecided or (each.key and each.tried.untried) for each in self.comparisons)

    def of(self, key: str) -> list[TrialComparison]:
        """What another value of a key was compared with, without tries that there was no time for."""
        return [each for each in self.comparisons if each.key == key and not each.tried.untried]

    def list_untried(self) -> dict[str, str]:
        """Names of values that there was no time for -> why."""
        missed = [each for each in self.comparisons if each.key and each.tried.untried]
        return {self.name(each.key, each.tried.values): each.tried.untried for each in missed}

    def describe(self) -> str:
        """ "compiled blocks (1.24 times eager), micro-batch 8 (1.06 times 4)"; "" if nothing was compared."""
        first, keys = self.comparisons[0].tried, [key for key, _ in self.space.axes]
        parts = [f"{self.name(keys[0], first.values)}: {first.failure}"] if first.failure else []
        parts += [f"{self.name(key, self.values)} ({self.explain(key)})" for key in keys if self.of(key)]
        return ", ".join(parts)

    def explain(self, key: str) -> str:
        """Why the value of a key is chosen: "1.24 times eager", or "8: 0.97 times as fast, 2: out of memory"."""
        tries = self.of(key)
        won, start = [each for each in tries if each.won], tries[0].against
        if won:
            best = won[-1].tried
            if start is None:
                return "the first that could be measured"
            return f"{start.seconds / best.seconds:.2f} times {name_value(key, start.values[key])}"
        return ", ".join(f"{name_value(key, each.tried.values[key])}: {each.describe_loss()}" for each in tries)

    def name(self, key: str, values: Values) -> str:
        """A value with its noun: "compiled blocks", "micro-batch 8"."""
        return f"{'micro-batch ' if key == MICRO else ''}{name_value(key, values[key])}"


def name_value(key: str, value: Any) -> str:
    """A value in a sentence: "compiled blocks", "8", "bf16"."""
    return _NAMES.get((key, value), str(value))
