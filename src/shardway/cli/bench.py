"""`shardway bench`: the measurements of a machine, each a verb of its own in the module that is named after it.

Invariant: without torch; a verb imports it when it measures.
"""

from __future__ import annotations

import typer

from shardway.cli.bench_comm import comm
from shardway.cli.bench_device import device
from shardway.cli.bench_infer import app as infer
from shardway.cli.bench_step import step
from shardway.cli.bench_topology import topology

app = typer.Typer(help="Measure this machine: what it reaches, and what it should reach.", no_args_is_help=True)
app.command("comm")(comm)
app.command("device")(device)
app.command("topology")(topology)
app.command("step")(step)
app.add_typer(infer, name="infer")
