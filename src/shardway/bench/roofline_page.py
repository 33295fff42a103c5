"""A step under its roofline as it is shown: tables and a picture in plain characters, and one HTML file.

Invariants:
- Figures are those of `roofline.StepRoofline`; what is not known reads "n/a". Lines are plain ASCII, 80 characters.
- The page is complete: it fetches nothing, runs no script, and is readable in light, in dark and on paper. A group
  without arithmetic has no place on the logarithmic picture and is named below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from shardway.bench.roofline import GroupRoof, StepRoofline, list_verdict, render_si, roof
from shardway.drawing import (
    Frame,
    circle,
    colour_of,
    line,
    polyline,
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
from shardway.units import render_plural
from shardway.watch.trace.groups import Group
from shardway.watch.words import align_cells, fold_line, pack_parts

WIDTH = 80

# --- tables

_WORK = ("group", "calls", "ms", "step", "FLOP", "bytes", "FLOP/B")
_ROOF = ("group", "FLOP/s", "B/s", "roof FLOP/s", "of roof", "bound", "saved ms")
_NOTE = (
    "Bytes: operands and results, each once; a lower bound. Of a compiled kernel those of its inputs and results. "
    "Saved: at most, at the roof; never added up."
)


def render_report(step: StepRoofline) -> str:
    """The tables, the picture and the verdict, without a newline at the end."""
    blocks = [
        [part for each in _describe(step) for part in fold_line(each, WIDTH)],
        align_cells([_WORK, *_list_work(step)], to_the_right=True),
        align_cells([_ROOF, *_list_roofs(step)], to_the_right=True),
        fold_line(_NOTE, WIDTH),
        draw_roofline(step),
        ["Verdict", *(part for each in list_verdict(step) for part in fold_line(f"- {each}", WIDTH))],
    ]
    return "\n".join("\n".join([*block, ""]) for block in blocks).rstrip("\n")


def _describe(step: StepRoofline) -> tuple[str, str]:
    """What was captured, and the roof."""
    run, ceilings = step.run, step.ceilings
    where = f"{run.device}, {run.format}, {render_plural(run.ranks, 'rank')}"
    where += f" (this is rank {step.rank})" if run.ranks > 1 else ""
    what = f"{run.name}: {render_plural(step.steps, 'step')} of {step.step_ms:.2f} ms on average, {where}"
    products = ", ".join(f"{render_si(rate)}FLOP/s in {name}" for name, rate in ceilings.products.items())
    ridge = f"{_render_intensity(ceilings.ridge(run.format))} FLOP/B"
    roofs = f"roof: {products}, {render_si(ceilings.bytes_per_s)}B/s, ridge {ridge} ({ceilings.source})"
    return what, roofs


def _tight(value: float | None) -> str:
    return render_si(value).replace(" ", "")


def _render_intensity(intensity: float | None) -> str:
    if intensity is None:
        return "n/a"
    return f"{intensity:.3g}" if intensity < 999.5 else f"{intensity:,.0f}"


def _power(power: int) -> str:
    """A power of ten: 10 -> "10G"."""
    return render_si(10.0**power, 1).replace(" ", "")


def _list_work(step: StepRoofline) -> Iterator[tuple[str, ...]]:
    for each in step.groups:
        yield (
            each.title,
            f"{each.calls:.0f}",
            f"{each.ms:.2f}",
            f"{step.share(each.ms):.1%}",
            _tight(each.flop),
            _tight(each.bytes),
            _render_intensity(each.intensity),
        )
    yield "idle", "", f"{step.idle_ms:.2f}", f"{step.share(step.idle_ms):.1%}", "", "", ""
    yield "step", "", f"{step.step_ms:.2f}", "100.0%", "", "", ""


def _list_roofs(step: StepRoofline) -> Iterator[tuple[str, ...]]:
    for each in step.groups:
        yield (
            each.title,
            _tight(each.flops_per_s),
            _tight(each.bytes_per_s),
            _tight(each.roof),
            "n/a" if each.reached is None else f"{each.reached:.0%}",
            each.bound,
            "n/a" if each.saved_ms is None else f"{each.saved_ms:.2f}",
        )


# --- the picture, logarithmic in both directions

LETTERS: Mapping[Group, str] = {
    "attention": "A",
    "products": "P",
    "output": "O",
    "norms": "N",
    "elementwise": "E",
    "casts": "C",
    "optimizer": "U",
    "communication": "M",
    "copies": "K",
    "other": "X",
}


class LogScales:
    """Both axes of a picture of a step: FLOP a byte, and FLOP a second, from a power of ten to another one."""

    def __init__(self, step: StepRoofline) -> None:
        self.points = [(each, each.intensity, each.flops_per_s) for each in step.groups]
        self.shown: list[tuple[GroupRoof, float, float]] = [
            (each, intensity, rate) for each, intensity, rate in self.points if intensity and rate
        ]
        ceilings = step.ceilings
        ridges = [rate / ceilings.bytes_per_s for rate in ceilings.products.values()]
        self.x = _decades([*ridges, *(intensity for _, intensity, _ in self.shown)], 0.3)
        low = [rate for _, _, rate in self.shown]
        self.y = _decades([*ceilings.products.values(), *low], 0.1)

    def place(self, intensity: float, rate: float) -> tuple[float, float]:
        """Where a point is, 0 to 1 from the left and from below."""
        return tuple(  # type: ignore[return-value]
            (math.log10(value) - low) / (high - low) for value, (low, high) in ((intensity, self.x), (rate, self.y))
        )

    def list_left_out(self) -> list[GroupRoof]:
        """Groups that have work and no place: without arithmetic."""
        return [each for each, intensity, rate in self.points if each.bytes and not (intensity and rate)]


def _decades(values: Sequence[float], room: float) -> tuple[int, int]:
    """The powers of ten around all values, with room beyond them."""
    logs = [math.log10(each) for each in values]
    return math.floor(min(logs) - room), max(math.ceil(max(logs) + room), math.floor(min(logs) - room) + 1)


_LEFT, _ROWS = 9, 17


def draw_roofline(step: StepRoofline) -> list[str]:
    """The picture in plain characters."""
    scales, columns = LogScales(step), WIDTH - _LEFT - 1
    grid = [[" "] * columns for _ in range(_ROWS)]
    (left, right), (low, high) = scales.x, scales.y

    def put(column: int, height: float, mark: str) -> None:
        row = _ROWS - 1 - round(height * (_ROWS - 1))
        if 0 <= row < _ROWS and 0 <= column < columns:
            grid[row][column] = mark

    for peak in sorted(step.ceilings.products.values()):
        for column in range(columns):
            intensity = 10 ** (left + (right - left) * column / (columns - 1))
            rate = roof(intensity, peak, step.ceilings.bytes_per_s)
            put(column, scales.place(intensity, rate)[1], "-" if rate == peak else "/")
    for each, intensity, rate in sorted(scales.shown, key=lambda point: point[0].ms):
        x, y = scales.place(intensity, rate)
        column = round(x * (columns - 1))
        row = _ROWS - 1 - round(min(1.0, max(0.0, y)) * (_ROWS - 1))
        while column + 1 < columns and grid[row][column] in LETTERS.values():
            column += 1
        grid[row][column] = LETTERS[each.group]
    ticks = {round((_ROWS - 1) * (high - power) / (high - low)): power for power in range(low, high + 1)}
    lines = [f"{'FLOP/s':>{_LEFT - 1}}"]
    for row, cells in enumerate(grid):
        label = _power(ticks[row]) if row in ticks else ""
        lines.append(f"{label:>{_LEFT - 1}} |{''.join(cells)}".rstrip())
    below = [" "] * (WIDTH + 8)
    for power in range(left, right + 1):
        word, at = f"{10.0**power:g}", _LEFT + 1 + round((columns - 1) * (power - left) / (right - left))
        begin = min(max(0, at - len(word) // 2), WIDTH - len(word))
        below[begin : begin + len(word)] = word
    lines += [f"{'':>{_LEFT}}+{'-' * columns}", "".join(below).rstrip()]
    lines.append(f"{'FLOP a byte':>{WIDTH}}")
    key = [f"{LETTERS[each.group]} {each.title}" for each, _, _ in scales.shown]
    lines += pack_parts(key, WIDTH, indent="")
    if without := scales.list_left_out():
        lines += fold_line(f"not in it, without arithmetic: {', '.join(each.title for each in without)}", WIDTH)
    return lines


_SIZE, _FRAME = (760.0, 440.0), Frame(70, 16, 670, 372)
_LABEL_HEIGHT = 14.0


def draw_svg(step: StepRoofline) -> str:
    """The picture as SVG: a dot's area is the group's part of the step, a line leads from it to its roof."""
    scales, frame, ceilings = LogScales(step), _FRAME, step.ceilings
    (left, right), (low, high) = scales.x, scales.y

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x, y = scales.place(intensity, rate)
        return frame.x + x * frame.width, frame.bottom - y * frame.height

    parts = []
    for power in range(left, right + 1):
        x = at(10.0**power, 10.0**low)[0]
        parts.append(line((x, frame.y), (x, frame.bottom), "grid"))
        parts.append(text((x, frame.bottom + 16), f"{10.0**power:g}", "soft", "middle"))
    for power in range(low, high + 1):
        y = at(10.0**left, 10.0**power)[1]
        parts.append(line((frame.x, y), (frame.right, y), "grid"))
        parts.append(text((frame.x - 6, y + 4), _power(power), "soft", "end"))
    parts.append(text((frame.right, frame.bottom + 34), "arithmetic intensity, FLOP a byte", "soft", "end"))
    parts.append(text((frame.x + 6, frame.y + 14), "FLOP/s", "soft"))
    for name, peak in ceilings.products.items():
        start = max(10.0**left, 10.0**low / ceilings.bytes_per_s)
        ends = [at(start, start * ceilings.bytes_per_s), at(peak / ceilings.bytes_per_s, peak), at(10.0**right, peak)]
        parts.append(polyline(ends, "curve" if name == step.run.format else "ideal"))
        parts.append(text((frame.right - 4, ends[-1][1] - 6), f"{render_si(peak)}FLOP/s in {name}", "small", "end"))
    used: list[tuple[float, float]] = []
    for each, intensity, rate in sorted(scales.shown, key=lambda point: -point[2]):
        x, y = at(intensity, rate)
        parts.append(line((x, y), at(intensity, each.roof or rate), "axis"))
        tip = f"{each.title}: {each.ms:.2f} ms, {_render_intensity(intensity)} FLOP/B, {render_si(rate)}FLOP/s"
        parts.append(circle((x, y), 4 + 14 * math.sqrt(step.share(each.ms)), colour_of(each.title), tip))
        label = y + 4
        while any(abs(label - other) < _LABEL_HEIGHT and abs(x - beside) < 150 for beside, other in used):
            label += _LABEL_HEIGHT / 2
        used.append((x, label))
        end = x > frame.right - 140
        space = 8 + 14 * math.sqrt(step.share(each.ms))
        parts.append(text((x - space if end else x + space, label), each.title, "small", "end" if end else "start"))
    words = (
        f"Roofline of {step.run.name}: products at most {render_si(ceilings.peak(step.run.format))}FLOP/s, copies "
        f"{render_si(ceilings.bytes_per_s)}B/s, {len(scales.shown)} groups of operators below"
    )
    return render_drawing(_SIZE, words, parts, least=560)


# --- the page


def render_page(step: StepRoofline) -> str:
    """The HTML file."""
    sentences = list_verdict(step)
    without = LogScales(step).list_left_out()
    note = "A dot is as large as its part of the step; the line above it ends at its roof."
    if without:
        note += f" Without arithmetic, so not in it: {', '.join(each.title for each in without)}."
    key = {each.title: colour_of(each.title) for each, _, _ in LogScales(step).shown}
    head = [
        f"<header>\n<h1>Roofline of {escape(step.run.name)}</h1>",
        *(render_text(each, "soft") for each in _describe(step)),
        render_text(sentences[0], "verdict"),
        render_tiles(_list_tiles(step)),
        "</header>",
    ]
    sums = ("step",)
    body = [
        "\n".join(head),
        render_section("The roof", render_figure(draw_svg(step), key, note)),
        render_section(
            "Groups of operators",
            render_table("Work of a step", _WORK, _list_work(step), sums=sums),
            render_table("Against the roof", _ROOF, _list_roofs(step)),
            render_text(_NOTE, "soft"),
        ),
        render_section("Verdict", render_list(sentences)),
    ]
    return render_document(f"Roofline of {step.run.name}", "\n".join(body))


def _list_tiles(step: StepRoofline) -> Iterator[tuple[str, ...]]:
    run, ceilings = step.run, step.ceilings
    yield "one step", f"{step.step_ms:.2f} ms", f"{step.idle_ms:.2f} ms idle"
    yield "sum of kernel floors", f"{step.share(step.floor_ms):.0%}", f"{step.floor_ms:.2f} ms of the step"
    peak = ceilings.peak(run.format)
    full, causal = step.mfu(peak, causal=False), step.mfu(peak, causal=True)
    if full is not None and causal is not None:
        yield "MFU, all scores counted", f"{full:.1%}", "of the measured products"
        yield "MFU, causal half counted", f"{causal:.1%}", "of the measured products"
    yield "best product", f"{render_si(peak)}FLOP/s", f"in {run.format}"
    yield "copy", f"{render_si(ceilings.bytes_per_s)}B/s", "read and written"
    yield "ridge", f"{_render_intensity(ceilings.ridge(run.format))} FLOP/B", "products above, memory below"
