"""What a check is, and what it found.

Invariant: a finding with verdict "warn" or "fail" has a remedy. This module must not look at anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardway.ranks.doctor.surroundings import MachineView


class CheckVerdict(StrEnum):
    """What a check says, from the harmless to the worst."""

    NA = "n/a"
    """Not looked at, or not to be known here."""
    OK = "ok"
    WARN = "warn"
    """It will work, slowly or by luck."""
    FAIL = "fail"
    """A job will fail or hang."""

    @property
    def weight(self) -> int:
        """Larger is worse."""
        return list(CheckVerdict).index(self)


class CheckScope(StrEnum):
    """Where a check makes sense, and how often."""

    MACHINE = "machine"
    """On any machine, once."""
    LOGIN = "login"
    """On a login node: what answers there alone."""
    NODE = "node"
    """On a node of a job, once."""
    RANK = "rank"
    """In each rank of a job."""
    WORLD = "world"
    """Over all ranks, told by rank 0."""


@dataclass(frozen=True)
class CheckResult:
    """What one check found. `facts` are what nodes are compared by; the runner fills in `check`."""

    verdict: CheckVerdict
    found: str
    remedy: str = ""
    facts: Mapping[str, str | float] = field(default_factory=dict)
    check: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain data; `parse_finding` reads it."""
        return asdict(self)


@dataclass(frozen=True)
class DoctorCheck:
    """One check: what it asks, where, and the function that looks.

    `quick`: part of the preflight of an attempt. `deep`: only on request, since it takes seconds or loads the machine.
    """

    question: str
    where: CheckScope
    examine: Callable[[MachineView], CheckResult]
    quick: bool = False
    deep: bool = False
    limit_s: float = 10.0


@dataclass(frozen=True)
class Report:
    """Everything that one rank found."""

    rank: int
    host: str
    findings: tuple[CheckResult, ...]

    def fact(self, name: str) -> str | float | None:
        """A fact of any finding, or None."""
        return next((each.facts[name] for each in self.findings if name in each.facts), None)


def good(found: str, **facts: str | float) -> CheckResult:
    """All is well."""
    return CheckResult(CheckVerdict.OK, found, facts=facts)


def poor(found: str, remedy: str, **facts: str | float) -> CheckResult:
    """It will work, slowly or by luck."""
    return CheckResult(CheckVerdict.WARN, found, remedy, facts)


def bad(found: str, remedy: str, **facts: str | float) -> CheckResult:
    """A job will fail or hang."""
    return CheckResult(CheckVerdict.FAIL, found, remedy, facts)


def unknown(found: str, **facts: str | float) -> CheckResult:
    """Nothing to say."""
    return CheckResult(CheckVerdict.NA, found, facts=facts)


def parse_finding(table: Mapping[str, Any]) -> CheckResult:
    """A finding from its plain data. Raises ValueError, KeyError or TypeError where it is none."""
    facts = {str(name): value for name, value in dict(table["facts"]).items() if isinstance(value, str | int | float)}
    return CheckResult(
        CheckVerdict(table["verdict"]), str(table["found"]), str(table["remedy"]), facts, check=str(table["check"])
    )
