"""`shardway init`: a run file to start from; `shardway config show | explain | schema`: every value with its origin,
the doc of a key, the JSON Schema.

Invariants:
- `init` never overwrites a file; its template is the schema, its examples are those of the project.
- What `show` prints is a run file that runs as it stands, with --mesh a picture of the ranks that it would run on, with
  --deepspeed the ds_config.json that DeepSpeed would be started with.
"""

from __future__ import annotations

import json
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
    examples_folder,
    list_examples,
    read_request,
)
from shardway.errors import UserError

if TYPE_CHECKING:
    from shardway.resolve.request import Resolution, ResolveRequest

app = typer.Typer(help="Show what a run resolves to, explain a key, print the schema.", no_args_is_help=True)


NodesOption = Annotated[
    int | None,
    typer.Option(min=1, help="Nodes of the job that is shown, of --nproc ranks each (default: the site's devices)."),
]
MeshOption = Annotated[bool, typer.Option("--mesh", help="Draw which ranks are on which node, and which communicate.")]
DeepspeedOption = Annotated[
    bool, typer.Option("--deepspeed", help="Print the ds_config.json that DeepSpeed would be started with.")
]


@app.command("show")
def show(
    words: Words = None,
    directory: DirOption = None,
    nproc: NprocOption = None,
    nodes: NodesOption = None,
    mesh: MeshOption = False,
    deepspeed: DeepspeedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the resolved run, each value with where it came from; or its ranks on nodes; or its ds_config.json."""
    from shardway.resolve.request import resolve_request

    request = read_request(words, directory)
    per_node = nproc or (1 if nodes is None else _ranks_of_a_node(request))
    resolution = resolve_request(request, (nodes or 1) * per_node, per_node)
    if mesh and deepspeed:
        raise UserError("--mesh and --deepspeed show different things; allowed: one of them.")
    if mesh:
        _show_mesh(resolution, as_json)
    elif deepspeed:
        _show_deepspeed(resolution)
    elif as_json:
        typer.echo(json.dumps(resolution_facts(resolution), indent=1))
    else:
        typer.echo(f"# run directory: {resolution.directory.path}")
        typer.echo(resolution.resolved.render(), nl=False)


def _ranks_of_a_node(request: ResolveRequest) -> int:
    """As many as a node of the site has devices. Raises UserError where the site does not say."""
    from shardway.resolve.request import site_of
    from shardway.runfile.load import load_run

    site = site_of(load_run(request.run_file, request.overrides))
    if not site.node.accelerators_per_node:
        raise UserError(
            f'--nodes: the site "{site.name}" names no accelerators of a node, so its number of ranks is not known.\n'
            "  To do: say how many with --nproc, or choose a site with site.name."
        )
    return site.node.accelerators_per_node


def _show_mesh(resolution: Resolution, as_json: bool) -> None:
    from shardway.layout import layout_of
    from shardway.plan.placement import place_mesh, render_placement

    resolved = resolution.resolved
    placement = place_mesh(layout_of(resolved.values.parallel), resolved.circumstances.ranks_per_node)
    if as_json:
        typer.echo(json.dumps(placement.facts(), indent=1))
    else:
        typer.echo(render_placement(placement), nl=False)


def _show_deepspeed(resolution: Resolution) -> None:
    from shardway.resolve.rules.deepspeed import render_ds_config

    if resolution.resolved.values.train.engine != "deepspeed":
        raise UserError(
            '--deepspeed: train.engine is "torch", so nothing is handed to DeepSpeed.\n'
            "  To do: set train.engine=deepspeed."
        )
    typer.echo(render_ds_config(resolution.resolved), nl=False)


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
    from shardway.runfile.load import search_keys

    found = search_keys(key)
    if as_json:
        typer.echo(json.dumps([doc.as_json() for doc in found.docs], indent=1))
        return
    typer.echo(found.render())


@app.command("schema")
def schema() -> None:
    """Print the JSON Schema of run files, for editors that complete and check TOML."""
    from shardway.runfile.schema import RunFile

    typer.echo(json.dumps(RunFile.model_json_schema(), indent=1))


def resolution_facts(resolution: Any) -> dict[str, Any]:
    """Every key with its value and origin, and what follows from them."""
    resolved = resolution.resolved
    values = resolved.values.model_dump(mode="json")
    keys = {
        dotted: {"value": values[dotted.split(".")[0]][dotted.split(".")[1]], "origin": origin}
        for dotted, origin in resolved.origins.items()
    }
    derived = {"replicas": resolved.derived.replicas, "accumulation": resolved.derived.accumulation}
    return {
        "directory": str(resolution.directory.path),
        "keys": keys,
        "derived": {**derived, "peak_lr": resolved.derived.peak_lr},
    }


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
kind = "text"
path = "python:stdlib"        # a file or folder of your own

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
    from shardway.runfile.load import render_commented
    from shardway.runfile.schema import RunFile

    return render_commented(RunFile(), {"data.kind": "text", "data.path": "python:stdlib", "train.steps": "800 steps"})


def _read_example(name: str) -> str:
    known, plain = list_examples(), name.removesuffix(".toml").rpartition("/")[2]
    if plain not in known:
        raise UserError(f'there is no example "{name}".\n      allowed: {", ".join(known)}')
    text = (examples_folder() / f"{plain}.toml").read_text(encoding="utf-8")
    return text.replace(f"examples/{plain}.toml", "THIS_FILE")
