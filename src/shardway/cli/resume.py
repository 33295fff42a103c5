"""`shardway resume`: submits a run again, with what was asked for the last time.

Invariant: it is a submission like any other; what it takes over is the order that the last attempt recorded. This
module must not build scripts or ask schedulers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from shardway.cli.options import JsonOption
from shardway.cli.stop import RunName
from shardway.cli.submit import MostOption, print_sent, warn


def resume(
    run: RunName,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set anew.")] = None,
    until_done: Annotated[bool | None, typer.Option("--until-done/--once", help="As a chain, or once.")] = None,
    max_attempts: MostOption = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script, and do nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Go on with a run that was stopped, failed, or whose chain has ended."""
    from shardway.launch.find import find_known
    from shardway.launch.hosts import find_host
    from shardway.launch.prepare import prepare
    from shardway.launch.resume import read_last_order
    from shardway.launch.send import send

    known = find_known(run)
    host = find_host(known.host)
    with read_last_order(host, known) as order:
        request = replace(order.request, overrides=(*order.request.overrides, *(keys or [])))
        chain = order.until_done if until_done is None else until_done
        order = replace(order, request=request, until_done=chain, max_attempts=max_attempts or order.max_attempts)
        if dry_run:
            prepared = prepare(order, host)
            warn(prepared)
            typer.echo(prepared.script, nl=False)
            return
        print_sent(send(order, host), as_json)
