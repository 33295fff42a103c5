"""`shardway plugins list`: what is registered in each group, by which package, and whether its name leads there.

Invariant: without --check no plugin is imported.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shardway.cli.options import JsonOption
from shardway.errors import UserError, legible

app = typer.Typer(help="List the optimizers, data sources, schedulers ... that are registered.", no_args_is_help=True)

OthersOption = Annotated[bool, typer.Option("--others", help="List those of other packages alone.")]
CheckOption = Annotated[bool, typer.Option("--check", help="Load each, and say what is wrong; exit code 1 if it is.")]
GroupArgument = Annotated[str | None, typer.Argument(metavar="GROUP", help="One group, such as optimizers.")]

COLUMNS = ("group", "name", "package", "version", "state")


@app.callback()
def _verbs() -> None:
    """Makes `list` a verb of its own, though it is the only one."""


@app.command("list")
def list_registered(
    group: GroupArgument = None, others: OthersOption = False, check: CheckOption = False, as_json: JsonOption = False
) -> int:
    """List what is registered in each group, by which package, and whether its name leads there."""
    from shardway.plugins import GROUPS, describe_state, list_plugins

    if group is not None and group not in GROUPS:
        raise UserError(f'there is no group "{group}"\n  allowed: {", ".join(GROUPS)}')
    found = [plugin for name in ([group] if group else GROUPS) for plugin in list_plugins(name)]
    shown = [plugin for plugin in found if not others or plugin.package != "shardway"]
    rows = [
        dict(zip(COLUMNS, (each.group, each.name, each.package, each.version, state), strict=True))
        for each in shown
        for state in [describe_state(each, check=check)]
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    elif not rows:
        typer.echo("no other package adds anything")
    else:
        head = {column: column.upper() for column in COLUMNS}
        widths = {column: max(len(row[column]) for row in [head, *rows]) for column in COLUMNS}
        for row in [head, *rows]:
            typer.echo(legible("  ".join(row[column].ljust(widths[column]) for column in COLUMNS).rstrip()))
    return int(check and any(row["state"] != "ok" for row in rows))
