"""The catalogue against hand-typed datasheet values, its own rules, and real device names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.hardware.catalogue import (
    DTYPES,
    Accelerator,
    Dtype,
    Link,
    find_accelerator,
    load_accelerators,
    load_links,
    match_accelerator,
)

ACCELERATORS = sorted(load_accelerators().values(), key=lambda accelerator: accelerator.key)
LINKS = sorted(load_links().values(), key=lambda link: link.key)

# Typed by hand from the vendors' sheets, dense. NVIDIA prints the H100's column "with sparsity"
# (1,979 bf16, 3,958 fp8; https://www.nvidia.com/en-us/data-center/h100/), so its dense peaks are half of that;
# the A100's sheet prints both (312 and 624); the V100's sheet knows no sparsity (125 with fp16).
# MI250X: 383 for the module of two dies, https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html
DENSE_PEAKS: list[tuple[str, Dtype, float]] = [
    ("v100-sxm2-32gb", "fp16", 125e12),
    ("a100-sxm4-80gb", "bf16", 312e12),
    ("a100-sxm4-80gb", "tf32", 156e12),
    ("a100-pcie-40gb", "fp32", 19.5e12),
    ("h100-sxm5-80gb", "bf16", 989e12),
    ("h100-sxm5-80gb", "fp8", 1979e12),
    ("h100-sxm5-96gb", "bf16", 989e12),
    ("h100-sxm5-64gb", "bf16", 989e12),
    ("h800-sxm5-80gb", "bf16", 989e12),
    ("h200-sxm-141gb", "bf16", 989e12),
    ("gh200-96gb", "bf16", 989e12),
    ("b200-sxm-180gb", "bf16", 2250e12),
    ("b200-sxm-180gb", "fp4", 9000e12),
    ("b300-sxm-288gb", "bf16", 2250e12),
    ("gb200", "bf16", 2500e12),
    ("gb300", "fp4", 15000e12),
    ("mi250x-gcd", "bf16", 383e12 / 2),
    ("mi300x", "bf16", 1307e12),
    ("l40s", "bf16", 362e12),
]

# Parts of the systems whose training throughput is published.
PLANNED_PARTS = [
    "v100-sxm2-16gb",
    "v100-sxm2-32gb",
    "a100-sxm4-40gb",
    "a100-sxm4-80gb",
    "a100-sxm-64gb",
    "l40s",
    "h100-sxm5-80gb",
    "h100-sxm5-64gb",
    "h100-sxm5-96gb",
    "h800-sxm5-80gb",
    "h200-sxm-141gb",
    "gh200-96gb",
    "gh200-141gb",
    "b200-sxm-180gb",
    "b300-sxm-288gb",
    "gb200",
    "gb300",
    "mi250x-gcd",
    "mi300x",
    "mi325x",
    "mi355x",
]

# Names that torch.cuda.get_device_name or nvidia-smi give.
DEVICE_NAMES = [
    ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
    ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
    ("NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"),
    ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
    ("A100-SXM4-40GB", "a100-sxm4-40gb"),
    ("NVIDIA A100-SXM-64GB", "a100-sxm-64gb"),
    ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
    ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
    ("NVIDIA A40", "a40"),
    ("NVIDIA L40S", "l40s"),
    ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
    ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
    ("NVIDIA H100 NVL", "h100-nvl-94gb"),
    ("NVIDIA H800", "h800-sxm5-80gb"),
    ("NVIDIA H200", "h200-sxm-141gb"),
    ("NVIDIA GH200 120GB", "gh200-96gb"),
    ("NVIDIA GH200 480GB", "gh200-96gb"),
    ("NVIDIA GH200 144G HBM3e", "gh200-141gb"),
    ("NVIDIA B200", "b200-sxm-180gb"),
    ("NVIDIA B300 SXM6 AC", "b300-sxm-288gb"),
    ("NVIDIA GB200", "gb200"),
    ("NVIDIA GB300", "gb300"),
    ("NVIDIA GeForce RTX 5090", "rtx-5090"),
    ("AMD Instinct MI250X", "mi250x-gcd"),
    ("AMD Instinct MI300X", "mi300x"),
    ("AMD Instinct MI300X OAM", "mi300x"),
    ("AMD Instinct MI325X", "mi325x"),
    ("AMD Instinct MI355X", "mi355x"),
]

# Other parts, slices of a part, and names that stand for several parts.
UNKNOWN_NAMES = [
    "",
    "cpu",
    "NVIDIA H100",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA GH200 480GB MIG 1g.12gb",
    "GRID A100X-40C",
    "NVIDIA H20",
    "NVIDIA H800 PCIe",
    "NVIDIA H200 NVL",
    "NVIDIA A400",
    "NVIDIA L40",
    "AMD Instinct MI250X / MI250",
    "AMD Instinct MI308X",
    "AMD Radeon Graphics",
    "NVIDIA Graphics Device",
]


@pytest.mark.parametrize(("key", "dtype", "flops"), DENSE_PEAKS)
def test_peaks_are_the_dense_ones_of_the_datasheets(key: str, dtype: Dtype, flops: float) -> None:
    assert load_accelerators()[key].peak(dtype) == flops


@pytest.mark.parametrize("key", PLANNED_PARTS)
def test_a_part_of_the_published_systems_has_what_a_plan_needs(key: str) -> None:
    part = load_accelerators()[key]
    assert part.peak("bf16") or part.peak("fp16")
    assert None not in (part.memory_bytes, part.memory_bandwidth_bytes_per_s, part.link)


# What nvidia-smi prints for these, in MiB.
DRIVER_MEMORY = [
    ("h100-sxm5-80gb", 81559),
    ("h100-sxm5-64gb", 65247),
    ("h200-sxm-141gb", 143771),
    ("gh200-96gb", 97280),
    ("b200-sxm-180gb", 183359),
]


@pytest.mark.parametrize(("key", "mebibytes"), DRIVER_MEMORY)
def test_memory_is_what_the_driver_reports_where_a_source_says_so(key: str, mebibytes: int) -> None:
    assert load_accelerators()[key].memory_bytes == mebibytes * 2**20


def test_a_custom_part_is_the_sheet_scaled_by_what_its_owner_states() -> None:
    # CINECA: 15 % over the A100, 22.4 against 19.5 TFLOP/s of fp32, whole TFLOP/s kept.
    ours, sheet = load_accelerators()["a100-sxm-64gb"], load_accelerators()["a100-sxm4-40gb"]
    for dtype in ("tf32", "fp16", "bf16"):
        assert (ours.peak(dtype) or 0.0) / (sheet.peak(dtype) or 1.0) == pytest.approx(22.4 / 19.5, rel=2e-3)


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda accelerator: accelerator.key)
def test_no_sparse_peak_stands_among_the_dense_ones(accelerator: Accelerator) -> None:
    # A sparse number among dense ones shows as a factor of four. GB300 has three from fp8 to fp4 by design
    # (5 and 15 PFLOP/s dense).
    ladder = [accelerator.peak(dtype) for dtype in ("tf32", "bf16", "fp8", "fp4")]
    stated = [peak for peak in ladder if peak is not None]
    assert stated == sorted(stated)
    assert all(after / before < 3.01 for before, after in pairwise(stated))


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda accelerator: accelerator.key)
def test_fp8_is_twice_bf16_within_rounding(accelerator: Accelerator) -> None:
    bf16, fp8 = accelerator.peak("bf16"), accelerator.peak("fp8")
    assert bf16 is None or fp8 is None or fp8 / bf16 == pytest.approx(2, rel=0.015)


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda accelerator: accelerator.key)
def test_every_stated_value_of_an_accelerator_has_a_source(accelerator: Accelerator) -> None:
    fields = ("memory_bytes", "memory_bandwidth_bytes_per_s", "link", "power_w", "multiprocessors")
    stated = {field for field in fields if getattr(accelerator, field) is not None}
    stated |= {f"peak_flops.{dtype}" for dtype in accelerator.peak_flops}
    whole_table = {path for path in stated if path.startswith("peak_flops.") and "peak_flops" in accelerator.sources}
    assert set(accelerator.sources) - {"peak_flops"} == stated - whole_table
    assert accelerator.sources
    assert all("http" in citation or "(cited by title" in citation for citation in accelerator.sources.values())


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.key)
def test_every_stated_rate_of_a_link_has_a_source(link: Link) -> None:
    fields = ("bandwidth_bytes_per_s", "peer_bandwidth_bytes_per_s", "links")
    stated = {field for field in fields if getattr(link, field) is not None}
    assert stated - {"links"}
    assert set(link.sources) == stated


def test_keys_of_dtypes_and_links_exist() -> None:
    assert {dtype for accelerator in ACCELERATORS for dtype in accelerator.peak_flops} <= set(DTYPES)
    assert {accelerator.link for accelerator in ACCELERATORS} - {None} <= set(load_links())


def test_a_peer_gets_no_more_than_the_whole_link() -> None:
    both = [(link.peer_bandwidth_bytes_per_s, link.bandwidth_bytes_per_s) for link in LINKS]
    assert all(peer <= whole for peer, whole in both if peer is not None and whole is not None)


def test_what_no_source_states_is_none() -> None:
    # Volta has no bf16; no source states the dense peaks of the RTX 5090; GH200's power is that of the superchip; the
    # dies of MI250X share a link.
    assert load_accelerators()["v100-sxm2-32gb"].peak("bf16") is None
    unstated = load_accelerators()["rtx-5090"]
    assert [unstated.peak(dtype) for dtype in DTYPES] == [None] * len(DTYPES)
    assert load_accelerators()["gh200-96gb"].power_w is None
    assert load_links()["xgmi-mi250x"].bandwidth_bytes_per_s is None


@pytest.mark.parametrize(("device_name", "key"), DEVICE_NAMES)
def test_a_device_name_finds_its_part(device_name: str, key: str) -> None:
    found = find_accelerator(device_name)
    assert found is not None
    assert found.key == key


@pytest.mark.parametrize("device_name", UNKNOWN_NAMES)
def test_an_unknown_device_name_finds_nothing(device_name: str) -> None:
    assert find_accelerator(device_name) is None


def test_every_pattern_of_the_catalogue_finds_its_own_row() -> None:
    found = {
        (accelerator.key, match.key if (match := find_accelerator(pattern)) else None)
        for accelerator in ACCELERATORS
        for pattern in accelerator.device_names
        if "*" not in pattern and "?" not in pattern
    }
    assert {key for key, match in found if key != match} == set()


@given(st.sampled_from(DEVICE_NAMES), st.sampled_from([str.upper, str.lower, lambda name: f"  {name} "]))
def test_letter_case_and_blanks_of_a_device_name_do_not_matter(
    named: tuple[str, str], change: Callable[[str], str]
) -> None:
    found = find_accelerator(change(named[0]))
    assert found is not None
    assert found.key == named[1]


def _part(key: str, *patterns: str) -> Accelerator:
    return replace(load_accelerators()["h200-sxm-141gb"], key=key, device_names=patterns)


def test_the_most_specific_pattern_wins_in_any_order() -> None:
    parts = [_part("family", "X9*"), _part("special", "X9 96GB*"), _part("other", "Y1")]
    for order in (parts, parts[::-1]):
        found = match_accelerator("NVIDIA X9 96GB HBM4", order)
        assert found is not None
        assert found.key == "special"


def test_two_equally_specific_parts_are_no_answer() -> None:
    assert match_accelerator("X9 96GB", [_part("one", "X9 ?6GB"), _part("two", "X9 9?GB")]) is None


def test_two_patterns_of_one_part_are_one_answer() -> None:
    found = match_accelerator("X9 96GB", [_part("one", "X9 ?6GB", "X9 9?GB")])
    assert found is not None
    assert found.key == "one"


def test_the_catalogue_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        load_accelerators()["mine"] = ACCELERATORS[0]  # type: ignore[index]
    with pytest.raises(TypeError):
        ACCELERATORS[0].peak_flops["fp4"] = 1.0  # type: ignore[index]
