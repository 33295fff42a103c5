"""Attempts as lines for people, and as plain data.

Invariant: what is unknown is left out or said to be unknown. This module must not ask anybody.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shardway.launch.runs.job_status import JobStatus
from shardway.units import render_clock


def render_attempts(standings: Sequence[JobStatus]) -> list[str]:
    """One line an attempt, oldest first, and under it why it waits or how it ended."""
    lines = []
    for standing in standings:
        lines.append(f"  attempt {standing.entry.number:<3} {standing.word:<13} {_render_facts(standing)}".rstrip())
        lines += [f"      {line}" for line in _render_why(standing)]
    return lines


def _render_facts(standing: JobStatus) -> str:
    entry, result = standing.entry, standing.result
    facts = [f"job {entry.job}" if entry.job else ""]
    if result is None and entry.started is not None:
        facts.append(f"on {entry.started.nodes}" if entry.started.nodes else "")
        left = entry.started.deadline - time.time()
        facts.append(f"{render_clock(left)} of wall-time left" if entry.started.deadline and left > 0 else "")
    if result is not None:
        facts.append(f"step {result.step}" if result.step else "")
        began = entry.started.started if entry.started else 0.0
        facts.append(f"after {render_clock(result.ended - began)}" if began and result.ended > began else "")
    return "  ".join(fact for fact in facts if fact)


def _render_why(standing: JobStatus) -> list[str]:
    lines = []
    if standing.result is not None and standing.result.reason:
        lines.append(standing.result.reason)
    if standing.why is not None and (standing.result is None or standing.why.code != "completed"):
        lines += [standing.why.sentence] if standing.why.sentence not in lines else []
        lines.append(f"to do: {standing.why.remedy}")
    if standing.silence:
        lines.append(f"the scheduler did not answer: {standing.silence}")
    return lines


def attempts_as_json(standings: Sequence[JobStatus]) -> list[dict[str, Any]]:
    """Plain data, with stable keys."""
    return [_as_json(standing) for standing in standings]


def _as_json(standing: JobStatus) -> dict[str, Any]:
    entry, result, record = standing.entry, standing.result, standing.record
    return {
        "attempt": entry.number,
        "state": standing.word,
        "job": entry.job,
        "scheduler": entry.submission.scheduler if entry.submission else "",
        "nodes": entry.started.nodes if entry.started else "",
        "started": entry.started.started if entry.started else None,
        "deadline": entry.started.deadline if entry.started else None,
        "ended": result.ended if result else None,
        "step": result.step if result else None,
        "reason": result.reason if result else "",
        "exit_code": result.exit_code if result else None,
        "failure": result.failure if result else "",
        "scheduler_state": record.state if record else "",
        "scheduler_reason": record.reason if record else "",
        "explanation": standing.why.sentence if standing.why else "",
        "remedy": standing.why.remedy if standing.why else "",
        "silence": standing.silence,
    }
