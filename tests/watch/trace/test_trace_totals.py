"""Totals of a whole capture, where other tools differ: what is computing, what is the device's, what is the steps'."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_traces import MadeTrace

from shardway.watch.trace.analysis import analyse_trace


def test_an_all_reduce_over_multicast_memory_is_communication(tmp_path: Path) -> None:
    made = MadeTrace()
    made.launch("nvjet_tst_128x256", 300)
    made.launch("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)", 200)
    found = analyse_trace(made.write(tmp_path / "t.json"))
    assert found.capture["compute_ms"] == pytest.approx(0.3, rel=0.03)
    assert found.breakdown.comm_exposed_ms == pytest.approx(0.2, rel=0.03)


def test_an_operator_of_the_host_with_a_stream_is_not_the_devices(tmp_path: Path) -> None:
    """Inductor records the launch of its kernels as an operator that names the stream."""
    made = MadeTrace()
    made.launch("triton_poi_fused_add_0", 20)
    made.event("cpu_op", "triton_poi_fused_add_0", made.now, 500, stream=7, grid="grid(1,)")
    made.spend(500)
    made.launch("triton_poi_fused_add_0", 20)
    found = analyse_trace(made.write(tmp_path / "t.json")).capture
    assert found["compute_ms"] == pytest.approx(0.04, rel=0.03)
    assert found["idle_ms"] == pytest.approx(0.484, rel=0.03)


@pytest.mark.parametrize("steps", [1, 3])
def test_work_queued_before_the_first_of_several_steps_is_left_out(steps: int, tmp_path: Path) -> None:
    """With one step there is nothing to tell the queue of the loop from the step's own work."""
    made = MadeTrace()
    for _ in range(5):
        made.event("kernel", "nvjet_of_the_step_before", made.now, 1000, stream=7, device=0, correlation=-1)
        made.now += 1000
    for number in range(steps):
        begin = made.now
        made.launch("nvjet_tst_128x256", 2000)
        made.wait_for_device()
        made.annotate(f"ProfilerStep#{number}", begin)
    found = analyse_trace(made.write(tmp_path / "t.json")).capture
    assert found["busy_ms"] == pytest.approx(2 * steps + (5 if steps == 1 else 0), rel=0.02)
