"""Fit the planner's efficiency factors to published rows: python bench/planner/fit.py ROWS.csv [--hold SOURCE ...]

Writes src/shardway/plan/time/ceilings.toml (with --hold: prints the score of the sources that were left out, and writes
nothing). Every factor moves between bounds that its meaning sets, belongs to a kind of part, and is fitted only where
ten rows or more depend on it. Needs scipy.
"""

from __future__ import annotations

import argparse
import collections
import csv
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import answers
import measured
import rows
import score
from scipy.optimize import least_squares

from shardway.plan.case import Case
from shardway.plan.machine import Machine
from shardway.plan.time.ceilings import Ceilings, generation_of
from shardway.plan.time.step import estimate_step

TARGET = pathlib.Path(__file__).parents[2] / "src/shardway/plan/time/ceilings.toml"
LEAST_ROWS = 10
SPARSE = {"vtrain": 8, "megatron-bridge": 2}
"""Of long sweeps every so-manieth row that is not among those that are scored."""
WEIGHT = 0.4
"""Rows of a source count by this power of their number less."""
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
        Factor("flash1", 0.35, 0.15, 0.7),
        Factor("flash2", 0.5, 0.2, 0.75),
    ),
    "hopper": (
        Factor("matmul", 0.72, 0.4, 0.85),
        Factor("matmul_low", 0.65, 0.3, 0.8),
        Factor("flash1", 0.25, 0.1, 0.6),
        Factor("flash2", 0.35, 0.2, 0.6),
        Factor("flash3", 0.5, 0.25, 0.75),
    ),
    "blackwell": (
        Factor("matmul", 0.6, 0.35, 0.8),
        Factor("matmul_low", 0.6, 0.3, 0.8),
        Factor("matmul_fp4", 0.4, 0.15, 0.7),
        Factor("flash3", 0.5, 0.25, 0.75),
    ),
}
GENERAL = (
    Factor("matmul_ramp", 150, 100, 300),
    Factor("narrow_ramp", 60, 20, 200),
    Factor("misaligned", 0.3, 0, 1),
    Factor("batched", 0.4, 0.2, 0.8),
    Factor("scores_passes", 5, 3, 12),
    Factor("flash_ramp", 500, 100, 1500),
    Factor("flash_backward", 0.8, 0.5, 1.0),
    Factor("memory", 0.82, 0.75, 0.92),
    Factor("stream", 1.3, 0.8, 2.5),
    Factor("gates", 1.3, 0.8, 2.5),
    Factor("plain_norm", 10, 4, 20),
    Factor("kernel_s", 15e-6, 6e-6, 25e-6),
    Factor("power", 0.7, 0.3, 1.2),
    Factor("link", 0.78, 0.65, 0.9),
    Factor("link_latency_s", 20e-6, 8e-6, 45e-6),
    Factor("network", 0.85, 0.7, 0.92),
    Factor("network_latency_s", 30e-6, 10e-6, 100e-6),
    Factor("hop_s", 5e-6, 1e-6, 15e-6),
    Factor("half_bytes", 1e6, 2e5, 4e6),
    Factor("overlap", 0.8, 0.6, 0.95),
    Factor("optimizer_passes", 1.2, 0.9, 3),
    Factor("step_s", 0.005, 0.001, 0.015),
)
STARTS = Ceilings(
    matmul=0.65,
    matmul_low=0.55,
    matmul_fp4=0.35,
    flash1=0.3,
    flash2=0.45,
    flash3=0.45,
    async_tensor=0.6,
    low=0.85,
    high=1.15,
    **{factor.name: factor.start for factor in GENERAL},
)
TOLD = {"cdna": {"matmul": 0.47}}
"""Not fitted: nine tenths of what large products reach on MI300X (0.51 of the peak, Stas Bekman's ml-engineering)."""

Key = tuple[str, str]
Values = Mapping[Key, float]


@dataclass(frozen=True)
class Sample:
    """A row with the case that stands for it and its measured step."""

    row: rows.Row
    question: rows.Question
    seconds: float


def main() -> None:
    """Read, fit, write or score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows")
    parser.add_argument("--hold", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    samples = read_samples(arguments.rows)
    used = [sample for sample in samples if sample.row["source_id"] not in arguments.hold and is_used(sample)]
    values = fit(used, arguments.rounds)
    errors = {sample.row["id"]: error for sample, error in zip(samples, errors_of(samples, values), strict=True)}
    held = [sample for sample in samples if sample.row["source_id"] in arguments.hold and score.is_core(sample.row)]
    if arguments.hold:
        print(f"held out: {score.describe_errors([errors[sample.row['id']] for sample in held])}")
        return
    core = [errors[sample.row["id"]] for sample in samples if score.is_core(sample.row)]
    print(f"core rows: {score.describe_errors(core)}")
    write(values, used, interval_of(core))


def read_samples(path: str) -> list[Sample]:
    """Rows with a time that can be priced."""
    found = []
    with open(path, newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            try:
                question = rows.read_question(row)
            except rows.Missing:
                continue
            seconds = measured.read_measured(row, question.case, question.machine).step_s
            if seconds and row["quality"] in "ABC" and generation_of(question.machine.accelerator.key) in BY_GENERATION:
                found.append(Sample({**row, "number": str(number)}, question, seconds))
    return found


def is_used(sample: Sample) -> bool:
    """All scored rows; of others those whose case is complete, long sweeps thinned."""
    row = sample.row
    if score.is_core(row):
        return True
    vague = "lora" in row["extra"].lower() or "first number" in row["precision"] or row["arch"] in ("", "hybrid/other")
    return not vague and "limited" not in row["gpu"] and int(row["number"]) % SPARSE.get(row["source_id"], 1) == 0


def fit(samples: Sequence[Sample], rounds: int) -> Values:
    """Factors that make the logarithms of predicted over measured small; open cases are chosen anew each round."""
    factors = factors_for(samples)
    values = {key: factor.start for key, factor in factors.items()}
    for _ in range(rounds):
        fixed = [(sample, chosen_case(sample, values)) for sample in samples]
        values = _fit_fixed(fixed, factors, values)
    return values


def _fit_fixed(fixed: Sequence[tuple[Sample, Case]], factors: Mapping[Key, Factor], values: Values) -> Values:
    counts = collections.Counter(sample.row["source_id"] for sample, _ in fixed)
    weights = [
        (1.0 if sample.row["quality"] in "AB" else 0.5) / counts[sample.row["source_id"]] ** WEIGHT
        for sample, _ in fixed
    ]
    start = [_to_unit(factor, factor.start) for factor in factors.values()]

    def residuals(units: Sequence[float]) -> list[float]:
        at = {key: _from_unit(factor, unit) for (key, factor), unit in zip(factors.items(), units, strict=True)}
        errors = [_error(sample, case, at) for sample, case in fixed]
        pulls = [PULL * (unit - first) for unit, first in zip(units, start, strict=True)]
        return [weight * error for weight, error in zip(weights, errors, strict=True)] + pulls

    first = [min(0.999, max(0.001, _to_unit(factors[key], value))) for key, value in values.items()]
    solved = least_squares(residuals, first, bounds=(0, 1), loss="soft_l1", f_scale=0.05, max_nfev=14, diff_step=1e-3)
    return {key: _from_unit(factor, unit) for (key, factor), unit in zip(factors.items(), solved.x, strict=True)}


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
    base = [_error(sample, case, values) for sample, case in cases]
    counts = {}
    for key in factors:
        moved = {**values, key: values[key] * 1.1}
        errors = [_error(sample, case, moved) for sample, case in cases]
        counts[key] = sum(abs(one - other) > 1e-3 for one, other in zip(base, errors, strict=True))
    return counts


def ceilings_at(values: Values, machine: Machine) -> Ceilings:
    """The factors of a machine."""
    generation = generation_of(machine.accelerator.key)
    told = TOLD.get(generation, {})
    general = {name: value for (kind, name), value in values.items() if kind == "general"}
    own = {name: value for (kind, name), value in values.items() if kind == generation}
    return replace(STARTS, **general, **told, **own)


def _error(sample: Sample, case: Case, values: Values) -> float:
    time = estimate_step(case, sample.question.machine, ceilings_at(values, sample.question.machine))
    return math.log(time.seconds / sample.seconds)


def chosen_case(sample: Sample, values: Values) -> Case:
    """The case that stands for a row under these factors."""
    return answers.answer(sample.question, lambda machine: ceilings_at(values, machine)).case


def errors_of(samples: Sequence[Sample], values: Values) -> list[float]:
    """Predicted over measured, less 1."""
    return [math.expm1(_error(sample, chosen_case(sample, values), values)) for sample in samples]


def interval_of(errors: Sequence[float]) -> tuple[float, float]:
    """Factors of a prediction between which four of five measurements lie."""
    ratios = sorted(1 / (1 + error) for error in errors)
    edge = round(0.09 * len(ratios))
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
        "# Behind a fitted factor stands how many rows depend on it; the others are told in fit.py with their reason.",
        "# Meanings: src/shardway/plan/time/ceilings.py.",
        "",
        "[general]",
        *_lines(general, {name: counts[kind, name] for kind, name in counts if kind == "general"}),
    ]
    for generation in (*BY_GENERATION, *TOLD):
        own = {name: value for (kind, name), value in values.items() if kind == generation} | TOLD.get(generation, {})
        lines += ["", f"[{generation}]", *_lines(own, {name: counts[k, name] for k, name in counts if k == generation})]
    TARGET.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(values: Mapping[str, float], counts: Mapping[str, int]) -> list[str]:
    return [
        f"{name} = {value:.4g}" + (f"  # {counts[name]} rows" if name in counts else "")
        for name, value in values.items()
    ]


if __name__ == "__main__":
    main()
