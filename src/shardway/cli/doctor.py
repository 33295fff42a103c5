"""`shardway doctor`: whether this machine, or the nodes of this job, are fit to train.

Invariant: it ends with 0 whatever it finds, unless `--strict` asks for 3 where a check fails: a check must not end a
job. Of several ranks rank 0 prints, and any rank that could not reach it. This module must not look at anything.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import JsonOption, Words, print_line, read_request, read_time, report
from shardway.errors import SiteError, UserError

if TYPE_CHECKING:
    from shardway.ranks.doctor.surroundings import MachineNeeds
    from shardway.sites.schema import SiteProfile

_QUICK_GPU_S, _GPU_S = 10.0, 20.0
_QUICK_WAIT_S, _WAIT_S = 30.0, 60.0


def doctor(
    words: Words = None,
    site: Annotated[str | None, typer.Option("--site", help="Profile to compare with (default: the run's).")] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="The run directory (default: the run's).")] = None,
    as_json: JsonOption = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also measure GPUs, their links and the file system.")] = False,
    preflight: Annotated[bool, typer.Option("--preflight", help="Only what takes seconds, without torch.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Show each check that has nothing to say, and why.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="End with 3 where a check fails.")] = False,
    wait: Annotated[str, typer.Option("--wait", help="How long ranks wait for each other (default 60s).")] = "",
) -> int:
    """Look whether this machine, or each node of this job, is fit to train, and say what to do where it is not."""
    from shardway.ranks.doctor import examine
    from shardway.ranks.doctor.surroundings import look_around
    from shardway.ranks.heartbeat import bind_to_cores

    if why := bind_to_cores(os.environ):  # as the ranks of a training that starts here
        print_line(why)
    wait_s = read_time("--wait", wait) if wait else _QUICK_WAIT_S if preflight else _WAIT_S
    profile, wanted = _try_demands(words, site, directory) if preflight else _read_demands(words, site, directory)
    limit_s = _QUICK_GPU_S if preflight else _GPU_S
    around = look_around(dict(os.environ), profile, wanted, deep=deep, gpu_limit_s=limit_s)
    diagnosis = examine.examine_machine(around, quick=preflight, wait_s=wait_s)
    rows = examine.list_rows(diagnosis)
    if diagnosis.speaks and as_json:
        typer.echo(json.dumps(examine.render_json(diagnosis, profile.name, around.world), indent=1))
    elif diagnosis.speaks:
        typer.echo(f"{around.host}, compared with {profile.name}")
        typer.echo(examine.render_rows(rows, every=every))
    return SiteError.exit_code if strict and examine.judge_rows(rows) == "fail" else 0


def _try_demands(words: list[str] | None, site: str | None, directory: Path | None) -> tuple[SiteProfile, MachineNeeds]:
    """As `_read_demands`; what is wrong with the run file is printed; training reports it again."""
    try:
        return _read_demands(words, site, directory)
    except UserError as error:
        report(f"{error}\n  The preflight goes on without the run file.")
        return _read_demands(None, None, directory)


def _read_demands(
    words: list[str] | None, site: str | None, directory: Path | None
) -> tuple[SiteProfile, MachineNeeds]:
    """The profile, and what the run wants; without a run file nothing but a folder."""
    from shardway.ranks.doctor.surroundings import MachineNeeds
    from shardway.sites.load import load_site

    if not words:
        return load_site(site or "laptop"), MachineNeeds(folder=directory)
    from shardway.ranks.doctor.examine import read_wanted
    from shardway.resolve.request import resolve_request

    resolution = resolve_request(read_request(words, directory))
    return load_site(site or resolution.resolved.values.site.name), read_wanted(resolution)
