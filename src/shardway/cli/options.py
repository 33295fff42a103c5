"""Arguments that several verbs share, and how words on the command line become a request.

Invariant: a verb that takes a run takes it in the same words as every other. This module must not print.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.completing import complete_run, complete_words
from shardway.errors import UserError

if TYPE_CHECKING:
    from shardway.resolve.request import ResolveRequest
    from shardway.rundir.directory import RunDir

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN_FILE] [KEY=VALUE]...",
        help="A run file, and keys to set over it.",
        show_default=False,
        autocompletion=complete_words,
    ),
]
DirOption = Annotated[
    Path | None,  # what cannot be read is told where it is used
    typer.Option("--dir", help="The run directory (default: run.root/run.name).", readable=False),
]
NprocOption = Annotated[int | None, typer.Option("--nproc", min=1, help="Ranks to start and watch on this machine.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print facts as JSON on stdout, and nothing else there.")]
RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN_DIR]",
        help="A run directory, or a folder of them (default: runs).",
        autocompletion=complete_run,
    ),
]


def read_request(words: list[str] | None, directory: Path | None, fresh: bool = False) -> ResolveRequest:
    """The request in the words of a command line. Raises UserError where they name two run files."""
    from shardway.resolve.request import parse_words

    return replace(parse_words(words or []), directory=directory, fresh=fresh)


def find_run(path: Path | None) -> RunDir:
    """The one run at a path (or the only one in the default folder). Raises UserError where that is not one run."""
    from shardway.watch.summary import find_runs

    root = path or Path("runs")
    runs = find_runs(root)
    if not runs:
        raise UserError(f"there is no run in {root}.\n  To do: name a run directory, or start a run: `shardway train`.")
    if len(runs) > 1:
        names = "\n".join(f"    {run.path}" for run in runs)
        raise UserError(f"{root} holds {len(runs)} runs; name one of them:\n{names}")
    return runs[0]
