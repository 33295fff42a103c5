"""`shardway bench`: the measurements of a machine, each a verb of its own in the module that is named after it.

Invariant: without torch; a verb imports it when it measures.
"""

from __future__ import annotations

import typer

from shardway.cli.bench_comm import comm

app = typer.Typer(help="Measure this machine: what it reaches, and what it should reach.", no_args_is_help=True)
app.command("comm")(comm)
