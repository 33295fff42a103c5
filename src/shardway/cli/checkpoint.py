"""`shardway checkpoint`: are a run's checkpoints whole, what is in them, and weights out of a run and into a new one.

Invariant: a run directory that exists is only read. This module must not know formats: `shardway.train.export` does.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.checkpoint_contents import CheckpointArgument, diff, inspect
from shardway.cli.checkpoint_import import import_
from shardway.cli.options import JsonOption
from shardway.errors import JobError, UserError, legible

if TYPE_CHECKING:
    from shardway.checkpoint.verify import Verified
    from shardway.watch.progress import BestCheckpoint

app = typer.Typer(
    help="Whether a run's checkpoints are whole, what is in them, and weights to and from elsewhere.",
    no_args_is_help=True,
)


app.command("inspect")(inspect)
app.command("diff")(diff)
app.command("import")(import_)


class Format(StrEnum):
    """Number formats of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


_OF_OWN_NAMES = ("files", "left_out")
"""What is told of an export where there is something to tell."""


@app.command("verify")
def verify(
    run: CheckpointArgument,
    as_json: JsonOption = False,
) -> int:
    """Compare every byte of every checkpoint with its checksum; exit code 4 where one is damaged.

    Nothing is changed: a run that goes on sets damaged ones aside itself.
    """
    from shardway.checkpoint.find import find_checkpoints
    from shardway.checkpoint.verify import verify_all
    from shardway.rundir.directory import RunDir
    from shardway.watch.progress import find_best_checkpoint

    found, best = [], None
    with contextlib.suppress(JobError):  # events that cannot be read are no damage of a checkpoint
        best = find_best_checkpoint(RunDir(run))
    for each in verify_all(find_checkpoints(run)):
        found.append(each)
        if not as_json:
            typer.echo(legible(_render_verified(each, best)))
    if as_json:
        marked = [{**each.as_json(), "best": best is not None and each.step == best.step} for each in found]
        typer.echo(json.dumps(marked, indent=1))
    return 0 if all(each.is_whole for each in found) else 4


def _render_verified(each: Verified, best: BestCheckpoint | None) -> str:
    from shardway.watch.words import render_monitored, render_size

    if each.manifest is None or not each.is_whole:
        return f"{each.name}  damaged: {'; '.join(each.reasons)}"
    files, ranks = len(each.manifest.files), each.manifest.world
    mark = ""
    if best is not None and each.step == best.step:
        mark = f", the best: {render_monitored(best.metric, best.value)}"
    return (
        f"{each.name}  whole  {render_size(each.manifest.total_bytes)} in {files} file{'s' * (files != 1)}, "
        f"saved by {ranks} rank{'s' * (ranks != 1)}{mark}"
    )


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    dtype: Annotated[
        Format | None,
        typer.Option(help="Number format of the weights that are written; else fp32, or under own names as saved."),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="The step (default: the newest).")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The one with the best validation by checkpoint.monitor, of those kept.")
    ] = False,
    own_names: Annotated[
        bool, typer.Option("--own-names", help="model.safetensors and model.pt under the model's own names.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint, the newest unless told, as a folder that `from_pretrained` reads; of a script's model, as
    `model.safetensors` and `model.pt` (a `state_dict`) under its own names.

    A model that one process cannot hold is exported by several: `torchrun --nproc-per-node 8 -m shardway checkpoint
    export ...`.
    """
    from shardway.ranks.launcher import find_placement
    from shardway.rundir.directory import RunDir
    from shardway.train.export import Which, export_run

    if best and step is not None:
        raise UserError(f"--best and --step {step} name two checkpoints.\n  To do: leave one of them out.")
    which = Which(step, best)
    exported = export_run(RunDir(run), folder, dtype and dtype.value, os.environ, own_names=own_names, which=which)
    if exported is not None and find_placement(os.environ).rank == 0:
        for damaged in exported.passed_over:
            typer.echo(f"step {damaged.step} is damaged and was passed over: {damaged.reason}", err=True)
        for why in exported.left_out:
            typer.echo(why, err=True)
        facts = {name: value for name, value in asdict(exported).items() if value or name not in _OF_OWN_NAMES}
        files = f": {', '.join(exported.files)}" if exported.files else ""
        told = f"step {exported.step} written to {exported.folder}{files}"
        typer.echo(json.dumps(facts, indent=1) if as_json else told)
