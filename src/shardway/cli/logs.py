"""`shardway logs`: what a run says, from its events, or the output of one of its ranks.

Invariant: it only reads, and survives a run that is writing. This module must not interpret events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import JsonOption, RunArgument, find_run
from shardway.errors import UserError

if TYPE_CHECKING:
    from shardway.rundir.directory import RunDir
    from shardway.rundir.events import Event


def logs(
    path: RunArgument = None,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Whose events or output.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    output: Annotated[bool, typer.Option("--output", help="What the rank itself printed, not its events.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the events of a run as lines."""
    from shardway.watch.plain import PlainLines

    run = find_run(path)
    run.check_format()
    if output:
        typer.echo(_read_output(run, rank), nl=False)
        return
    if rank not in run.ranks_with_events():
        known = ", ".join(map(str, run.ranks_with_events())) or "none yet"
        raise UserError(f"rank {rank} has no events in {run.path}; ranks with events: {known}.")
    lines = PlainLines(every_s=0.0)
    for event in _events(run, rank, follow):
        for line in [json.dumps(event)] if as_json else lines.lines(event):
            typer.echo(line)


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
