"""`shardway logs`: what a run says, from its events, or the output of one of its ranks.

Invariant: it only reads, and survives a run that is writing. This module must not interpret events.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import JsonOption, find_run, report
from shardway.cli.status import RunWord
from shardway.errors import UserError

if TYPE_CHECKING:
    from shardway.launch.runs.find import Known
    from shardway.rundir.directory import RunDir
    from shardway.rundir.events import Event


def logs(
    run: RunWord = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Whose events or output (default: 0; all).")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    output: Annotated[bool, typer.Option("--output", help="What the rank itself printed, not its events.")] = False,
    job: Annotated[bool, typer.Option("--job", help="What a job of the run printed.")] = False,
    node: Annotated[int | None, typer.Option("--node", min=0, help="Of a job: what this node's ranks printed.")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Of a job: which (default: newest).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the events of a run as lines, or what its jobs printed."""
    known = _find(run)
    directory = _directory(known)
    if not known.host:
        directory.check_format()
    asks_for_job = job or node is not None or attempt is not None or bool(known.host)
    if asks_for_job or not (output or as_json or _has_events(directory, follow)):
        lines = _job_lines(known, rank, node, attempt, follow)
    elif output:
        typer.echo(_read_output(directory, rank or 0), nl=False)
        return
    elif follow:
        lines = _followed_lines(directory, rank or 0, as_json)
    else:
        lines = _event_lines(directory, rank or 0, False, as_json)
    for line in lines:
        typer.echo(line)


def _find(word: str | None) -> Known:
    """The run that a word means; the only one of a folder, or of ./runs where nothing is said."""
    from shardway.launch.runs.find import Known, find_known, is_run, list_runs

    folder = Path(word or "runs")
    if word is not None and (is_run(folder) or not os.path.isdir(folder)):
        return find_known(word)
    runs = list_runs(folder)
    return Known(str(runs[0] if len(runs) == 1 else find_run(folder).path))


def _directory(known: Known) -> RunDir:
    from shardway.rundir.directory import RunDir

    return RunDir(Path(known.run))


def _has_events(run: RunDir, follow: bool) -> bool:
    """Whether a run is shown by its events: it has some, or its job will write them and is waited for."""
    from shardway.launch.runs.logs import trains_a_run_file

    return bool(run.ranks_with_events()) or not run.attempts() or (follow and trains_a_run_file(run))


def _job_lines(known: Known, rank: int | None, node: int | None, attempt: int | None, follow: bool) -> Iterator[str]:
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.job_status import read_ledger
    from shardway.launch.runs.logs import choose_attempt, follow_output, only_rank, read_output

    host = find_host(known.host)
    entry = choose_attempt(read_ledger(host, Path(known.run)), attempt)
    lines = follow_output(host, entry.attempt, node, report) if follow else read_output(host, entry.attempt, node)
    return lines if rank is None else only_rank(lines, rank)


def _followed_lines(run: RunDir, rank: int, as_json: bool) -> Iterator[str]:
    """The events of a job from its begin on; where it ended without one, what it printed says more."""
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.logs import Beginning, read_output

    host = find_host("")
    why = Beginning(host, run).wait(rank)
    attempts = run.attempts()
    try:
        if run.ranks_with_events() or not attempts or as_json:
            yield from _event_lines(run, rank, True, as_json)
        else:
            yield from read_output(host, attempts[-1], None)
    finally:
        if why:
            report(why)


def _event_lines(run: RunDir, rank: int, follow: bool, as_json: bool) -> Iterator[str]:
    from shardway.watch.plain import PlainLines

    if rank not in run.ranks_with_events():
        known = ", ".join(map(str, run.ranks_with_events())) or "none yet"
        raise UserError(f"rank {rank} has no events in {run.path}; ranks with events: {known}.")
    lines = PlainLines(every_s=0.0)
    for event in _events(run, rank, follow):
        yield from [json.dumps(event)] if as_json else lines.lines(event)


def _events(run: RunDir, rank: int, follow: bool) -> Iterator[Event]:
    if follow:
        yield from _followed_events(run, rank)
    else:
        yield from run.events(rank)


def _followed_events(run: RunDir, rank: int) -> Iterator[Event]:
    """Events until no process writes any more, or the lock's holder died without releasing it, which is reported."""
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.logs import LeftLock

    left, why = LeftLock(find_host(""), run), ""

    def is_over() -> bool:
        nonlocal why
        why = "" if run.find_writer() is None else left.look()
        return why != "" or run.find_writer() is None

    left.put_off()
    for event in run.follow_events(rank).follow(until=is_over):
        left.put_off()
        yield event
    if why:
        report(why)


def _read_output(run: RunDir, rank: int) -> str:
    files = run.rank_output(rank)
    if not files:
        raise UserError(
            f"there is no captured output of rank {rank} in {run.path}.\n"
            "  Output is captured of ranks that `shardway train --nproc N` starts; others print where they started."
        )
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
