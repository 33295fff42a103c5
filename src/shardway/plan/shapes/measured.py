"""A model that is no transformer as numbers: its units, each with what it holds, computes and keeps of one sample.

Invariant: all counts of a model are sums over its units, so that they cannot disagree; what is written as JSON is read
back as the same value. This module must not know of layouts, machines or how the counts were taken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from shardway.errors import Problem, UserError, check_no_problems
from shardway.plan.shapes.architecture import Architecture

FORMAT = 1
_UNIT_NUMBERS = ("count", "parameters", "forward_flops", "saved_bytes", "fixed_bytes")
_KINDS: Mapping[str, tuple[type, ...]] = {"str": (str,), "int": (int,)}
_REMEDY = "write the file anew: `shardway plan run.toml --trace`"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """`count` parts alike that are sharded and recomputed as one each; all numbers are those of one of them.

    FLOPs count a multiplication and an addition each; `saved_bytes` are all that the backward pass needs of a sample.
    """

    name: str
    parameters: int
    forward_flops: float
    saved_bytes: float
    count: int = 1
    fixed_bytes: float = 0.0
    """Those of `saved_bytes` that do not follow the format of activations: masks, indices."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model known by its units. Raises UserError that names every number that cannot be."""

    name: str
    units: tuple[Unit, ...]
    source: str = ""
    """How the counts were taken, and for which sample."""
    value_bytes: int = 4
    """Bytes of an activation when `saved_bytes` were counted."""

    def __post_init__(self) -> None:
        check_no_problems(f"the model {self.name}", _find_problems(self))

    @cached_property
    def parameters(self) -> int:
        """All of them."""
        return sum(unit.count * unit.parameters for unit in self.units)

    @cached_property
    def forward_flops_per_sample(self) -> float:
        """A multiplication and an addition each."""
        return sum(unit.count * unit.forward_flops for unit in self.units)

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward, which is twice as much (Kaplan et al., arXiv:2001.08361, section 2.1)."""
        return 3 * self.forward_flops_per_sample

    def saved_bytes_per_sample(self, value_bytes: int | None = None) -> float:
        """What all units keep for the backward pass, with activations of so many bytes; None: as they were counted."""
        scale = (value_bytes or self.value_bytes) / self.value_bytes
        return sum(u.count * (u.fixed_bytes + (u.saved_bytes - u.fixed_bytes) * scale) for u in self.units)

    def to_json(self) -> str:
        """The content of a shape file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"


Shape = Architecture | Measured
"""What a plan may be made for."""


def measured_from_json(text: str, origin: str = "the shape file") -> Measured:
    """What `to_json` wrote. Raises UserError that names every key that is missing or cannot be."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin} is no JSON: {error}.\n  To do: {_REMEDY}") from error
    table: Mapping[str, Any] = content if isinstance(content, dict) else {}
    check_no_problems(origin, _find_file_problems(table))
    units = tuple(Unit(**unit) for unit in table["units"])
    return Measured(name=table["name"], units=units, source=table["source"], value_bytes=table["value_bytes"])


def read_measured(path: Path) -> Measured:
    """A stored shape file. Raises UserError where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"the shape file {path} cannot be read: {error}.\n  To do: name one, or {_REMEDY}") from error
    return measured_from_json(text, str(path))


def _find_problems(model: Measured) -> list[Problem]:
    problems = [] if model.units else [Problem("units", "there is none", allowed="at least 1")]
    if model.value_bytes not in (1, 2, 4, 8):
        problems.append(Problem("value_bytes", f"{model.value_bytes} is the size of no number", allowed="1, 2, 4, 8"))
    for unit in model.units:
        for name in _UNIT_NUMBERS:
            value, least = getattr(unit, name), int(name == "count")
            if not least <= value < math.inf:
                problems.append(Problem(f"{unit.name}: {name}", f"{value} cannot be", allowed=f"{least} or more"))
        if unit.fixed_bytes > unit.saved_bytes:
            what = f"{unit.fixed_bytes:g} is more than saved_bytes, {unit.saved_bytes:g}"
            problems.append(Problem(f"{unit.name}: fixed_bytes", what, allowed="a part of saved_bytes"))
    return problems


def _find_file_problems(table: Mapping[str, Any]) -> list[Problem]:
    if table.get("format") != FORMAT:
        what = f"{table.get('format')!r} is not a format that is known"
        return [Problem("format", what, allowed=str(FORMAT), remedy=_REMEDY)]
    kinds: dict[str, type] = {"name": str, "source": str, "value_bytes": int, "units": list}
    problems = [_describe(key, table, kind) for key, kind in kinds.items() if type(table.get(key)) is not kind]
    units = table["units"] if not problems else []
    for number, unit in enumerate(units):
        problems += _find_unit_problems(f"units[{number}]", unit if isinstance(unit, dict) else {})
    return problems


def _find_unit_problems(where: str, unit: Mapping[str, Any]) -> list[Problem]:
    numbers: tuple[type, ...] = (int, float)
    kinds = {each.name: numbers if each.type == "float" else _KINDS[str(each.type)] for each in fields(Unit)}
    wrong = [_describe(key, unit, *kinds[key], where=where) for key in kinds if type(unit.get(key)) not in kinds[key]]
    unknown = [key for key in unit if key not in kinds]
    return wrong + [Problem(f"{where}.{key}", "is not known", allowed=", ".join(kinds)) for key in unknown]


def _describe(key: str, table: Mapping[str, Any], *kinds: type, where: str = "") -> Problem:
    what = f"{table[key]!r} cannot be" if key in table else "is missing"
    words = {str: "a text", int: "a whole number", float: "a number", list: "a list"}
    return Problem(f"{where}.{key}".lstrip("."), what, allowed=words[kinds[-1]], remedy=_REMEDY)
