"""`shardway bench device`: what this machine's device reaches, and what it should reach.

Invariants:
- Every mistake that can be found without torch is reported before torch is imported.
- In a launch each rank measures its own device, and rank 0 prints and writes.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

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
from shardway.errors import Problem, check_no_problems
from shardway.hardware.catalogue import Dtype
from shardway.hardware.limits import count_own_cores
from shardway.ranks.launcher import Placement, find_placement

if TYPE_CHECKING:
    from shardway.bench.device_report import DeviceReport, RankDevice

_FORMATS: tuple[Dtype, ...] = tuple(name for name in get_args(Dtype) if name != "fp4")
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class DeviceOptions:
    """What the command line asks for; None where it says nothing."""

    device: str | None
    formats: tuple[Dtype, ...] | None
    sizes: tuple[int, ...] | None
    disk: Path | None
    seconds: float
    outputs: BenchOutputs


def device(
    kind: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda (default: cuda where there is one).")
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option("--formats", metavar="NAME,...", help="Of products: fp32, tf32, fp16, bf16, fp8 (default: all)."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes",
            metavar=SIZES_METAVAR,
            help="Bytes of copies (default: 16KiB:256MiB, 1MiB:1GiB on a GPU; factor 4).",
        ),
    ] = None,
    disk: Annotated[
        str | None, typer.Option("--disk", metavar="DIR", help="Measure the disk of this folder too, with 2 GiB.")
    ] = None,
    seconds: SecondsOption = 40.0,
    site: SiteOption = None,
    to_json: JsonFileOption = None,
    save: SaveOption = None,
) -> None:
    """Measure this device: products, copies, attention, starts of kernels, a disk; and what it should reach."""
    placement = find_placement(os.environ)
    with reported_once(placement.rank):
        outputs = BenchOutputs(site, to_json, save=save)
        _measure(placement, _read_options(kind, formats, sizes, disk, seconds, outputs))


def _read_options(
    kind: str | None,
    formats: str | None,
    sizes: str | None,
    disk: str | None,
    seconds: float,
    outputs: BenchOutputs,
) -> DeviceOptions:
    """Raises UserError that names every mistake."""
    from shardway.bench.disk import describe_lack

    problems: list[Problem] = []
    if kind is not None and kind not in _DEVICES:
        problems.append(Problem("--device", f'"{kind}" is no device', ORIGIN, " or ".join(_DEVICES)))
    names = _FORMATS if formats is None else split_names(formats)
    problems += find_wrong_names("--formats", names, _FORMATS, "format")
    read = read_sizes(sizes, 4, problems)
    if disk is not None and (lack := describe_lack(disk)):
        problems.append(Problem("--disk", lack, ORIGIN, "a folder that you may write, with 4 GiB of room"))
    problems += [*find_wrong_time(seconds), *outputs.find_wrong()]
    if outputs.save is not None and kind == "cpu":
        problems.append(_refuse_to_save("no catalogue rates CPUs, so there is no ceiling to keep"))
    check_no_problems("the command line", problems)
    outputs.check_profiles()
    chosen = None if formats is None else tuple(name for name in _FORMATS if name in names)
    return DeviceOptions(kind, chosen, read, None if disk is None else Path(disk), seconds, outputs)


def _refuse_to_save(what: str) -> Problem:
    return Problem("--save", what, ORIGIN, "on a device of the site, which the catalogue has")


def _measure(placement: Placement, options: DeviceOptions) -> None:
    """Measure, with the other ranks where there are any; rank 0 reports. Raises UserError for what this device is not
    or does not have."""
    with uncollected():
        from shardway.bench.device import DeviceRequest, measure_device
        from shardway.bench.device_report import RankDevice

    kind = _choose_device(options)
    ranks = join_ranks(placement, kind, count_own_cores(placement.local_world), options.seconds)
    disk = options.disk if ranks.is_first else None
    request = DeviceRequest(options.formats, options.sizes, disk, options.seconds)
    report = ranks.together(lambda: measure_device(ranks.device, request))
    reports = ranks.gather(RankDevice(ranks.rank, socket.gethostname(), report))
    if ranks.is_first:
        _report(report, reports, options)
    ranks.end()


def _choose_device(options: DeviceOptions) -> str:
    """The type of the device. Raises UserError where it is not there, or is not one whose ceilings can be saved."""
    import torch

    visible = torch.cuda.is_available() and torch.cuda.device_count() > 0
    kind = options.device or ("cuda" if visible else "cpu")
    problems = []
    if kind == "cuda" and not visible:
        what = f"torch {torch.__version__} sees no CUDA device here"
        problems.append(Problem("--device", what, ORIGIN, "cpu"))
    elif options.outputs.save is not None and (site := options.outputs.load_site()) is not None:
        from shardway.bench.site_ceilings import describe_other_part

        if kind == "cpu":
            problems.append(_refuse_to_save("no catalogue rates CPUs, so there is no ceiling to keep"))
        elif why := describe_other_part(torch.cuda.get_device_name(), site):
            problems.append(_refuse_to_save(why))
    check_no_problems("the command line", problems)
    return kind


def _report(report: DeviceReport, ranks: list[RankDevice], options: DeviceOptions) -> None:
    """Print what was found and write what was asked for."""
    from shardway.bench.device_report import render_facts, render_report
    from shardway.bench.site_ceilings import render_device_profile

    options.outputs.write(lambda: render_report(report, ranks), lambda: render_facts(report, ranks))
    options.outputs.keep(lambda name, site, parent, day: render_device_profile(name, site, parent, day, report))
