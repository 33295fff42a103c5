"""Results of inference as one HTML file: what was reached, how it depends on batch and load, under what conditions.

Invariants:
- The page is complete: it fetches nothing, runs no script, and is readable in light, in dark, on a phone and on paper.
- Its figures are those of the rows; a point that is not known is not drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from shardway.bench.inference.readers import ComparedResult
from shardway.bench.inference.report import TITLES, list_compared, render_conditions, render_peaks
from shardway.bench.inference.results import LATENCIES, ONE_BATCH, SERVE, THROUGHPUT
from shardway.drawing import (
    Frame,
    circle,
    line,
    nice_ticks,
    polyline,
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
from shardway.units import render_plural

_SIZE = (640.0, 300.0)
_PLOT = Frame(70, 16, 550, 230)
_COLOURS = ("blue", "orange", "teal", "plum", "red", "green", "brown", "rose", "navy", "amber")


def render_page(results: Sequence[ComparedResult]) -> str:
    """The whole document."""
    title = "Inference: " + ", ".join(TITLES[kind].lower() for kind in TITLES if any(e.kind == kind for e in results))
    body = [
        f"<header>\n<h1>{escape(title)}</h1>",
        render_text(render_plural(len(results), "result"), "soft"),
        render_tiles(_list_tiles(results)),
        "</header>",
        _render_batches([each for each in results if each.kind == ONE_BATCH]),
        _render_throughputs([each for each in results if each.kind == THROUGHPUT]),
        _render_services([each for each in results if each.kind == SERVE]),
        _render_conditions(results),
    ]
    return render_document(title, "\n".join(part for part in body if part), style=_STYLE)


_STYLE = "".join(f"svg .line-{name} {{ stroke: var(--{name}); stroke-width: 2; fill: none; }}\n" for name in _COLOURS)

_BEST = (
    (ONE_BATCH, "median_decode_throughput", "best decode", "tokens/s of a static batch"),
    (ONE_BATCH, "prefill_throughput", "best prefill", "tokens/s of a static batch"),
    (THROUGHPUT, "output_throughput", "offline output", "tokens/s"),
    (THROUGHPUT, "total_throughput", "offline input and output", "tokens/s"),
    (SERVE, "output_throughput", "served output", "tokens/s"),
)


def _list_tiles(results: Sequence[ComparedResult]) -> Iterator[tuple[str, ...]]:
    for kind, field, label, unit in _BEST:
        known = [each for each in results if each.kind == kind and _number(each, field) is not None]
        if known:
            best = max(known, key=lambda each: _number(each, field) or 0.0)
            yield label, f"{_number(best, field):,.0f}", unit, f"{best.label}, {best.origin}"


def _number(result: ComparedResult, field: str) -> float | None:
    value = result.figures.get(field)
    return float(value) if isinstance(value, int | float) else None


# --- kinds


def _render_batches(results: Sequence[ComparedResult]) -> str:
    if not results:
        return ""
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in results:
        batch, rate = _number(each, "batch_size"), _number(each, "median_decode_throughput")
        if batch is not None and rate is not None:
            lines.setdefault(f"{each.label}, input {each.figures['input_len']}", []).append((batch, rate))
    plot = _plot_lines(lines, "batch size", "decode, tokens/s", "median decode throughput by batch size")
    return render_section(TITLES[ONE_BATCH], plot, _render_table(results, ONE_BATCH))


def _render_throughputs(results: Sequence[ComparedResult]) -> str:
    if not results:
        return ""
    bars = [
        (
            each.label,
            [(field, _number(each, field)) for field in ("input_throughput", "output_throughput", "total_throughput")],
        )
        for each in results
    ]
    key = {"input": "sky", "output": "blue", "input and output": "stone"}
    picture = _draw_bars(bars, list(key.values()), "tokens/s", "tokens a second: input, output, both")
    return render_section(
        TITLES[THROUGHPUT], render_figure(picture, key) if picture else "", _render_table(results, THROUGHPUT)
    )


def _render_services(results: Sequence[ComparedResult]) -> str:
    if not results:
        return ""
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in results:
        rate, wait = _number(each, "output_throughput"), _number(each, "median_ttft_ms")
        if rate is not None and wait is not None:
            lines.setdefault(f"{each.label}, {each.origin}", []).append((rate, wait))
    several = any(len(points) > 1 for points in lines.values()) or len(lines) > 1
    curve = _plot_lines(lines, "output, tokens/s", "median TTFT, ms", "wait by throughput") if several else ""
    parts = [curve]
    for name in LATENCIES:
        bars = [
            (each.label, [(part, _number(each, f"{part}_{name}_ms")) for part in ("median", "p90", "p99")])
            for each in results
        ]
        key = {"median": "blue", "p90": "amber", "p99": "orange"}
        picture = _draw_bars(bars, list(key.values()), "ms", f"{name.upper()}: median, p90 and p99 in milliseconds")
        parts.append(render_figure(picture, key, name.upper()) if picture else "")
    return render_section(TITLES[SERVE], *parts, _render_table(results, SERVE))


def _render_table(results: Sequence[ComparedResult], kind: str) -> str:
    head, *rows = list_compared(results, kind)
    return render_table("", head, rows, words={1})


def _render_conditions(results: Sequence[ComparedResult]) -> str:
    """Of our own results: those of other programs do not state theirs."""
    known = [each for each in results if each.row.get("settings") is not None and "prompts" in each.row]
    texts = dict.fromkeys(" ".join((each.label + ":", *render_conditions(each.row))) for each in known)
    peaks = dict.fromkeys(render_peaks(each.row) for each in known if each.kind != SERVE)
    note = "Results compare only where these are alike: engines differ threefold where they are not."
    return render_section("Conditions", render_text(note, "soft"), render_list([*texts, *peaks])) if texts else ""


# --- pictures


def _plot_lines(lines: dict[str, list[tuple[float, float]]], across: str, up: str, label: str) -> str:
    """A figure of lines through points, both axes from 0; "" for no point."""
    points = [point for each in lines.values() for point in each]
    if not points:
        return ""
    widest, highest = max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0
    parts = list(_draw_axes(widest, highest, across, up))
    key = {}
    for number, (name, found) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        key[name] = colour
        places = [
            (_PLOT.x + _PLOT.width * x / widest, _PLOT.bottom - _PLOT.height * y / highest) for x, y in sorted(found)
        ]
        if len(places) > 1:
            parts.append(polyline(places, f"line-{colour}"))
        parts += [
            circle(place, 4, colour, f"{name}: {x:g}, {y:,.4g}")
            for place, (x, y) in zip(places, sorted(found), strict=True)
        ]
    return render_figure(render_drawing(_SIZE, label, parts, 420), key)


def _draw_axes(widest: float, highest: float, across: str, up: str) -> Iterator[str]:
    yield from _draw_rows(highest, up)
    for tick in nice_ticks(widest):
        x = _PLOT.x + _PLOT.width * tick / widest
        yield text((x, _PLOT.bottom + 18), f"{tick:,g}", "soft", "middle")
    yield text((_PLOT.x + _PLOT.width / 2, _PLOT.bottom + 40), across, "soft", "middle")


def _draw_rows(highest: float, up: str) -> Iterator[str]:
    for tick in nice_ticks(highest):
        y = _PLOT.bottom - _PLOT.height * tick / highest
        yield line((_PLOT.x, y), (_PLOT.right, y), "grid")
        yield text((_PLOT.x - 6, y + 4), f"{tick:,g}", "soft", "end")
    yield text((_PLOT.x, _PLOT.y - 4), up, "soft", "start")


def _draw_bars(
    groups: Sequence[tuple[str, Sequence[tuple[str, float | None]]]], colours: Sequence[str], up: str, label: str
) -> str:
    """Bars side by side for each group; "" where no value is known."""
    values = [value for _, bars in groups for _, value in bars if value is not None]
    if not values:
        return ""
    highest = max(values) or 1.0
    parts = list(_draw_rows(highest, up))
    wide = _PLOT.width / len(groups)
    for place, (name, bars) in enumerate(groups):
        each = min(60.0, 0.8 * wide / len(bars))
        left = _PLOT.x + place * wide + (wide - each * len(bars)) / 2
        for number, (what, value) in enumerate(bars):
            if value is None:
                continue
            height = _PLOT.height * value / highest
            frame = Frame(left + number * each, _PLOT.bottom - height, 0.92 * each, height)
            parts.append(rect(frame, colours[number], f"{name}, {what}: {value:,.4g} {up}"))
        if len(groups) <= 8:
            parts.append(text((_PLOT.x + (place + 0.5) * wide, _PLOT.bottom + 18), name[:16], "soft", "middle"))
    return render_drawing(_SIZE, label, parts, 420)
