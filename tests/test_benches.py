"""Benches that a `make` target runs still run; what they measure is not looked at here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TINY = ("model.dim=16", "model.layers=1", "model.heads=2", "data.seq_len=12", "train.global_batch=4")


def test_the_loop_is_measured_against_a_hand_written_one() -> None:
    command = [sys.executable, "bench/loop_overhead.py", "--pairs", "2", *TINY, "run.device=cpu"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"ours / hand-written: ([\d.]+) of medians", ended.stdout)
    assert found is not None, ended.stdout
    assert 0.0 < float(found[1]) < 100.0
