"""`shardway shell` and `shardway exec` on this machine: the commands of docs/interactive.md, and what they find."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import Ended, Shardway

from page_shell import list_blocks
from shardway.rundir.directory import RunDir

PAGE = Path(__file__).parents[2] / "docs" / "interactive.md"


def list_commands() -> list[str]:
    blocks = list_blocks(PAGE.read_text(encoding="utf-8"))
    return "".join(blocks).splitlines()


def run_when_begun(shardway: Shardway, *words: str) -> Ended:
    """Run a verb, again for as long as it says that the job has not begun."""
    while "has only just started" in (ended := shardway(*words)).err:
        time.sleep(0.2)
    return ended


@pytest.fixture(name="stopped")
def _stopped(shardway: Shardway) -> object:
    """Ends what a test that fails leaves behind."""
    yield None
    shardway("stop", "runs/sleeper", "--now", "--yes")


def test_the_commands_of_the_page(shardway: Shardway, tmp_path: Path, stopped: object) -> None:
    commands = list_commands()
    assert len(commands) == 7
    for command in commands:
        program, *words = shlex.split(command)
        ended = run_when_begun(shardway, *words)
        assert (program, ended.code) == ("shardway", 0), ended.err
    run = RunDir(tmp_path / "runs/sleeper")
    assert (run.work / "found.txt").read_text() == f"{run.attempt(1).path} {run.work}\n"
    assert len(list((tmp_path / "runs/shell/shells").iterdir())) == 1  # a dry run writes none


def test_a_command_ends_with_its_code_and_finds_what_the_job_finds(
    shardway: Shardway, tmp_path: Path, stopped: object
) -> None:
    own = 'site.environment={OWN = "a b$c"}'
    assert shardway("submit", "run.name=sleeper", own, "--", "sleep", "60").code == 0
    words = ("bash", "-c", 'echo "$OWN" "${SHARDWAY_JOB-none}"; exit 7')
    ended = run_when_begun(shardway, "exec", "runs/sleeper", "--all", "--", *words)
    assert ended.code == 7
    assert re.fullmatch(r"\S+  a b\$c none\n", ended.out)
    assert shardway("exec", "runs/sleeper", "--", "bash", "-c", "exit 5").code == 5
    refused = shardway("exec", "runs/sleeper", "--node", "3", "--", "true")
    assert refused.code == 2
    assert "--node 3: the job has no such node.\n  Allowed: 0 (" in refused.err
    dry = shardway("shell", "runs/sleeper", "--dry-run")
    assert f"cd {RunDir(tmp_path / 'runs/sleeper').work} ||" in dry.out
    assert "export OWN='a b$c'" in dry.out


def test_a_shell_reads_its_input_and_ends_with_its_code(tmp_path: Path) -> None:
    program = [str(Path(sys.executable).with_name("shardway")), "shell", 'site.environment={OWN = "a b$c"}']
    done = subprocess.run(program, input='echo "$OWN|$PWD"; exit 7', cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, f"a b$c|{tmp_path}\n"), done.stderr


def test_the_cost_is_a_fact_and_a_budget_is_agreed_to(shardway: Shardway, tmp_path: Path) -> None:
    words = ("submit", "run.name=quick", "site.budget=0.001", "--walltime", "1h", "--json")
    assert shardway(*words, "--", "true").code == 2
    assert not (tmp_path / "runs").exists()
    [cost] = json.loads(shardway(*words, "--yes", "--", "true").out)["cost"]
    assert (cost["budget"], cost["attempts"], cost["walltime_s"]) == (0.001, 1, 3600)
    assert cost["most"] == cost["per_node"] * cost["nodes"]
