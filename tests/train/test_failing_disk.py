"""A file system that takes nothing, or answers nothing, for a moment or to the end, from any operation on: the run goes
on, or says what to do; the same command then comes to the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from failing_disk import ERRORS
from speed import picked

PROGRAM = Path(__file__).parents[1] / "failing_disk.py"
SOME_AND_EACH = pytest.mark.parametrize(
    ("seed", "cases"), [(0, 6), pytest.param(1, 100_000, marks=pytest.mark.exhaustive)], ids=["some", "each"]
)


@pytest.mark.usefixtures("warm_starts")
@SOME_AND_EACH
@pytest.mark.parametrize("kind", picked(ERRORS, "full"))
def test_a_file_system_that_fails_costs_a_run_nothing_but_time(
    kind: str, tmp_path: Path, seed: int, cases: int
) -> None:
    command = [sys.executable, str(PROGRAM), kind, str(tmp_path), str(seed), str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=True)
    told = json.loads(done.stdout)
    assert not told["well"]["kind"], told["well"]
    assert told["well"]["operations"] >= 2 * 12, "more than are drawn; how many depends on how often the status is due"
    assert len(told["losses"]) == 20
    for case in told["cases"]:
        check(kind, case)
        assert case["losses"] == told["losses"], case
    kinds = {bool(case["ended"]["kind"]) for case in told["cases"]}
    assert kinds == {False, True}


def check(kind: str, case: dict[str, Any]) -> None:
    """It ended well, or with a sentence; well where what failed was over before the last step."""
    ended = case["ended"]
    if not ended["kind"]:
        return
    assert ended["kind"] in ("JobError", "UserError"), case
    assert os.strerror(ERRORS[kind]) in ended["message"] or "no space is left" in ended["message"], case
    assert "To do: " in ended["message"], case
    assert not ended["met_steps_alone"], case
