"""A disk that takes nothing for a moment or to the end, from any operation on: the run goes on, or says what to do; the
same command then comes to the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "full_disk.py"


@pytest.mark.parametrize(
    ("seed", "cases"), [(0, 30), pytest.param(1, 100_000, marks=pytest.mark.exhaustive)], ids=["some", "each"]
)
def test_a_full_disk_costs_a_run_nothing_but_time(tmp_path: Path, seed: int, cases: int) -> None:
    command = [sys.executable, str(PROGRAM), str(tmp_path), str(seed), str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    told = json.loads(done.stdout)
    assert not told["error"]
    assert told["operations"] > 100
    assert len(told["losses"]) == 20
    for case in told["cases"]:
        assert case["kind"] in ("", "JobError", "UserError"), case
        assert not case["kind"] or ("No space left" in case["message"] or "no space is left" in case["message"]), case
        assert not case["kind"] or "To do: " in case["message"], case
        assert case["losses"] == told["losses"], case
    assert any(case["kind"] for case in told["cases"])
    assert any(not case["kind"] for case in told["cases"])
