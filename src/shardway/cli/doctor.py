"""`shardway doctor`: whether this machine, or the nodes of this job, are fit to train; `shardway rehearse`: stops a run
by a deadline on this machine, resumes it, and compares the losses.

Invariants:
- The doctor ends with 0 whatever it finds, unless `--strict` asks for 3 where a check fails: a check must not end a
  job. Of several ranks rank 0 prints, and any rank that could not reach it. This module must not look at anything.
- The run that is rehearsed is not touched: everything happens in a scratch folder beside it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import (
    JsonOption,
    NprocOption,
    Words,
    complete_site,
    complete_words,
    print_json,
    print_line,
    read_request,
    read_time,
    report,
)
from shardway.errors import JobError, SiteError, UserError, check_no_problems
from shardway.installed import check_torch
from shardway.refusals import find_remedy

if TYPE_CHECKING:
    from shardway.launch.rehearsal import RehearsalCheck, RehearsedProgram
    from shardway.ranks.doctor.surroundings import MachineNeeds
    from shardway.sites.schema import SiteProfile


def doctor(
    words: Words = None,
    site: Annotated[
        str | None,
        typer.Option("--site", help="Profile to compare with (default: the run's).", autocompletion=complete_site),
    ] = None,
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
    wait_s = read_time("--wait", wait) if wait else 30.0 if preflight else 60.0
    try:
        profile, wanted = _read_demands(words, site, directory)
    except UserError as error:
        if not preflight:
            raise
        report(f"{error}\n  The preflight goes on without the run file.")  # which training reports again
        profile, wanted = _read_demands(None, None, directory)
    limit_s = 10.0 if preflight else 20.0
    around = look_around(dict(os.environ), profile, wanted, deep=deep, gpu_limit_s=limit_s)
    diagnosis = examine.examine_machine(around, quick=preflight, wait_s=wait_s)
    rows = examine.list_rows(diagnosis)
    if diagnosis.speaks and as_json:
        print_json(examine.render_json(diagnosis, profile.name, around.world))
    elif diagnosis.speaks:
        typer.echo(f"{around.host}, compared with {profile.name}")
        typer.echo(examine.render_rows(rows, every=every))
    return SiteError.exit_code if strict and examine.judge_rows(rows) == "fail" else 0


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


# --- the rehearsal

RehearsalWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN_FILE] [KEY=VALUE]... | -- COMMAND...",
        help="A run file, and keys to set over it; or a command that torchrun could run.",
        show_default=False,
        autocompletion=complete_words,
    ),
]


def rehearse(
    words: RehearsalWords = None,
    deadline: Annotated[str, typer.Option("--deadline", help="Wall-time of an attempt, from its start.")] = "30s",
    nproc: NprocOption = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=2, help="Train so many steps, to the end; else as long as a deadline.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the scratch folder.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop a run by a deadline, let it go on, and compare it with one that nothing stopped."""
    from shardway.launch.rehearsal import rehearse as run_rehearsal

    piece, root = _read_piece(words or [], read_time("--deadline", deadline), nproc, steps)
    checks = []
    with _ended_by_sigterm(), _scratch(root, keep) as folder:
        if not as_json:
            typer.echo(f"rehearsing in {folder}")
        try:
            for check in run_rehearsal(piece, folder):
                checks.append(check)
                if not as_json:
                    typer.echo(_render(check))
        except OSError as error:
            raise UserError(f"the command cannot be started: {error.strerror} ({error.filename}).") from None
    if as_json:
        print_json({"checks": [asdict(check) for check in checks], "folder": str(folder)})
    if failed := [check for check in checks if check.verdict == "fail"]:
        where = f"see {folder}" if keep else "rehearse with --keep to look at what was written"
        raise JobError(f"the rehearsal failed: {failed[0].name}: {failed[0].found.splitlines()[0]}\n  To do: {where}.")


def _read_piece(
    words: list[str], deadline_s: float, nproc: int | None, steps: int | None
) -> tuple[RehearsedProgram, Path]:
    """What is rehearsed, and the folder of run directories: a command if the first word names neither a run file nor a
    key."""
    from shardway.launch.rehearsal import RehearsedProgram

    if words and words[0] and "=" not in words[0] and not words[0].endswith(".toml"):
        if nproc or steps:
            raise UserError("--nproc and --steps belong to a run file; a command says so itself, after `--`.")
        from shardway.launch.snapshot import plan_snapshot, work_in_copies
        from shardway.launch.submission.command import Code, list_lost_paths

        # It works in copies of the current folder, where some words would mean something else.
        snapshot = plan_snapshot(Path.cwd())
        code = Code(Path.cwd(), snapshot)
        check_no_problems("the command", [problem for word in words for problem in list_lost_paths(word, code)])
        return RehearsedProgram(lambda folder: words, deadline_s, place=work_in_copies(snapshot)), Path("runs")
    from shardway.resolve.request import resolve_request

    words = [*words, f"train.steps={steps}"] if steps else words
    root = resolve_request(read_request(words, None), nproc or 1, nproc or 1).directory.path.parent
    check_torch("`shardway rehearse`")
    ranks = ["--nproc", str(nproc)] if nproc else []
    train = [sys.executable, "-m", "shardway", "train", *words, *ranks, "--dir"]
    return RehearsedProgram(lambda folder: [*train, str(folder)], deadline_s, steps is not None), root


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM acts as Ctrl-C, so that the current attempt is ended with its rehearsal."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _scratch(root: Path, keep: bool) -> Iterator[Path]:
    folder = root / f"rehearsal-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"the folder {folder} cannot be made: {error.strerror}.\n  To do: {find_remedy(error, 'set run.root')}."
        ) from None
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _render(check: RehearsalCheck) -> str:
    lines = check.found.splitlines() or [""]
    more = [f"{'':36}{line}" for line in lines[1:]]
    remedy = [f"{'':36}to do: {check.remedy}"] if check.remedy else []
    return "\n".join([f"{check.verdict:<8}{check.name:<28}{lines[0]}", *more, *remedy])
