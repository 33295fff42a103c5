"""`shardway config show | explain | schema`: every value with its origin, the doc of a key, the JSON Schema.

Invariant: what `show` prints is a run file that runs as it stands. This module must not resolve: it asks
`shardway.resolve`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from shardway.cli.options import DirOption, JsonOption, NprocOption, Words, read_request

app = typer.Typer(help="Show what a run resolves to, explain a key, print the schema.", no_args_is_help=True)


@app.command("show")
def show(
    words: Words = None, directory: DirOption = None, nproc: NprocOption = None, as_json: JsonOption = False
) -> None:
    """Print the resolved run, each value with where it came from."""
    from shardway.resolve.request import resolve_request

    ranks = nproc or 1
    resolution = resolve_request(read_request(words, directory), ranks, ranks)
    if as_json:
        typer.echo(json.dumps(resolution_facts(resolution), indent=1))
        return
    typer.echo(f"# run directory: {resolution.directory.path}")
    typer.echo(resolution.resolved.render(), nl=False)


@app.command("explain")
def explain(
    key: Annotated[str, typer.Argument(help="A key such as train.steps, or a section.")], as_json: JsonOption = False
) -> None:
    """Say what a key means, what it takes and what it defaults to."""
    from shardway.runfile.explain import explain_key

    docs = explain_key(key)
    if as_json:
        typer.echo(json.dumps([doc.as_json() for doc in docs], indent=1))
        return
    typer.echo("\n\n".join(doc.render() for doc in docs))


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
