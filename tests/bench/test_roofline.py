"""The roofline: floors, intensities and shares of invented groups, what is said of them, how they are shown, and the
exercises of workshops."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from page_tables import check_table
from shardway.bench.roofline import (
    CapturedRun,
    GroupRoof,
    RoofCeilings,
    StepRoofline,
    Utilisation,
    find_remedy,
    floor_ms,
    judge_group,
    judge_step,
    list_verdict,
    render_facts,
    render_si,
    roof,
)
from shardway.bench.roofline_page import draw_roofline, render_page, render_report
from shardway.rundir.file_io import render_json
from shardway.watch.advice.findings import Advice
from shardway.watch.trace.groups import CallWork, Group, GroupTime, count_call
from shardway.watch.trace.operators import Operator
from workshop_formulas import matmul_intensity, ridge_intensity, roofline_flops

CEILINGS = RoofCeilings({"bf16": 800e12, "fp32": 50e12}, 4e12, "invented")


def operator(
    ms: float, flop: float | None, moved: float | None, *, dtype: str = "bf16", calls: float = 1.0
) -> Operator:
    return Operator("aten::mm", "product", ([8, 8], [8, 8]), (dtype,), calls, ms, calls, "", flop, moved)


def group(name: Group, *operators: Operator, ms: float | None = None) -> GroupTime:
    return GroupTime(name, sum(each.ms for each in operators) if ms is None else ms, operators)


PRODUCTS = group("products", operator(2.0, 1.2e12, 1e9), operator(1.0, 0.02e12, 0.2e9, dtype="fp32"))
NORMS = group("norms", operator(1.0, 2e9, 2e9), operator(0.5, 1e9, 1e9))


def judged(time: GroupTime, update: CallWork | None = None) -> GroupRoof:
    return judge_group(time, CEILINGS, update or CallWork())


# --- formulas


def test_a_roof_is_the_smaller_of_both_ceilings() -> None:
    ridge = CEILINGS.ridge("bf16")
    assert ridge == pytest.approx(200.0, rel=1e-12)
    for intensity in (0.1, 1.0, ridge, 10 * ridge):
        expected = roofline_flops(intensity, 800e12, 4e12)
        assert roof(intensity, 800e12, 4e12) == pytest.approx(expected, rel=1e-12)
    assert ridge == pytest.approx(ridge_intensity(800e12, 4e12), rel=1e-12)


def test_a_group_is_the_sum_of_its_operators_each_under_its_own_roof() -> None:
    found = judged(PRODUCTS)
    first = max(1.2e12 / 800e12, 1e9 / 4e12)
    second = max(0.02e12 / 50e12, 0.2e9 / 4e12)
    assert found.floor_ms == pytest.approx(1e3 * (first + second), rel=1e-12)
    assert found.reached == pytest.approx((first + second) / 3e-3, rel=1e-12)
    assert found.saved_ms == pytest.approx(3.0 - 1e3 * (first + second), rel=1e-12)
    assert found.intensity == pytest.approx(1.22e12 / 1.2e9, rel=1e-12)
    assert found.flops_per_s == pytest.approx(1.22e12 / 3e-3, rel=1e-12)
    assert found.bytes_per_s == pytest.approx(1.2e9 / 3e-3, rel=1e-12)
    assert found.peak == pytest.approx(1.22e12 / (1.2e12 / 800e12 + 0.02e12 / 50e12), rel=1e-12)
    assert found.roof == pytest.approx(found.peak, rel=1e-12)  # far right of the ridge
    assert found.bound == "compute"


def test_a_group_left_of_the_ridge_is_bound_by_memory() -> None:
    found = judged(NORMS)
    assert found.bound == "memory"
    assert found.intensity == pytest.approx(1.0, rel=1e-12)
    assert found.roof == pytest.approx(4e12, rel=1e-12)
    assert found.floor_ms == pytest.approx(1e3 * 3e9 / 4e12, rel=1e-12)


@pytest.mark.parametrize(("calls", "bound"), [(100.0, "memory"), (101.0, "latency")])
def test_short_calls_far_above_their_floor_are_bound_by_latency(calls: float, bound: str) -> None:
    """1 ms in so many calls: 10 microseconds each is the limit."""
    assert judged(group("norms", operator(1.0, 1e6, 1e6, calls=calls))).bound == bound


def test_short_calls_at_their_floor_are_not() -> None:
    assert judged(group("norms", operator(1.0, 1e6, 2.1e9, calls=1000.0))).bound == "memory"


def test_what_shapes_do_not_show_is_not_known_and_counts_for_no_rate() -> None:
    found = judged(group("elementwise", operator(1.0, 1e9, 2e9), operator(3.0, None, None)))
    assert (found.busy_ms, found.unknown_ms) == (4.0, 3.0)
    assert found.bytes_per_s == pytest.approx(2e12, rel=1e-12)
    assert found.reached == pytest.approx(0.5, rel=1e-12)
    assert found.saved_ms == pytest.approx(0.5, rel=1e-12)
    nothing = judged(group("other", operator(3.0, None, None)))
    assert (nothing.flop, nothing.reached, nothing.saved_ms, nothing.bound) == (None, None, None, "n/a")


def test_communication_has_no_roof() -> None:
    assert judged(group("communication", operator(1.0, 1e9, 2e9))).floor_ms is None


def test_an_update_over_lists_of_tensors_counts_by_its_parameters() -> None:
    update = CallWork(14e9, 28e9)
    known, unknown = operator(1.0, 1e9, 4e9), operator(9.0, None, None)
    found = judged(group("optimizer", known, unknown), update)
    assert (found.flop, found.bytes, found.unknown_ms) == (15e9, 32e9, 0.0)
    assert found.floor_ms == pytest.approx(1e3 * 32e9 / 4e12, rel=1e-12)
    assert judged(group("optimizer", known), update).bytes == 4e9  # its shapes show everything
    assert judged(group("norms", known, unknown), update).bytes == 4e9


def test_what_ran_side_by_side_saves_no_more_than_its_part_of_the_step() -> None:
    found = judged(group("products", operator(4.0, 0.8e12, 1e9), ms=1.5))
    assert found.reached == pytest.approx(0.25, rel=1e-12)
    assert found.saved_ms == 1.5


def test_a_format_that_was_not_measured_has_the_ceiling_of_fp32() -> None:
    assert CEILINGS.peak("fp16") == 50e12
    assert RoofCeilings({"bf16": 8.0}, 1.0, "").peak("fp32") == 8.0
    assert floor_ms(operator(1.0, 50e12, 4e12, dtype="tf32"), CEILINGS) == (1000.0, 1000.0)


# --- what is said


def make_step(*times: GroupTime, **changes: Any) -> StepRoofline:
    """A step of 10 ms in which nothing else happens."""
    found = judge_step(times, CEILINGS)
    run = CapturedRun("my", "NVIDIA H100 80GB HBM3", "bf16", micro_batch=4, on_device=True)
    idle = 10.0 - sum(each.ms for each in times)
    step = StepRoofline(run, 0, 3, 10.0, idle, {"unknown": idle}, found, CEILINGS)
    return replace(step, **changes)


def test_the_verdict_names_the_group_that_loses_most_and_what_to_change() -> None:
    fast = group("products", operator(3.0, 2.8e12, 1e9))
    said = list_verdict(make_step(fast, group("norms", operator(6.0, 2e9, 2e9))))
    assert said[0] == "60 % of the step: norms, at 8 % of the roof (on the memory side of the ridge)"
    assert said[1] == "30 % of the step: products of blocks, at 117 % of the roof (compute-bound)"
    assert said[2].startswith("most is lost in norms: at the roof at most 5.50 ms (55 % of the step) would be saved")
    assert said[3] == 'to do for norms: train.compile = "blocks" fuses these into fewer kernels that move less'
    assert "the kernels' floors add up to 4.00 ms, 40 % of the step of 10.00 ms" in said
    assert said[-1].startswith("above the roof: products of blocks 117 %; the ceiling was measured lower")


def test_advice_of_the_trace_comes_before_the_general_one() -> None:
    advice = Advice("unfused", "chains", "compile this block", "trace again", 5.0, 50.0)
    step = make_step(NORMS, advice=(advice,))
    assert find_remedy(step, "norms") == "compile this block"
    compiled = replace(step, advice=(), run=replace(step.run, compiled=True))
    assert "train.compile" not in find_remedy(compiled, "norms")


def test_utilisation_has_both_conventions_and_both_peaks() -> None:
    step = make_step(PRODUCTS, utilisation=Utilisation(4e12, 3e12, 2048, 1000e12))
    assert step.mfu(800e12, causal=False) == pytest.approx(0.5, rel=1e-12)
    assert step.mfu(1000e12, causal=True) == pytest.approx(0.3, rel=1e-12)
    said = "\n".join(list_verdict(step))
    assert "MFU 50.0% (causal 37.5%) of the measured 800 TFLOP/s in bf16; 204,800 tokens/s a rank" in said
    assert "MFU 40.0% (causal 30.0%) of the rated 1.00 PFLOP/s in bf16" in said
    assert make_step(PRODUCTS).mfu(800e12, causal=True) is None


def test_limits_of_the_numbers_are_said() -> None:
    unknown = group("elementwise", operator(1.0, 1e9, 2e9), operator(2.0, None, None))
    step = make_step(unknown, slowdown=1.4, faults=("kernels were lost; to do: capture fewer steps",))
    said = list_verdict(replace(step, run=replace(step.run, ranks=2, on_device=False)))
    assert "20 % of the step is in operators whose shapes were not recorded: n/a, not 0" in said
    assert "kernels were lost; to do: capture fewer steps" in said
    assert said[-2].startswith("captured steps took 1.40 times those before")
    assert said[-1] == "the ceilings are of one process alone, and 2 ranks shared this machine's memory"


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0 "), (9.87e9, "9.87 G"), (999.6e9, "1.00 T"), (67.1e9, "67.1 G"), (456.0, "456 "), (None, "n/a")],
)
def test_numbers_have_a_prefix(value: float | None, words: str) -> None:
    assert render_si(value) == words


# --- how it is shown


def test_the_table_has_every_group_and_fits_eighty_columns() -> None:
    copies = group("copies", operator(0.5, 0.0, 1e9))
    lines = render_report(make_step(PRODUCTS, NORMS, copies)).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert ["products", "of", "blocks", "2", "3.00", "30.0%", "1.22T", "1.20G", "1,017"] in rows
    assert ["norms", "2.00T", "2.00T", "4.00T", "50%", "memory", "0.75"] in rows
    assert ["idle", "5.00", "50.0%"] in rows
    assert "not in it, without arithmetic: copies" in lines
    assert all(line.isascii() for line in lines)


def test_the_picture_has_each_group_below_the_roof_at_its_place() -> None:
    lines = draw_roofline(make_step(PRODUCTS, NORMS))
    places = {
        letter: (row, line.index(letter)) for letter in "PN" for row, line in enumerate(lines[1:18]) if letter in line
    }
    assert places["P"][0] < places["N"][0]  # higher
    assert places["P"][1] > places["N"][1]  # further right
    row, column = places["N"]
    assert any(lines[1 + above][column : column + 1] == "/" for above in range(row)), "\n".join(lines)


def test_facts_are_those_of_the_report_and_json() -> None:
    step = make_step(PRODUCTS, NORMS)
    facts = json.loads(render_json(render_facts(step)))
    assert facts["format"] == 1
    assert sum(each["ms"] for each in facts["groups"]) + facts["idle_ms"] == pytest.approx(facts["step_ms"], rel=1e-12)
    assert facts["verdict"] == list_verdict(step)
    first = facts["groups"][0]
    assert (first["group"], first["title"], first["bound"]) == ("products", "products of blocks", "compute")
    assert first["roof_flop_per_s"] == pytest.approx(judged(PRODUCTS).roof)


def test_the_page_is_whole_and_fetches_nothing() -> None:
    step = make_step(PRODUCTS, NORMS, utilisation=Utilisation(4e12, 3e12, 2048))
    page = render_page(replace(step, run=replace(step.run, name="<my>")))
    assert "<my>" not in page
    assert not any(word in page for word in ("http:", "https:", "src=", "<script"))
    assert "prefers-color-scheme: dark" in page
    assert page.count("<circle") == 2
    assert "MFU, causal half counted" in page
    for sentence in ("Roofline of &lt;my&gt;", "50.0%", "norms: 1.50 ms, 1 FLOP/B, 2.00 TFLOP/s"):
        assert sentence in page


# --- the exercises of workshops


def call(name: str, kind: Any, *shapes: list[int], dtype: str = "fp32", concrete: str = "") -> float:
    """FLOP a byte of one call."""
    work = count_call(Operator(name, kind, shapes, (dtype,) * len(shapes), 1.0, 1.0, 1.0, "", concrete=concrete))
    assert work.flop is not None
    assert work.bytes
    return work.flop / work.bytes


def test_intensities_of_the_page(request: pytest.FixtureRequest) -> None:
    rows: list[tuple[object, ...]] = [("operator", "fp32, FLOP/B", "bf16, FLOP/B", "in words")]
    for n in (1024, 4096):
        side = [n, n]
        both = [call("aten::mm", "product", side, side, dtype=dtype) for dtype in ("fp32", "bf16")]
        assert both == pytest.approx([n / 6, n / 3], rel=1e-12)
        assert both == pytest.approx([matmul_intensity(n, n, n, size) for size in (4, 2)], rel=1e-12)
        rows.append((f"product, {n} x {n} x {n}", *(f"{each:.1f}" for each in both), "n/6 and n/3"))
    length, name = 4096, "aten::_scaled_dot_product_flash_attention"
    four = [1, 16, length, 64]
    both = [call(name, "attention", four, four, four, dtype=dtype, concrete='["True"]') for dtype in ("fp32", "bf16")]
    assert both == pytest.approx([length / 8, length / 4], rel=1e-12)
    words = "half of 4 b h s² d over 4 b h s d values: s/8 and s/4"
    rows.append((f"causal attention, fused, {length} tokens", *(f"{each:.1f}" for each in both), words))
    wide = [8, 2048, 1024]
    both = [call("aten::_fused_rms_norm", "elementwise", wide, [1024], dtype=dtype) for dtype in ("fp32", "bf16")]
    assert both == pytest.approx([4 / 8, 4 / 4], rel=1e-3)
    rows.append(("RMSNorm, one kernel", *(f"{each:.2f}" for each in both), "4 FLOP a value, read and written"))
    both = [call("aten::add", "elementwise", wide, wide, dtype=dtype) for dtype in ("fp32", "bf16")]
    assert both == pytest.approx([1 / 12, 1 / 6], rel=1e-12)
    rows.append(("addition", *(f"{each:.3f}" for each in both), "1 FLOP, two values read, one written"))
    rows.append(("AdamW, fused", f"{14 / 28:.2f}", f"{14 / 14:.2f}", "14 FLOP; 28 bytes a parameter, 14 in 16 bits"))
    check_table(request, "bench-step.md", "intensities", rows)
