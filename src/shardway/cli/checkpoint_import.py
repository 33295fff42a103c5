"""`shardway checkpoint import`: a run directory that begins with weights from elsewhere.

Invariant: nothing that exists is changed. This module must not know formats: `shardway.checkpoint.sources` does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import DirOption, JsonOption, Words, read_request
from shardway.errors import legible, list_some

if TYPE_CHECKING:
    from shardway.train.importing import Imported

SourceArgument = Annotated[
    Path,
    typer.Argument(
        help="Safetensors (a folder or a file), a folder of torch.distributed.checkpoint, a file of torch.save, or a "
        "run directory of Shardway or one of its checkpoints.",
        show_default=False,
    ),
]
FullOption = Annotated[
    bool, typer.Option("--full", help="Of a Shardway checkpoint: optimizer, position and random state as well.")
]
PrefixOption = Annotated[
    str | None, typer.Option("--prefix", help="What stands before the names of the weights (default: found).")
]
StepOption = Annotated[int | None, typer.Option("--step", min=0, help="Of a run: the step (default: the newest).")]


def import_(
    source: SourceArgument,
    words: Words = None,
    directory: DirOption = None,
    full: FullOption = False,
    step: StepOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a run directory that begins with weights from elsewhere: `shardway train` then starts from them.

    Name the run file and keys as for `shardway train`. A model that one process cannot hold is imported by several:
    `torchrun --nproc-per-node 8 -m shardway checkpoint import ...`.
    """
    request = read_request(words, directory)
    from shardway.ranks.launcher import find_placement
    from shardway.train.importing import ImportRequest, import_run

    imported = import_run(request, ImportRequest(source, step, prefix, full), os.environ)
    if find_placement(os.environ).rank != 0:
        return
    if as_json:
        typer.echo(json.dumps(asdict(imported), indent=1))
        return
    for line in _render(imported):
        typer.echo(legible(line))


def _render(imported: Imported) -> Iterator[str]:
    from shardway.watch.words import render_plural

    what = "everything" if imported.full else f"{render_plural(imported.tensors, 'tensor')} of the model"
    yield f"{what} ({imported.parameters} parameters) from {imported.source}, {imported.kind}"
    if imported.prefix and not imported.full:
        yield f"names there begin with {imported.prefix}"
    for conversion, count in imported.converted.items():
        yield f"converted from {conversion}: {render_plural(count, 'tensor')}"
    for part, count in imported.left_out.items():
        yield f"not used: {part} ({render_plural(count, 'tensor')})"
    if imported.initial:
        yield f"not there, so with initial values: {list_some(imported.initial, 8)}"
    begins = f"goes on after step {imported.step}" if imported.full else "begins with them and a fresh optimizer"
    yield f"{imported.directory}: `shardway train` with the same run file and --dir {begins}"
