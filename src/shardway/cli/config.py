"""`shardway init`: a run file to start from; `shardway config show | explain | schema`: every value with its origin,
the doc of a key, the JSON Schema.

Invariants:
- `init` never overwrites a file; its template is the schema, its examples are those of the project. Its first line
  names the schema for editors (Taplo, Even Better TOML), as a file in the cache, since no network is needed then.
- What `show` prints is a run file that runs as it stands, with --mesh a picture of the ranks that it would run on, with
  --deepspeed the ds_config.json that DeepSpeed would be started with.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.options import (
    DirOption,
    JsonOption,
    NprocOption,
    Words,
    complete_example,
    complete_key,
    list_examples,
    print_json,
    read_request,
)
from shardway.errors import UserError
from shardway.places import find_own_folder
from shardway.refusals import UNWRITABLE, find_remedy
from shardway.rundir.file_io import render_json, write_new, write_whole

if TYPE_CHECKING:
    from shardway.resolve.request import Resolution

app = typer.Typer(help="Show what a run resolves to, explain a key, print the schema.", no_args_is_help=True)


@app.command("show")
def show(
    words: Words = None,
    directory: DirOption = None,
    nproc: NprocOption = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Nodes of the job that is shown, of --nproc ranks each (default: the site's devices)."
        ),
    ] = None,
    mesh: Annotated[
        bool, typer.Option("--mesh", help="Draw which ranks are on which node, and which communicate.")
    ] = False,
    deepspeed: Annotated[
        bool, typer.Option("--deepspeed", help="Print the ds_config.json that DeepSpeed would be started with.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the resolved run, each value with where it came from; or its ranks on nodes; or its ds_config.json."""
    from shardway.resolve.request import resolve_request, site_of
    from shardway.runfile.load import load_run

    request = read_request(words, directory)
    per_node = nproc or 1
    if nproc is None and nodes is not None:
        site = site_of(load_run(request.run_file, request.overrides))
        per_node = site.node.accelerators_per_node or 0
        if not per_node:
            raise UserError(
                f'--nodes: the site "{site.name}" names no accelerators of a node, so its number of ranks is not '
                "known.\n  To do: say how many with --nproc, or choose a site with site.name."
            )
    resolution = resolve_request(request, (nodes or 1) * per_node, per_node)
    resolved = resolution.resolved
    if mesh and deepspeed:
        raise UserError("--mesh and --deepspeed show different things; allowed: one of them.")
    if mesh:
        from shardway.layout import layout_of
        from shardway.plan.placement import place_mesh, render_placement

        placement = place_mesh(layout_of(resolved.values.parallel), per_node)
        if as_json:
            print_json(placement.facts())
        else:
            typer.echo(render_placement(placement), nl=False)
    elif deepspeed:
        from shardway.resolve.rules.deepspeed import render_settings, resolve_ds_config

        if resolved.values.train.engine != "deepspeed":
            raise UserError(
                '--deepspeed: train.engine is "torch", so nothing is handed to DeepSpeed.\n'
                "  To do: set train.engine=deepspeed."
            )
        typer.echo(render_settings(resolve_ds_config(resolved)), nl=False)
    elif as_json:
        print_json(resolution_facts(resolution))
    else:
        typer.echo(f"# run directory: {resolution.directory.path}")
        typer.echo(resolved.render(), nl=False)


@app.command("explain")
def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="WORD",
            help="A key such as train.steps, a section, a word, or what another trainer calls it.",
            autocompletion=complete_key,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Say what a key means, what it takes and what it defaults to; finds keys by any word, and by others' names."""
    from shardway.runfile.load import KeyDoc, search_keys

    found = search_keys(key)
    if as_json:
        print_json([asdict(each) for each in found if isinstance(each, KeyDoc)])
    else:
        typer.echo("\n\n".join(each.render() for each in found))


class SchemaKind(StrEnum):
    """The files that have a schema."""

    run = "run"
    site = "site"


@app.command("schema")
def schema(
    kind: Annotated[SchemaKind, typer.Argument(help="Of run files, or of site profiles.")] = SchemaKind.run,
) -> None:
    """Print the JSON Schema of run files or of site profiles, for editors that complete and check TOML."""
    print_json(schema_of(kind))


def schema_of(kind: SchemaKind) -> dict[str, Any]:
    """The schema, in words that draft 7 has too, which editors of TOML read; names of plugins are those that are
    installed here."""
    if kind is SchemaKind.run:
        from shardway.runfile.schema import RunFile

        found = RunFile.model_json_schema()
    else:
        from shardway.sites.schema import profile_schema

        found = profile_schema()
    return {"$schema": "http://json-schema.org/draft-07/schema#", **found}


def _keep_schema(*, dry: bool) -> str:
    """The URL of a copy of the run file's schema in the cache, written there unless `dry`; "" where there is none."""
    folder = find_own_folder("CACHE")
    if folder is None:
        return ""
    path = folder / "schema" / "run.json"
    if not dry:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, render_json(schema_of(SchemaKind.run), indent=1), durable=False)
        except OSError:
            return ""
    return path.as_uri()


def resolution_facts(resolution: Resolution) -> dict[str, Any]:
    """Every key with its value and origin, and what follows from them."""
    resolved = resolution.resolved
    values, derived = resolved.values.model_dump(mode="json"), resolved.derived
    keys = {}
    for dotted, origin in resolved.origins.items():
        section, name = dotted.split(".")
        keys[dotted] = {"value": values[section][name], "origin": origin}
    follows = {name: getattr(derived, name) for name in ("replicas", "accumulation", "peak_lr")}
    return {"directory": str(resolution.directory.path), "keys": keys, "derived": follows}


# --- a run file to start from

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
path = "python:stdlib"        # a file or folder of your own; kind = "jsonl", "parquet" ... if it is no text
include = "*.py"              # of a folder: which files, such as "*.txt"

[train]
steps = "800 steps"           # or "2e7 tokens", "3 epochs"
global_batch = 16             # samples in a step, over all ranks

[optim]
lr = 3e-3
"""


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
    if example is not None:
        known, plain = list_examples(), example.removesuffix(".toml").rpartition("/")[2]
        if plain not in known:
            raise UserError(f'there is no example "{example}".\n      allowed: {", ".join(known)}')
        text = known[plain].replace(f"examples/{plain}.toml", "THIS_FILE")
    elif minimal:
        text = MINIMAL
    else:
        from shardway.runfile.load import render_commented
        from shardway.runfile.schema import RunFile

        chosen = {"data.path": "python:stdlib", "train.steps": "800 steps"}  # a kind that is set is not looked for
        text = render_commented(RunFile(), chosen)
    if dry_run:
        url = _keep_schema(dry=True)
        typer.echo(f"#:schema {url}\n{text}" if url else text, nl=False)
        return
    try:
        if not path.exists() and (url := _keep_schema(dry=False)):
            text = f"#:schema {url}\n{text}"
        is_new = not os.path.lexists(path) and write_new(path, text)
    except OSError as error:
        elsewhere = "name a file in a folder that you may write to"
        remedy = find_remedy(error, elsewhere) if error.errno in UNWRITABLE else elsewhere
        raise UserError(f"{path} cannot be written: {error.strerror}.\n  To do: {remedy}.") from None
    if not is_new:
        raise UserError(f"{path} exists and is left as it is.\n  To do: name another file, or move it away.")
    typer.echo(f"wrote {path}; train it with `shardway train {shlex.quote(str(path))}`")
