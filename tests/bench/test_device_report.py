"""What is said of a device: tables, shares of what is rated, what is little, which rank is slow, the page; and what a
plan takes of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from device_reports import COPIED, IN_A_LAYER, SEARCHED, make_device_report
from page_tables import check_block, check_table
from plan_cases import case_of
from shardway.bench.device_report import DeviceReport, RankDevice, list_verdict, render_facts, render_report
from shardway.bench.disk import DiskTimes
from shardway.bench.kernels import LAYER_SIZES
from shardway.bench.site_ceilings import describe_other_part, find_device_ceilings
from shardway.hardware.catalogue import Dtype, load_accelerators
from shardway.plan.case import ceilings_of, load_ceilings, machine_of_site
from shardway.plan.shapes import AttentionShape, Matrix
from shardway.plan.time import StepPricer
from shardway.sites.load import load_site
from shardway.sites.schema import SiteProfile

RATED = load_accelerators()["h100-sxm5-80gb"]


def test_the_page_shows_what_is_printed(request: pytest.FixtureRequest) -> None:
    shown: tuple[Dtype, ...] = ("bf16", "fp8")
    searched, in_a_layer = ({name: rates[name] for name in shown} for rates in (SEARCHED, IN_A_LAYER))
    lines = render_report(make_device_report(searched, in_a_layer)).splitlines()
    check_block(request, "bench-device.md", "example", "text", [line.rstrip() for line in lines])


def test_the_page_has_the_ridges_of_the_catalogue(request: pytest.FixtureRequest) -> None:
    rows: list[tuple[object, ...]] = [
        ("device", "bf16 TFLOP/s", "memory TB/s", "ridge FLOP/B", "side of such a product")
    ]
    for key in ("a100-sxm4-40gb", "a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "mi250x-gcd"):
        part = load_accelerators()[key]
        peak, memory = part.peak("bf16"), part.memory_bandwidth_bytes_per_s
        assert peak is not None
        assert memory is not None
        ridge = peak / memory
        rows.append((part.name, round(peak / 1e12), round(memory / 1e12, 3), round(ridge), round(3 * ridge)))
    check_table(request, "bench-device.md", "ridges", rows)


def test_a_copy_that_caches_may_hold_is_not_the_rate_of_the_memory() -> None:
    report = make_device_report(copied={2**20: 1.2e12, 2**24: 4.1e12})
    said = list_verdict(report)
    assert report.memory_copy is None
    assert "memory: n/a, caches may hold what was copied; --sizes with 256MiB or more shows its rate" in said
    assert not any("ridge" in line for line in said)
    assert render_facts(report)["products"][0]["ridge_flops_per_byte"] is None
    assert "memory" not in find_device_ceilings(report, load_site("dgx-slurm"))
    assert "memory" not in dict(RankDevice(0, "node1", report).list_rates())


def test_facts_hold_what_was_measured_and_what_is_rated() -> None:
    facts = render_facts(make_device_report())
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["format"], facts["part"]) == (1, "h100-sxm5-80gb")
    for each in facts["products"]:
        assert each["flops_per_s"] == pytest.approx(SEARCHED[each["format"]], rel=1e-12)
        assert each["should_be_flops_per_s"] == RATED.peak(each["format"])
        assert each["ridge_flops_per_byte"] == pytest.approx(SEARCHED[each["format"]] / COPIED[2**30], rel=1e-12)
    rated = [each["should_be_bytes_per_s"] for each in facts["copies"]]
    assert rated == [None, RATED.memory_bandwidth_bytes_per_s]  # smaller ones are in caches
    forward = next(each for each in facts["attention"] if each["backend"] == "cudnn")
    assert forward["forward_flops_per_s"] == pytest.approx(600e12, rel=1e-12)
    assert forward["backward_flops_per_s"] == pytest.approx(480e12, rel=1e-12)


def test_a_good_device_has_nothing_that_is_little() -> None:
    lines = list_verdict(make_device_report())
    assert not [line for line in lines if "little" in line or "slow" in line]
    share = SEARCHED["bf16"] / float(RATED.peak("bf16") or 0)
    assert any(
        line.startswith("bf16: 794 TFLOP/s by 8192 x 8192 x 8192,") and f" {share:.0%} of " in line for line in lines
    )
    assert any("ridge of the roofline: 260 FLOP/B in bf16" in line for line in lines)


def test_a_slow_format_is_named() -> None:
    lines = list_verdict(make_device_report(searched={**SEARCHED, "fp8": 900e12}))
    assert [line.split(";")[0] for line in lines if "little" in line] == [
        "this is little: fp8 products reach 45% of the rated 1979 TFLOP/s"
    ]


def test_a_slow_memory_is_named() -> None:
    lines = list_verdict(make_device_report(copied={**COPIED, 2**30: 2.0e12}))
    assert [line.split(";")[0] for line in lines if "little" in line] == [
        "this is little: the copy reaches 60% of the rated 3350 GB/s"
    ]


def test_what_no_catalogue_has_is_not_judged() -> None:
    report = make_device_report()
    report.name = "NVIDIA H900"
    lines = list_verdict(report)
    assert lines[0] == "what should be reached is n/a (the catalogue does not have NVIDIA H900)"
    assert not [line for line in lines if "%" in line and "pageable" not in line]
    assert "n/a" in render_report(report)


def test_a_folder_in_memory_is_no_disk() -> None:
    report = make_device_report()
    report.disk = DiskTimes("/dev/shm", "tmpfs", 2**30, True, 0.2, 0.1)
    assert "/dev/shm is in memory (tmpfs): this is no disk" in list_verdict(report)


def make_ranks(*slow: int) -> list[RankDevice]:
    """Four ranks; those named have products of 0.8 of the usual rate."""
    rates = {
        rank: {name: rate * (0.8 if rank in slow else 1.0) for name, rate in IN_A_LAYER.items()} for rank in range(4)
    }
    return [RankDevice(rank, f"node{rank // 2}", make_device_report(in_a_layer=rates[rank])) for rank in range(4)]


def test_a_slow_device_is_named_among_ranks() -> None:
    ranks = make_ranks(3)
    lines = [line for line in list_verdict(ranks[0].report, ranks) if line.startswith("slow device")]
    assert lines[0] == "slow device: rank 3 (node1), bf16 products of a layer 552 TFLOP/s, 80% of the median"
    assert len(lines) == len(IN_A_LAYER)
    assert not [line for line in list_verdict(ranks[0].report, make_ranks()) if line.startswith("slow device")]
    assert [each["rank"] for each in render_facts(ranks[0].report, ranks)["ranks"]] == [0, 1, 2, 3]


# --- for the planner


def measured(report: DeviceReport) -> dict[str, float]:
    return dict(find_device_ceilings(report, load_site("dgx-slurm")))


def test_ceilings_are_parts_of_what_is_rated() -> None:
    found = measured(make_device_report())
    assert set(found) == {"matmul", "matmul_low", "memory", "flash2", "flash3", "flash_backward"}
    bf16, fp8 = float(RATED.peak("bf16") or 0), float(RATED.peak("fp8") or 0)
    assert found["matmul"] == pytest.approx(IN_A_LAYER["bf16"] / bf16, rel=0.02)
    assert found["matmul_low"] == pytest.approx(IN_A_LAYER["fp8"] / fp8, rel=0.02)
    assert found["memory"] == pytest.approx(COPIED[2**30] / float(RATED.memory_bandwidth_bytes_per_s or 0), rel=1e-3)
    ramp = 1 + load_ceilings(RATED).flash_ramp / 2048.5
    assert found["flash2"] == pytest.approx(420e12 / bf16 * ramp, rel=1e-3)
    assert found["flash_backward"] == pytest.approx(480 / 600, rel=1e-3)


@pytest.mark.parametrize("site", ["dgx-slurm", "marenostrum5-acc"])  # one with the power of the sheet, one without
def test_the_planner_gives_back_the_times_that_were_measured(site: str) -> None:
    report = make_device_report()
    machine = machine_of_site(load_site(site))
    machine = replace(machine, measured=find_device_ceilings(report, load_site(site)))
    case = case_of(precision="bf16", attention="flash3")
    pricer = StepPricer(case, machine, ceilings_of(machine))
    tokens, width, kv_width, ffn = LAYER_SIZES["cuda"]
    weights = ((width, width), (width, kv_width), (width, ffn), (ffn, width))
    passes = [pricer.product(Matrix("q", "attention", *sides), tokens) for sides in weights]
    seconds = sum(each.forward + each.backward for each in passes)
    assert seconds == pytest.approx(report.layers[0].times.median_s, rel=2e-3)
    best = report.best_attention
    assert best is not None
    shape = AttentionShape(heads=best.heads, kv_heads=best.heads, head_dim=best.width)
    attention = pricer._attention(shape, best.batch * best.seq, best.seq)
    assert attention.forward == pytest.approx(best.forward.median_s, rel=2e-3)
    assert attention.backward == pytest.approx(best.backward.median_s, rel=2e-3)


def test_what_was_not_measured_is_no_ceiling() -> None:
    report = make_device_report(in_a_layer={"fp32": 50e12}, copied={})
    report.attention = [replace(each, backend="math") for each in report.attention]
    assert measured(report) == {}


def test_only_a_device_of_the_site_counts() -> None:
    site = load_site("dgx-slurm")
    assert describe_other_part("NVIDIA H100 80GB HBM3", replace_part(site, "h100-sxm5-80gb")) == ""
    assert "a100-sxm4-80gb" in describe_other_part("NVIDIA H100 80GB HBM3", replace_part(site, "a100-sxm4-80gb"))
    assert "which the catalogue does not have" in describe_other_part("NVIDIA H900", site)


def replace_part(site: SiteProfile, key: str) -> SiteProfile:
    return site.model_copy(update={"node": site.node.model_copy(update={"accelerator": key})})
