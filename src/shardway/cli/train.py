"""`shardway train`: trains a run file on one rank, on N local ranks, or as a rank of any launcher.

Invariant: every mistake that can be found without torch is reported before torch is imported. Nothing is trained here:
this module starts ranks, shows what they write, and reports how the run ended.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.config import resolution_facts
from shardway.cli.main import uncollected
from shardway.cli.options import DirOption, JsonOption, NprocOption, Words, print_line, read_request, report
from shardway.errors import SiteError, UserError
from shardway.hardware.limits import ensure_temporary
from shardway.ranks.launcher import NodeSpec, find_placement, is_in_terminal, parse_host, was_started_before
from shardway.ranks.outputs import enduring_outputs
from shardway.ranks.stop import SignalWatch
from shardway.rundir.attempts import VARIABLE
from shardway.rundir.directory import RunDir

PORT = 29600
"""The port at which the agents of several machines meet by default."""

if TYPE_CHECKING:
    from shardway.ranks.failure import AttemptShare
    from shardway.resolve.request import Resolution, ResolveRequest


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
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="By which port of theirs --nodes meet.")] = PORT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a run file (the default run where none is named); resumes by itself."""
    from shardway.ranks.failure import AttemptShare, failure_reported

    share = AttemptShare()
    with ExitStack() as stack:
        if not dry_run:
            for context in (enduring_outputs(), failure_reported(share, (typer.Exit, typer.Abort)), SignalWatch()):
                stack.enter_context(context)
        request = read_request(words, directory, fresh)
        if nodes is not None or node is not None:
            spec = _read_nodes(nodes, node, port, nproc)
            _train_on_nodes(request, spec, share, dry_run=dry_run, as_json=as_json)
        else:
            _train(request, nproc, dry_run=dry_run, as_json=as_json)


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


def _train_on_nodes(
    request: ResolveRequest, nodes: NodeSpec, share: AttemptShare, *, dry_run: bool, as_json: bool
) -> None:
    """Be the agent of one machine of several; the first one shows the progress."""
    ranks, leads = len(nodes.addresses) * nodes.ranks, nodes.node == 0
    resolution = _resolve(request, ranks, nodes.ranks, reports=leads)
    share.ends_attempt = leads or resolution.resolved.values.run.elastic == "off"
    if dry_run:
        _print_plan(resolution, ranks, as_json)
        return
    if leads:
        _check_free(resolution)
        _check_unchanged(resolution)
    with _quiet_network(), uncollected():
        from shardway.ranks.nodes import train_on_nodes

    written = resolution.directory.read_status()
    dropped = _old_stop_dropped(resolution.directory) if leads else nullcontext()
    with dropped, _display(resolution, as_json, launched=True) if leads else nullcontext():
        outcome = train_on_nodes(resolution, nodes, print_line)
    if isinstance(outcome, int):
        raise typer.Exit(outcome)
    _print_end(outcome, as_json, written)


@contextmanager
def _quiet_network() -> Iterator[None]:
    """While torch is imported: it prints pages about a lost connection, which the agent reports in a line."""
    name = "TORCH_CPP_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "ERROR")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[name]


def _train(request: ResolveRequest, nproc: int | None, *, dry_run: bool, as_json: bool) -> None:
    placement = find_placement(os.environ)
    by_hand = nproc is not None and (placement.world == 1 or (is_in_terminal(os.environ) and sys.stdin.isatty()))
    launched = placement.launcher != "none" and not by_hand
    if launched and nproc is not None:
        raise UserError(
            f"--nproc {nproc} starts ranks, but this process is already rank {placement.rank} of {placement.world}, "
            f"started by {placement.launcher}: each of these would start {nproc}.\n"
            "  To do: leave out --nproc. Agents on several nodes find each other by --nodes and --node."
        )
    ranks = placement.world if launched else nproc or 1
    resolution = _resolve(request, ranks, placement.local_world if launched else ranks, reports=placement.rank == 0)
    if dry_run:
        _print_plan(resolution, ranks, as_json)
        return
    shown = _display(resolution, as_json, launched) if placement.rank == 0 else nullcontext()
    if placement.rank == 0:
        _check_free(resolution)
    if not launched:
        _check_unchanged(resolution)
    written = resolution.directory.read_status()
    dropped = _old_stop_dropped(resolution.directory) if placement.rank == 0 else nullcontext()
    with dropped, shown:
        outcome = _train_here(request, resolution) if launched or nproc is None else _train_local(resolution, ranks)
    if placement.rank == 0:
        _print_end(outcome, as_json, written)


def _resolve(request: ResolveRequest, ranks: int, ranks_per_node: int, *, reports: bool) -> Resolution:
    """Resolve the run. Every rank of a launch finds the same mistakes; one rank reports them."""
    from shardway.resolve.request import check_variables, resolve_request

    try:
        resolution = resolve_request(request, ranks, ranks_per_node)
        check_variables(resolution.loaded)
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
    by_hand = _is_by_hand() and not was_started_before(os.environ)
    drops = by_hand and run.stop_requested() and is_of_its_time(reason)
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


def _check_unchanged(resolution: Resolution) -> None:
    """Check the data, and that nothing has changed that must not change between two starts of a run, before torch is
    imported and anything is written. Raises UserError, JobError. Text is prepared here, so that the ranks find it
    ready."""
    from shardway.data.open import open_described
    from shardway.resolve import check_same_run, resolve_with_data

    run = resolution.directory
    resolve_with_data(resolution.resolved, open_described(resolution.resolved.values).facts)
    if not resolution.request.fresh and run.checkpoint_steps():
        check_same_run(run.read_resolved(), resolution.resolved, str(run.path))


def _train_here(request: ResolveRequest, resolution: Resolution) -> dict[str, Any]:
    os.environ.setdefault("OMP_NUM_THREADS", str(resolution.resolved.values.run.threads))
    ensure_temporary()  # which the import of torch needs
    with uncollected():
        from shardway.train.recipe import train as train_run

    return asdict(train_run(request))


def _train_local(resolution: Resolution, ranks: int) -> dict[str, Any]:
    ensure_temporary()  # which the import of torch needs
    with uncollected():
        from shardway.ranks.supervisor import SingleNode, build_launch, open_standby, train_local

    with open_standby(resolution.resolved.values.run) as standby:
        return train_local(resolution, build_launch(resolution, ranks), SingleNode(ranks, standby, print_line))


def _display(resolution: Resolution, as_json: bool, launched: bool) -> AbstractContextManager[object]:
    if resolution.resolved.values.run.display == "off":
        return nullcontext()
    from shardway.cli.progress import Display

    # A launcher collects output, also where it gives its first rank a terminal of its own (mpirun does).
    return Display(resolution.directory, to_stderr=as_json, plain=launched)


def _print_plan(resolution: Resolution, ranks: int, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"ranks": ranks, **resolution_facts(resolution)}, indent=1))
        return
    typer.echo(f"# would train with {ranks} rank(s) into {resolution.directory.path}")
    typer.echo(resolution.resolved.render(), nl=False)


def _print_end(outcome: dict[str, Any], as_json: bool, before: dict[str, Any]) -> None:
    """How it ended; `before` is the status that was there when it began."""
    if as_json:
        typer.echo(json.dumps(outcome, indent=1))
        return
    from shardway.watch.words import list_last_lines

    run = RunDir(Path(outcome["directory"]))
    state, reason, report_path = outcome["state"], outcome["reason"], str(run.report_path)
    idle = state == "finished" and run.read_status() == before
    for line in list_last_lines(
        str(run.path), state, reason, report=report_path, nothing_done=idle, status=before, by_hand=_is_by_hand()
    ):
        typer.echo(line)
