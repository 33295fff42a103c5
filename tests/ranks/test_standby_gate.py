"""A standby waits at its gate until it is released, or nobody is left who could release it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardway.ranks.heartbeat import GATE_VARIABLE, RELEASED, wait_at_gate
from shardway.ranks.local import StandbyGate

pytestmark = pytest.mark.usefixtures("warm_starts")

PATIENCE_S = 60.0

STANDBY = """
import os, sys
from shardway.ranks.heartbeat import GATE_VARIABLE, RELEASED, wait_at_gate
is_rank = wait_at_gate(os.environ, lambda: print("ready", flush=True))
print(is_rank, os.environ.get("RANK"), os.environ.get(GATE_VARIABLE), RELEASED in os.environ)
"""
HOLDER = """
import sys, time
from pathlib import Path
from shardway.ranks.local import StandbyGate
gate = StandbyGate(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[StandbyGate]:
    gate = StandbyGate(tmp_path / "gate")
    yield gate
    gate.close()


def start(program: str, *words: str, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *words]
    return subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    return out.splitlines()


def test_who_is_no_standby_goes_on_at_once() -> None:
    environ = {"RANK": "3", GATE_VARIABLE: ""}
    assert wait_at_gate(environ, pytest.fail)
    assert environ == {"RANK": "3"}
    assert RELEASED not in environ


@pytest.mark.parametrize("early", [True, False], ids=["before it is there", "while it waits"])
def test_a_standby_that_is_released_has_the_variables_of_its_rank(gate: StandbyGate, early: bool) -> None:
    if early:
        gate.release({"RANK": "5", "LONG": "x" * 2000})
    standby = start(STANDBY, **{GATE_VARIABLE: str(gate.path), "RANK": "0"})
    if not early:
        assert standby.stdout is not None
        assert standby.stdout.readline() == "ready\n"
        time.sleep(0.2)
        assert standby.poll() is None
        gate.release({"RANK": "5", "LONG": "x" * 2000})
    assert said(standby)[-1] == "True 5 None True"


def test_a_standby_that_nobody_needs_leaves(gate: StandbyGate) -> None:
    standby = start(STANDBY, **{GATE_VARIABLE: str(gate.path), "RANK": "0"})
    assert standby.stdout is not None
    assert standby.stdout.readline() == "ready\n"
    gate.close()
    assert said(standby) == ["False 0 None False"]


def test_a_standby_leaves_where_its_agent_is_killed(tmp_path: Path) -> None:
    holder = start(HOLDER, str(tmp_path / "gate"))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    standby = start(STANDBY, **{GATE_VARIABLE: str(tmp_path / "gate"), "RANK": "0"})
    assert standby.stdout is not None
    assert standby.stdout.readline() == "ready\n"
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=PATIENCE_S)
    assert said(standby) == ["False 0 None False"]
    late = start(STANDBY, **{GATE_VARIABLE: str(tmp_path / "gate"), "RANK": "0"})
    assert said(late) == ["ready", "False 0 None False"]


def test_a_gate_that_is_gone_lets_nobody_in(tmp_path: Path) -> None:
    assert not wait_at_gate({GATE_VARIABLE: str(tmp_path / "none")}, pytest.fail)
