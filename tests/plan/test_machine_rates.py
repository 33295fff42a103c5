"""A machine's rates by format, and which groups of ranks leave the fast link."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan_cases import h100s
from shardway.errors import UserError
from shardway.plan.case import SHEET_WATTS, machine_of_part

V100, A100, H100, B200 = (
    machine_of_part(key) for key in ("v100-sxm2-32gb", "a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb")
)


def test_rates_on_paper_without_sparsity() -> None:
    """NVIDIA's data sheets, in TFLOP/s."""
    assert [round(machine.peak("bf16") / 1e12) for machine in (A100, H100)] == [312, 989]
    assert round(V100.peak("fp16") / 1e12) == 125
    assert round(H100.peak("fp8") / 1e12) == 1979


def test_formats_that_run_as_others() -> None:
    assert H100.peak("mxfp8") == H100.peak("fp8")
    assert H100.peak("fp4") == H100.peak("fp8") < B200.peak("fp4")
    assert H100.peak("tf32") > H100.peak("fp32")
    assert V100.peak("tf32") == V100.peak("fp32")


@pytest.mark.parametrize("machine", [V100, A100], ids=lambda machine: machine.name)
def test_a_format_that_a_part_lacks_is_told_with_those_that_it_has(machine: object) -> None:
    with pytest.raises(UserError, match=r'"fp8" has no rate on .*\n.*fp32'):
        machine.peak("fp8")  # type: ignore[attr-defined]


def test_a_part_with_less_power_than_its_sheet() -> None:
    for key, watts in SHEET_WATTS.items():
        machine = machine_of_part(key)
        assert machine.power_share == pytest.approx((machine.accelerator.power_w or watts) / watts)
        assert 0 < machine.power_share < 1
    assert H100.power_share == 1


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([4, 8, 72]))
def test_a_group_leaves_the_link_where_its_ranks_reach_beyond_it(ranks: int, stride: int, domain: int) -> None:
    machine = replace(h100s(), domain=domain)
    last = (ranks - 1) * stride
    if machine.spans_nodes(ranks, stride):
        assert last + stride > domain
    else:
        assert last < domain
