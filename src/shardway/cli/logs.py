"""`shardway logs`: what a run says, from its events, or the output of one of its ranks.

Invariant: it only reads, and survives a run that is writing. This module must not interpret events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import JsonOption, find_run
from shardway.cli.status import RunWord
from shardway.errors import UserError

if TYPE_CHECKING:
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
    if job or node is not None or attempt is not None or _is_elsewhere(run):
        for line in _job_lines(run, rank, node, attempt, follow):
            typer.echo(line)
        return
    directory = find_run(Path(run) if run else None)
    directory.check_format()
    if output:
        typer.echo(_read_output(directory, rank or 0), nl=False)
        return
    for line in _event_lines(directory, rank or 0, follow, as_json):
        typer.echo(line)


def _is_elsewhere(run: str | None) -> bool:
    """Whether a word names no folder here with events: a run on another host, or one whose job has not begun."""
    from shardway.rundir.directory import RunDir

    return run is not None and not RunDir(Path(run)).exists() and not Path(run).is_dir()


def _job_lines(run: str | None, rank: int | None, node: int | None, attempt: int | None, follow: bool) -> Iterator[str]:
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.find import find_known
    from shardway.launch.runs.ledger import read_ledger
    from shardway.launch.runs.logs import choose_attempt, only_rank, read_output

    known = find_known(run or str(find_run(None).path))
    host = find_host(known.host)
    entry = choose_attempt(read_ledger(host, Path(known.run)), attempt)
    lines = read_output(host, entry.attempt, node, follow=follow)
    return lines if rank is None else only_rank(lines, rank)


def _event_lines(run: RunDir, rank: int, follow: bool, as_json: bool) -> Iterator[str]:
    from shardway.watch.plain import PlainLines

    if rank not in run.ranks_with_events():
        known = ", ".join(map(str, run.ranks_with_events())) or "none yet"
        raise UserError(f"rank {rank} has no events in {run.path}; ranks with events: {known}.")
    lines = PlainLines(every_s=0.0)
    for event in _events(run, rank, follow):
        yield from [json.dumps(event)] if as_json else lines.lines(event)


def _events(run: RunDir, rank: int, follow: bool) -> Iterator[Event]:
    if not follow:
        return iter(run.events(rank))
    return run.follow_events(rank).follow(until=lambda: run.find_writer() is None)


def _read_output(run: RunDir, rank: int) -> str:
    files = run.rank_output(rank)
    if not files:
        raise UserError(
            f"there is no captured output of rank {rank} in {run.path}.\n"
            "  Output is captured of ranks that `shardway train --nproc N` starts; others print where they started."
        )
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
