"""`shardway trace`: what a trace of torch's profiler shows, and what to change.

Invariant: without torch; nothing is written. What a trace shows is found in `shardway.watch.trace`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from shardway.cli.options import JsonOption, complete_gpu, print_json, report
from shardway.errors import UserError, legible


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
        width = min(shutil.get_terminal_size((120, 24)).columns, 120)
        typer.echo(legible(render_analysis(ranks, comparison, operators=operators, width=width)))


_WHERE = ("traces", ".", "plugins/profile/*")
"""Where in a folder the traces are: of a run, of a folder of ranks, of TensorBoard's profile plugin."""


def _find_files(paths: list[Path]) -> list[Path]:
    """The traces that are named, or that the folders hold. Raises UserError where there are none."""
    found = []
    for path in paths:
        found += _find_inside(path) if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def _find_inside(folder: Path) -> list[Path]:
    """The traces of a folder; of a run that was captured several times, those of the latest capture."""
    for where in _WHERE:
        found = _list_traces(folder, where)
        captures = {path: re.match(r"(steps-\d+-\d+)-rank-\d+", path.name) for path in found}
        if found and all(captures.values()):
            latest = captures[max(found, key=lambda path: path.stat().st_mtime)]
            found = [path for path, match in captures.items() if match and latest and match[1] == latest[1]]
            if len(found) < len(captures):
                report(
                    f"{folder}: the latest capture, {found[0].name}, of {len(captures)} traces; name others to see them"
                )
        if found:
            return found
    below = next((path.parent for path in sorted(folder.glob("*/*.json*")) if path in _list_traces(path.parent)), None)
    raise UserError(
        f"{folder} has no trace.\n  Allowed: a file .json or .json.gz, a folder of such files, or a run with traces/.\n"
        + (
            f"  To do: name {below}, which has traces."
            if below
            else "  To do: `shardway profile`, `touch RUN/profile` in a live run, or name the file that your profiler"
            " wrote."
        )
    )


def _list_traces(folder: Path, where: str = ".") -> list[Path]:
    from shardway.watch.trace.reader import may_be_trace

    named = {*folder.glob(f"{where}/*.json"), *folder.glob(f"{where}/*.json.gz")}
    return sorted(path for path in named if path.is_file() and may_be_trace(path))
