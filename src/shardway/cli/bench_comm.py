"""`shardway bench comm`: how fast the ranks of a launch exchange data, whether it arrives, and which pair is slow.

Invariants:
- Every mistake that can be found without torch is reported before torch is imported.
- Started alone it starts ranks of its own, each of which is this verb again; in a launch it is one of the ranks. Rank 0
  prints and writes; nothing is written but the file that --json names, and the profile that --save names.
"""

from __future__ import annotations

import datetime
import math
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.main import uncollected
from shardway.cli.options import complete_site, print_json
from shardway.errors import (
    ERRORS_BY_NAME,
    JobError,
    LostContact,
    Problem,
    ShardwayError,
    SiteError,
    UserError,
    check_no_problems,
    legible,
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
    site: str | None
    json: str
    save: str | None


def comm(
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Ranks to start on this machine (default: its GPUs, else 2)."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes",
            metavar="FIRST:LAST[:FACTOR] | SIZE,...",
            help="Bytes (default: 1KiB:16MiB, 1KiB:1GiB on GPUs; factor 4).",
        ),
    ] = None,
    collectives: Annotated[
        str | None, typer.Option("--collectives", metavar="NAME,...", help="Which of the seven (default: all).")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="About how long it may take.")] = 20.0,
    backend: Annotated[
        str | None, typer.Option("--backend", help="gloo or nccl (default: nccl where each rank has a GPU).")
    ] = None,
    site: Annotated[
        str | None,
        typer.Option("--site", help="Profile whose links are compared with.", autocompletion=complete_site),
    ] = None,
    to_json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - prints it alone.")
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(
            "--save", metavar="NAME", help="Keep what was measured as a site of your own that extends --site."
        ),
    ] = None,
) -> None:
    """Measure the collectives between ranks: bandwidths, latency, whether data arrive, and which pair is slow."""
    placement = find_placement(os.environ)
    by_hand = nproc is not None and (placement.world == 1 or (is_in_terminal(os.environ) and sys.stdin.isatty()))
    launched = placement.launcher != "none" and not by_hand
    try:
        options = _read_options(sizes, collectives, seconds, backend, site, to_json, save)
        if launched and nproc is not None:
            raise UserError(
                f"--nproc {nproc} starts ranks, but this process is already rank {placement.rank} of "
                f"{placement.world}, started by {placement.launcher}: each of these would start {nproc}.\n"
                "  To do: leave out --nproc."
            )
        if launched:
            _measure_as_rank(placement, options)
            return
    except UserError as error:  # which every rank finds alike
        if placement.rank == 0 or not launched:
            raise
        raise typer.Exit(error.exit_code) from None
    typer.echo(_run_ranks(nproc, options), nl=False)


# --- what the options say


def _read_options(
    sizes: str | None,
    collectives: str | None,
    seconds: float,
    backend: str | None,
    site: str | None,
    to_json: str | None,
    save: str | None,
) -> CommOptions:
    """Raises UserError that names every mistake."""
    from shardway.bench.bandwidth import BUS_FACTORS
    from shardway.sites.load import find_place, load_site

    problems: list[Problem] = []
    names = tuple(dict.fromkeys((collectives or ",".join(BUS_FACTORS)).replace("-", "_").replace(",", " ").split()))
    origin = "command line"
    if unknown := [name for name in names if name not in BUS_FACTORS]:
        what = f"{', '.join(unknown)} {'is no collective' if len(unknown) == 1 else 'are no collectives'}"
        problems.append(Problem("--collectives", what, origin, ", ".join(BUS_FACTORS)))
    if not names:
        problems.append(Problem("--collectives", "names none", origin, ", ".join(BUS_FACTORS)))
    if not (math.isfinite(seconds) and seconds > 0):
        problems.append(Problem("--seconds", f"{seconds:g} is no time to measure in", origin, "a number above 0"))
    if backend is not None and backend not in _BACKENDS:
        problems.append(Problem("--backend", f'"{backend}" is no backend', origin, " or ".join(_BACKENDS)))
    read: tuple[int, ...] | None = None
    try:
        read = None if sizes is None else parse_sizes(sizes)
    except ValueError as error:
        problems.append(Problem("--sizes", str(error), origin))
    if to_json not in (None, "-"):
        folder = Path(to_json or "").parent
        if Path(to_json or "").is_dir() or not folder.is_dir():
            what = f"{to_json} is a folder" if folder.is_dir() else f"the folder {folder} does not exist"
            problems.append(Problem("--json", what, origin, "a file in a folder that exists, or -"))
    if save is not None and site is None:
        problems.append(Problem("--save", "needs --site: which site was measured", origin))
    check_no_problems("the command line", problems)
    if site is not None:
        load_site(site)
    if save is not None:
        find_place(save)
    return CommOptions(backend, read, names, seconds, site, to_json or "", save)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes from "1KiB:16MiB", "1KiB:1GiB:2" (each twice the one before; else 4 times) or "4KiB,1MiB". Raises
    ValueError with a sentence."""
    from shardway.bench.bandwidth import list_sizes
    from shardway.units import parse_bytes, render_bytes

    first, *more = text.split(":")
    if not more:
        found = tuple(parse_bytes(each) for each in text.split(","))
    else:
        low, high = parse_bytes(first), parse_bytes(more[0])
        factor = 4.0
        if more[1:]:
            try:
                factor = float(more[1])
            except ValueError:
                factor = math.nan
        if len(more) > 2 or not 1.1 <= factor <= 1e6:
            raise ValueError(
                f'"{text}" has no factor from one size to the next; allowed: FIRST:LAST:FACTOR, from 1.1 on'
            )
        if low > high:
            raise ValueError(f'"{text}" is empty: {render_bytes(low)} is more than {render_bytes(high)}')
        found = list_sizes(low, high, factor) if low else (0,)
    if min(found) < 1:
        raise ValueError(f'"{text}" has a size of 0; allowed: 1 byte and more')
    return found


# --- as one of the ranks


def _measure_as_rank(placement: Placement, options: CommOptions) -> None:
    """Join the other ranks and measure; rank 0 reports. Raises JobError where data did not arrive as they were sent."""
    if placement.launcher == "shardway":
        from shardway.ranks.stop import stop_with_agent

        stop_with_agent(os.environ)
    ensure_temporary()
    with uncollected():
        from shardway.bench.communication import CommRequest, describe_lone_rank, measure_communication
        from shardway.ranks.start import StartOptions, start_ranks

    if placement.world < 2:
        raise UserError(describe_lone_rank(placement.world))
    device = _choose_device(options)
    ranks = start_ranks(placement, StartOptions(device, _count_threads(), _START_S, options.seconds + _SILENT_S))
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
    from shardway.rundir.file_io import write_json
    from shardway.sites.load import keep_profile, load_site

    site = load_site(options.site) if options.site is not None else None
    known = find_known_links(report, site)
    if options.json == "-":
        print_json(render_facts(report, known))
    else:
        typer.echo(legible(render_report(report, known)))
    if options.json not in ("", "-"):
        write_json(Path(options.json), render_facts(report, known), durable=False)
    if options.save is not None and site is not None and not report.wrong:
        from shardway.bench.site_ceilings import render_measured_profile

        parent = str(Path(options.site or "").resolve()) if "/" in (options.site or "") else str(options.site)
        text = render_measured_profile(options.save, site, parent, report, known, datetime.date.today())
        path = keep_profile(options.save, text)
        typer.echo(f"wrote {path}: `shardway plan ... --on {options.save}` takes it", err=options.json == "-")


_START_S = 300.0
_SILENT_S = 60.0
"""Waits for ranks that are still to begin, and for one that is silent."""


def _count_threads() -> int:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() and int(threads) else 1


def _choose_device(options: CommOptions) -> str:
    """The device type of a backend, or of the best one here. Raises UserError where it is not there, or has no rated
    links that are to be saved."""
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problems = []
    if options.backend == "nccl" and not (visible and torch.distributed.is_nccl_available()):
        lacks = "is built without it" if visible else "sees no CUDA device here"
        what = f"nccl is not there: torch {torch.__version__} {lacks}"
        problems.append(Problem("--backend", what, "command line", "gloo"))
    device = _BACKENDS[options.backend] if options.backend is not None else "cuda" if visible else "cpu"
    if options.save is not None and device == "cpu":
        what = "what gloo sends over has no rated bandwidth, of which a ceiling is a part"
        problems.append(Problem("--save", what, "command line", "with nccl"))
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
        check_no_problems("the command line", [Problem("--nproc", what, "command line", allowed)])
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
    if options.site is not None:
        yield from ("--site", options.site)
    if options.save is not None:
        yield from ("--save", options.save)
    if options.json:
        yield from ("--json", options.json)


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
