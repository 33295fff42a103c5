"""A node's topology as one HTML file: verdict, a picture of the links, the matrix of paths, adapters, what to do.

Invariants:
- The page is complete: it fetches nothing, runs no script, and is readable in light, in dark, on a phone and on paper.
- Its figures and sentences are those of `topology_text`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from shardway.bench.bandwidth import format_rate
from shardway.bench.topology import NVLINK, XGMI, list_pairs
from shardway.bench.topology_report import TopologyReport
from shardway.bench.topology_text import (
    describe_fast_links,
    describe_node,
    group_by_place,
    list_adapter_rows,
    list_path_rows,
    list_sentences,
    name_range,
)
from shardway.drawing import (
    Frame,
    line,
    rect,
    render_document,
    render_drawing,
    render_figure,
    render_list,
    render_section,
    render_table,
    render_text,
    render_tiles,
    text,
)
from shardway.units import UNKNOWN, render_plural

_WIDTH, _RADIUS, _TOP = 560.0, 190.0, 225.0
_BOX, _PLACE_BOX = (62.0, 26.0), (98.0, 26.0)
_LEAST_PIXELS = 320


def render_page(report: TopologyReport) -> str:
    """The whole document."""
    title = f"Links of {report.topology.title}"
    body = [
        f"<header>\n<h1>{escape(title)}</h1>",
        render_text(describe_node(report), "soft"),
        render_text(_headline(report), f"verdict {_mood(report)}"),
        render_tiles(_list_tiles(report)),
        "</header>",
        _render_findings(report),
        _render_picture(report),
        _render_matrix(report),
        _render_adapters(report),
    ]
    return render_document(title, "\n".join(part for part in body if part))


def _mood(report: TopologyReport) -> str:
    levels = {each.level for each in report.findings}
    return "bad" if "wrong" in levels else "unsure" if "uneven" in levels else "good"


def _headline(report: TopologyReport) -> str:
    first = next((each for each in report.findings if each.level != "note"), None)
    return f"{first.level}: {first.what}" if first is not None else list_sentences(report)[0]


def _list_tiles(report: TopologyReport) -> Iterator[tuple[str, ...]]:
    topology, slowest = report.topology, report.slowest
    yield "devices", str(len(topology.devices)), describe_fast_links(report) or "no NVLink and no XGMI between them"
    rows = list_path_rows(report)
    if rows:
        label, count, rate, crosses = rows[0]
        yield "nearest path", label, f"{rate} GB/s each way", f"{count} pairs", crosses
    if slowest is not None:
        label, count, rate, crosses = rows[-1]
        groups = " or ".join(name_range(group) for group in slowest.groups)
        within = (f"keep tensor parallel within {groups}",) if groups else ()
        yield "slowest path", label, f"{rate} GB/s each way", f"{count} pairs", crosses, *within
    yield "network adapters", str(len(topology.adapters))


# --- what was found


def _render_findings(report: TopologyReport) -> str:
    rows = [(each.level, each.what, each.should or "", each.remedy) for each in report.findings]
    found = render_table("", ("", "found", "should be", "to do"), rows, words={1, 2, 3}) if rows else ""
    return render_section("Verdict", found, render_list(list_sentences(report)))


# --- the picture


def _render_picture(report: TopologyReport) -> str:
    if not report.topology.devices:
        return ""
    circle = _draw_circle(report)
    key = {"device": "blue"}
    if report.bad_pairs:
        key["a device with a wrong or uneven link"] = "red"
    note = "Solid: NVLink or XGMI. Dashed: the slowest pairs. Red: wrong or uneven."
    return render_section("Links", render_figure(circle, key, note), _draw_places(report))


def _draw_circle(report: TopologyReport) -> str:
    """The devices on a circle in the order of their NUMA nodes, and lines for NVLink, XGMI and what is wrong."""
    topology, bad = report.topology, report.bad_pairs
    order = [device.index for _, devices, _ in group_by_place(report) for device in devices]
    at = {index: _place_on_circle(place, len(order)) for place, index in enumerate(order)}
    slow = set(report.slowest.pairs) if report.slowest is not None else set()
    parts = []
    for pair, path in list_pairs(topology):
        is_fast = path.kind in (NVLINK, XGMI)
        kind = "physical" if pair in bad else "curve" if is_fast else "ideal" if pair in slow else ""
        if kind:
            parts.append(line(at[pair[0]], at[pair[1]], kind))
    suspects = {index for each in report.findings if each.level != "note" for index in each.devices}
    for index, (x, y) in at.items():
        device = topology.device(index)
        frame = Frame(x - _BOX[0] / 2, y - _BOX[1] / 2, *_BOX)
        tip = ", ".join(filter(None, (device.label, device.name, device.place, str(device.pcie_most or ""))))
        parts.append(rect(frame, f"box {'red' if index in suspects else 'blue'}", tip))
        parts.append(text((x, y + 4), device.label, "on bold", "middle"))
    label = f"{render_plural(len(order), 'device')}: {describe_fast_links(report) or 'joined by PCIe alone'}"
    return render_drawing((_WIDTH, 2 * _TOP), label, parts, _LEAST_PIXELS)


def _place_on_circle(place: int, count: int) -> tuple[float, float]:
    angle = 2 * math.pi * (place + 0.5) / count - math.pi / 2
    radius = _RADIUS if count > 1 else 0.0
    return _WIDTH / 2 + radius * math.cos(angle), _TOP + radius * math.sin(angle)


def _draw_places(report: TopologyReport) -> str:
    """A box for each NUMA node with its devices and adapters."""
    parts, y, wide = [], 8.0, _WIDTH - 16
    for title, devices, adapters in group_by_place(report):
        names = [(device.label, "blue") for device in devices]
        names += [(adapter.name, "teal" if adapter.state in ("", "ACTIVE") else "stone") for adapter in adapters]
        columns = max(1, int((wide - 16) // (_PLACE_BOX[0] + 8)))
        height = 30 + 34 * max(1, math.ceil(len(names) / columns))
        parts.append(rect(Frame(8, y, wide, height), "lane"))
        parts.append(text((18, y + 19), title, "soft"))
        for number, (name, colour) in enumerate(names):
            left = 16 + (number % columns) * (_PLACE_BOX[0] + 8)
            frame = Frame(left, y + 28 + 34 * (number // columns), *_PLACE_BOX)
            parts.append(rect(frame, f"box {colour}", name))
            parts.append(text((left + _PLACE_BOX[0] / 2, frame.y + 17), name[:14], "on", "middle"))
        y += height + 8
    drawing = render_drawing((_WIDTH, y), "devices and network adapters by NUMA node", parts, _LEAST_PIXELS)
    return render_figure(drawing, {"device": "blue", "network adapter": "teal"})


# --- tables


def _render_matrix(report: TopologyReport) -> str:
    topology, bad = report.topology, report.bad_pairs
    if not topology.pairs:
        return ""
    paths = render_table(
        "Paths, and what each should reach in one direction",
        ("path", "pairs", "GB/s", "crosses"),
        list_path_rows(report),
        words={3},
    )
    rows = []
    for first in topology.devices:
        cells = []
        for second in topology.devices:
            path = topology.pair(first.index, second.index)
            pair = (min(first.index, second.index), max(first.index, second.index))
            mark = " !" if pair in bad else ""
            cells.append("X" if first is second else (path.label if path is not None else UNKNOWN) + mark)
        rows.append((first.label, *cells))
    labels = [device.label for device in topology.devices]
    matrix = render_table("Each device to each (! wrong or uneven)", ("", *labels), rows)
    return render_section("Paths", paths, matrix, _render_copies(report))


def _render_copies(report: TopologyReport) -> str:
    if report.copies is None:
        return ""
    indices = [device.index for device in report.topology.devices]
    rows = []
    for first in indices:
        rates = (report.copies.pairs.get((first, second)) for second in indices)
        rows.append((f"from GPU{first}", *(UNKNOWN if rate is None else format_rate(rate) for rate in rates)))
    host = (report.copies.from_host.get(index) for index in indices)
    rows.append(("from the host", *(UNKNOWN if rate is None else format_rate(rate) for rate in host)))
    return render_table("Measured copies, GB/s", ("", *(f"GPU{index}" for index in indices)), rows)


def _render_adapters(report: TopologyReport) -> str:
    rows = list_adapter_rows(report)
    if not rows:
        return ""
    columns = ("adapter", "state", "Gb/s", "NUMA node", "nearest")
    kept = [place for place in range(len(columns)) if place in (0, 4) or any(row[place] != UNKNOWN for row in rows)]
    words = {number for number, place in enumerate(kept) if place in (1, 4)}
    shown = ([row[place] for place in kept] for row in rows)
    return render_section("Network adapters", render_table("", [columns[place] for place in kept], shown, words=words))
