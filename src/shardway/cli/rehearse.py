"""`shardway rehearse`: stops a run by a deadline on this machine, resumes it, and compares the losses.

Invariant: the run itself is not touched: everything happens in a scratch folder beside it.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import JsonOption, NprocOption, read_request, read_time
from shardway.errors import JobError, UserError, check_no_problems
from shardway.refusals import find_remedy

if TYPE_CHECKING:
    from shardway.launch.rehearsal import RehearsalCheck, RehearsedProgram

SCRATCH = "rehearsal"

RehearsalWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN_FILE] [KEY=VALUE]... | -- COMMAND...",
        help="A run file, and keys to set over it; or a command that torchrun could run.",
        show_default=False,
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
    piece, root = _read_piece(words or [], read_time("--deadline", deadline), nproc, steps)
    with _ended_by_sigterm(), _scratch(root, keep) as folder:
        if not as_json:
            typer.echo(f"rehearsing in {folder}")
        checks = list(_describe(piece, folder, quiet=as_json))
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(check) for check in checks], "folder": str(folder)}, indent=1))
    failed = [check for check in checks if check.verdict == "fail"]
    if failed:
        where = f"see {folder}" if keep else "rehearse with --keep to look at what was written"
        raise JobError(f"the rehearsal failed: {failed[0].name}: {failed[0].found.splitlines()[0]}\n  To do: {where}.")


def _read_piece(
    words: list[str], deadline_s: float, nproc: int | None, steps: int | None
) -> tuple[RehearsedProgram, Path]:
    """What is rehearsed, and the folder of run directories."""
    from shardway.launch.rehearsal import RehearsedProgram

    if _is_command(words):
        if nproc or steps:
            raise UserError("--nproc and --steps belong to a run file; a command says so itself, after `--`.")
        return RehearsedProgram(lambda folder: words, deadline_s, place=_plan_copies(words)), Path("runs")
    from shardway.resolve.request import resolve_request

    words = [*words, f"train.steps={steps}"] if steps else words
    resolution = resolve_request(read_request(words, None), nproc or 1, nproc or 1)
    ranks = ["--nproc", str(nproc)] if nproc else []
    train = [sys.executable, "-m", "shardway", "train", *words, *ranks, "--dir"]
    return RehearsedProgram(
        lambda folder: [*train, str(folder)], deadline_s, steps is not None
    ), resolution.directory.path.parent


def _plan_copies(words: Sequence[str]) -> Callable[[Path], Path]:
    """The working folders of a command: copies of the current folder. Raises UserError if none can be made, and for
    words that would mean something else there."""
    from shardway.launch.snapshot import plan_snapshot, work_in_copies
    from shardway.launch.submission.host_checks import Code, list_lost_paths

    plan = plan_snapshot(Path.cwd())
    code = Code(Path.cwd(), plan)
    check_no_problems("the command", [problem for word in words for problem in list_lost_paths(word, code)])
    return work_in_copies(plan)


def _is_command(words: Sequence[str]) -> bool:
    """Whether words are a program and its arguments: the first names neither a run file nor a key."""
    first = next(iter(words), "")
    return bool(first) and "=" not in first and not first.endswith(".toml")


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
    folder = root / f"{SCRATCH}-{uuid.uuid4().hex[:8]}"
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


def _describe(piece: RehearsedProgram, folder: Path, *, quiet: bool) -> Iterator[RehearsalCheck]:
    from shardway.launch.rehearsal import rehearse as run_rehearsal

    try:
        for check in run_rehearsal(piece, folder):
            if not quiet:
                typer.echo(_render(check))
            yield check
    except OSError as error:
        raise UserError(f"the command cannot be started: {error.strerror} ({error.filename}).") from None


def _render(check: RehearsalCheck) -> str:
    lines = check.found.splitlines() or [""]
    more = [f"{'':36}{line}" for line in lines[1:]]
    remedy = [f"{'':36}to do: {check.remedy}"] if check.remedy else []
    return "\n".join([f"{check.verdict:<8}{check.name:<28}{lines[0]}", *more, *remedy])
