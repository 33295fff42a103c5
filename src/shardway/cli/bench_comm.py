"""`shardway bench comm`: how fast the ranks of a launch exchange data, whether it arrives, and which pair is slow.

Invariants:
- Every mistake that can be found without torch is reported before torch is imported.
- Started alone it starts ranks of its own, each of which is this verb again; in a launch it is one of the ranks. Rank 0
  prints and writes; nothing is written but the file that --json names, and the profile that --save names.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.bench_options import (
    ORIGIN,
    SIZES_METAVAR,
    BenchOutputs,
    JsonFileOption,
    SaveOption,
    SecondsOption,
    SiteOption,
    find_wrong_names,
    find_wrong_time,
    join_ranks,
    read_sizes,
    reported_once,
    split_names,
)
from shardway.cli.main import uncollected
from shardway.errors import (
    ERRORS_BY_NAME,
    JobError,
    LostContact,
    Problem,
    ShardwayError,
    SiteError,
    UserError,
    check_no_problems,
)
from shardway.hardware.limits import ensure_temporary
from shardway.ranks.launcher import Placement, find_placement, is_in_terminal

if TYPE_CHECKING:
    from shardway.bench.comm_report import CommReport
    from shardway.ranks.failure import RankFailure

_BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
"""The device whose memory each one sends from: those that a training uses."""


@dataclass(frozen=True)
class CommOptions:
    """What the command line asks for; None where it says nothing."""

    backend: str | None
    sizes: tuple[int, ...] | None
    collectives: tuple[str, ...]
    seconds: float
    outputs: BenchOutputs


def comm(
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Ranks to start on this machine (default: its GPUs, else 2)."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes",
            metavar=SIZES_METAVAR,
            help="Bytes (default: 1KiB:16MiB, 1KiB:1GiB on GPUs; factor 4).",
        ),
    ] = None,
    collectives: Annotated[
        str | None, typer.Option("--collectives", metavar="NAME,...", help="Which of the seven (default: all).")
    ] = None,
    seconds: SecondsOption = 20.0,
    backend: Annotated[
        str | None, typer.Option("--backend", help="gloo or nccl (default: nccl where each rank has a GPU).")
    ] = None,
    site: SiteOption = None,
    to_json: JsonFileOption = None,
    save: SaveOption = None,
) -> None:
    """Measure the collectives between ranks: bandwidths, latency, whether data arrive, and which pair is slow."""
    placement = find_placement(os.environ)
    by_hand = nproc is not None and (placement.world == 1 or (is_in_terminal(os.environ) and sys.stdin.isatty()))
    launched = placement.launcher != "none" and not by_hand
    with reported_once(placement.rank if launched else 0):
        options = _read_options(sizes, collectives, seconds, backend, BenchOutputs(site, to_json, save=save))
        if launched and nproc is not None:
            raise UserError(
                f"--nproc {nproc} starts ranks, but this process is already rank {placement.rank} of "
                f"{placement.world}, started by {placement.launcher}: each of these would start {nproc}.\n"
                "  To do: leave out --nproc."
            )
        if launched:
            _measure_as_rank(placement, options)
            return
    typer.echo(_run_ranks(nproc, options), nl=False)


def _read_options(
    sizes: str | None, collectives: str | None, seconds: float, backend: str | None, outputs: BenchOutputs
) -> CommOptions:
    """Raises UserError that names every mistake."""
    from shardway.bench.bandwidth import BUS_FACTORS

    names = tuple(BUS_FACTORS) if collectives is None else split_names(collectives.replace("-", "_"))
    problems = [*find_wrong_names("--collectives", names, BUS_FACTORS, "collective")]
    if backend is not None and backend not in _BACKENDS:
        problems.append(Problem("--backend", f'"{backend}" is no backend', ORIGIN, " or ".join(_BACKENDS)))
    read = read_sizes(sizes, 1, problems)
    check_no_problems("the command line", [*problems, *find_wrong_time(seconds), *outputs.find_wrong()])
    outputs.check_profiles()
    return CommOptions(backend, read, names, seconds, outputs)


# --- as one of the ranks


def _measure_as_rank(placement: Placement, options: CommOptions) -> None:
    """Join the other ranks and measure; rank 0 reports. Raises JobError where data did not arrive as they were sent."""
    if placement.launcher == "shardway":
        from shardway.ranks.stop import stop_with_agent

        stop_with_agent(os.environ)
    with uncollected():
        from shardway.bench.communication import CommRequest, describe_lone_rank, measure_communication

    if placement.world < 2:
        raise UserError(describe_lone_rank(placement.world))
    ranks = join_ranks(placement, _choose_device(options), 1, options.seconds)
    request = CommRequest(options.collectives, options.sizes, options.seconds)
    report = measure_communication(ranks, socket.gethostname(), request)
    if ranks.is_first:
        _report(report, options)
    is_wrong = bool(report.wrong)
    ranks.end()
    if is_wrong and not ranks.is_first:
        raise typer.Exit(JobError.exit_code)
    if is_wrong:
        each = report.wrong[0]
        raise JobError(
            f"{each.collective} gave rank {each.rank} ({report.hosts[each.rank]}) wrong data: {each.what}\n"
            "  Training over these links would compute wrong numbers. To do: leave that node out, and report it to the "
            "site's support with this output."
        )


def _report(report: CommReport, options: CommOptions) -> None:
    """Print what was found and write what was asked for; a profile only where the data were right."""
    from shardway.bench.comm_report import find_known_links, render_facts, render_report
    from shardway.bench.site_ceilings import render_links_profile

    known = find_known_links(report, options.outputs.load_site())
    options.outputs.write(lambda: render_report(report, known), lambda: render_facts(report, known))
    if not report.wrong:
        options.outputs.keep(
            lambda name, site, parent, day: render_links_profile(name, site, parent, day, report, known)
        )


def _choose_device(options: CommOptions) -> str:
    """The device type of a backend, or of the best one here. Raises UserError where it is not there, or has no rated
    links that are to be saved."""
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problems = []
    if options.backend == "nccl" and not (visible and torch.distributed.is_nccl_available()):
        lacks = "is built without it" if visible else "sees no CUDA device here"
        what = f"nccl is not there: torch {torch.__version__} {lacks}"
        problems.append(Problem("--backend", what, ORIGIN, "gloo"))
    device = _BACKENDS[options.backend] if options.backend is not None else "cuda" if visible else "cpu"
    if options.outputs.save is not None and device == "cpu":
        what = "what gloo sends over has no rated bandwidth, of which a ceiling is a part"
        problems.append(Problem("--save", what, ORIGIN, "over nccl, with a GPU for each rank"))
    check_no_problems("the command line", problems)
    return device


# --- with ranks of its own


def _run_ranks(nproc: int | None, options: CommOptions) -> str:
    """Start ranks on this machine, each with the same words; what rank 0 printed. Raises the error of the rank that
    failed first."""
    ensure_temporary()
    with uncollected():
        import torch
        from torch.distributed.elastic.multiprocessing import PContext

        from shardway.bench.communication import describe_lone_rank
        from shardway.ranks.local import LocalLaunch, RankAssignment, run_local, start_program

    device, visible = _choose_device(options), torch.cuda.device_count()
    if options.backend is None and visible < 2:
        device = "cpu"  # over nccl each rank needs a GPU of its own
    count = nproc or max(2, visible if device == "cuda" else 0)
    if count < 2:
        raise UserError(describe_lone_rank(count))
    if device == "cuda" and visible < count:
        what = f"{count} ranks need a GPU each, and torch sees {visible}"
        allowed = f"2 to {visible}" if visible >= 2 else "2 or more over gloo: --backend gloo"
        check_no_problems("the command line", [Problem("--nproc", what, ORIGIN, allowed)])
    started: list[PContext] = []

    def start(launch: LocalLaunch, assignment: RankAssignment) -> PContext:
        started.append(start_program(launch, assignment))
        return started[-1]

    stops: list[str] = []

    def stop() -> None:
        stops.append("a signal")
        raise UserError("there is nothing to save")  # so the ranks get SIGTERM

    with tempfile.TemporaryDirectory(prefix="shardway-bench-") as folder:
        launch = LocalLaunch(
            ranks=count,
            module="shardway",
            arguments=list(_list_words(options, device)),
            log_folder=Path(folder) / "output",
            threads=1,
            stop_path=Path(folder) / "no stop",
            stop_timeout_s=options.seconds,
        )
        failures = run_local(launch, stop, start=start)
        if stops:
            raise KeyboardInterrupt
        shown = Path(started[0].stdouts[0]).read_text(encoding="utf-8")
        if failures:
            typer.echo(shown, nl=False)
            raise _find_cause(failures)
    return shown


def _list_words(options: CommOptions, device: str) -> Iterator[str]:
    """The command line of each rank."""
    yield from ("bench", "comm", "--seconds", str(options.seconds), "--collectives", ",".join(options.collectives))
    yield from ("--backend", next(name for name, kind in _BACKENDS.items() if kind == device))
    if options.sizes is not None:
        yield from ("--sizes", ",".join(map(str, options.sizes)))
    outputs = options.outputs
    for name, value in (("--site", outputs.site), ("--save", outputs.save), ("--json", outputs.json)):
        if value is not None:
            yield from (name, value)


def _find_cause(failures: Sequence[RankFailure]) -> ShardwayError:
    """The error of the ranks: a rank that was killed, else what one printed that is no mere loss of contact."""
    for failure in failures:
        if failure.signal_name is not None and not failure.by_agent:
            memory = "memory ran out" if failure.for_memory else "if that was not on purpose, look at `dmesg`"
            return JobError(
                f"rank {failure.rank} (process {failure.pid}) was ended by {failure.signal_name}, and the others with "
                f"it.\n  To do: {memory}; then run the same command again."
            )
    kinds = {kind.exit_code: kind for kind in ERRORS_BY_NAME.values() if kind in (UserError, SiteError, JobError)}
    said = [(failure, failure.last_error()) for failure in failures if failure.last_error()]
    said.sort(key=lambda each: "lost contact with" in each[1])
    for failure, text in said:
        kind: Any = LostContact if "lost contact with" in text else kinds.get(failure.exit_code, JobError)
        return kind(text)
    printed = failures[0].read_printed().strip().splitlines()
    return JobError(
        f"rank {failures[0].rank} ended with exit code {failures[0].exit_code}"
        f"{': ' + printed[-1] if printed else ''}.\n  To do: run the same command again."
    )
