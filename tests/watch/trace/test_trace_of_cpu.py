"""Real captures of torch's profiler on this machine, with a fault built into the loop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from shardway.watch.trace.analysis import TraceAnalysis, analyse_trace

FAULTS = {"": "", "loader": "data-loader", "item": "host-sync", "optimizer": "optimizer", "fp32": "fp32-products"}


def capture(fault: str, path: Path) -> TraceAnalysis:
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> torch.Tensor:
            if fault == "loader":
                time.sleep(0.004)
            return torch.full((128,), float(index))

    torch.manual_seed(0)
    torch.set_num_threads(1)
    depth, width = (60, 16) if fault == "optimizer" else (2, 512)
    layers = [
        torch.nn.Linear(128, width),
        *(torch.nn.Linear(width, width) for _ in range(depth)),
        torch.nn.Linear(width, 1),
    ]
    model = torch.nn.Sequential(*layers)
    if fault == "fp32":
        model = model.to(torch.bfloat16)
        wide = torch.nn.Linear(1024, 1024)
    kinds: dict[str, Any] = {"foreach": False} if fault == "optimizer" else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **kinds)
    plan = schedule(wait=1, warmup=1, active=5, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU],
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        schedule=plan,
        record_shapes=True,
    ) as prof:
        batches = DataLoader(Rows(), batch_size=8) if fault == "loader" else [torch.rand(8, 128) for _ in range(8)]
        for rows in batches:
            batch = rows.to(torch.bfloat16) if fault == "fp32" else rows
            loss = model(batch).float().square().mean()
            if fault == "fp32":
                loss = loss + wide(torch.ones(256, 1024)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if fault == "item":
                loss.item()
            prof.step()
    return analyse_trace(path)


@pytest.mark.slow
def test_faults_of_a_loop_on_this_machine(tmp_path: Path) -> None:
    for fault, rule in FAULTS.items():
        found = capture(fault, tmp_path / "t.json")
        assert [each.rule for each in found.quality if each.severity != "note"] == []
        assert found.steps == 3
        parts = found.breakdown
        assert parts.compute_ms + parts.comm_exposed_ms + parts.copy_ms + parts.idle_ms == pytest.approx(found.step_ms)
        if rule:
            assert [each.rule for each in found.advice][:1] == [rule], fault
        else:
            assert len([each for each in found.advice if (each.ceiling_percent or 0) > 3]) <= 1
            assert found.optimizer is not None
            assert found.optimizer["kind"] == "fused"
