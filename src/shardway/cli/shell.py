"""`shardway shell`: a shell on an allocation with what a run's job would find; `shardway exec`: a command on the nodes
of a job that runs.

Invariants:
- The exit code is that of the shell, or of the command.
- What --dry-run prints is what would be started, and the script that it starts; nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.main import CommandWithProgram, read_program_words
from shardway.cli.options import DirOption, RunName, Words, print_line, read_request, report
from shardway.errors import SiteError, UserError
from shardway.inherited import strip

if TYPE_CHECKING:
    from shardway.launch.hosts.base import Host
    from shardway.launch.interactive import NodeCommand
    from shardway.launch.submission.prepare import SubmitRequest

COMMANDS = {"exec": CommandWithProgram}

AT_ONCE = 8
"""Nodes on which --all runs a command at the same time; one connection of ssh carries ten sessions."""

OnOption = Annotated[str, typer.Option("--on", metavar="[USER@HOST:]SITE", help="The site (default: site.name).")]
NodesOption = Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the allocation.")]
GpusOption = Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs of each node (default: 1, if it has any).")]
WalltimeOption = Annotated[
    str, typer.Option("--walltime", help="How long it may last (default: 1h, or the queue's limit).")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Open it though it may cost more than site.budget.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and do nothing.")]


def shell(
    words: Words = None,
    on: OnOption = "",
    gpus: GpusOption = None,
    nodes: NodesOption = 1,
    walltime: WalltimeOption = "",
    directory: DirOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Open a shell on an allocation, with the environment of a run file or a run (RUN_FILE may be a RUN)."""
    from shardway.launch.interactive import ShellOptions, describe_shell, plan_shell, write_shell
    from shardway.launch.script import quote_all

    terminal = _has_terminal()
    with _find_request(list(words or []), on, directory) as (request, host):
        options = ShellOptions(nodes, gpus, walltime)
        plan = plan_shell(request, host, options, terminal=terminal, agreed=yes)
        for warning in plan.prepared.warnings:
            report(str(warning))
        if dry_run:
            typer.echo(f"# {host.name or 'this machine'} runs:\n{quote_all(plan.words)}")
            for path, text in plan.files.items():
                if path.name != "lib.sh":  # of every job: `submit --dry-run --lib` prints it
                    typer.echo(f"\n# --- {path}\n{text}", nl=False)
            return
        for line in describe_shell(plan):
            report(line)
        write_shell(plan, host)
    raise typer.Exit(_run_attached(host.attach(plan.words, terminal=terminal)))


@contextlib.contextmanager
def _find_request(words: list[str], on: str, directory: Path | None) -> Iterator[tuple[SubmitRequest, Host]]:
    """The request that the words name, which may be those of a run, and its host."""
    from shardway.launch.hosts import find_host, parse_target
    from shardway.launch.interactive import find_existing, find_work
    from shardway.launch.runs.find import find_known
    from shardway.launch.runs.job_status import read_ledger
    from shardway.launch.submission.prepare import SubmitRequest, read_last_request

    target = parse_target(on) if on else None
    site = target.site if target else ""
    first = words[0] if words else ""
    if not first or "=" in first or first.endswith(".toml") or find_existing(first):
        request = SubmitRequest(read_request(words, directory), site)
        yield request, find_host(target.host if target else "")
        return
    if directory is not None:
        raise UserError(f"--dir and the run {first} both name a run directory.\n  To do: leave one of them out.")
    known = find_known(first)
    if target is not None and target.host != known.host:
        places = [f"on {name}" if name else "on this machine" for name in (known.host, target.host)]
        raise UserError(
            f"--on {on}: {first} is {places[0]}, and the shell would be {places[1]}.\n"
            "  To do: name the site alone, as it is called there, or leave --on out."
        )
    host = find_host(known.host)
    with read_last_request(host, Path(known.run)) as last:
        run_request = replace(last.run_request, overrides=(*last.run_request.overrides, *words[1:]))
        workdir = find_work(host, read_ledger(host, Path(known.run)))
        yield replace(last, run_request=run_request, site=site or last.site, workdir=workdir), host


def exec(
    ctx: typer.Context,
    run: RunName,
    node: Annotated[str, typer.Option("--node", metavar="N|HOST", help="By its number or name (default: 0).")] = "",
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Where it runs; {pid} is its process.")] = None,
    every: Annotated[bool, typer.Option("--all", help="On every node, each line with the node's name.")] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Run `-- COMMAND` on a node of a running job, in its environment and container."""
    from shardway.launch.hosts import find_host
    from shardway.launch.interactive import ExecTarget, plan_exec
    from shardway.launch.runs.find import find_known
    from shardway.launch.script import quote, quote_all

    command = read_program_words(ctx)
    if not command:
        raise UserError(f"no command is named.\n  To do: name it behind `--`: shardway exec {quote(run)} -- nvidia-smi")
    given = {"--node": bool(node), "--rank": rank is not None, "--all": every}
    if len(twice := [name for name, value in given.items() if value]) > 1:
        raise UserError(f"{' and '.join(twice)} both say where.\n  To do: leave one of them out.")
    known, terminal = find_known(run), _has_terminal()
    host = find_host(known.host)
    path = Path(known.run) if host.name else Path(known.run).absolute()
    commands = plan_exec(host, path, ExecTarget(node, rank, every), command, terminal=terminal)
    if dry_run:
        for each in commands:
            typer.echo(quote_all(each.words))
        return
    if every:
        raise typer.Exit(_run_on_all(host, commands))
    raise typer.Exit(_run_attached(host.attach(commands[0].words, terminal=terminal)))


# --- processes with this one's terminal


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _run_attached(words: Sequence[str]) -> int:
    """Run a command with this process's input and output to its end; its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        process = subprocess.Popen(words, env=strip(os.environ))
    except FileNotFoundError:
        raise SiteError(
            f"there is no program {words[0]} on this machine's PATH.\n"
            "  To do: type this on a login node of the site, or name one: --on USER@HOST:SITE."
        ) from None

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    def wait_on(number: int, frame: FrameType | None) -> None:
        """A terminal sends these to the command too, which decides what they mean."""

    handlers = {signal.SIGTERM: pass_on, signal.SIGHUP: pass_on, signal.SIGINT: wait_on, signal.SIGQUIT: wait_on}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _run_on_all(host: Host, commands: Sequence[NodeCommand]) -> int:
    """Run the command on every node, some at a time, with the node before each line; the largest exit code."""
    width = max((len(each.node) for each in commands), default=0)

    def run(each: NodeCommand) -> int:
        process = subprocess.Popen(
            host.attach(each.words, terminal=False),
            env=strip(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="surrogateescape",
        )
        with process:
            for line in process.stdout or ():
                typer.echo(f"{each.node:<{width}}  {line}", nl=line[-1:] != "\n")
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    with ThreadPoolExecutor(AT_ONCE) as pool:
        codes = list(pool.map(run, commands))
    for each, code in zip(commands, codes, strict=True):
        if code:
            print_line(f"shardway: {each.node} ended with {code}")
    return max(codes, default=0)
