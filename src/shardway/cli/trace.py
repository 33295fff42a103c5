"""`shardway trace`: what a trace of torch's profiler shows, and what to change.

Invariant: without torch; nothing is written. What a trace shows is found in `shardway.watch.trace`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardway.cli.options import JsonOption, complete_gpu, print_json
from shardway.errors import UserError, legible
from shardway.rundir.directory import RunDir


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Traces (.json or .json.gz), or folders of them: one, or one of each rank."
        ),
    ],
    as_json: JsonOption = False,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FILE", help="An earlier trace: show what changed.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="The GPU, where the trace does not name it.", autocompletion=complete_gpu),
    ] = None,
    operators: Annotated[int, typer.Option("--operators", min=0, help="How many operators to show.")] = 10,
) -> None:
    """Analyse traces of torch's profiler: the quality of the capture, a step's time, operators, what to change."""
    from shardway.watch.trace.analysis import analyse_ranks, analyse_trace, compare_traces, merge_ranks
    from shardway.watch.trace.text import render_analysis

    ranks = analyse_ranks(_find_files(files), gpu)
    comparison = None
    if against is not None:
        slowest = max(ranks, key=lambda each: each.busy_ms)
        comparison = compare_traces(slowest, analyse_trace(_find_files([against])[0], gpu))
    if as_json:
        found = merge_ranks(ranks)
        print_json({**found, "against": comparison} if comparison is not None else found)
    else:
        typer.echo(legible(render_analysis(ranks, comparison, operators=operators)))


def _find_files(paths: list[Path]) -> list[Path]:
    """The traces that are named, or that the folders hold. Raises UserError where there are none."""
    found = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted({*path.glob("traces/*.json"), *path.glob("traces/*.json.gz")})
        if not inside and not RunDir(path).exists():  # a run has JSON files of its own
            inside = sorted({*path.glob("*.json"), *path.glob("*.json.gz")})
        if not inside:
            raise UserError(
                f"{path} has no trace.\n  Allowed: a file .json or .json.gz, a folder of such files, or a run with"
                " traces/.\n"
                "  To do: `shardway profile`, `touch RUN/profile` in a live run, or name the file that your profiler"
                " wrote."
            )
        found += inside
    return list(dict.fromkeys(found))
