"""`shardway checkpoint export`: a run's newest weights as a folder of the Hugging Face library.

Invariant: the run directory is only read. This module must not know formats: `shardway.train.export` does.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardway.cli.options import JsonOption

app = typer.Typer(help="What is in a run's checkpoints, for use elsewhere.", no_args_is_help=True)


class Format(StrEnum):
    """Number formats of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    dtype: Annotated[Format, typer.Option(help="Number format of the weights that are written.")] = Format.fp32,
    as_json: JsonOption = False,
) -> None:
    """Write the newest checkpoint as a folder that `from_pretrained` reads.

    A model that one process cannot hold is exported by several: `torchrun --nproc-per-node 8 -m shardway checkpoint
    export ...`.
    """
    from shardway.ranks.launcher import find_placement
    from shardway.rundir.directory import RunDir
    from shardway.train.export import export_run

    exported = export_run(RunDir(run), folder, dtype.value, os.environ)
    if find_placement(os.environ).rank == 0:
        for damaged in exported.passed_over:
            typer.echo(f"step {damaged.step} is damaged and was passed over: {damaged.reason}", err=True)
        facts = asdict(exported)
        typer.echo(json.dumps(facts, indent=1) if as_json else f"step {exported.step} written to {exported.folder}")
