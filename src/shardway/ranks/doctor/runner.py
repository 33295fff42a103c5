"""Runs checks side by side, each within its own time.

Invariant: `run_checks` returns one finding a check, in the order of the table, soon after the longest limit; a check
that hangs is left behind in a thread that ends with the process. This module must not know what a check looks at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from shardway.ranks.doctor.finding import CheckResult, CheckScope, DoctorCheck, bad, poor, unknown
from shardway.ranks.doctor.surroundings import MachineView

QUICK_LIMIT_S = 4.0
"""What a check of a preflight may take."""


def run_checks(checks: Mapping[str, DoctorCheck], around: MachineView, *, quick: bool = False) -> list[CheckResult]:
    """The findings of every check that applies to this rank, and "n/a" for those that apply elsewhere."""
    started = [
        _Started(name, check, around, quick) for name, check in checks.items() if _is_asked(check, around, quick)
    ]
    return [each.finish() for each in started]


def _is_asked(check: DoctorCheck, around: MachineView, quick: bool) -> bool:
    """Whether this rank has an answer to give; what a node has once is told by the first of its ranks."""
    if (quick and not check.quick) or (check.deep and not around.deep):
        return False
    return check.where is CheckScope.RANK or around.first_of_node


def find_obstacle(check: DoctorCheck, around: MachineView) -> str:
    """Why a check makes no sense here, or ""."""
    if check.where in (CheckScope.NODE, CheckScope.RANK) and not around.in_job:
        return "this is no node of a job"
    if check.where is CheckScope.LOGIN and around.in_job and around.site.scheduler != "local":
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
