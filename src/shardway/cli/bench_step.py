"""`shardway bench step`: the roofline of a run file's own step, against the ceilings of the device that runs it.

Invariant: the run that the run file names is not touched: steps are captured as by `shardway profile`, in a directory
of their own. Every mistake that can be found without torch is reported before a step is run.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from shardway.cli.bench_options import BenchOutputs, JsonFileOption, find_wrong_time
from shardway.cli.main import uncollected
from shardway.cli.options import DirOption, NprocOption, Words, complete_site
from shardway.cli.profile import capture_steps
from shardway.errors import JobError, UserError, check_no_problems
from shardway.ranks.launcher import find_placement
from shardway.runfile.capture import MOST_STEPS


def step(
    words: Words = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=MOST_STEPS - 2, help="How many steps are analysed.")] = 3,
    after: Annotated[
        int, typer.Option("--after", min=1, help="How many steps come before them: compilers settle in these.")
    ] = 10,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="The rank to capture (default: rank 0 and the slowest).")
    ] = None,
    nproc: NprocOption = None,
    directory: DirOption = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="About how long the ceilings of the device are measured.")
    ] = 4.0,
    site: Annotated[
        str | None,
        typer.Option("--site", help="Profile whose [measured] has the ceilings instead.", autocompletion=complete_site),
    ] = None,
    to_html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write the roofline as one HTML file.")
    ] = None,
    to_json: JsonFileOption = None,
) -> None:
    """Show how far each part of a training step is from what this device can compute and move."""
    outputs = BenchOutputs(json=to_json, html=to_html)
    check_no_problems("the command line", [*find_wrong_time(seconds), *outputs.find_wrong()])
    ceilings = None
    if site is not None:
        from shardway.bench.step import read_site_ceilings

        ceilings = read_site_ceilings(site)
    found = capture_steps(words, steps, after, rank, nproc, directory, "step", to_stderr=to_json == "-")
    if find_placement(os.environ).rank != 0 and nproc is None:
        return  # of a launch, whose first rank reports
    if not found.files:
        reasons = [str(event.get("reason", "")) for event in found.events]
        if reasons:
            raise JobError(f"no step was captured: {'; '.join(reasons)}")
        raise UserError(
            f"no step was captured: the run ended before step {after + 1} (train.steps), the first to be captured.\n"
            f"  To do: set train.steps to {found.last} or more, or lower --after (now {after})."
        )
    with uncollected():
        from shardway.bench.step import judge_captures
    judged = judge_captures(found.files, found.run, ceilings, seconds)
    from shardway.bench.roofline import render_facts
    from shardway.bench.roofline_page import render_page, render_report

    def describe() -> str:
        fewer = f"\n\n{judged.steps} of {steps} steps are analysed: {found.explain_fewer()}."
        return f"\n{render_report(judged)}{fewer if judged.steps < steps else ''}"

    outputs.write(describe, lambda: render_facts(judged), lambda: render_page(judged))
