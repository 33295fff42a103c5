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
from shardway.cli.submit import DryRunOption, MostOption, carry_out


def resume(
    run: RunName,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set anew.")] = None,
    until_done: Annotated[bool | None, typer.Option("--until-done/--once", help="As a chain, or once.")] = None,
    max_attempts: MostOption = 0,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on with a run that was stopped, failed, or whose chain has ended."""
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.find import find_known
    from shardway.launch.submission.send import read_last_order

    known = find_known(run)
    host = find_host(known.host)
    with read_last_order(host, known) as order:
        request = replace(order.request, overrides=(*order.request.overrides, *(keys or [])))
        chain = order.until_done if until_done is None else until_done
        order = replace(order, request=request, until_done=chain, max_attempts=max_attempts or order.max_attempts)
        carry_out(order, host, dry_run=dry_run, as_json=as_json)
