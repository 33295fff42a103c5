"""`shardway bench topology`: how the accelerators and adapters of a node are joined, and which link is wrong.

Invariants:
- Without torch, but for --measure. The exit code is 0 whatever is found; 2 for what cannot be read.
- Nothing is written but the files that --json and --html name.
"""

from __future__ import annotations

import os
import sys
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.bench_options import ORIGIN, BenchOutputs, JsonFileOption, SiteOption
from shardway.cli.main import uncollected
from shardway.errors import Problem, UserError, check_no_problems

if TYPE_CHECKING:
    from shardway.bench.topology import NodeTopology
    from shardway.bench.topology_report import CopyRates, TopologyReport


def topology(
    recorded: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Recorded output of nvidia-smi topo -m, nvlink -s, or rocm-smi --showtopo; repeatable, - is stdin.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="NAME", help="The accelerator by its driver's name, where no file has it."),
    ] = "",
    site: SiteOption = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure copies between the GPUs too.")] = False,
    to_html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write the picture as one page.")
    ] = None,
    to_json: JsonFileOption = None,
    plain: Annotated[bool, typer.Option("--plain", help="ASCII alone.")] = False,
) -> None:
    """How the accelerators and adapters of a node are joined: what each link should be, and which is wrong."""
    from shardway.bench.topology_report import judge_topology

    outputs = BenchOutputs(site, to_json, to_html)
    problems = [*outputs.find_wrong(recorded or ())]
    if recorded and measure:
        problems.append(Problem("--measure", "measures this machine, and --from names another", ORIGIN, "one of them"))
    if device and not recorded:
        what = "is for recorded files; this machine's driver names its own"
        problems.append(Problem("--device", what, ORIGIN, "with --from FILE"))
    check_no_problems("the command line", problems)
    profile = outputs.load_site()
    nodes = _read_recorded(recorded, device) if recorded else [_read_machine()]
    if to_html is not None and len(nodes) > 1:
        what = f"{len(nodes)} of the files have a matrix, and a page is of one node"
        check_no_problems("the command line", [Problem("--html", what, ORIGIN, "one node in --from")])
    _report([judge_topology(node, profile, _measure(node) if measure else None) for node in nodes], outputs, plain)


def _report(reports: list[TopologyReport], outputs: BenchOutputs, plain: bool) -> None:
    """Print what was found and write what was asked for."""
    from shardway.bench.topology_page import render_page
    from shardway.bench.topology_text import render_facts, render_topology

    plain = plain or not (sys.stdout.encoding or "").lower().startswith("utf")
    outputs.write(
        lambda: "\n\n\n".join(render_topology(report, plain=plain) for report in reports),
        lambda: (
            render_facts(reports[0]) if len(reports) == 1 else {"format": 1, "nodes": [*map(render_facts, reports)]}
        ),
        lambda: render_page(reports[0]),
    )


# --- what is read


def _read_machine() -> NodeTopology:
    from shardway.bench.topology_machine import read_machine

    return read_machine(os.environ)


def _read_recorded(names: list[str], device: str) -> list[NodeTopology]:
    """Raises UserError that names every file that cannot be read or has no topology."""
    from shardway.bench.topology import read_recorded

    texts, problems = {}, []
    for name in dict.fromkeys(names):
        title = "stdin" if name == "-" else name or '""'
        try:
            texts[title] = _read_text(name)
            read_recorded({title: texts[title]})
        except OSError as error:
            problems.append(Problem(title, error.strerror or "cannot be read", "--from", remedy=_RECORD))
        except ValueError as error:
            problems.append(Problem(title, str(error).removeprefix(f"{title} "), "--from", remedy=_RECORD))
    check_no_problems("--from", problems)
    return read_recorded(texts, device)


_RECORD = (
    "nvidia-smi topo -m > FILE; nvidia-smi nvlink -s >> FILE; for AMD: rocm-smi --showtopo --showproductname > FILE"
)
_MOST_BYTES = 10_000_000


def _read_text(name: str) -> str:
    """Raises OSError, and ValueError for what is too large or empty. A file from Windows may be in UTF-16."""
    if name == "-":
        data = sys.stdin.buffer.read(_MOST_BYTES + 1)
    else:
        with open(name, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    if not data.strip():
        raise ValueError("is empty")
    if len(data) > _MOST_BYTES:
        raise ValueError(f"has more than {_MOST_BYTES:,} bytes, and recorded output has a few thousand")
    return data.decode("utf-16" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig", "replace")


def _measure(node: NodeTopology) -> CopyRates:
    """Raises UserError where torch sees no CUDA device."""
    with uncollected():
        import torch

        from shardway.bench.peer_copies import list_cuda_uuids, map_devices, measure_copies, time_cuda_copy

    if not torch.cuda.is_available():
        raise UserError(
            f"--measure copies between GPUs, and torch {torch.__version__} sees no CUDA device here\n"
            "  to do: leave out --measure, or run it on a node with GPUs"
        )
    return measure_copies(map_devices(node, list_cuda_uuids()), time_cuda_copy)
