"""Benches still run, and loops that are compared still compute the same; how fast they are is not looked at here."""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import warm
from outside import ROOT, modules_of
from pool import ranks

TINY = ("model.dim=16", "model.layers=1", "model.heads=2", "data.seq_len=12", "train.global_batch=4")


def test_the_loop_is_measured_against_a_hand_written_one() -> None:
    command = [sys.executable, "bench/loop_overhead.py", "--pairs", "2", *TINY, "run.device=cpu"]
    with warm.starts():
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"ours / hand-written: ([\d.]+) of medians", ended.stdout)
    assert found is not None, ended.stdout
    assert 0.0 < float(found[1]) < 100.0


@ranks(2)
def test_hand_written_loops_learn_alike(rank: int, tmp_path: Path) -> None:
    import torch

    with modules_of("bench"):
        loops, turns = importlib.import_module("plain_loops"), importlib.import_module("turns")

    def losses(name: str) -> torch.Tensor:
        """Of three steps, the means over ranks."""
        steps = getattr(loops, name)(turns.Task(TINY, rank, 2, str(tmp_path)))
        found = torch.tensor(list(itertools.islice(steps, 3)), dtype=torch.float64)
        torch.distributed.all_reduce(found)
        return found / 2

    expected = losses("plain_ddp")
    for name in ("plain_fsdp2", "plain_tp"):
        torch.testing.assert_close(losses(name), expected, rtol=turns.TOLERANCE, atol=0)
