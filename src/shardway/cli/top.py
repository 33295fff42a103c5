"""`shardway top`: a view of several runs in the terminal, live or recorded.

Invariants:
- It reads run directories of this machine; no scheduler is asked, except to stop a run, which is confirmed first.
- Textual draws it and is an extra: without it one sentence says how to install it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import complete_run
from shardway.errors import SiteError, UserError

if TYPE_CHECKING:
    from shardway.watch.advice.findings import Advice

MOST_RUNS = 40
"""Of more runs, those that changed last are shown."""

_LEAST_S, _MOST_S = 0.2, 600.0


def top(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Run directories, folders of them, names of runs, or ids of jobs (default: all of this machine).",
            show_default=False,
            autocompletion=complete_run,
        ),
    ] = None,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", help="Between two looks.")] = 2.0,
) -> None:
    """Watch several runs: accelerators as a heat map, loss, speed, waiting for data, alerts."""
    if not _LEAST_S <= every <= _MOST_S:
        raise UserError(f"--every {every:g}: it is out of range.\n      allowed: {_LEAST_S:g} to {_MOST_S:g} seconds")
    find = _make_finder(runs or [])
    try:
        import textual  # noqa: F401
    except ImportError:
        raise UserError(
            "`shardway top` draws with Textual, which is not installed here.\n"
            '  To do: pip install "shardway[top]"; `shardway status --watch` needs nothing.'
        ) from None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(
            "`shardway top` needs a terminal, and its input or output is none.\n"
            "  To do: use `shardway status --watch`, which prints blocks; over ssh, `ssh -t` gives a terminal."
        )
    from shardway.watch.top import Board, TopApp

    TopApp(Board(find), _Actions(), every).run()


# --- which runs


def _make_finder(words: Sequence[str]) -> Callable[[], Sequence[Path]]:
    """What lists the runs that are meant at each look: folders may get new ones. Raises UserError for a word that means
    no run, or one on another host."""
    from shardway.launch.runs.find import find_all, find_known, is_folder_of_runs, list_runs

    folders: list[Path] = []
    named: list[Path] = []
    for word in words:
        if is_folder_of_runs(word):
            folders.append(Path(word))
            continue
        known = find_known(word)
        if known.host:
            raise UserError(
                f"{word} is on another host, {known.host}, and its files are not here.\n"
                f"  To do: run `shardway top` there (`ssh -t {known.host} shardway top`), or "
                f"`shardway status {shlex.quote(word)}`."
            )
        named.append(Path(known.run))

    def find() -> Sequence[Path]:
        if words:
            # One that was named stays where its folder cannot be looked at, and is gone where the folder is.
            inside = [path for folder in folders for path in list_runs(folder)]
            return [*(path for path in named if os.path.lexists(path)), *_newest(inside)]
        return _newest([Path(known.run) for known in find_all(Path("runs")) if not known.host])

    return find


def _newest(runs: Sequence[Path]) -> Sequence[Path]:
    if len(runs) <= MOST_RUNS:
        return runs
    from shardway.rundir.directory import RunDir

    def changed(path: Path) -> float:
        times = [0.0]
        for each in (RunDir(path).status_path, RunDir(path).attempts_folder, path):
            try:
                times.append(each.stat().st_mtime)
            except OSError:
                continue
        return max(times)

    return sorted(runs, key=changed, reverse=True)[:MOST_RUNS]


# --- what the view can ask for


class _Actions:
    """The two changes that the view makes, and advice."""

    def stop(self, run: Path) -> str:
        from shardway.launch.hosts import find_host
        from shardway.launch.runs.job_status import read_ledger
        from shardway.launch.runs.stop import Stopper

        stopper = Stopper(find_host(""))
        lines = stopper.ask(read_ledger(stopper.host, run)).list_lines()
        return f"{run.name}: {'; '.join(lines)}" if lines else f"{run.name} has no job that waits or runs"

    def report(self, run: Path) -> str:
        import webbrowser

        from shardway.rundir.directory import RunDir
        from shardway.watch.report import render_report

        directory = RunDir(run)
        directory.write_report(render_report(directory))
        shown = directory.report_path.absolute()
        has_screen = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
        if has_screen and not os.environ.get("SSH_CONNECTION"):
            try:
                webbrowser.get()
            except webbrowser.Error as error:
                raise SiteError(f"the report is in {shown}; no browser is found here: {error}") from None
            webbrowser.open(shown.as_uri())
        return f"the report is in {shown}"

    def advise(self, run: Path) -> Sequence[Advice]:
        from shardway.rundir.directory import RunDir
        from shardway.watch.advice.advise import advise

        return advise(RunDir(run))
