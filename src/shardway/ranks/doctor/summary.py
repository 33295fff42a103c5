"""What all ranks found, one row a check.

Invariant: a row shows its worst verdict, and which nodes have it; nothing is averaged away. The JSON form keeps its
keys: format, verdict, site, world, hosts, missing, checks, reports. This module must not print.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardway.errors import list_some
from shardway.ranks.doctor.examine import Diagnosis
from shardway.ranks.doctor.finding import CheckResult, CheckVerdict
from shardway.ranks.doctor.table import list_names

FORMAT = 1
_SHOWN = 4


@dataclass(frozen=True)
class SummaryRow:
    """One check over all ranks: its worst verdict, what was found there, and on which hosts (empty: on all)."""

    check: str
    verdict: CheckVerdict
    found: str
    remedy: str
    hosts: tuple[str, ...]

    def render(self) -> str:
        """A line, and what to do below it."""
        where = f"  [{list_some(self.hosts, _SHOWN)}]" if self.hosts else ""
        line = f"{self.verdict.value:<5} {self.check:<16} {self.found}{where}"
        return line + (f"\n{'':<23}To do: {self.remedy}" if self.remedy else "")


def list_rows(diagnosis: Diagnosis) -> list[SummaryRow]:
    """A row for every check that somebody ran, in the order of the table."""
    told: dict[str, list[tuple[str, CheckResult]]] = {}
    for report in diagnosis.reports:
        for finding in report.findings:
            told.setdefault(finding.check, []).append((report.host, finding))
    for finding in diagnosis.together:
        told.setdefault(finding.check, []).append(("", finding))
    return [_summarise(name, told[name]) for name in list_names() if name in told]


def _summarise(name: str, told: list[tuple[str, CheckResult]]) -> SummaryRow:
    """The worst, and where; hosts are left out where all have it."""
    worst = max(told, key=lambda each: each[1].verdict.weight)[1]
    alike = list(dict.fromkeys(host for host, finding in told if finding.verdict is worst.verdict))
    everywhere = set(alike) == {host for host, _ in told}
    return SummaryRow(name, worst.verdict, worst.found, worst.remedy, () if everywhere else tuple(alike))


def judge(rows: list[SummaryRow]) -> CheckVerdict:
    """The verdict over all: the worst."""
    return max((row.verdict for row in rows), key=lambda verdict: verdict.weight, default=CheckVerdict.NA)


def render(rows: list[SummaryRow], *, every: bool = False) -> str:
    """The rows as text; those that say nothing share a line, unless `every` is wanted."""
    silent = [row.check for row in rows if row.verdict is CheckVerdict.NA and not every]
    lines = [row.render() for row in rows if every or row.verdict is not CheckVerdict.NA]
    if silent:
        lines.append(f"{'n/a':<5} {', '.join(silent)}")
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in CheckVerdict}
    told = [f"{counts[verdict]} {verdict}" for verdict in (CheckVerdict.FAIL, CheckVerdict.WARN, CheckVerdict.OK)]
    return "\n".join([*lines, ", ".join(told)])


def as_json(diagnosis: Diagnosis, site: str, world: int) -> dict[str, Any]:
    """Plain data with stable keys; `reports` has every finding of every rank."""
    rows = list_rows(diagnosis)
    return {
        "format": FORMAT,
        "verdict": judge(rows),
        "site": site,
        "world": world,
        "hosts": list(dict.fromkeys(report.host for report in diagnosis.reports)),
        "missing": list(diagnosis.missing),
        "checks": [asdict(row) for row in rows],
        "reports": [
            {"rank": report.rank, "host": report.host, "findings": [each.as_json() for each in report.findings]}
            for report in diagnosis.reports
        ],
    }
