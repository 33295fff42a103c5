"""The numbers of a scaling study: step times with intervals, where warm-up ends, and what does not shrink.

Invariants:
- The same times give the same numbers: every draw has a fixed seed.
- An interval is of 95 %. It holds what varies between steps and between repeats, and for a fit also the misfit that
  these do not explain; where no size has two runs, what varies between runs is not in it.
- A model is fitted only to more points than it has parameters. Sizes are relative to the smallest point.

Strong scaling (the global work stays) is fitted by Amdahl's law, T(n) = a + b/n: the serial share is a/(a + b) (G. M.
Amdahl, AFIPS 1967). Weak scaling (the work of a rank stays) is fitted by Gustafson's law, S(n) = s + (1 - s) n for
the scaled speed-up (J. L. Gustafson, CACM 31, 1988). Communication adds c log2(n) to either step: the latencies of a
tree or of recursive doubling (R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19, 2005) under Hockney's alpha-beta model
(R. W. Hockney, Parallel Computing 20, 1994). Its bandwidth term for an all-reduce, 2 (n - 1)/n m beta, is a constant
and a part in 1/n, so a and b hold it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DRAWS = 1000
LEVEL = 0.95
MOST_STEPS = 2000
"""Steps of a repeat that are drawn from, the last ones: more do not narrow an interval that matters."""

# --- estimates


@dataclass(frozen=True)
class ScaleEstimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


def find_estimate(value: float, draws: Any) -> ScaleEstimate:
    """The interval of a number from its draws; never without the number itself."""
    import numpy as np

    low, high = (float(each) for each in np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    return ScaleEstimate(value, min(low, value), max(high, value))


# --- steps of one run


def find_warm_up(times: Sequence[float]) -> int:
    """How many first steps are left out: compilation, caches and clocks settle in these.

    The first cut, in the first half, after which the standard error of the mean is at most twice that after the best
    one; MSER (K. P. White, Simulation 69, 1997) takes the best, which of few steps that are all alike leaves out many.
    """
    import numpy as np

    values = np.asarray(times, dtype=float)
    count = len(values)
    if count < 4:
        return 0
    cuts = np.arange(count // 2 + 1)
    left = count - cuts
    sums, squares = (np.concatenate([[0.0], np.cumsum(each)]) for each in (values, values**2))
    means = (sums[-1] - sums[cuts]) / left
    spread = np.maximum((squares[-1] - squares[cuts]) / left - means**2, 0.0)
    errors = spread / left
    return int(np.argmax(errors <= 4 * errors.min()))


@dataclass(frozen=True)
class PointTimes:
    """Seconds of a step at one size: the mean over repeats of their medians, and its draws of shape (DRAWS,)."""

    size: float
    seconds: float
    draws: Any

    @property
    def estimate(self) -> ScaleEstimate:
        return find_estimate(self.seconds, self.draws)


def measure_points(repeats: Mapping[float, Sequence[Sequence[float]]], seed: int = 1) -> list[PointTimes]:
    """The step times of all sizes from the steps of each of their repeats (size -> repeats), without their warm-up.

    Repeats differ by what varies between runs and within them. Relative to its mean, their spread is taken to be that
    of all sizes: two or three repeats of one size show little of it, and those of four sizes have 4 (R - 1) degrees of
    freedom. The logarithms of the times are drawn from a normal distribution whose variance is drawn as well, which is
    Student's (Biometrika 6, 1908). Without repeats, steps are drawn in blocks of consecutive ones, as these are alike
    (Hall, Horowitz and Jing 1995).
    """
    import numpy as np

    medians = {size: np.array([float(np.median(each)) for each in runs]) for size, runs in repeats.items()}
    freedom = sum(len(each) - 1 for each in medians.values())
    rng = np.random.default_rng(seed)
    squares = sum(float(np.square(np.log(each) - np.log(each).mean()).sum()) for each in medians.values())
    spreads = np.sqrt(squares / rng.chisquare(freedom, DRAWS)) if freedom else None
    points = []
    for size, each in medians.items():
        own, value = np.random.default_rng([seed, round(size * 1000)]), float(each.mean())
        if spreads is None:
            draws = _draw_medians(np.asarray(repeats[size][0], dtype=float)[-MOST_STEPS:], own)
        else:
            draws = value * np.exp(spreads * own.standard_normal(DRAWS) / math.sqrt(len(each)))
        points.append(PointTimes(size, value, draws))
    return points


def _draw_medians(values: Any, rng: Any) -> Any:
    import numpy as np

    count = len(values)
    block = max(1, min(count // 4 or 1, round(2 * count ** (1 / 3))))
    starts = rng.integers(0, count - block + 1, (DRAWS, -(-count // block)))
    places = (starts[:, :, None] + np.arange(block)).reshape(DRAWS, -1)[:, :count]
    return np.median(values[places], axis=1)


# --- speed-up and efficiency


def find_speed_up(base: PointTimes, point: PointTimes, work: float = 1.0) -> ScaleEstimate:
    """How many times the work of a second: `work` is that of a step at the point by that at the base."""
    if point is base:
        return ScaleEstimate(1.0, 1.0, 1.0)
    return find_estimate(work * base.seconds / point.seconds, work * base.draws / point.draws)


def find_efficiency(base: PointTimes, point: PointTimes, work: float = 1.0) -> ScaleEstimate:
    """The speed-up by the ideal one, which is the ratio of sizes."""
    up, ideal = find_speed_up(base, point, work), point.size / base.size
    return ScaleEstimate(up.value / ideal, up.low / ideal, up.high / ideal)


# --- fits


@dataclass(frozen=True)
class _LinearFit:
    """Coefficients of a model that is linear in them, their draws (DRAWS, k), and the root mean square of the relative
    residuals."""

    values: Any
    draws: Any
    misfit: float


def _fit_linear(columns: Sequence[Any], points: Sequence[PointTimes]) -> _LinearFit:
    """Least squares of relative residuals. Misfit beyond the noise of the points is added to the draws."""
    import numpy as np

    times = np.array([each.seconds for each in points])
    noise = np.stack([each.draws for each in points], axis=1) / times
    design = np.stack(columns, axis=1) / times[:, None]
    inverse = np.linalg.pinv(design)
    values = inverse @ np.ones(len(points))
    residuals = 1.0 - design @ values
    free = len(points) - len(columns)
    draws = noise @ inverse.T
    beyond = float((residuals**2).sum()) / free - float(noise.var(axis=0).mean()) if free else 0.0
    if beyond > 0:
        rng = np.random.default_rng(7)
        draws = draws + math.sqrt(beyond) * rng.standard_normal((DRAWS, len(points))) @ inverse.T
    return _LinearFit(values, draws, float(np.sqrt((residuals**2).mean())))


@dataclass(frozen=True)
class AmdahlFit:
    """T(n) = a + b/n. `share`: a/(a + b), of a step at the smallest size; `serial_s`: a. `misfit`: root mean square of
    the relative residuals."""

    share: ScaleEstimate
    serial_s: ScaleEstimate
    parallel_s: ScaleEstimate
    misfit: float

    @property
    def most_speed_up(self) -> float:
        """What no number of ranks exceeds; infinite without a serial share."""
        return 1 / self.share.value if self.share.value > 0 else math.inf

    def estimate_s(self, n: float) -> float:
        """Seconds of a step at n times the smallest size."""
        return self.serial_s.value + self.parallel_s.value / n


def fit_amdahl(points: Sequence[PointTimes]) -> AmdahlFit | None:
    """Of strong scaling; None for fewer than three sizes."""
    import numpy as np

    if len(points) < 3:
        return None
    n = _relative(points)
    found = _fit_linear([np.ones(len(n)), 1 / n], points)

    def part(values: Any) -> Any:
        return np.clip(values[..., 0] / (values[..., 0] + values[..., 1]), 0.0, 1.0)

    share = find_estimate(float(part(found.values)), part(found.draws))
    return AmdahlFit(share, _coefficient(found, 0), _coefficient(found, 1), found.misfit)


@dataclass(frozen=True)
class GustafsonFit:
    """S(n) = s + (1 - s) n: `share` is s, of the time at each size."""

    share: ScaleEstimate
    misfit: float

    def estimate_speed_up(self, n: float) -> float:
        """The scaled speed-up at n times the smallest size."""
        return self.share.value + (1 - self.share.value) * n


def fit_gustafson(points: Sequence[PointTimes], work: Sequence[float]) -> GustafsonFit | None:
    """Of weak scaling; `work`: that of a step at each point by that of the first. None for fewer than three sizes.

    Least squares of 1 - S(n)/n, the loss of efficiency, in 1 - 1/n.
    """
    import numpy as np

    if len(points) < 3:
        return None
    n, base = _relative(points), points[0]
    drop = 1 - 1 / n
    scale = np.asarray(work) / n
    losses = 1 - scale * base.seconds / np.array([each.seconds for each in points])
    drawn = 1 - scale * np.stack([base.draws / each.draws for each in points], axis=1)
    value = float(drop @ losses / (drop @ drop))
    draws = drawn @ drop / (drop @ drop)
    residuals = losses - value * drop
    free = len(points) - 2  # the first point is 0 by definition
    beyond = float((residuals**2).sum()) / free - float(drawn[:, 1:].var(axis=0).mean())
    if beyond > 0:
        normal = np.random.default_rng(7).standard_normal(DRAWS)
        draws = draws + math.sqrt(beyond / float(drop @ drop)) * normal
    misfit = float(np.sqrt((residuals[1:] ** 2).mean()))
    return GustafsonFit(find_estimate(min(max(value, 0.0), 1.0), np.clip(draws, 0.0, 1.0)), misfit)


@dataclass(frozen=True)
class CommunicationFit:
    """T(n) = a + b/n + c log2(n), without the part in 1/n for weak scaling. `doubling_s`: c, what each doubling adds;
    `fixed_s`: a; `shrinking_s`: b, None for weak scaling."""

    fixed_s: ScaleEstimate
    shrinking_s: ScaleEstimate | None
    doubling_s: ScaleEstimate
    misfit: float

    @property
    def is_seen(self) -> bool:
        """Whether the interval of c leaves out 0, from above."""
        return self.doubling_s.low > 0

    def estimate_s(self, n: float) -> float:
        """Seconds of a step at n times the smallest size."""
        shrinking = self.shrinking_s.value / n if self.shrinking_s is not None else 0.0
        return self.fixed_s.value + shrinking + self.doubling_s.value * math.log2(n)


def fit_communication(points: Sequence[PointTimes], *, weak: bool) -> CommunicationFit | None:
    """None for fewer than four sizes of strong scaling, three of weak."""
    import numpy as np

    if len(points) < (3 if weak else 4):
        return None
    n = _relative(points)
    columns = [np.ones(len(n)), *([] if weak else [1 / n]), np.log2(n)]
    found = _fit_linear(columns, points)
    shrinking = None if weak else _coefficient(found, 1)
    return CommunicationFit(_coefficient(found, 0), shrinking, _coefficient(found, len(columns) - 1), found.misfit)


def _relative(points: Sequence[PointTimes]) -> Any:
    import numpy as np

    return np.array([each.size for each in points]) / points[0].size


def _coefficient(found: _LinearFit, place: int) -> ScaleEstimate:
    return find_estimate(float(found.values[place]), found.draws[:, place])
