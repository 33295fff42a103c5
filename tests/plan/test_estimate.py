"""Throughput and utilisation of an estimate: units, conventions, and what recompute adds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_cases import case_of, cases, gpt_layer, h100s, model_of
from shardway.errors import UserError
from shardway.plan.case import Case, Machine, load_ceilings, machine_of_part
from shardway.plan.memory import estimate_memory, load_overheads, peak_stage
from shardway.plan.planner import estimate
from shardway.plan.time import estimate_step

BRIEF = settings.get_profile("brief")
H100 = h100s()


@BRIEF
@given(cases())
def test_units(case: Case) -> None:
    found = estimate(case, H100)
    assert found.tokens_per_second * found.time.seconds == pytest.approx(case.global_batch * case.seq_len)
    of_all = found.mfu(causal=True) * found.peak_flops * case.degrees.world * found.time.seconds
    assert of_all == pytest.approx(case.model.flops_per_token(case.seq_len, causal=True) * case.tokens_per_step)


@BRIEF
@given(cases())
def test_utilisation_is_a_part_of_what_there_is(case: Case) -> None:
    found = estimate(case, H100)
    assert 0 < found.mfu(causal=True) < found.mfu(causal=False)
    for causal in (True, False):
        assert found.mfu(causal=causal) <= found.hfu(causal=causal) <= 4 / 3 * found.mfu(causal=causal) * (1 + 1e-12)
    # Attention in 16 bits may be faster than the peak that fp32 is measured by.
    assert found.hfu(causal=True) < 1 or case.precision == "fp32"


@BRIEF
@given(cases())
def test_an_estimate_is_its_parts(case: Case) -> None:
    found = estimate(case, H100)
    assert found.memory == estimate_memory(case, load_overheads())
    assert found.peak == peak_stage(found.memory)
    assert found.time == estimate_step(case, H100, load_ceilings(H100.accelerator))


def test_six_times_the_parameters() -> None:
    """A token costs 6 FLOPs a parameter that it is multiplied with, and 12 L h s for scores (Chowdhery et al.,
    arXiv:2204.02311, appendix B), half of these behind a mask."""
    model, seq = model_of(gpt_layer(4096, 32), layers=24), 2048
    matrices = 24 * 12 * 4096**2 + 4096 * model.vocab
    scores = 12 * 24 * 4096 * seq
    assert model.flops_per_token(seq, causal=False) == pytest.approx(6 * matrices + scores)
    assert model.flops_per_token(seq, causal=True) == pytest.approx(6 * matrices + scores * (seq + 1) / (2 * seq))


def test_what_is_computed_again_counts_for_the_hardware() -> None:
    """All layers once more of four passes: the rates of Korthikanti et al., arXiv:2205.05198, section 6.3."""
    case = case_of(model_of(gpt_layer(4096, 32), layers=24), attention="plain")
    none, some, full = (estimate(replace(case, recompute=mode), H100) for mode in ("none", "selective", "full"))
    assert none.hfu(causal=False) == none.mfu(causal=False)
    head = 2 * 4096 * case.model.vocab
    forward = case.model.forward_flops_per_token(1024, causal=False)
    assert full.hfu(causal=False) / full.mfu(causal=False) == pytest.approx(1 + (forward - head) / (3 * forward))
    scores = 24 * 4 * 4096 * 1024
    assert some.hfu(causal=False) / some.mfu(causal=False) == pytest.approx(1 + scores / (3 * forward))


def test_nothing_else_is_computed_again_beside_fused_attention() -> None:
    found = estimate(case_of(recompute="selective", attention="flash2"), H100)
    assert found.hfu(causal=True) == found.mfu(causal=True)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_utilisation_is_measured_by_the_rate_of_the_format(precision: str) -> None:
    found = estimate(case_of(precision=precision), H100)
    assert found.peak_flops == H100.accelerator.peak(precision)


@BRIEF
@given(cases(), st.floats(1.0, 2.0))
def test_a_machine_that_is_better_in_one_thing_is_no_slower(case: Case, factor: float) -> None:
    part = H100.accelerator
    faster = replace(
        part,
        peak_flops={name: factor * rate for name, rate in part.peak_flops.items()},
        memory_bandwidth_bytes_per_s=factor * (part.memory_bandwidth_bytes_per_s or 1.0),
    )
    better: Machine = replace(H100, accelerator=faster)
    # Waiting for the host hides no messages in these estimates, so less computation may show more of them.
    ceilings = replace(load_ceilings(part), kernel_s=0.0)
    assert estimate_step(case, better, ceilings).seconds <= estimate_step(case, H100, ceilings).seconds * (1 + 1e-12)


def test_a_format_that_a_part_lacks_is_told() -> None:
    with pytest.raises(UserError, match=r'"fp8" has no rate on .*A100'):
        estimate(case_of(precision="fp8"), machine_of_part("a100-sxm4-80gb"))
