"""The plan beside what was measured, in the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardway.rundir.directory import RunDir
from shardway.watch.progress import read_progress
from shardway.watch.report import render_report
from shardway.watch.report.event_log import EventLog
from shardway.watch.report.predicted import predict

RESOLVED = """
format = 1
[model]
dim = 1024
layers = 8
heads = 16
kv_heads = 16
head_dim = 64
ffn_dim = 4096
vocab = 32768
[data]
seq_len = 1024
[train]
global_batch = 64
micro_batch = 8
[precision]
compute = "bf16"
[parallel]
dp_replicate = 8
dp_shard = 1
pp_stages_per_rank = 1
pp_micro_batches = 1
reshard_after_forward = true
[site]
name = "dgx-slurm"
"""


def run_with(folder: Path, device: str, resolved: str = RESOLVED, steps: int = 20, rate: float = 64.0) -> RunDir:
    run = RunDir(folder / "run")
    run.create()
    run.write_request("", resolved)
    facts: dict[str, Any] = {"world": 8, "device": device, "total_steps": 100}
    with run.event_writer(0) as events:
        events.write("started", step=0, **facts)
        for step in range(1, steps + 1):
            slow = 0.1 if step <= 3 else 1.0
            events.write(
                "step", step=step, loss=3.0, grad_norm=1.0, lr=1e-3, tokens_per_s=1.0, samples_per_s=rate * slow
            )
    return run


def test_the_step_is_compared_without_its_first_ones(tmp_path: Path) -> None:
    run = run_with(tmp_path, "cuda")
    found = predict(run, read_progress(run).attempts, EventLog(run.all_events()))
    assert found is not None
    assert found.measured_seconds == pytest.approx(1.0)
    assert found.low < found.seconds < found.high
    assert not found.held
    assert found.measured_mfu == pytest.approx(found.mfu * found.seconds)
    page = render_report(run)
    assert "Predicted and measured" in page
    assert "outside of the interval" in page


@pytest.mark.parametrize(
    ("device", "resolved", "steps"),
    [
        ("cpu", RESOLVED, 20),
        ("cuda", RESOLVED, 5),
        ("cuda", RESOLVED.replace("dgx-slurm", "laptop"), 20),
        ("cuda", RESOLVED.replace("dgx-slurm", "gone"), 20),
        ("cuda", RESOLVED.replace("dim = 1024", 'dim = "wide"'), 20),
        ("cuda", "", 20),
    ],
    ids=["on a CPU", "few steps", "no accelerator", "unknown site", "damaged", "nothing resolved"],
)
def test_without_a_plan_there_is_none(tmp_path: Path, device: str, resolved: str, steps: int) -> None:
    run = run_with(tmp_path, device, resolved, steps)
    assert predict(run, read_progress(run).attempts, EventLog(run.all_events())) is None
    assert "Predicted and measured" not in render_report(run)
