"""A node's topology in the terminal and as facts: a drawing by NUMA node, the matrix of paths, adapters, the verdict.

Invariants:
- No line is wider than 80 columns, but for a name that is; `plain` has ASCII alone.
- What is drawn, printed and written as facts is of one `TopologyReport`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardway.bench.bandwidth import format_rate
from shardway.bench.topology import NVLINK, PATHS, XGMI, AdapterPlace, TopologyDevice, list_pairs
from shardway.bench.topology_report import (
    LinkFinding,
    Pair,
    TopologyReport,
    find_link,
    find_part,
    group_near,
    rate_pair,
    render_limit,
)
from shardway.errors import list_some
from shardway.hardware.catalogue import find_accelerator
from shardway.units import UNKNOWN, render_plural
from shardway.watch.words import align_cells, fold_line

WIDTH = 80
MEANINGS = {
    NVLINK: "NVLink",
    XGMI: "AMD's link, direct",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge (the CPU)",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between sockets",
}
"""What a path crosses."""


def render_topology(report: TopologyReport, *, plain: bool = False) -> str:
    """The whole report, without a newline at the end."""
    blocks = [
        [describe_node(report)],
        list(_draw(report, plain)),
        _list_matrix(report),
        _list_paths(report),
        _list_adapters(report),
        _list_copies(report),
        list(_list_verdict(report)),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def describe_node(report: TopologyReport) -> str:
    """ "node12: 8 x NVIDIA H100 80GB HBM3, 12 network adapters, 2 NUMA nodes"."""
    topology = report.topology
    names = Counter(device.name or "accelerator of an unknown kind" for device in topology.devices)
    devices = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no accelerator"
    nodes = f", {render_plural(len(topology.numa), 'NUMA node')}" if topology.numa else ""
    return f"{topology.title}: {devices}, {render_plural(len(topology.adapters), 'network adapter')}{nodes}"


# --- the drawing


def group_by_place(report: TopologyReport) -> list[tuple[str, list[TopologyDevice], list[AdapterPlace]]]:
    """Each NUMA node with its devices and adapters; adapters at no device's place are under "" or their own node."""
    topology = report.topology
    places = {f"NUMA {node}": cpus for node, cpus in topology.numa.items()}
    for device in topology.devices:
        places.setdefault(device.place, device.cpus if device.numa is not None else "")
    found = []
    for place, cpus in sorted(places.items(), key=lambda each: (not each[0], _natural(each[0]))):
        devices = [device for device in topology.devices if device.place == place]
        adapters = [each for each in topology.adapters if find_place(report, each) == place]
        title = f"{place} (CPUs {cpus})" if cpus else place or "place not stated"
        if devices or adapters or place:
            found.append((title, devices, adapters))
    rest = [each for each in topology.adapters if find_place(report, each) not in places]
    if rest:
        found.append(("adapters at none of these", [], rest))
    return found


def _natural(place: str) -> tuple[int, str]:
    number = place.rpartition(" ")[2]
    return (int(number), "") if number.isdecimal() else (10**9, place)


def find_place(report: TopologyReport, adapter: AdapterPlace) -> str:
    """The place of an adapter: its NUMA node, else that of the devices that it is near to; "-" for neither."""
    if adapter.numa is not None:
        return f"NUMA {adapter.numa}"
    kind, devices = adapter.nearest
    places = {report.topology.device(index).place for index in devices} if kind not in ("", "SYS") else set()
    return places.pop() if len(places) == 1 else "-"


def _draw(report: TopologyReport, plain: bool) -> Iterator[str]:
    branch, last, rest = ("|- ", "`- ", "|  ") if plain else ("├─ ", "└─ ", "│  ")
    for title, devices, adapters in group_by_place(report):
        yield title
        lines = [" ".join(device.label for device in devices)] if devices else []
        for kind, names in _by_nearest(adapters).items():
            lines += [f"{kind} to {near}: {' '.join(held)}" if kind else " ".join(held) for near, held in names.items()]
        for place, line in enumerate(lines):
            is_last = place == len(lines) - 1
            first, *others = fold_line(line, WIDTH - len(branch))
            yield (last if is_last else branch) + first
            yield from ((" " * len(rest) if is_last else rest) + other for other in others)
    if joined := describe_fast_links(report):
        yield from fold_line(joined, WIDTH)


def _by_nearest(adapters: Sequence[AdapterPlace]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for adapter in adapters:
        kind, devices = adapter.nearest
        name = adapter.name if adapter.state in ("", "ACTIVE") else f"{adapter.name} ({adapter.state.lower()})"
        found.setdefault(kind, {}).setdefault(name_range(devices), []).append(name)
    order = (*PATHS, "")
    return dict(sorted(found.items(), key=lambda each: order.index(each[0])))


def describe_fast_links(report: TopologyReport) -> str:
    """How NVLink or XGMI joins the devices, in a sentence; "" for no such link."""
    pairs = dict(list_pairs(report.topology))
    fast = {pair: path for pair, path in pairs.items() if path.kind in (NVLINK, XGMI)}
    if not fast:
        return ""
    devices = [device.index for device in report.topology.devices]
    parts = []
    for label in sorted({path.label for path in fast.values()}):
        alike = [pair for pair, path in fast.items() if path.label == label]
        groups = list(group_near(devices, alike))
        if sum(len(group) * (len(group) - 1) // 2 for group in groups) == len(alike):
            names = " and ".join(name_range(group) for group in groups)
            parts.append(f"{names}: {label} each to each")
        else:
            parts.append(f"{label} between GPUs {list_some([f'{first}-{second}' for first, second in alike], 16)}")
    return "; ".join(parts)


def name_range(devices: Sequence[int]) -> str:
    """ "GPU0-GPU3, GPU6"."""
    parts: list[list[int]] = []
    for index in sorted(devices):
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    names = [f"GPU{p[0]}" if len(p) == 1 else f"GPU{p[0]}-GPU{p[-1]}" for p in parts]
    return ", ".join(names)


# --- tables


def _list_matrix(report: TopologyReport) -> list[str]:
    """The paths between devices; "!" marks a pair that is wrong or uneven."""
    devices, bad = report.topology.devices, report.bad_pairs
    if len(devices) < 2 or not report.topology.pairs:
        return []
    rows = [[device.label, *(_cell(report, device.index, other.index, bad) for other in devices)] for device in devices]
    lines = align_cells([["", *(str(device.index) for device in devices)], *rows], to_the_right=True)
    if max(map(len, lines)) > WIDTH:
        short = [[row[0], *(_shorten(cell) for cell in row[1:])] for row in rows]
        lines = align_cells([["", *(str(device.index) for device in devices)], *short], to_the_right=True)
        lines.append("a number: NVLinks; G XGMI, I PIX, B PXB, H PHB, N NODE, S SYS")
    if bad:
        lines.append("! wrong or uneven, see below")
    return lines


def _cell(report: TopologyReport, first: int, second: int, bad: frozenset[Pair]) -> str:
    if first == second:
        return "X"
    path = report.topology.pair(first, second)
    mark = "!" if (min(first, second), max(first, second)) in bad else ""
    return (path.label if path is not None else "?") + mark


def _shorten(cell: str) -> str:
    mark = "!" if cell.endswith("!") else ""
    codes = {"XGMI": "G", "PIX": "I", "PXB": "B", "PHB": "H", "NODE": "N", "SYS": "S"}
    bare = cell.removesuffix("!")
    return (bare[2:] if bare.startswith("NV") else codes.get(bare, bare)) + mark


def list_path_rows(report: TopologyReport) -> list[tuple[str, str, str, str]]:
    """Each kind of path of this node: label, number of pairs, GB/s that it should reach, what it crosses."""
    paths: dict[str, list[Pair]] = {}
    for pair, path in sorted(list_pairs(report.topology), key=lambda each: each[1].distance):
        paths.setdefault(path.label, []).append(pair)
    rows = []
    for label, pairs in paths.items():
        path = report.topology.pairs[pairs[0]]
        limit = rate_pair(report.topology, pairs[0], path, report.site)
        most = "" if path.kind in (NVLINK, XGMI) else "at most "
        said = UNKNOWN if limit is None else f"{most}{format_rate(limit.rate)}"
        crosses = render_plural(path.links, "NVLink") if path.kind == NVLINK else MEANINGS[path.kind]
        over = f" ({limit.name})" if limit is not None else ""
        rows.append((label, str(len(pairs)), said, crosses + over))
    return rows


def _list_paths(report: TopologyReport) -> list[str]:
    rows = list_path_rows(report)
    if not rows:
        return []
    titles = ("path", "pairs", "should be GB/s", "crosses")
    lines = align_cells([titles, *rows])
    return [part for line in lines for part in fold_line(line, WIDTH)]


def list_adapter_rows(report: TopologyReport) -> list[tuple[str, str, str, str, str]]:
    """Each adapter: name, state, Gb/s, NUMA node, and what it is nearest to."""
    rows = []
    for each in report.topology.adapters:
        kind, devices = each.nearest
        rate = f"{each.rate_gbit_s:g}" if each.rate_gbit_s else UNKNOWN
        numa = UNKNOWN if each.numa is None else str(each.numa)
        near = f"{kind} {name_range(devices)}" if kind else UNKNOWN
        rows.append((each.name, each.state.lower() or UNKNOWN, rate, numa, near))
    return rows


def _list_adapters(report: TopologyReport) -> list[str]:
    rows = list_adapter_rows(report)
    if not any(each.state or each.numa is not None for each in report.topology.adapters):
        return []  # the drawing has all that is known
    return align_cells([("adapter", "state", "Gb/s", "NUMA", "nearest"), *rows])


def _list_copies(report: TopologyReport) -> list[str]:
    """Measured GB/s, from the device of a row to that of a column, and from the host."""
    copies = report.copies
    if copies is None:
        return []
    devices = [device.index for device in report.topology.devices]
    titles = ["GB/s", *map(str, devices), "us"]
    rows = []
    for first in devices:
        rates = [copies.pairs.get((first, second)) for second in devices]
        late = [copies.latencies[first, second] for second in devices if (first, second) in copies.latencies]
        cells = ["X" if first == second else _number(rate) for second, rate in zip(devices, rates, strict=True)]
        rows.append([f"GPU{first}", *cells, f"{min(late) * 1e6:.1f}" if late else UNKNOWN])
    host = ["host", *(_number(copies.from_host.get(index)) for index in devices), ""]
    return align_cells([titles, *rows, host], to_the_right=True)


def _number(rate: float | None) -> str:
    return UNKNOWN if rate is None else format_rate(rate)


# --- the verdict


def _list_verdict(report: TopologyReport) -> Iterator[str]:
    yield "Verdict"
    for each in report.findings:
        yield from _fold(f"{each.level}: {each.what}", "")
        if each.should:
            yield from _fold(f"should be: {each.should}", "  ")
        if each.remedy:
            yield from _fold(f"{'to do' if each.level != 'note' else 'look'}: {each.remedy}", "  ")
    for sentence in list_sentences(report):
        yield from _fold(sentence, "")


def list_sentences(report: TopologyReport) -> list[str]:
    """What is said besides the findings: whether links are wrong, which pairs are slowest and what follows."""
    found, topology = [], report.topology
    wrong = [each for each in report.findings if each.level == "wrong"]
    if not topology.devices:
        found.append("no accelerator is found: neither NVIDIA's driver nor AMD's shows one to this process")
    elif not wrong:
        basis = "by the catalogue and by each other" if find_part(topology) is not None else "compared with each other"
        found.append(f"no link is wrong, {basis}")
    found += _describe_unknown(report)
    slowest = report.slowest
    if slowest is not None:
        pairs = list_some([f"GPU{first}-GPU{second}" for first, second in slowest.pairs], 6)
        most = "at most " if slowest.limit is not None and not slowest.label.startswith((NVLINK, XGMI)) else ""
        found.append(
            f"slowest: {pairs}, {slowest.label} ({_meaning(slowest.label)}), {most}{render_limit(slowest.limit)}"
        )
        if slowest.groups:
            groups = " or ".join(name_range(group) for group in slowest.groups)
            found.append(f"keep tensor parallel within {groups}")
    elif len(topology.pairs) > 0:
        labels = {path.label for path in topology.pairs.values()}
        found.append(
            f"no pair is slower than another: {render_plural(len(topology.pairs), 'pair')} with {labels.pop()}"
        )
    return found


def _describe_unknown(report: TopologyReport) -> list[str]:
    """Why what links should reach is not known, where that is because of a device's name."""
    topology, site = report.topology, report.site
    if all(rate_pair(topology, pair, path, site) is not None for pair, path in list_pairs(topology)):
        return []
    names = {each.name for each in topology.devices if find_link(each, site) is None}
    unknown = sorted(name for name in names if not name or find_accelerator(name) is None)
    if not unknown:
        return []
    names_none = "no file names the devices: --device takes what nvidia-smi -L prints"
    why = f"the catalogue has no device that its driver names {', '.join(unknown)}" if unknown[0] else names_none
    return [f"what links should reach is n/a: {why}"]


def _meaning(label: str) -> str:
    kind = NVLINK if label.startswith(NVLINK) else XGMI if label.startswith(XGMI) else label
    return MEANINGS[kind]


def _fold(text: str, indent: str) -> list[str]:
    return fold_line(indent + text, WIDTH)


# --- as facts


def render_facts(report: TopologyReport) -> Mapping[str, Any]:
    """Everything as JSON; rates in bytes per second, None for what is not known."""
    topology, bad = report.topology, report.bad_pairs
    pairs = []
    for pair, path in list_pairs(topology):
        limit = rate_pair(topology, pair, path, report.site)
        pairs.append(
            {
                "devices": list(pair),
                "path": path.label,
                "p2p": path.p2p or None,
                "should_be_bytes_per_s": limit and limit.rate,
                "link": limit and limit.name,
                "suspect": pair in bad,
            }
        )
    slowest = report.slowest
    return {
        "format": 1,
        "node": topology.title,
        "devices": [_list_device(device) for device in topology.devices],
        "pairs": pairs,
        "adapters": [{**asdict(each), "paths": _by_text(each.paths)} for each in topology.adapters],
        "numa": _by_text(topology.numa),
        "findings": [_list_finding(each) for each in report.findings],
        "slowest": slowest
        and {
            "path": slowest.label,
            "pairs": [list(pair) for pair in slowest.pairs],
            "should_be_bytes_per_s": slowest.limit and slowest.limit.rate,
            "groups": [list(group) for group in slowest.groups],
        },
        "copies": report.copies and _list_copy_facts(report),
        "verdict": list_sentences(report),
    }


def _by_text(table: Mapping[int, str]) -> Mapping[str, str]:
    return {str(index): value for index, value in sorted(table.items())}


def _list_device(device: TopologyDevice) -> Mapping[str, Any]:
    return {**asdict(device), "inactive": list(device.inactive)}


def _list_finding(finding: LinkFinding) -> Mapping[str, Any]:
    return {
        **asdict(finding),
        "pairs": [list(pair) for pair in finding.pairs],
        "devices": list(finding.devices),
        "adapters": list(finding.adapters),
    }


def _list_copy_facts(report: TopologyReport) -> Mapping[str, Any]:
    copies = report.copies
    if copies is None:
        return {}
    return {
        "pairs": [
            {"from": pair[0], "to": pair[1], "bytes_per_s": rate, "latency_s": copies.latencies.get(pair)}
            for pair, rate in copies.pairs.items()
        ],
        "from_host_bytes_per_s": {str(index): rate for index, rate in copies.from_host.items()},
    }
