"""The page of a plan: its numbers are those of the answer, its pictures are to scale, it needs nothing but itself."""

from __future__ import annotations

import re
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_pages import NAMES, Page, machine, number, page

from shardway.drawing import nice_ticks, render_style, round_parts
from shardway.plan.case import list_stages
from shardway.plan.economy import JobTerms, Price
from shardway.plan.huggingface import find_named
from shardway.plan.page import hours_per_giga, ideal_rate, render_page
from shardway.plan.planner import PlanOptions, efficiency, make_plan, request_of
from shardway.plan.schedule import pick_ranks, stage_seconds
from shardway.plan.time import BUBBLE, GRADIENTS, OPTIMIZER, REST, STAGES, WEIGHTS
from shardway.units import Span

GIB = 2**30


@pytest.fixture(params=NAMES)
def any_page(request: pytest.FixtureRequest) -> Page:
    return page(request.param)


# --- the file


def test_it_needs_nothing_but_itself(any_page: Page) -> None:
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(|\bsrc=|\bhref=|\bon\w+=", any_page.text)
    assert "default-src 'none'" in any_page.text


def test_every_picture_says_what_it_shows(any_page: Page) -> None:
    drawings = [each for each in any_page.root.iter("svg") if each.get("aria-hidden") != "true"]
    assert len(drawings) >= 2
    assert all(each.get("role") == "img" and each.get("aria-label") for each in drawings)
    assert "<title>llama" in any_page.text
    assert 'lang="en"' in any_page.text


def test_every_colour_has_a_rule() -> None:
    sheet = render_style()
    rules = set(re.findall(r"\.([a-z]+)", sheet))
    for name in NAMES:
        shapes = (each for drawing in page(name).root.iter("svg") for each in drawing.iter())
        used = {kind for shape in shapes for kind in (shape.get("class") or "").split()}
        assert used <= rules
    light, dark = (dict(re.findall(r"--(\w+): (#\w+);", part)) for part in sheet.split("prefers-color-scheme: dark"))
    assert light.keys() == dark.keys() >= set(re.findall(r"var\(--(\w+)\)", sheet))
    assert "@media print" in sheet


def test_nothing_reaches_beyond_its_picture(any_page: Page) -> None:
    for drawing in any_page.root.iter("svg"):
        width, height = map(float, (drawing.get("viewBox") or "").split()[2:])
        for shape in drawing.iter("rect"):
            x, y = (float(shape.get(name, "0")) for name in ("x", "y"))
            assert -0.01 <= x <= x + float(shape.get("width", "0")) <= width + 0.01
            assert -0.01 <= y <= y + float(shape.get("height", "0")) <= height + 0.01
        for shape in drawing.iter("text"):
            assert 0 <= float(shape.get("x", "0")) <= width
            assert 0 <= float(shape.get("y", "0")) <= height


def test_names_cannot_become_markup() -> None:
    hostile = '<script>alert("&")</script>'
    found = page("one node").answer
    question = found.request
    named = replace(
        found,
        request=replace(
            question,
            machine=replace(question.machine, name=hostile),
            case=replace(question.case, model=replace(question.case.model, name=hostile)),
        ),
        warnings=(hostile,),
        assumed=(hostile,),
    )
    text = render_page(named, ())
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(&quot;&amp;&quot;)&lt;/script&gt;") >= 4


# --- the top


def test_the_facts_are_those_of_the_answer(any_page: Page) -> None:
    shown, tiles = any_page.answer.shown, any_page.tiles()
    for label, causal in (("MFU, all scores counted", False), ("MFU, causal half counted", True)):
        value, peak, hardware = tiles[label]
        assert number(value) == pytest.approx(100 * shown.mfu(causal=causal), abs=0.051)
        assert number(hardware.removeprefix("HFU ")) == pytest.approx(100 * shown.hfu(causal=causal), abs=0.051)
        assert f"{shown.peak_flops / 1e12:,.0f} TFLOP/s" in peak
        assert shown.case.precision in peak
    value, usable = tiles["memory of the fullest rank"][0], tiles["memory of the fullest rank"][2]
    assert number(value) == pytest.approx(shown.peak.device / GIB, abs=0.051)
    assert number(usable.removeprefix("of ")) == pytest.approx(shown.usable_bytes / GIB, abs=0.051)
    assert shown.case.degrees.render() in any_page.words
    assert any_page.answer.request.case.model.name in any_page.words


def seconds(text: str) -> float:
    """A time such as "4.71 s" or "2.5 h: ..."."""
    value, unit = text.split(":")[0].split()
    return number(value) * {"ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86400}[unit]


def test_the_time_of_a_step_with_its_interval(any_page: Page) -> None:
    time = any_page.answer.shown.time
    value, interval = any_page.tiles()["one step"]
    found = [seconds(value), *map(seconds, interval.split(" to "))]
    assert found == pytest.approx([time.seconds, time.low, time.high], rel=0.006)


def test_tokens_and_their_cost() -> None:
    shown = page("large").answer.shown
    value, each = page("large").tiles()["tokens/s"]
    assert value.endswith("M")
    assert number(value[:-1]) == pytest.approx(shown.tokens_per_second / 1e6, rel=0.005)
    assert number(each) == pytest.approx(shown.tokens_per_second / 16384, rel=0.005)


def test_whether_it_fits_and_by_how_much() -> None:
    for name in NAMES:
        shown = page(name).answer.shown
        left = (shown.usable_bytes - shown.peak.device) / GIB
        verdict = next(each for each in page(name).root.iter("p") if "verdict" in (each.get("class") or ""))
        words = verdict.text or ""
        assert words.startswith("Fits" if left >= 0 else "Does not fit")
        found = re.search(r"([\d,.]+) GiB are left", words) if left >= 0 else re.search(r", ([\d,.]+) GiB \(", words)
        assert found
        assert number(found[1]) == pytest.approx(abs(left), abs=0.051)


def test_a_host_that_is_too_small_is_told() -> None:
    found = page("one node").answer
    full = replace(found.shown.peak, host=1e12)
    shown = replace(found.shown, memory=(full,), machine=replace(found.shown.machine, host_bytes=2**39))
    assert not shown.fits
    words = render_page(replace(found, shown=shown), ())
    assert f"{4e12 / GIB:,.1f} GiB of its host&#x27;s 512.0 GiB" in words


# --- memory


def test_the_breakdown_adds_up_as_it_is_shown(any_page: Page) -> None:
    peak = any_page.answer.shown.peak
    rows = any_page.table("Pipeline rank" if len(any_page.answer.shown.memory) > 1 else "One rank")
    cents = {name: round(100 * number(cells[0])) for name, cells in rows.items()}
    for name, cents_shown in cents.items():
        exact = getattr(peak, name) if name in ("allocated", "reserved", "device") else peak.device_items[name]
        assert cents_shown / 100 == pytest.approx(exact / GIB, abs=0.0101 * (1 if name in peak.device_items else 3))
        assert number(rows[name][1]) == pytest.approx(100 * exact / peak.device, abs=0.11)
    sums = {name: cents.pop(name) for name in ("allocated", "reserved", "device")}
    assert sums["device"] == sum(cents.values()) == round(100 * peak.device / GIB)
    assert sums["reserved"] == sums["device"] - cents["context"]
    assert sums["allocated"] == sums["reserved"] - cents["fragmentation"]


def test_bars_are_to_scale(any_page: Page) -> None:
    shown = any_page.answer.shown
    drawing = any_page.drawing("Memory of")
    bars: dict[str, list[float]] = {}
    for bar in drawing.iter("rect"):
        rank = (bar.findtext("title") or "").split(",")[0]
        bars.setdefault(rank, []).append(float(bar.get("width", "0")))
    drawn = pick_ranks(len(shown.memory), shown.peak.rank)
    assert list(bars) == [f"rank {rank}" for rank in drawn]
    start = min(float(bar.get("x", "0")) for bar in drawing.iter("rect"))
    scale = sum(bars[f"rank {shown.peak.rank}"]) / shown.peak.device
    for rank in drawn:
        sizes = [size * scale for size in shown.memory[rank].device_items.values() if size > 0]
        assert bars[f"rank {rank}"] == pytest.approx(sizes, abs=0.03)
    for kind, size in (("usable", shown.usable_bytes), ("physical", shown.machine.memory_bytes)):
        places = {float(each.get("x1", "0")) for each in drawing.iter("line") if each.get("class") == kind}
        assert places
        assert [*places] == pytest.approx([start + size * scale] * len(places), abs=0.3)


def test_all_ranks_are_in_the_table() -> None:
    shown = page("large").answer.shown
    rows = page("large").table("All pipeline ranks")
    assert list(rows) == [str(stage.rank) for stage in shown.memory]
    for stage in shown.memory:
        *items, device, kept = map(number, rows[str(stage.rank)])
        assert sum(items) == pytest.approx(device, abs=1e-9)
        assert device == pytest.approx(stage.device / GIB, abs=0.0051)
        assert kept == pytest.approx(stage.in_flight, rel=0.005)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(0, 299))
def test_ranks_that_are_drawn(ranks: int, always: int) -> None:
    always = min(always, ranks - 1)
    chosen = pick_ranks(ranks, always)
    assert len(chosen) == min(ranks, 16)
    assert chosen == sorted(set(chosen))
    assert {0, always, ranks - 1} <= set(chosen)


# --- the step


def test_the_items_of_a_step_add_up(any_page: Page) -> None:
    time = any_page.answer.shown.time
    rows = any_page.table("One step, item by item")
    unit = 1e-3 if time.seconds < 10 else 1.0
    assert list(rows) == [*time.items, "one step"]
    total = number(rows.pop("one step")[0])
    assert sum(number(cells[0]) for cells in rows.values()) == pytest.approx(total, abs=1e-6)
    assert total == pytest.approx(time.seconds / unit, abs=0.051)
    for name, cells in rows.items():
        assert number(cells[0]) == pytest.approx(time.items[name] / unit, abs=0.101)
    widths = [float(bar.get("width", "0")) for bar in any_page.drawing("One step").iter("rect")]
    scale = sum(widths) / time.seconds
    assert widths == pytest.approx([seconds * scale for seconds in time.items.values()], abs=0.02)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=15), st.integers(0, 3))
def test_rounded_parts_add_up(parts: list[float], decimals: int) -> None:
    rounded = round_parts(parts, decimals)
    unit = 10.0**-decimals
    assert sum(rounded) == pytest.approx(sum(parts), abs=0.5001 * unit)
    assert all(abs(found - part) < unit * 1.0001 for found, part in zip(rounded, parts, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-6, 1e9), st.integers(3, 8))
def test_ticks_are_few_and_inside(top: float, count: int) -> None:
    ticks = nice_ticks(top, count)
    assert ticks[0] == 0
    assert ticks[-1] <= top * (1 + 1e-6)
    assert count / 2.6 <= len(ticks) <= count + 1


# --- the pipeline


def test_there_is_a_schedule_only_for_a_pipeline() -> None:
    assert "Pipeline" not in page("one node").words
    assert "Schedule gpipe: 8 ranks with 1 stage each, 4 micro-batches a step" in page("few micro-batches").words


@pytest.mark.parametrize("name", ["large", "few micro-batches"])
def test_stages_take_what_the_plan_prices(name: str) -> None:
    """The slowest rank's passes are the step without what comes once and what the pipeline adds."""
    shown = page(name).answer.shown
    once = (BUBBLE, STAGES, GRADIENTS, WEIGHTS, OPTIMIZER, REST)
    passes = shown.time.seconds - sum(shown.time.items.get(each, 0.0) for each in once)
    slowest = (
        max(each.forward + each.backward + each.weight for each in stage_seconds(shown)) * shown.case.stages_per_rank
    )
    assert slowest * shown.case.micro_batches == pytest.approx(passes)
    assert len(stage_seconds(shown)) == len(list_stages(shown.case))


def test_what_is_left_out_of_the_picture_is_told() -> None:
    assert page("large").answer.shown.case.micro_batches == 32
    assert "Drawn are the first 16 of 32 micro-batches." in page("large").words
    assert "Drawn are" not in page("few micro-batches").words
    assert len(page("large").table("The picture in numbers")) == 16


def test_boxes_are_numbered_where_there_is_room() -> None:
    drawing = page("few micro-batches").drawing("Schedule")
    numbers = [each.text for each in drawing.iter("text") if each.get("class") == "on"]
    assert sorted(numbers) == sorted([str(number) for number in range(4)] * 2 * 8)
    assert sum(each.get("class") == "blue box" for each in drawing.iter("rect")) == 4 * 8
    assert sum(each.get("class") == "teal box" for each in drawing.iter("rect")) == 4 * 8


def test_a_picture_of_many_passes_stays_small() -> None:
    assert len(page("large").text) < 400_000


# --- scaling


@pytest.mark.parametrize("name", ["one node", "large"])
def test_the_curve_in_numbers(name: str) -> None:
    curve, rows = page(name).curve, page(name).table("The curve in numbers")
    assert list(rows) == [f"{point.nodes:,}" for point in curve]
    for point in curve:
        gpus, _, _, _, share, hours, layout = rows[f"{point.nodes:,}"]
        if point.best is None:
            assert (gpus, share, hours) == ("", "", "")
            assert layout == f"none: {point.why_not}"
            continue
        assert number(gpus) == point.best.case.degrees.world
        assert number(share) == pytest.approx(100 * efficiency(curve, point), abs=0.051)
        assert number(hours) == pytest.approx(hours_per_giga(point), rel=0.006)
        assert point.best.case.degrees.render() in layout


def test_a_token_costs_what_its_gpus_cost() -> None:
    curve = page("large").curve
    for point in curve:
        if point.best:
            assert hours_per_giga(point) == pytest.approx(
                1e9 / point.best.tokens_per_second * point.best.case.degrees.world / 3600
            )
            per_gpu = ideal_rate(curve, point) / point.best.case.degrees.world
            assert per_gpu >= point.best.tokens_per_second / point.best.case.degrees.world
    assert len({round(ideal_rate(curve, each) / each.nodes, 3) for each in curve if each.best}) == 1


def test_nodes_without_a_layout_are_crossed_out() -> None:
    curve = page("large").curve
    missing = sum(point.best is None for point in curve)
    assert missing
    for label in ("Tokens per second", "GPU-hours"):
        drawing = page("large").drawing(label)
        assert sum(each.get("class") == "cross" for each in drawing.iter("line")) == 2 * missing
        assert len(list(drawing.iter("circle"))) == len(curve) - missing
        assert sum(each.get("class") == "asked" for each in drawing.iter("circle")) == 1


def test_higher_points_are_faster() -> None:
    dots = list(page("large").drawing("Tokens per second").iter("circle"))
    heights = [-float(dot.get("cy", "0")) for dot in dots]
    rates = [point.best.tokens_per_second for point in page("large").curve if point.best]
    assert sorted(range(len(dots)), key=heights.__getitem__) == sorted(range(len(dots)), key=rates.__getitem__)


def test_a_curve_on_which_nothing_fits() -> None:
    assert "Nothing fits on any of these numbers of nodes." in page("does not fit").words
    assert "More and fewer nodes" not in render_page(page("one node").answer, ())


# --- alternatives and grounds


def test_runners_up_with_their_reasons() -> None:
    candidates = page("large").answer.found.candidates
    rows = page("large").table("The best of each set of degrees")
    assert len(rows) == len(candidates) > 2
    for cells, each in zip(rows.values(), candidates, strict=True):
        assert number(cells[2]) == pytest.approx(each.estimate.peak.device / GIB, abs=0.051)
        assert each.estimate.case.degrees.render() in cells[4]
        assert cells[5] == (each.reason or "the layout of this page")


def test_what_would_make_it_fit() -> None:
    changes = page("does not fit").answer.changes
    assert list(page("does not fit").table("What would make it fit")) == [change.what for change in changes]
    assert "What would make it fit" not in page("one node").words


def test_assumptions_and_warnings_are_told(any_page: Page) -> None:
    assert all(" ".join(each.split()) in any_page.words for each in any_page.answer.assumed)
    told = replace(any_page.answer, warnings=("the queue takes 4 nodes a job",))
    assert "the queue takes 4 nodes a job" in render_page(told, ())


def test_where_the_rates_come_from() -> None:
    assert "nothing was measured on this site" in page("one node").words
    measured = replace(machine("leonardo-booster"), measured=MappingProxyType({"matmul": 0.5123}))
    found = make_plan(request_of(PlanOptions(nodes=1, seq_len=2048, micro_batch=1), find_named("llama3-8b"), measured))
    assert "Measured on this site: matmul 0.5123." in render_page(found, ())


def test_the_whole_run() -> None:
    said = PlanOptions(
        gpus=16, global_batch=8, length=Span(1e9, "tokens"), layout={"pp": 8, "dp_shard": 2}, micro_batch=1
    )
    terms = JobTerms(queue="night", wall_seconds=86400, cores_per_node=32, price=Price(per_gpu_hour=2, currency="EUR"))
    found = make_plan(request_of(said, find_named("llama3-8b"), machine()), terms)
    run = found.run
    assert run
    assert run.cost
    assert run.charge
    shown = Page(found, ())
    rows = shown.table("Wall time")
    total = number(rows.pop("together")[0])
    assert sum(number(cells[0]) for cells in rows.values()) == pytest.approx(total, abs=1e-9)
    assert total == pytest.approx(run.days, abs=0.00051)
    value, nodes, cores, energy, cost = shown.tiles()["GPU-hours"]
    assert number(value) == pytest.approx(run.gpu_hours, rel=0.006)
    assert number(nodes) == pytest.approx(run.gpu_hours / 8, rel=0.006)
    assert (cores.split()[1], energy.split()[1], cost.split()[1]) == ("core-hours", "kWh", "EUR")
    assert number(cost) == pytest.approx(run.cost.value, rel=0.006)
    assert number(cores) == pytest.approx(run.charge.value, rel=0.006)
    assert "(queue night)" in shown.words
