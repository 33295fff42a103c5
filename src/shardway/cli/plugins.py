"""`shardway plugins list`: what is registered in each group, by which package, and whether its name leads there.

Invariant: without --check no plugin is imported.
"""

from __future__ import annotations

from typing import Annotated

import typer

from shardway.cli.options import JsonOption, print_json, print_table
from shardway.errors import UserError

app = typer.Typer(help="List the optimizers, data sources, schedulers ... that are registered.", no_args_is_help=True)


@app.callback()
def _verbs() -> None:
    """Makes `list` a verb of its own, though it is the only one."""


@app.command("list")
def list_registered(
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="One group, such as optimizers.")] = None,
    others: Annotated[bool, typer.Option("--others", help="List those of other packages alone.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Load each, and say what is wrong; exit code 1 if it is.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """List what is registered in each group, by which package, and whether its name leads there."""
    from shardway.plugins import GROUPS, describe_state, list_plugins

    if group is not None and group not in GROUPS:
        raise UserError(f'there is no group "{group}"\n  allowed: {", ".join(GROUPS)}')
    found = [plugin for name in ([group] if group else GROUPS) for plugin in list_plugins(name)]
    columns = ("group", "name", "package", "version")
    rows = [
        {column: getattr(each, column) for column in columns} | {"state": describe_state(each, check=check)}
        for each in found
        if not others or each.package != "shardway"
    ]
    if as_json:
        print_json(rows)
    elif rows:
        print_table((*columns, "state"), rows)
    else:
        typer.echo("no other package adds anything")
    return int(check and any(row["state"] != "ok" for row in rows))
