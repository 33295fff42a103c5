"""What the times of a collective mean: algorithm and bus bandwidth, cost by size, slow pairs of ranks.

Invariants:
- Plain arithmetic, without torch: the same numbers on every rank, whatever clock they come from.
- Sizes are counted as nccl-tests counts them: all bytes of one rank's larger buffer, so for all_gather and
  reduce_scatter those of the whole, not of one rank's part.

Source of the factors: nccl-tests, doc/PERFORMANCE.md, https://github.com/NVIDIA/nccl-tests
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

# --- bandwidths

BUS_FACTORS: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
        "all_gather": lambda ranks: (ranks - 1) / ranks,
        "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
        "broadcast": lambda ranks: 1.0,
        "reduce": lambda ranks: 1.0,
        "all_to_all": lambda ranks: (ranks - 1) / ranks,
        "send_recv": lambda ranks: 1.0,
    }
)
"""Bus bandwidth over algorithm bandwidth by collective, as a function of the number of ranks: how often a byte has to
cross the slowest link, so that the result can be compared with what that link is rated at."""

DIVIDED = frozenset(("all_gather", "reduce_scatter", "all_to_all"))
"""Collectives whose size is the sum of one part for each rank."""

ELEMENT_BYTES = 4
"""Elements are fp32."""

PART_BYTES = 16
"""The part of a rank is a multiple of this, as in nccl-tests."""


def list_sizes(first: int, last: int, factor: float = 4.0) -> tuple[int, ...]:
    """Sizes from the first to the last, each `factor` times the one before."""
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(round(sizes[-1] * factor))
    return tuple(sizes)


def round_size(collective: str, size: int, ranks: int) -> int:
    """The bytes that are really sent for a requested size: a whole number of elements, and of parts where each rank has
    one; at least one of these."""
    unit = PART_BYTES * ranks if collective in DIVIDED else ELEMENT_BYTES
    return max(1, size // unit) * unit


def algorithm_bandwidth(size: float, seconds: float) -> float:
    """Bytes per second that a caller sees: size over time."""
    return size / seconds


def bus_bandwidth(collective: str, size: float, seconds: float, ranks: int) -> float:
    """Bytes per second over the busiest link, one direction."""
    return algorithm_bandwidth(size, seconds) * BUS_FACTORS[collective](ranks)


def format_rate(rate: float, unit: float = 1e9) -> str:
    """A rate in a unit (GB/s) with three digits, from 100 on without any after the point."""
    return f"{rate / unit:.3g}" if rate < 100 * unit else f"{rate / unit:.0f}"


# --- cost by size


@dataclass(frozen=True)
class CostFit:
    """Seconds of a call are `alpha_s` + `beta_s_per_byte` x bytes (the model of Hockney, 1994)."""

    alpha_s: float
    beta_s_per_byte: float

    def predict(self, size: float) -> float:
        """Seconds of a call with so many bytes."""
        return self.alpha_s + self.beta_s_per_byte * size


_ROUNDS = 60
_LEAST_RESIDUAL = 1e-9


def fit_cost(points: Iterable[tuple[float, float]]) -> CostFit | None:
    """The cost that fits pairs of bytes and seconds best; None for fewer than two sizes.

    The sum of the absolute relative errors is least, so that small and large sizes count alike and a point that was
    disturbed does not pull the others: iteratively reweighted least squares on prediction / time - 1. Neither
    coefficient is negative.
    """
    rows = [(1 / seconds, size / seconds) for size, seconds in points]
    if len({slope / start for start, slope in rows}) < 2:
        return None
    weights, fit = [1.0] * len(rows), CostFit(0.0, 0.0)
    for _ in range(_ROUNDS):
        fit = _solve(rows, weights)
        errors = [fit.alpha_s * start + fit.beta_s_per_byte * slope - 1 for start, slope in rows]
        weights = [1 / max(abs(error), _LEAST_RESIDUAL) for error in errors]
    return fit


def _solve(rows: Sequence[tuple[float, float]], weights: Sequence[float]) -> CostFit:
    """Weighted least squares of two coefficients that are not negative, for a target of 1 in each row."""
    moments = [(w * a * a, w * a * b, w * b * b, w * a, w * b) for (a, b), w in zip(rows, weights, strict=True)]
    aa, ab, bb, a1, b1 = (sum(column) for column in zip(*moments, strict=True))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (bb * a1 - ab * b1) / determinant, (aa * b1 - ab * a1) / determinant
        if alpha >= 0 and beta >= 0:
            return CostFit(alpha, beta)
    only_alpha, only_beta = CostFit(a1 / aa, 0.0), CostFit(0.0, b1 / bb)
    # What is left of the sum of squares is least where the projection on the one column is largest.
    return only_alpha if a1 * a1 / aa >= b1 * b1 / bb else only_beta


def left_out_error(points: Sequence[tuple[float, float]]) -> float | None:
    """Median relative error of each size predicted from the others, those at the ends aside, which would be
    extrapolated; None for fewer than four sizes."""
    ordered = sorted(points)
    errors = []
    for index in range(1, len(ordered) - 1):
        size, seconds = ordered[index]
        if (fit := fit_cost([*ordered[:index], *ordered[index + 1 :]])) is not None:
            errors.append(abs(fit.predict(size) / seconds - 1))
    return median(errors) if len(ordered) >= 4 and errors else None


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of the values does not exceed (0.99: the 99th percentile)."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(len(ordered) * share * 1e6) // 10**6) - 1)]


# --- pairs

SLOW = 1.5
"""A pair that takes more than so many times the median of all pairs of its kind is slow."""

LEAST_PAIRS = 3
"""Among fewer pairs none is said to be slow: each may be the slow one."""


@dataclass(frozen=True)
class PairTime:
    """Seconds of an exchange between two ranks, `first` < `second`, of `size` bytes each way at once: the 10th
    percentile of several, on the slower rank. `kind` is "within" a node or "between" nodes."""

    first: int
    second: int
    kind: str
    size: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second, one direction."""
        return self.size / self.seconds


def list_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Rounds in which each of `count` meets each other once, all pairs of a round at the same time (circle method)."""
    seats: list[int | None] = list(range(count)) + [None] * (count % 2)
    rounds = []
    for _ in range(max(0, len(seats) - 1)):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def usual_seconds(pairs: Iterable[PairTime], kind: str) -> float:
    """The median time of the pairs of a kind; 0 for none."""
    return median([pair.seconds for pair in pairs if pair.kind == kind] or [0.0])


def find_slow(pairs: Sequence[PairTime]) -> list[PairTime]:
    """The pairs that take more than SLOW times the median of their kind, the slowest first."""
    found = []
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        alike = [pair for pair in pairs if pair.kind == kind]
        usual = usual_seconds(alike, kind)
        found += [pair for pair in alike if len(alike) >= LEAST_PAIRS and pair.seconds > SLOW * usual]
    return sorted(found, key=lambda pair: -pair.seconds)


def find_slow_ranks(pairs: Sequence[PairTime], slow: Sequence[PairTime]) -> list[int]:
    """The ranks whose every pair of a kind is slow, of two at least: what they share is slow, not a link of a pair."""
    found = []
    for rank in sorted({rank for pair in slow for rank in (pair.first, pair.second)}):
        for kind in ("within", "between"):
            own = [pair for pair in pairs if pair.kind == kind and rank in (pair.first, pair.second)]
            if len(own) >= 2 and all(pair in slow for pair in own) and rank not in found:
                found.append(rank)
    return found
