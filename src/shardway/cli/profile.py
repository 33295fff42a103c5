"""`shardway profile`: a short run of its own, whose last steps are captured, and what their trace shows.

Invariant: the run that the run file names is not touched: this one has a directory of its own, saves nothing, and has
the steps, schedule and layout of the other.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shardway.cli.options import DirOption, JsonOption, NprocOption, Words, print_json, read_request
from shardway.errors import Problem, check_no_problems, legible
from shardway.ranks.launcher import find_placement
from shardway.rundir.directory import RunDir
from shardway.runfile.capture import MOST_STEPS, WITHOUT_EXTRAS
from shardway.runfile.load import COMMAND_LINE
from shardway.units import render_plural

_EDGES = 2
"""The analysis leaves out the first and the last of the captured steps, so these are captured besides."""


def profile(
    words: Words = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, max=MOST_STEPS - _EDGES, help="How many steps are analysed.")
    ] = 3,
    after: Annotated[
        int, typer.Option("--after", min=1, help="How many steps come before them: compilers settle in these.")
    ] = 10,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="The rank to capture (default: rank 0 and the slowest).")
    ] = None,
    nproc: NprocOption = None,
    directory: DirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a few steps of a run file in a directory of their own, and capture the last ones with a profiler."""
    found = capture_steps(words, steps, after, rank, nproc, directory, "profile", to_stderr=as_json)
    run, files = found.run, found.files
    analysis, merged = list[Any](), dict[str, Any]()
    if files:
        from shardway.watch.trace.analysis import analyse_ranks, merge_ranks
        from shardway.watch.trace.text import render_analysis

        analysis = analyse_ranks(files)
        merged = merge_ranks(analysis)
    if as_json:
        traces = [str(file) for file in files]
        print_json({"directory": str(run.path), "traces": traces, "events": found.events, "analysis": merged or None})
        return
    for file in files:
        typer.echo(f"trace          {file}")
    if analysis:
        typer.echo(legible(render_analysis(analysis)))
        if merged["steps"] < steps:
            typer.echo(f"\n{merged['steps']} of {steps} steps are analysed: {found.explain_fewer()}.")


@dataclass(frozen=True)
class CapturedSteps:
    """The run of its own in which steps were captured, up to step `last` if its length allows; its traces, and its
    events about them."""

    run: RunDir
    last: int
    files: Sequence[Path]
    events: Sequence[dict[str, Any]]

    def explain_fewer(self) -> str:
        """Why fewer steps can be analysed than were asked for."""
        ended = next((int(event["last"]) for event in self.events if "last" in event), self.last)
        return (
            f"the run ended with step {ended} (train.steps)" if ended < self.last else "the others cannot be relied on"
        )


def capture_steps(
    words: list[str] | None,
    steps: int,
    after: int,
    rank: int | None,
    nproc: int | None,
    directory: Path | None,
    suffix: str,
    *,
    to_stderr: bool,
) -> CapturedSteps:
    """Train in a directory of its own (that of the run with `suffix`, if none is given) and capture `steps` after
    `after` others. Raises as `shardway train`, and UserError for a rank that the run has not."""
    from shardway.cli.train import train

    ranks = nproc or find_placement(os.environ).world
    if rank is not None and rank >= ranks:
        what, allowed = f"{rank} is no rank of this run, which has {render_plural(ranks, 'rank')}", f"0 to {ranks - 1}"
        check_no_problems("the command line", [Problem("--rank", what, COMMAND_LINE, allowed if ranks > 1 else "0")])
    place = directory
    if place is None:
        from shardway.resolve.request import resolve_request

        own = resolve_request(read_request(words, None), nproc or 1, nproc or 1).directory.path
        place = own.with_name(f"{own.name}-{suffix}")
    of_rank = f", rank {rank}" if rank is not None else ""
    last = after + steps + _EDGES
    asked = f"train.profile=steps {after + 1}-{last}{of_rank}, then finish"
    with contextlib.redirect_stdout(sys.stderr) if to_stderr else contextlib.nullcontext():
        train([*(words or []), *WITHOUT_EXTRAS, asked], nproc=nproc, directory=place, fresh=True)
    run = RunDir(place)
    events = list(run.all_events(0, ("profiled", "profile_failed")))
    return CapturedSteps(run, last, [run.path / name for event in events for name in event.get("files", [])], events)
