"""`shardway profile`: a short run of its own, whose last steps are captured, and what their trace shows.

Invariant: the run that the run file names is not touched: this one has a directory of its own, saves nothing, and has
the steps, schedule and layout of the other.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardway.cli.options import DirOption, JsonOption, NprocOption, Words, print_json, read_request
from shardway.errors import legible
from shardway.rundir.directory import RunDir
from shardway.runfile.capture import MOST_STEPS

_EDGES = 2
"""The analysis leaves out the first and the last of the captured steps, so these are captured besides."""

_WITHOUT = (
    *(
        'checkpoint.every="off"',
        'checkpoint.local_every="off"',
        'checkpoint.keep_every="off"',
        "checkpoint.keep_best=0",
    ),
    *('train.validate_every="off"', 'train.patience="off"', "track.to=[]", "track.settings={}"),
)
"""What a run of a few steps does without."""


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
    from shardway.cli.train import train

    place = directory
    if place is None:
        from shardway.resolve.request import resolve_request

        own = resolve_request(read_request(words, None), nproc or 1, nproc or 1).directory.path
        place = own.with_name(f"{own.name}-profile")
    of_rank = f", rank {rank}" if rank is not None else ""
    last = after + steps + _EDGES
    asked = f"train.profile=steps {after + 1}-{last}{of_rank}, then finish"
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        train([*(words or []), *_WITHOUT, asked], nproc=nproc, directory=place, fresh=True)
    run = RunDir(place)
    found = list(run.all_events(0, ("profiled", "profile_failed")))
    files = [str(run.path / name) for event in found for name in event.get("files", [])]
    analysis, merged = list[Any](), dict[str, Any]()
    if files:
        from shardway.watch.trace.analysis import analyse_ranks, merge_ranks
        from shardway.watch.trace.text import render_analysis

        analysis = analyse_ranks([Path(file) for file in files])
        merged = merge_ranks(analysis)
    if as_json:
        print_json({"directory": str(run.path), "traces": files, "events": found, "analysis": merged or None})
        return
    for file in files:
        typer.echo(f"trace          {file}")
    if analysis:
        typer.echo(legible(render_analysis(analysis)))
        if merged["steps"] < steps:
            ended = next((int(event["last"]) for event in found if "last" in event), last)
            why = f"the run ended with step {ended} (train.steps)" if ended < last else "the others cannot be relied on"
            typer.echo(f"\n{merged['steps']} of {steps} steps are analysed: {why}.")
