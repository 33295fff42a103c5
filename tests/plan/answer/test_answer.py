"""A whole answer: what was said is kept, what was not is told, and its parts agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardway.errors import UserError
from shardway.plan.case import Machine, machine_of_part
from shardway.plan.economy import JobTerms, Price
from shardway.plan.huggingface import find_named
from shardway.plan.planner import (
    PlanOptions,
    PlanResult,
    curve_around,
    default_nodes,
    efficiency,
    list_changes,
    make_plan,
    parse_layout,
    parse_nodes,
    request_of,
    scaling_curve,
)
from shardway.plan.shapes import Architecture
from shardway.units import Span


def machine() -> Machine:
    return machine_of_part("a100-sxm4-80gb")


def small() -> Architecture:
    shape = find_named("gpt2-large")
    assert isinstance(shape, Architecture)
    return shape


def plan(terms: JobTerms | None = None, **said: object) -> PlanResult:
    return make_plan(request_of(PlanOptions(**said), small(), machine()), terms)  # type: ignore[arg-type]


def test_what_was_said_is_kept() -> None:
    found = plan(
        gpus=16, layout={"tp": 2, "dp_shard": 4}, micro_batch=2, recompute="full", global_batch=64, zero=3, seq_len=512
    )
    case = found.shown.case
    assert (case.degrees.tp, case.degrees.dp_shard, case.degrees.world) == (2, 4, 16)
    assert (case.micro_batch, case.recompute, case.global_batch, case.seq_len, case.zero) == (2, "full", 64, 512, 3)
    assert not any("--seq-len" in told or "--global-batch" in told for told in found.assumed)


def test_what_was_not_said_is_told() -> None:
    told = " ".join(plan().assumed)
    for option in ("--nodes", "--seq-len", "--global-batch", "--tokens"):
        assert option in told


def test_several_formats_are_tried() -> None:
    shape, h100 = small(), machine_of_part("h100-sxm5-80gb")
    both = make_plan(request_of(PlanOptions(precisions=("bf16", "fp8")), shape, h100))
    alone = [make_plan(request_of(PlanOptions(precisions=(each,)), shape, h100)).shown for each in ("bf16", "fp8")]
    assert both.shown.time.seconds == pytest.approx(min(each.time.seconds for each in alone))


def test_the_run_is_cut_into_jobs_of_the_queue() -> None:
    terms = JobTerms(queue="day", wall_seconds=86400, most_nodes=1, price=Price(per_gpu_hour=2, currency="EUR"))
    found = plan(terms, nodes=2, length=Span(1e12, "tokens"))
    assert found.run is not None
    assert found.run.steps == -(-(10**12) // found.shown.case.tokens_per_step)
    assert found.run.slots > 1
    assert found.run.cost is not None
    assert found.run.cost.value == pytest.approx(2 * found.run.gpu_hours)
    assert "takes 1 nodes" in found.warnings[0]


def test_half_the_wall_time_gives_twice_the_jobs() -> None:
    runs = [plan(JobTerms(wall_seconds=seconds), length=Span(1e12, "tokens")).run for seconds in (86400.0, 43200.0)]
    assert runs[0] is not None
    assert runs[1] is not None
    assert runs[1].slots == pytest.approx(2 * runs[0].slots, rel=0.05)


def test_each_change_helps_by_itself() -> None:
    shape = find_named("llama3-70b")
    assert isinstance(shape, Architecture)
    asked = request_of(
        PlanOptions(offload=False, layout={"tp": 8}, micro_batch=64, recompute="none", global_batch=512),
        shape,
        machine(),
    )
    found = make_plan(asked)
    assert not found.fits
    assert found.run is None
    assert found.changes == list_changes(asked)
    for change in found.changes:
        assert change.estimate.fits
    # No setting alone makes 70 B fit on eight devices, nor do more of them with a micro-batch of 64.
    assert [change.what for change in found.changes] == ["2 nodes (16 ranks), and all that is set left open"]


def test_each_setting_that_helps_is_offered() -> None:
    shape = find_named("gpt2-xl")
    assert isinstance(shape, Architecture)
    said = PlanOptions(offload=False, micro_batch=32, recompute="none", global_batch=512, layout={"dp_shard": 8})
    found = make_plan(request_of(said, shape, machine()))
    assert not found.fits
    told = [change.what for change in found.changes]
    assert told[:2] == ["a micro-batch of 16", "recompute full"]


def test_the_curve_keeps_the_batch() -> None:
    found = plan(gpus=2, global_batch=128)
    points = curve_around(found)
    assert [point.nodes for point in points] == list(default_nodes(found.request)) == [1, 2, 4]
    assert all(point.best is not None and point.best.case.global_batch == 128 for point in points)
    shares = [efficiency(points, point) for point in points]
    assert max(shares) == 1
    assert min(shares) > 0


def test_a_point_where_nothing_runs_says_why() -> None:
    question = request_of(PlanOptions(global_batch=3, layout={"dp_replicate": 1}), small(), machine())
    loose = replace(question, fixed=frozenset({"tp", "pp", "cp", "ep"}))
    (point,) = scaling_curve(loose, (2,))
    assert point.best is None
    assert point.why_not == "3 sequences do not split over 16 ranks"


@pytest.mark.parametrize("text", ["tp=8,pp=4", "tp 8 x pp 4", " tp=8 , pp=4 "])
def test_a_layout_is_read_as_people_write_it(text: str) -> None:
    assert parse_layout(text) == {"tp": 8, "pp": 4}


def test_a_list_of_nodes_is_sorted() -> None:
    assert parse_nodes("8,1, 2,8") == (1, 2, 8)
    with pytest.raises(UserError, match="no curve"):
        parse_nodes("1,two")


def test_no_legal_layout_is_told() -> None:
    with pytest.raises(UserError, match="no layout of 8 ranks is legal for a global batch of 1 "):
        plan(global_batch=1, layout={"tp": 1, "pp": 1, "cp": 1})
