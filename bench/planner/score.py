"""Score predictions against what was measured: python bench/planner/score.py ROWS.csv OUT.csv

Prints, by source and in total: errors of step time and of peak memory, right answers on what fits, order and regret
inside sweeps, and how many measurements the interval holds. OUT.csv is what predict.py wrote.
"""

from __future__ import annotations

import argparse
import collections
import csv
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import measured
import rows

LEAST_SWEEP = 5
GIB = 2**30

Row = Mapping[str, str]


@dataclass(frozen=True)
class Scored:
    """A row, what was measured and what was said."""

    row: Row
    measured: measured.Measured
    said: Row

    @property
    def time_error(self) -> float | None:
        """Predicted over measured, less 1."""
        if not self.measured.step_s or not self.said.get("step_time_s"):
            return None
        return float(self.said["step_time_s"]) / self.measured.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """The same for the kind of memory that was measured."""
        if not self.measured.memory_bytes or not self.said.get("mem_allocated_gib"):
            return None
        return float(self.said[f"mem_{self.measured.memory_kind}_gib"]) * GIB / self.measured.memory_bytes - 1


def is_core(row: Row) -> bool:
    """Rows that count: the balanced subset, complete or nearly so; all rows of a file that does not tell them apart."""
    return row.get("core", "1") == "1" and (row.get("quality") or "A") in "AB"


def source_of(row: Row) -> str:
    """Where a row is from."""
    return row.get("source_id") or "unnamed"


@dataclass(frozen=True)
class Level:
    """Sizes of errors: median, ninth decile, mean, and the part of them that is more than a tenth too low."""

    median: float
    decile: float
    mean: float
    low: float


def level_of(errors: Sequence[float]) -> Level:
    """What is reached; of one error or more."""
    sizes = sorted(map(abs, errors))
    decile = sizes[math.ceil(0.9 * len(sizes)) - 1]
    low = sum(error < -0.1 for error in errors) / len(errors)
    return Level(statistics.median(sizes), decile, statistics.mean(sizes), low)


def describe_errors(errors: Sequence[float]) -> str:
    """The level in a line."""
    if not errors:
        return "no rows"
    level = level_of(errors)
    return (
        f"{len(errors):4d} rows  median {level.median:6.1%}  p90 {level.decile:6.1%}  "
        f"mean {level.mean:6.1%}  too low by a tenth {level.low:5.1%}"
    )


def main() -> None:
    """Read both files and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows")
    parser.add_argument("predictions")
    arguments = parser.parse_args()
    scored = read_scored(arguments.rows, arguments.predictions)
    print("\n".join(render(scored)))


def read_scored(rows_path: str, predictions_path: str) -> list[Scored]:
    """Rows with their predictions; those that could not be priced are left out."""
    with open(predictions_path, newline="", encoding="utf-8") as file:
        said = {row["id"]: row for row in csv.DictReader(file)}
    found = []
    with open(rows_path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                question = rows.read_question(row)
            except rows.Missing:
                continue
            result = measured.read_measured(row, question.case, question.machine)
            if prediction := said.get(row.get("id") or ""):
                found.append(Scored(row, result, prediction))
    return found


def render(scored: Sequence[Scored]) -> Iterator[str]:
    """All tables."""
    core = [each for each in scored if is_core(each.row)]
    yield from _render_errors("step time", core, "time_error")
    yield ""
    yield from _render_errors("peak memory", core, "memory_error")
    yield ""
    yield _render_fits("fits or not, core", core)
    yield _render_fits("fits or not, all rows", scored)
    yield _render_sweeps(scored)
    yield _render_interval("interval of time", core, "time_low", "time_high", lambda each: each.measured.step_s)
    yield _render_interval("interval of memory", core, "mem_low", "mem_high", lambda each: each.measured.memory_bytes)


def errors_by_source(scored: Sequence[Scored], attribute: str) -> dict[str, list[float]]:
    """ "time_error" or "memory_error" of the rows that have it."""
    found = collections.defaultdict(list)
    for each in scored:
        error = getattr(each, attribute)
        if error is not None:
            found[source_of(each.row)].append(error)
    return dict(found)


def _render_errors(title: str, core: Sequence[Scored], attribute: str) -> Iterator[str]:
    by_source = errors_by_source(core, attribute)
    yield f"{title}: predicted over measured, less 1"
    for source, errors in sorted(by_source.items()):
        yield f"  {source:22s}{describe_errors(errors)}"
    yield f"  {'all':22s}{describe_errors([error for errors in by_source.values() for error in errors])}"
    means = [statistics.mean(map(abs, errors)) for errors in by_source.values()]
    medians = [statistics.median(map(abs, errors)) for errors in by_source.values()]
    if means:
        over = f"mean of means {statistics.mean(means):.1%}, of medians {statistics.mean(medians):.1%}"
        yield f"  over {len(means)} sources: {over}"


def _render_fits(title: str, scored: Sequence[Scored]) -> str:
    """Rows of the sources that tell of running out of memory often enough."""
    counts = collections.Counter(source_of(each.row) for each in scored if each.measured.out_of_memory)
    told = [each for each in scored if counts[source_of(each.row)] >= 20]
    missed = [each for each in told if each.measured.out_of_memory and each.said["fits"] == "1"]
    false = [each for each in told if not each.measured.out_of_memory and each.said["fits"] == "0"]
    real = sum(each.measured.out_of_memory for each in told)
    if not told:
        return f"{title}: no source tells of running out of memory"
    right = 1 - (len(missed) + len(false)) / len(told)
    return f"{title}: {right:.1%} of {len(told)} right; missed {len(missed)} of {real}; false alarms {len(false)}"


@dataclass(frozen=True)
class Order:
    """How layouts of one model are told apart, sweep by sweep: rank correlations, and what a wrong choice costs."""

    correlations: Sequence[float]
    regrets: Sequence[float]


def order_of(scored: Sequence[Scored]) -> Order:
    """Of all sweeps of five layouts or more; a correlation is left out where all measurements are alike."""
    sweeps = collections.defaultdict(list)
    for each in scored:
        if each.time_error is not None and (each.row.get("quality") or "A") in "AB":
            key = ("source_id", "group", "model", "gpu", "n_gpus", "seq", "gbs")
            sweeps[tuple(each.row.get(name) or "" for name in key)].append(each)
    long = [sweep for sweep in sweeps.values() if len(sweep) >= LEAST_SWEEP]
    orders = [spearman([float(e.said["step_time_s"]) for e in s], [e.measured.step_s or 0.0 for e in s]) for s in long]
    return Order([order for order in orders if not math.isnan(order)], [_regret(sweep) for sweep in long])


def _render_sweeps(scored: Sequence[Scored]) -> str:
    order = order_of(scored)
    if not order.correlations:
        return f"order: no sweep of {LEAST_SWEEP} or more layouts that differ"
    known, regrets = order.correlations, order.regrets
    return (
        f"order in {len(regrets)} sweeps of {LEAST_SWEEP} or more: Spearman {statistics.mean(known):.3f} "
        f"(lowest {min(known):.2f}), regret {statistics.mean(regrets):.1%} (largest {max(regrets):.1%})"
    )


def _regret(sweep: Sequence[Scored]) -> float:
    """What the layout that we would choose takes more than the best one."""
    chosen = min(sweep, key=lambda each: float(each.said["step_time_s"]))
    best = min(each.measured.step_s or math.inf for each in sweep)
    return (chosen.measured.step_s or math.inf) / best - 1


def spearman(ones: Sequence[float], others: Sequence[float]) -> float:
    """Correlation of ranks, ties sharing theirs; nan where one side is constant."""
    if len(set(ones)) < 2 or len(set(others)) < 2:
        return math.nan
    return statistics.correlation(_ranks(ones), _ranks(others))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(ordered.index(value) + len(ordered) - 1 - ordered[::-1].index(value)) / 2 for value in values]


def held_by(scored: Sequence[Scored], low: str, high: str, value: Callable[[Scored], float | None]) -> list[bool]:
    """Whether each measurement lies in the interval that was told."""
    scale = GIB if low.startswith("mem") else 1
    known = [(each, truth) for each in scored if (truth := value(each)) and each.said.get(low)]
    return [float(each.said[low]) * scale <= truth <= float(each.said[high]) * scale for each, truth in known]


def _render_interval(
    title: str, core: Sequence[Scored], low: str, high: str, value: Callable[[Scored], float | None]
) -> str:
    held = held_by(core, low, high, value)
    return f"{title}: holds {sum(held) / max(len(held), 1):.1%} of {len(held)}"


if __name__ == "__main__":
    main()
