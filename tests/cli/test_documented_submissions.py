from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from command_line import Shardway

from shardway.launch import hosts
from shardway.launch.hosts.local import LocalHost
from shardway.rundir.directory import RunDir

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/submit.md", "docs/workshops.md")
COMMANDS = list(
    dict.fromkeys(
        command.strip()
        for page in PAGES
        for command in re.findall(r"shardway (submit [^`#\n]+)", (ROOT / page).read_text(encoding="utf-8"))
        if not command.startswith("submit [") and "--when" not in command  # what may stand there, and no submission
    )
)


class Login(LocalHost):
    """A login node that is this machine."""

    name = "me@login"


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder without profiles or secrets, away from the project."""
    return tmp_path_factory.mktemp("home")


def test_every_page_has_commands() -> None:
    assert len(COMMANDS) >= 9
    assert sum("@" in command for command in COMMANDS) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_submission_is_accepted_as_it_is_printed(
    command: str, shardway: Shardway, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(hosts, "find_host", lambda name: Login() if name else LocalHost())
    for name in ("train.py", "compare.py"):
        (tmp_path / name).write_text("import torch.distributed\n", encoding="utf-8")
    words = shlex.split(command)
    for name in (word for word in words if word.endswith(".toml")):
        assert shardway("init", name).code == 0
    if "--after" in words:
        run = RunDir(tmp_path / "runs" / words[words.index("--after") + 1])
        run.create(empty=True)
        run.write_status(state="finished")
    at = words.index("--") if "--" in words else len(words)
    ended = shardway(*words[:at], *([] if "--dry-run" in words else ["--dry-run"]), *words[at:])
    said = ended.err.splitlines()
    others = [line for line in said if not line.startswith(("shardway: then ", "shardway: costs at most "))]
    assert (ended.code, others) == (0, [])
    assert len([line for line in said if line.startswith("shardway: then ")]) == words.count("--then")
    assert ended.out.startswith("#!/bin/bash\n")
