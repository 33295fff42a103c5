"""Fit the planner's efficiency factors to published rows.

    python bench/planner/fit.py ROWS.csv [--only GENERATION ...] [--hold SOURCE ...]

Writes src/shardway/plan/ceilings.toml; with --only all factors but those of the named generations of accelerators stay
as they are in it. With --hold it writes nothing and prints the score of the sources that were left out; with
--hold-each it does so for every source in its turn, and prints the table of score.py for rows of which each was
predicted by factors that never saw its source. Every factor moves between bounds that its meaning sets, belongs to a
kind of part, and is fitted only where ten rows or more depend on it. Needs numpy and scipy.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import math
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType

import answers
import measured
import numpy as np
import predict
import rows
import score
from scipy.optimize import least_squares

from shardway.plan.case import Case, Ceilings, Machine, generation_of
from shardway.plan.time import estimate_step

TARGET = pathlib.Path(__file__).parents[2] / "src/shardway/plan/ceilings.toml"
LEAST_ROWS = 10
SPARSE = {"vtrain": 8, "megatron-bridge": 2}
"""Of long sweeps every so-manieth row that is not among those that are scored."""
WEIGHT = 0.4
"""Rows of a source count by this power of their number less."""
BEYOND = 0.055
"""Part of the rows fitted to that an interval leaves out at each end: of others it leaves out more."""
DIFFERENCE = 1e-3
"""By which a factor is moved to see what depends on it, in units of its bounds."""
PULL = 0.04
"""How strongly a factor is held at its start, in units of its bounds."""


@dataclass(frozen=True)
class Factor:
    """A factor with where it starts and the bounds that its meaning sets."""

    name: str
    start: float
    low: float
    high: float


BY_GENERATION = {
    "ampere": (
        Factor("matmul", 0.78, 0.4, 0.9),
        Factor("link", 0.7, 0.6, 0.85),
        Factor("flash1", 0.35, 0.3, 0.5),  # Dao, arXiv:2307.08691: 25 to 40 % both ways
        Factor("flash2", 0.5, 0.2, 0.75),
    ),
    "hopper": (
        Factor("matmul", 0.72, 0.4, 0.85),
        Factor("link", 0.75, 0.6, 0.88),
        Factor("matmul_low", 0.65, 0.3, 0.8),
        Factor("flash1", 0.25, 0.1, 0.6),
        Factor("flash2", 0.35, 0.2, 0.6),
        Factor("early_flash3", 0.5, 0.25, 0.75),
    ),
    "blackwell": (
        Factor("matmul", 0.6, 0.35, 0.8),
        Factor("link", 0.65, 0.5, 0.85),
        Factor("matmul_low", 0.6, 0.3, 0.8),
        Factor("matmul_fp4", 0.4, 0.15, 0.7),
        Factor("flash3", 0.5, 0.25, 0.75),
    ),
}
GENERAL = (
    Factor("matmul_ramp", 80, 0, 250),
    Factor("narrow_ramp", 20, 0, 150),
    Factor("misaligned", 1, 0, 4),
    Factor("misaligned_batched", 3, 0, 8),
    Factor("batched", 0.4, 0.2, 0.8),
    Factor("scores_passes", 5, 3, 12),
    Factor("flash_ramp", 400, 100, 700),
    Factor("flash_backward", 0.8, 0.5, 1.0),
    Factor("memory", 0.82, 0.75, 0.92),
    Factor("stream", 1.3, 0.8, 2.5),
    Factor("gates", 1.3, 0.8, 2.5),
    Factor("plain_norm", 10, 4, 20),
    Factor("sums", 2, 1, 5),
    Factor("kernel_s", 15e-6, 6e-6, 25e-6),
    Factor("power", 0.7, 0.3, 1.2),
    Factor("link_latency_s", 25e-6, 8e-6, 60e-6),
    Factor("network", 0.85, 0.7, 0.92),
    Factor("network_latency_s", 30e-6, 10e-6, 100e-6),
    Factor("hop_s", 5e-6, 1e-6, 15e-6),
    Factor("half_bytes", 1e6, 2e5, 4e6),
    Factor("overlap", 0.6, 0.0, 0.95),
    Factor("tensor_contention", 0.3, 0.0, 0.8),
    Factor("optimizer_passes", 1.2, 0.9, 3),
    Factor("step_s", 0.004, 0.001, 0.015),
)
STARTS = Ceilings(
    matmul=0.65,
    matmul_low=0.55,
    matmul_fp4=0.35,
    flash1=0.3,
    flash2=0.45,
    flash3=0.45,
    early_flash3=0.45,
    link=0.7,
    low=0.85,
    high=1.15,
    **{factor.name: factor.start for factor in GENERAL},
)
TOLD = {"cdna": {"matmul": 0.47}, "hopper": {"flash3": 0.49}}
"""Not fitted. Of `matmul`, nine tenths of what large products reach on MI300X (0.51 of the peak, Stas Bekman's
ml-engineering). Of `flash3`, what cuDNN's kernels reach alone on H100 with 4,608 positions and heads of 128
(631 TFLOP/s
forward, 499 backward; pytorch's pull request 142132), as one rate with `flash_backward` 0.91 (0.57 of the peak), times
what products keep of theirs in training (0.68 of the 0.80 that they reach alone)."""

Key = tuple[str, str]
Values = Mapping[Key, float]


@dataclass(frozen=True)
class Sample:
    """A row with the case that stands for it and what it measured."""

    row: rows.Row
    question: rows.Question
    measured: measured.Measured

    @property
    def seconds(self) -> float:
        """Of the measured step."""
        return self.measured.step_s or math.nan


Fixed = tuple[Sample, Case]
"""A row with the one case that it is fitted by."""


def main() -> None:
    """Read, fit, write or score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows")
    parser.add_argument("--only", nargs="*", default=[], choices=(*BY_GENERATION, "general"))
    parser.add_argument("--hold", nargs="*", default=[])
    parser.add_argument("--hold-each", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    samples = read_samples(arguments.rows)
    if arguments.hold_each:
        print("\n".join(hold_each(arguments.rows, samples, arguments.rounds)))
    elif arguments.hold:
        print("\n".join(score.render(hold(samples, arguments.rounds, arguments.hold))))
    else:
        used = [sample for sample in samples if is_used(sample)]
        values = fit(used, arguments.rounds, read_shipped(arguments.only) if arguments.only else {})
        errors = errors_of([sample for sample in samples if score.is_core(sample.row)], values)
        print(f"core rows: {score.describe_errors(errors)}")
        write(values, used, interval_of(errors))


def hold_each(path: str, samples: Sequence[Sample], rounds: int) -> Iterator[str]:
    """The tables of rows that were each predicted without their own source."""
    families = sorted({family_of(sample.row["source_id"]) for sample in samples if score.is_core(sample.row)})
    with ProcessPoolExecutor() as pool:
        found = pool.map(partial(_hold_family, path, rounds), families)
        yield from score.render([scored for held in found for scored in held])


def family_of(source: str) -> str:
    """What is held out at once: sources whose names begin alike tell of the same runs."""
    return source.split("-")[0]


def _hold_family(path: str, rounds: int, family: str) -> list[score.Scored]:
    samples = read_samples(path)
    sources = {sample.row["source_id"] for sample in samples if family_of(sample.row["source_id"]) == family}
    return hold(samples, rounds, sorted(sources))


def hold(samples: Sequence[Sample], rounds: int, sources: Sequence[str]) -> list[score.Scored]:
    """Rows of sources, predicted by factors (and an interval) that were fitted to all others."""
    used = [sample for sample in samples if is_used(sample) and sample.row["source_id"] not in sources]
    values = fit(used, rounds)
    seen = [sample for sample in used if score.is_core(sample.row)]
    low, high = interval_of(errors_of(seen, values))
    return [_score(sample, values, low, high) for sample in samples if sample.row["source_id"] in sources]


def _score(sample: Sample, values: Values, low: float, high: float) -> score.Scored:
    fitted = Fitted(values)
    found = answers.answer(sample.question, lambda machine: replace(fitted(machine), low=low, high=high))
    said = predict.render(sample.question, found, measured.memory_kind(sample.row))
    return score.Scored(sample.row, sample.measured, said)


def read_samples(path: str) -> list[Sample]:
    """Rows with a time that can be priced."""
    found = []
    with open(path, newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            try:
                question = rows.read_question(row)
            except rows.Missing:
                continue
            result = measured.read_measured(row, question.case, question.machine)
            known = generation_of(question.machine.accelerator.key) in BY_GENERATION
            if result.step_s and row["quality"] in "ABC" and known:
                found.append(Sample({**row, "number": str(number)}, question, result))
    return found


def is_used(sample: Sample) -> bool:
    """All scored rows; of others those whose case is complete, long sweeps thinned."""
    row = sample.row
    if score.is_core(row):
        return True
    vague = "lora" in row["extra"].lower() or "first number" in row["precision"] or row["arch"] in ("", "hybrid/other")
    return not vague and "limited" not in row["gpu"] and int(row["number"]) % SPARSE.get(row["source_id"], 1) == 0


def read_shipped(moving: Sequence[str]) -> Values:
    """Factors as they are shipped, but those of the generations in `moving`."""
    table = tomllib.loads(TARGET.read_text(encoding="utf-8"))
    kept = [kind for kind in table if kind not in (*moving, "fitted")]
    return {(kind, name): value for kind in kept for name, value in table[kind].items()}


def fit(samples: Sequence[Sample], rounds: int, kept: Values = MappingProxyType({})) -> Values:
    """Factors that make the logarithms of predicted over measured small; open cases are chosen anew each round. Those
    in `kept` stay."""
    factors = {key: factor for key, factor in factors_for(samples).items() if key not in kept}
    values: Values = {key: factor.start for key, factor in factors.items()}
    for _ in range(rounds):
        fitted = Fitted({**kept, **values})
        fixed = [(sample, chosen_case(sample, fitted)) for sample in samples]
        values = _fit_fixed(fixed, factors, values, kept)
    return {**kept, **values}


def _fit_fixed(fixed: Sequence[Fixed], factors: Mapping[Key, Factor], values: Values, kept: Values) -> Values:
    problem = _Problem(fixed, factors, kept)
    first = [min(0.999, max(0.001, _to_unit(factors[key], value))) for key, value in values.items()]
    robust = {"loss": "soft_l1", "f_scale": 0.05}
    solved = least_squares(problem.residuals, first, jac=problem.slopes, bounds=(0, 1), max_nfev=14, **robust)
    return problem.values_at(solved.x)


class _Problem:
    """Weighted errors as a function of factors in units of their bounds."""

    def __init__(self, fixed: Sequence[Fixed], factors: Mapping[Key, Factor], kept: Values) -> None:
        self.fixed, self.factors, self.kept = fixed, factors, kept
        counts = collections.Counter(sample.row["source_id"] for sample, _ in fixed)
        self.weights = np.array(
            [
                (1.0 if sample.row["quality"] in "AB" else 0.5) / counts[sample.row["source_id"]] ** WEIGHT
                for sample, _ in fixed
            ]
        )
        self.start = np.array([_to_unit(factor, factor.start) for factor in factors.values()])
        self.dependants: list[Sequence[int]] = []

    def values_at(self, units: Sequence[float]) -> Values:
        """Factors in their own units."""
        return {key: _from_unit(factor, unit) for (key, factor), unit in zip(self.factors.items(), units, strict=True)}

    def residuals(self, units: Sequence[float]) -> np.ndarray:
        """Of all rows, then how far each factor was pulled from its start."""
        return np.concatenate([self.weights * self._errors(units, range(len(self.fixed))), PULL * (units - self.start)])

    def slopes(self, units: Sequence[float]) -> np.ndarray:
        """Derivatives of these; rows that a factor did not move at first are left out of it later."""
        base = self._errors(units, range(len(self.fixed)))
        slopes = np.zeros((len(base) + len(units), len(units)))
        known = bool(self.dependants)
        for place in range(len(units)):
            rows_moved = self.dependants[place] if known else range(len(base))
            step = DIFFERENCE if units[place] < 0.5 else -DIFFERENCE
            moved = np.array(units)
            moved[place] += step
            change = (self._errors(moved, rows_moved) - base[rows_moved]) / step
            slopes[rows_moved, place] = self.weights[rows_moved] * change
            slopes[len(base) + place, place] = PULL
            if not known:
                self.dependants.append(np.flatnonzero(change))
        return slopes

    def _errors(self, units: Sequence[float], places: Sequence[int]) -> np.ndarray:
        at = Fitted({**self.kept, **self.values_at(units)})
        return np.array([_error(*self.fixed[place], at) for place in places])


def _to_unit(factor: Factor, value: float) -> float:
    return (value - factor.low) / (factor.high - factor.low)


def _from_unit(factor: Factor, unit: float) -> float:
    return factor.low + unit * (factor.high - factor.low)


def factors_for(samples: Sequence[Sample]) -> dict[Key, Factor]:
    """Those that ten rows or more depend on."""
    every = {("general", factor.name): factor for factor in GENERAL}
    for generation, own in BY_GENERATION.items():
        every |= {(generation, factor.name): factor for factor in own}
    counts = count_dependants(samples, every)
    return {key: factor for key, factor in every.items() if counts[key] >= LEAST_ROWS}


def count_dependants(samples: Sequence[Sample], factors: Mapping[Key, Factor]) -> dict[Key, int]:
    """Rows whose predicted time moves by a thousandth or more when a factor moves by a tenth."""
    values = {key: factor.start for key, factor in factors.items()}
    cases = [(sample, sample.question.case) for sample in samples]
    start = Fitted(values)
    base = [_error(sample, case, start) for sample, case in cases]
    counts = {}
    for key in factors:
        moved = Fitted({**values, key: values[key] * 1.1})
        errors = [_error(sample, case, moved) for sample, case in cases]
        counts[key] = sum(abs(one - other) > 1e-3 for one, other in zip(base, errors, strict=True))
    return counts


class Fitted:
    """Fitted values as the factors of a machine, made once for each generation."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.known: dict[str, Ceilings] = {}

    def __call__(self, machine: Machine) -> Ceilings:
        """The factors of a machine."""
        generation = generation_of(machine.accelerator.key)
        if generation not in self.known:
            starts = {factor.name: factor.start for factor in BY_GENERATION.get(generation, ())}
            own = {name: value for kind in ("general", generation) for name, value in self._of(kind)}
            self.known[generation] = replace(STARTS, **{**starts, **TOLD.get(generation, {}), **own})
        return self.known[generation]

    def _of(self, kind: str) -> Iterator[tuple[str, float]]:
        return ((name, value) for (each, name), value in self.values.items() if each == kind)


def _error(sample: Sample, case: Case, factors: Fitted) -> float:
    machine = sample.question.machine
    return math.log(estimate_step(case, machine, factors(machine)).seconds / sample.seconds)


def chosen_case(sample: Sample, factors: Fitted) -> Case:
    """The case that stands for a row under these factors."""
    return answers.answer(sample.question, factors).case


def errors_of(samples: Sequence[Sample], values: Values) -> list[float]:
    """Predicted over measured, less 1."""
    fitted = Fitted(values)
    return [math.expm1(_error(sample, chosen_case(sample, fitted), fitted)) for sample in samples]


def interval_of(errors: Sequence[float]) -> tuple[float, float]:
    """Factors of a prediction between which measurements lie, wide enough for four of five of rows not fitted to."""
    ratios = sorted(1 / (1 + error) for error in errors)
    edge = round(BEYOND * len(ratios))
    return ratios[edge], ratios[-1 - edge]


def write(values: Values, samples: Sequence[Sample], interval: tuple[float, float]) -> None:
    """The TOML file with each factor and how many rows depend on it."""
    factors = factors_for(samples)
    counts = count_dependants(samples, factors)
    general = {field.name: getattr(STARTS, field.name) for field in fields(STARTS)}
    general |= {name: value for (kind, name), value in values.items() if kind == "general"}
    general |= {"low": interval[0], "high": interval[1]}
    lines = [
        "# What part of the rates on paper is reached. Written by bench/planner/fit.py: change that, not this file.",
        "# Behind a fitted factor stands how many rows depend on it; fit.py names the others with their reason.",
        "# Meanings: src/shardway/plan/case.py.",
        "",
        "[general]",
        *_lines(general, {name: counts[kind, name] for kind, name in counts if kind == "general"}),
    ]
    for generation in dict.fromkeys((*BY_GENERATION, *TOLD)):
        own = {name: value for (kind, name), value in values.items() if kind == generation} | TOLD.get(generation, {})
        lines += ["", f"[{generation}]", *_lines(own, {name: counts[k, name] for k, name in counts if k == generation})]
    lines += ["", "[fitted]", *_list_fitted(counts)]
    TARGET.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _list_fitted(counts: Mapping[Key, int]) -> list[str]:
    """The names of the factors that follow from rows, by the kind of accelerator; of all also the interval."""
    names: dict[str, list[str]] = {}
    for kind, name in (key for key, rows_moved in counts.items() if rows_moved):
        names.setdefault(kind, []).append(name)
    names.setdefault("general", []).extend(("low", "high"))
    return [f"{kind} = {json.dumps(sorted(found))}" for kind, found in sorted(names.items())]


def _lines(values: Mapping[str, float], counts: Mapping[str, int]) -> list[str]:
    return [
        f"{name} = {value:.4g}" + (f"  # {counts[name]} rows" if name in counts else "")
        for name, value in values.items()
    ]


if __name__ == "__main__":
    main()
