"""A fault that is built into a trace comes first in its advice; a trace without one has none above 3 %."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_traces import DEVICE_FAULTS, NVJET, MadeTrace, make_training

from shardway.watch.trace.analysis import analyse_ranks, analyse_trace, compare_traces, merge_ranks
from shardway.watch.trace.kernels import uses_matrix_units
from shardway.watch.trace.text import render_analysis


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("fault", DEVICE_FAULTS)
def test_the_fault_comes_first(fault: str, seed: int, tmp_path: Path) -> None:
    found = analyse_trace(make_training(fault, seed=seed).write(tmp_path / "t.json"))
    first = found.advice[0]
    assert first.rule == DEVICE_FAULTS[fault]
    assert first.ceiling_ms is not None
    assert 0 < first.ceiling_ms <= found.step_ms * 1.001
    assert first.ceiling_percent == pytest.approx(100 * first.ceiling_ms / found.step_ms, abs=0.01)
    assert all([first.evidence, first.do, first.check])


@pytest.mark.parametrize("seed", range(5))
def test_a_clean_trace_has_no_advice(seed: int, tmp_path: Path) -> None:
    found = analyse_trace(make_training(seed=seed).write(tmp_path / "t.json"))
    assert [each.rule for each in found.advice if (each.ceiling_percent or 0) > 3] == []
    assert found.attention == ("cudnn",)
    assert found.matrix_units == pytest.approx(1.0)
    assert found.optimizer is not None
    assert found.optimizer["kind"] == "fused"


def test_the_parts_add_up_and_steps_at_the_edges_are_left_out(tmp_path: Path) -> None:
    found = analyse_trace(make_training("item", steps=6).write(tmp_path / "t.json"))
    parts = found.as_json()["breakdown"]
    assert set(parts) == {"compute_ms", "comm_exposed_ms", "copy_ms", "idle_ms"}
    assert sum(parts.values()) == pytest.approx(found.step_ms, abs=0.01)
    assert sum(found.breakdown.idle_causes_ms.values()) == pytest.approx(parts["idle_ms"], abs=0.01)
    assert (found.steps, found.steps_seen) == (4, 6)


def test_a_step_of_known_parts(tmp_path: Path) -> None:
    """Computing 6 ms, 3 ms of communication of which 2 behind it, a copy of 1 ms, then nothing."""
    made = MadeTrace()
    for number in range(5):
        start = low = made.now
        for name, category, at, length, stream in (
            ("gemm", "kernel", 0, 6000, 7),
            ("ncclDevKernel_AllReduce", "kernel", 4000, 3000, 20),
            ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 7000, 1000, 7),
        ):
            made.number += 1
            made.event("cuda_runtime", "cudaLaunchKernel", low - 10, 4, correlation=made.number)
            low += 1
            made.event(category, name, start + at, length, stream=stream, device=0, correlation=made.number)
        made.now = start + 10_000
        made.annotate(f"ProfilerStep#{number}", start - 20)
    parts = analyse_trace(made.write(tmp_path / "t.json")).breakdown
    assert parts.compute_ms == pytest.approx(6)
    assert parts.comm_exposed_ms == pytest.approx(1)
    assert parts.comm_ms == pytest.approx(3)
    assert parts.copy_ms == pytest.approx(1)
    assert parts.idle_ms == pytest.approx(2)


def test_a_product_has_its_rate_and_share(tmp_path: Path) -> None:
    made = MadeTrace()
    for _ in range(10):
        made.product(4096, 4096, 4096, share=0.5)
    (product,) = analyse_trace(made.write(tmp_path / "t.json")).operators
    assert product.flop_share == pytest.approx(0.5, rel=0.03)
    assert product.tflops == pytest.approx(989 / 2, rel=0.03)
    assert product.flop == 10 * 2 * 4096**3
    assert product.bytes == 10 * 3 * 2 * 4096**2


def test_an_unknown_gpu_has_no_shares_until_it_is_named(tmp_path: Path) -> None:
    path = make_training(gpu={"id": 0, "name": "Fancy GPU 9000"}).write(tmp_path / "t.json")
    assert {each.flop_share for each in analyse_trace(path).operators} == {None}
    named = analyse_trace(path, "h100-sxm5-80gb")
    assert max(each.flop_share or 0.0 for each in named.operators) == pytest.approx(0.72, rel=0.03)


def test_a_straggler_is_named(tmp_path: Path) -> None:
    paths = [
        make_training(rank=rank, slow=1.3 if rank == 2 else 1.0, seed=rank).write(tmp_path / f"rank{rank}.json")
        for rank in range(4)
    ]
    ranks = analyse_ranks(paths[::-1])
    assert [each.rank for each in ranks] == [0, 1, 2, 3]
    facts = merge_ranks(ranks)
    first = facts["advice"][0]
    assert first["rule"] == "straggler"
    assert first["evidence"].startswith("rank 2 ")
    assert facts["arrival_spread_ms"]["per_step"] > 0.2
    assert [row["rank"] for row in facts["ranks"]] == [0, 1, 2, 3]
    assert "rank 2" in render_analysis(ranks)
    even = analyse_ranks([make_training(rank=r, seed=r).write(tmp_path / f"e{r}.json") for r in range(3)])
    assert "straggler" not in {each["rule"] for each in merge_ranks(even)["advice"]}


def test_two_traces_against_each_other(tmp_path: Path) -> None:
    now = analyse_trace(make_training().write(tmp_path / "now.json"))
    before = analyse_trace(make_training("vocabulary").write(tmp_path / "before.json"))
    found = compare_traces(now, before)
    assert found["speedup"] == pytest.approx(before.step_ms / now.step_ms, rel=0.001)
    assert found["speedup"] > 1.3
    assert "50257" in found["operators"][0]["name"]
    assert f"{found['speedup']:.3f} times as fast" in render_analysis([now], found)


def test_text_is_plain_and_judges_the_capture_first(tmp_path: Path) -> None:
    text = render_analysis([analyse_trace(make_training("fp32", steps=2).write(tmp_path / "t.json"))])
    assert text.isascii()
    assert 0 < text.index("few-steps") < text.index("A step, ms") < text.index("1. fp32-products")


UNITS = {
    NVJET: True,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas": None,
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>": True,
    "cutlass3x_sm90_tensorop_s64x256x16gemm_bf16": True,
    "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x64x32": True,
    "ampere_sgemm_128x64_nn": False,
    "cutlass_80_simt_sgemm_256x128_8x4_nn_align1": False,
    "void gemvNSP_kernel<float>": False,
    "Cijk_Ailk_Bljk_BBS_BH_MT256x112x64_MI16x16x16x1_SN": True,
    "void at::native::vectorized_elementwise_kernel": None,
    "triton_tem_fused_mm_3": None,
}


@pytest.mark.parametrize("name", UNITS)
def test_matrix_units_by_name(name: str) -> None:
    assert uses_matrix_units(name) is UNITS[name]
    assert uses_matrix_units("triton_tem_fused_mm_3", low_precision=True) is True


def test_times_do_not_depend_on_the_clock(tmp_path: Path) -> None:
    """Microseconds since 1970 leave a quarter of one to a float."""
    found = []
    for offset in (0.0, 1.77e15):
        made = make_training("all_reduce")
        for each in made.events:
            each["ts"] += offset
        found.append(analyse_trace(made.write(tmp_path / "t.json")).breakdown)
    assert np.allclose(
        [found[0].compute_ms, found[0].comm_exposed_ms], [found[1].compute_ms, found[1].comm_exposed_ms], rtol=1e-3
    )
