"""A check, its result, and how checks run side by side, each within its own time.

Invariants:
- A finding with verdict "warn" or "fail" has a remedy.
- `run_checks` returns one finding a check, in the order of the table, soon after the longest limit; a check that hangs
  stays behind in a thread that ends with the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from shardway.ranks.doctor.surroundings import MachineView


class CheckVerdict(StrEnum):
    """The verdict of a check, from the harmless to the worst."""

    NA = "n/a"
    """Not looked at, or unknown here."""
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
    """Only on a login node."""
    NODE = "node"
    """On a node of a job, once."""
    RANK = "rank"
    """In each rank of a job."""
    WORLD = "world"
    """Over all ranks, reported by rank 0."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. Nodes are compared by their `facts`; the runner fills in `check`."""

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
    """One check: its question, its scope, and the function that looks.

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
    """All findings of one rank."""

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
    """No verdict."""
    return CheckResult(CheckVerdict.NA, found, facts=facts)


def parse_finding(table: Mapping[str, Any]) -> CheckResult:
    """A finding from its plain data. Raises ValueError, KeyError or TypeError for anything else."""
    facts = {str(name): value for name, value in dict(table["facts"]).items() if isinstance(value, str | int | float)}
    return CheckResult(
        CheckVerdict(table["verdict"]), str(table["found"]), str(table["remedy"]), facts, check=str(table["check"])
    )


# --- running checks

QUICK_LIMIT_S = 4.0
"""The most seconds for a check of a preflight."""


def run_checks(checks: Mapping[str, DoctorCheck], around: MachineView, *, quick: bool = False) -> list[CheckResult]:
    """The findings of every check that applies to this rank, and "n/a" for those that apply elsewhere."""
    started = [
        _Started(name, check, around, quick) for name, check in checks.items() if _is_asked(check, around, quick)
    ]
    return [each.finish() for each in started]


def _is_asked(check: DoctorCheck, around: MachineView, quick: bool) -> bool:
    """Whether this rank runs the check; what a node has once is reported by the first of its ranks."""
    if (quick and not check.quick) or (check.deep and not around.deep):
        return False
    return check.where is CheckScope.RANK or around.first_of_node


def find_obstacle(check: DoctorCheck, around: MachineView) -> str:
    """Why a check makes no sense here, or ""."""
    if check.where in (CheckScope.NODE, CheckScope.RANK) and not around.in_job:
        return "this is no node of a job"
    if check.where is CheckScope.LOGIN and around.in_job and not around.scheduler.this_machine:
        return "this is a node of a job; scheduler commands are for login nodes"
    return ""


class _Started:
    """A check under way in a thread of its own."""

    def __init__(self, name: str, check: DoctorCheck, around: MachineView, quick: bool) -> None:
        self._name, self._check, self._around = name, check, around
        self._limit_s = min(check.limit_s, QUICK_LIMIT_S) if quick else check.limit_s
        self._found: list[CheckResult] = []
        self._deadline = time.monotonic() + self._limit_s
        self._thread = threading.Thread(target=self._run, name=f"doctor {name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            obstacle = find_obstacle(self._check, self._around)
            self._found.append(unknown(obstacle) if obstacle else self._check.examine(self._around))
        except Exception as error:  # a check that is wrong must not end the job
            text = f"the check itself failed: {type(error).__name__}: {error}"
            self._found.append(poor(text, "report this as a defect of Shardway"))

    def finish(self) -> CheckResult:
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._found:
            return replace(self._found[0], check=self._name)
        remedy = f"look at {self._around.host} by hand: what this check touches hangs"
        found = bad(f"no answer within {self._limit_s:g} s ({self._check.question}?)", remedy)
        return replace(found, check=self._name)
