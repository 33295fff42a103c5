"""`shardway train`: trains a run file on one rank, on N local ranks, or as a rank of any launcher.

Invariant: every mistake that can be found without torch is reported before torch is imported. Nothing is trained here:
this module starts ranks, shows what they write, and reports how the run ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.config import resolution_facts
from shardway.cli.main import uncollected
from shardway.cli.options import DirOption, JsonOption, NprocOption, Words, print_json, print_line, read_request, report
from shardway.errors import JobError, SiteError, UserError
from shardway.hardware.limits import ensure_temporary
from shardway.installed import check_torch
from shardway.ranks.launcher import (
    NodeSpec,
    find_placement,
    has_restarts_left,
    is_in_terminal,
    parse_host,
    was_started_before,
)
from shardway.ranks.outputs import enduring_outputs, leave_outputs
from shardway.ranks.stop import SignalWatch
from shardway.rundir.attempts import VARIABLE
from shardway.rundir.directory import RunDir

if TYPE_CHECKING:
    from shardway.data.open import Data
    from shardway.ranks.failure import AttemptShare
    from shardway.resolve.request import Resolution, ResolveRequest
    from shardway.rundir.events import Event
    from shardway.watch.facts import ValidatedEvent


def train(
    words: Words = None,
    nproc: NprocOption = None,
    directory: DirOption = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; what an earlier run left is moved aside, not deleted.")
    ] = False,
    nodes: Annotated[
        str | None,
        typer.Option("--nodes", metavar="ADDRESSES", help="Addresses of the machines to train on."),
    ] = None,
    node: Annotated[int | None, typer.Option("--node", min=0, help="Which of --nodes this machine is, from 0.")] = None,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="By which port of theirs --nodes meet.")
    ] = 29600,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a run file (the default run where none is named); resumes by itself."""
    from shardway.ranks.failure import AttemptShare, failure_reported, find_attempt

    share = AttemptShare(None)
    with ExitStack() as stack:
        if not dry_run:
            stack.enter_context(enduring_outputs())
            if not has_restarts_left(os.environ):
                share.attempt = find_attempt(os.environ)
            stack.enter_context(failure_reported(share, (typer.Exit, typer.Abort)))
            stack.enter_context(SignalWatch())
        request = read_request(words, directory, fresh)
        named = nodes is not None or node is not None
        spec = _read_nodes(nodes, node, port, nproc) if named else None
        _train(request, spec, nproc, share, dry_run=dry_run, as_json=as_json)


def _read_nodes(nodes: str | None, node: int | None, port: int, nproc: int | None) -> NodeSpec:
    """This machine among --nodes. Raises UserError if the options do not determine it."""
    addresses = tuple((nodes or "").replace(",", " ").split())
    if not addresses or node is None or node >= len(addresses):
        known = f"{len(addresses)} address(es)" if addresses else "no addresses"
        raise UserError(
            f"--nodes names {known} and --node is {'missing' if node is None else node}.\n"
            '  To do: give the same --nodes "ADDRESS ADDRESS ..." on each machine, and --node 0 on the first, 1 on the '
            "next."
        )
    hosts = tuple(parse_host(address) for address in addresses)
    if "" in hosts:
        raise UserError(
            f'--nodes: "{addresses[hosts.index("")]}" is no host name or address.\n'
            "      allowed: names and addresses with blanks between them, without a port, a scheme or [1-2]\n"
            "      to do: name each machine by itself, and the port by --port"
        )
    return NodeSpec(hosts, node, port, nproc or 1)


def _train(
    request: ResolveRequest,
    nodes: NodeSpec | None,
    nproc: int | None,
    share: AttemptShare,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train as the agent of one of `nodes`, as a rank of a launcher, or with local ranks; the first process of all
    reports and shows the progress."""
    if nodes is not None:  # an agent is no rank, so its launcher's variables need not place it among ranks
        leads = compares = nodes.node == 0
        launched, ranks, per_node = False, len(nodes.addresses) * nodes.ranks, nodes.ranks
    else:
        placement = find_placement(os.environ)
        by_hand = nproc is not None and (placement.world == 1 or (is_in_terminal(os.environ) and sys.stdin.isatty()))
        launched = placement.launcher != "none" and not by_hand
        if launched and nproc is not None:
            raise UserError(
                f"--nproc {nproc} starts ranks, but this process is already rank {placement.rank} of "
                f"{placement.world}, started by {placement.launcher}: each of these would start {nproc}.\n"
                "  To do: leave out --nproc. Agents on several nodes find each other by --nodes and --node."
            )
        ranks = placement.world if launched else nproc or 1
        per_node, leads, compares = placement.local_world if launched else ranks, placement.rank == 0, not launched
    resolution = _resolve(request, ranks, per_node, reports=leads)
    if nodes is not None and not leads and resolution.resolved.values.run.elastic != "off":
        share.attempt = None  # the other nodes may go on without this one
    if dry_run:
        if as_json:
            print_json({"ranks": ranks, **resolution_facts(resolution)})
            return
        typer.echo(f"# would train with {ranks} rank(s) into {resolution.directory.path}")
        typer.echo(resolution.resolved.render(), nl=False)
        return
    if leads:
        _check_free(resolution)
    data = _check_unchanged(resolution) if compares else None
    check_torch("`shardway train`")
    agent = _import_agent() if nodes is not None else None
    written = resolution.directory.read_status()
    with ExitStack() as stack:
        if leads:
            stack.enter_context(_old_stop_dropped(resolution.directory))
            if resolution.resolved.values.run.display != "off":
                # A launcher collects output, also where it gives its first rank a terminal of its own (mpirun does).
                plain = launched or nodes is not None
                stack.enter_context(run_displayed(resolution.directory, to_stderr=as_json, plain=plain))
        if agent is not None:
            outcome = agent(resolution, nodes, print_line)
        else:
            here = launched or nproc is None
            outcome = _train_here(request, resolution, data) if here else _train_local(resolution, ranks)
    if isinstance(outcome, int):
        raise typer.Exit(outcome)
    if leads or nodes is not None:
        _print_end(outcome, as_json, written)


def _import_agent() -> Callable[..., dict[str, Any] | int]:
    # torch prints pages about a lost connection, which the agent reports in a line.
    levels = {} if "TORCH_CPP_LOG_LEVEL" in os.environ else {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ.update(levels)
    with uncollected():
        from shardway.ranks.nodes import train_on_nodes
    for name in levels:
        del os.environ[name]
    return train_on_nodes


def _resolve(request: ResolveRequest, ranks: int, ranks_per_node: int, *, reports: bool) -> Resolution:
    """Resolve the run. Every rank of a launch finds the same mistakes; one rank reports them."""
    from shardway.resolve.request import check_variables, resolve_request

    try:
        resolution = resolve_request(request, ranks, ranks_per_node)
        check_variables(resolution.loaded)
        pipeline = resolution.resolved.values.pipeline
        if reports and _is_by_hand() and (pipeline.before or pipeline.then):
            report("[pipeline] is left out: its steps run with `shardway submit`")
        return resolution
    except UserError as error:
        if reports:
            raise
        raise typer.Exit(error.exit_code) from None


def _check_free(resolution: Resolution) -> None:
    """Report a second writer before torch is imported, also one whose ranks are still to begin; the lock itself is
    taken by rank 0, which calls this."""
    run = resolution.directory
    run.check_no_strangers()
    if run.exists():
        run.check_format()
    if _is_by_hand() and run.attempts_folder.exists():
        from shardway.launch.hosts import LocalHost
        from shardway.launch.runs.job_status import check_free_for_hand

        check_free_for_hand(LocalHost(), run.path, report)
    run.writer_lock().await_free(report)


@contextmanager
def _old_stop_dropped(run: RunDir) -> Iterator[None]:
    """Remove a stop request that was meant for an earlier start and not obeyed; restore it if this start is refused."""
    from shardway.launch.runs.stop import ASKED, is_of_its_time

    reason, before = ASKED if run.stop_is_record() else run.stop_reason(), run.read_status()
    starts = _is_by_hand() and not was_started_before(os.environ)
    drops = starts and run.stop_requested() and is_of_its_time(reason)
    if drops:
        run.clear_stop()
    try:
        yield
    except (UserError, SiteError):
        if drops and run.exists() and run.read_status() == before:
            run.request_stop(reason)
        raise


def _is_by_hand() -> bool:
    """Whether no job script started this process."""
    return VARIABLE not in os.environ


def _check_unchanged(resolution: Resolution) -> Data | None:
    """Check the data, and that nothing has changed that must not change between two starts of a run, before torch is
    imported and anything is written. Raises UserError, JobError. Text is prepared here, so that the ranks find it
    ready. Returns the open data; None where the run has to open them anew, after it has seeded random numbers."""
    from shardway.data.open import may_draw, open_resolved
    from shardway.resolve import check_same_run, resolve_with_data

    run, data = resolution.directory, open_resolved(resolution.resolved)
    resolve_with_data(resolution.resolved, data.facts)
    if not resolution.request.fresh and run.checkpoint_steps():
        check_same_run(run.read_resolved(), resolution.resolved, str(run.path))
    return None if may_draw(resolution.resolved.values.data) else data


def _train_here(request: ResolveRequest, resolution: Resolution, data: Data | None) -> dict[str, Any]:
    os.environ.setdefault("OMP_NUM_THREADS", str(resolution.resolved.values.run.threads))
    ensure_temporary()  # which the import of torch needs
    with uncollected():
        from shardway.train.run import train as train_run

    return asdict(train_run(request, data))


def _train_local(resolution: Resolution, ranks: int) -> dict[str, Any]:
    ensure_temporary()  # which the import of torch needs
    with uncollected():
        from shardway.ranks.supervisor import NodeGroup, build_launch, open_standby, train_local

    with open_standby(resolution.resolved.values.run) as standby:
        return train_local(resolution, build_launch(resolution, ranks), NodeGroup(ranks, standby, print_line))


def _print_end(outcome: dict[str, Any], as_json: bool, before: dict[str, Any]) -> None:
    """How it ended; `before` is the status that was there when it began."""
    if as_json:
        print_json(outcome)
        return
    from shardway.watch.words import list_last_lines

    run, state = RunDir(Path(outcome["directory"])), outcome["state"]
    idle = state == "finished" and run.read_status() == before
    shown: dict[str, Any] = {"report": str(run.report_path), "status": before, "by_hand": _is_by_hand()}
    for line in list_last_lines(str(run.path), state, outcome["reason"], nothing_done=idle, **shown):
        typer.echo(line)


# --- what is shown while it trains

REFRESH_S = 0.5
"""Twice a second, so that the run is not slowed."""

HARDWARE_S = 10.0
"""Telemetry is written every 20 s or so."""


@contextmanager
def run_displayed(run: RunDir, *, to_stderr: bool, plain: bool) -> Iterator[None]:
    """While entered, a thread shows the events that rank 0 appends: a live view on a terminal, plain lines elsewhere.
    It reads the run directory like any other reader, so it shows what was written, by any launcher."""
    from rich.console import Console
    from rich.live import Live

    from shardway.watch.advice.live import LiveAdvisor
    from shardway.watch.live import LiveView
    from shardway.watch.progress import read_validations
    from shardway.watch.top_hardware import HardwareTail
    from shardway.watch.words import PlainLines

    console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
    validations: list[ValidatedEvent] = []
    with suppress(JobError, OSError):  # reported by the process that writes there
        validations = read_validations(run)
    events, done = run.follow_events(from_end=True), threading.Event()

    def list_new() -> Iterator[list[Event]]:
        """New events, polled until the end, without the error itself, which is printed when the view has ended. If the
        files cannot be read now, they come later: the writing process reports an unreachable file system."""
        ended = False
        while not ended:
            ended = done.wait(REFRESH_S)
            with suppress(JobError):
                yield [event for event in events.new_events() if event["event"] != "fault"]

    def show() -> None:
        if plain or not console.is_terminal:
            lines = PlainLines(validations=validations)
            for found in list_new():
                for line in (line for event in found for line in lines.lines(event)):
                    console.print(line, markup=False)
            return
        view = LiveView(run.path.name, str(run.path), validations=validations)
        hardware, looked = HardwareTail(run.telemetry_folder), 0.0
        advisor = LiveAdvisor(run, view.folded)
        with Live(view.render(), console=console, auto_refresh=False) as live:
            for found in list_new():
                for event in found:
                    view.update(event)
                if time.monotonic() - looked >= HARDWARE_S:
                    looked = time.monotonic()
                    view.show_hardware(hardware.refresh())
                    if (advice := advisor.refresh()) is not None:
                        view.show_advice(advice)
                live.update(view.render(), refresh=True)

    thread = threading.Thread(target=show, name="display", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        leave_outputs()
        thread.join()
