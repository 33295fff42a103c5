"""`shardway init`: a run file to start from: every key with its doc, the few that one decides, or an example.

Invariant: an existing file is never overwritten. This module must not choose values: the template is the schema, and
the examples are those of the project.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from shardway.cli.options import complete_example
from shardway.errors import UserError

MINIMAL = """\
# A Shardway run file: what one has to decide. Every other key stands at its default: `shardway init all.toml` writes
# them all, `shardway config explain WORD` finds one.
format = 1

[model]
kind = "transformer"          # or hf = "FOLDER" for a model of the Hugging Face library
dim = 128
layers = 4
heads = 4

[data]
kind = "text"
path = "python:stdlib"        # a file or folder of your own

[train]
steps = "800 steps"           # or "2e7 tokens", "3 epochs"
global_batch = 16             # samples in a step, over all ranks

[optim]
lr = 3e-3
"""


def list_examples() -> list[str]:
    """The names of the examples."""
    folder = files("shardway.runfile").joinpath("examples")
    return sorted(each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml"))


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("run.toml"),
    minimal: Annotated[bool, typer.Option("--minimal", help="Only the keys that one has to decide.")] = False,
    example: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="EXAMPLE",
            help="An example: default, mnist, wikitext2.",
            show_default=False,
            autocompletion=complete_example,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file instead of writing it.")] = False,
) -> None:
    """Write a run file to start from: commented with every key, --minimal, or --from an example."""
    if minimal and example is not None:
        raise UserError("--minimal and --from write different files; allowed: one of them.")
    written = MINIMAL if minimal else _render_all()
    text = _read_example(example) if example is not None else written
    if dry_run:
        typer.echo(text, nl=False)
        return
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists and is left as it is.\n  To do: name another file, or move it away.") from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}.\n  To do: name a file in a folder that you may write to."
        ) from None
    typer.echo(f"wrote {path}; train it with `shardway train {path}`")


def _render_all() -> str:
    from shardway.runfile.schema import RunFile
    from shardway.runfile.write import render_commented

    return render_commented(RunFile(), {"data.kind": "text", "data.path": "python:stdlib", "train.steps": "800 steps"})


def _read_example(name: str) -> str:
    known, plain = list_examples(), name.removesuffix(".toml").rpartition("/")[2]
    if plain not in known:
        raise UserError(f'there is no example "{name}".\n      allowed: {", ".join(known)}')
    text = files("shardway.runfile").joinpath("examples", f"{plain}.toml").read_text(encoding="utf-8")
    return text.replace(f"examples/{plain}.toml", "THIS_FILE")
