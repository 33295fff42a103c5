"""`shardway track`: sends a run to trackers after the fact, from its run directory.

Invariant: a second call adds only what is new; nothing of the run but the list of what was sent changes.
"""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from shardway.cli.options import JsonOption, complete_run, find_run, print_json
from shardway.errors import UserError
from shardway.units import render_plural


def track(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", autocompletion=complete_run)],
    to: Annotated[str, typer.Option("--to", metavar="TRACKERS", help="Trackers, with commas between them.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TRACKER.NAME=VALUE", help="A setting, in place of that of track.settings."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Send a run to trackers (wandb, mlflow, trackio, tensorboard ...), also long after it has ended."""
    from shardway.plugins import is_registered, list_names
    from shardway.watch.trackers.send import send_run

    names = [name.strip() for name in to.split(",") if name.strip()]
    wrong = [name for name in names if not is_registered("trackers", name)]
    if wrong or not names:
        what = f'--to: "{wrong[0]}" is no tracker' if wrong else "--to names no tracker"
        raise UserError(f"{what}.\n  Allowed: {', '.join(list_names('trackers'))}.")
    found = []
    for sent in send_run(find_run(run), names, _read_settings(settings or [], names), os.environ):
        found.append(asdict(sent))
        if not as_json:
            what = f"{sent.events} steps, validations and logged values, "
            what += f"{render_plural(sent.windows, 'mean')} of the hardware"
            is_new = sent.events or sent.windows
            typer.echo(f"{sent.tracker}: {what if is_new else 'nothing is new'}{f' -> {sent.id}' if sent.id else ''}")
    if as_json:
        print_json(found)


def _read_settings(words: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    """Settings by tracker. Raises UserError."""
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        tracker, dot, name = key.partition(".")
        if not (equals and dot and name) or tracker not in names:
            raise UserError(
                f'--set: "{word}" is no setting of a tracker that --to names.\n'
                "  Allowed: TRACKER.NAME=VALUE, such as wandb.project=speech."
            )
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = tomllib.loads(f"value = {json.dumps(text)}")["value"]
        found.setdefault(tracker, {})[name] = value
    return found
