"""`shardway init`: a commented run file to start from.

Invariant: an existing file is never overwritten. This module must not choose values: the template is the schema.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardway.errors import UserError


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("run.toml"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file instead of writing it.")] = False,
) -> None:
    """Write a commented run file with every key and its default."""
    from shardway.runfile.schema import RunFile
    from shardway.runfile.write import render_commented

    text = render_commented(RunFile(), {"data.kind": "text", "data.path": "python:stdlib", "train.steps": "800 steps"})
    if dry_run:
        typer.echo(text, nl=False)
        return
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists and is left as it is.\n  To do: name another file, or remove it.") from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}.\n  To do: name a file in a folder that you may write to."
        ) from None
    typer.echo(f"wrote {path}; train it with `shardway train {path}`")
