from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.launch.hosts.local import LocalHost
from shardway.launch.snapshot import LeftOut, SnapshotPlan
from shardway.launch.submission.checks.code import Code
from shardway.launch.submission.checks.commands import parse_conda_environments
from shardway.launch.submission.prepare import Order, prepare
from shardway.resolve.request import Request

CONDA = """# conda environments:
#
base                   /opt/conda
train                * /opt/conda/envs/train
                       /home/alice/envs/own
"""
Refuse = Callable[..., str]


class Elsewhere(LocalHost):
    """Another host, whose files lie here."""

    name = "alice@login"


def make_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """What is said of `refuse("python", "x.py", keys=("site.venv=none",))`, "" for nothing."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setenv("PATH", f"{tmp_path}/tools:/usr/bin:/bin")
    (tmp_path / "code/package").mkdir(parents=True)
    (tmp_path / "code/package/__init__.py").touch()
    make_program(tmp_path / "code/program", "")

    def ask(*command: str, keys: tuple[str, ...] = (), host: LocalHost | None = None) -> str:
        order = Order(Request(None, keys, tmp_path / "run"), command=command, here=tmp_path / "code")
        try:
            prepare(order, host or LocalHost(), look=True)
        except UserError as error:
            return str(error).replace(str(tmp_path), "")
        return ""

    return ask


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with the modules of this Python but torch."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").touch()
    make_program(tmp_path / "venv/bin/python3", f'"{sys.executable}" "${{@/#torch/no_torch}}" | sed s/no_torch/torch/')
    make_program(tmp_path / "venv/bin/of-the-venv", "")
    return tmp_path / "venv"


@pytest.mark.parametrize("command", [("python", "-m", "package.main"), ("./program",), ("bash", "x"), ("env",)])
def test_a_program_that_is_there(command: tuple[str, ...], refuse: Refuse) -> None:
    assert refuse(*command) == ""


def test_modules_are_found_in_the_environment(refuse: Refuse, venv: Path) -> None:
    told = refuse("python", "-m", "no_module.main", keys=(f"site.venv={venv}",))
    assert told.splitlines()[1::2] == [
        "  site.venv (command line): /venv has no torch",
        "  the command (command line): there is no module no_module in the code or in /venv",
    ]
    assert "to do: `/venv/bin/pip install torch`" in told
    mpirun = (f"site.venv={venv}", "site.starter=mpirun")  # which needs no torch
    assert refuse("python", "-m", "json.tool", keys=mpirun) == ""
    assert refuse("of-the-venv", keys=mpirun) == ""
    assert "no program of-the-venv on the PATH" in refuse("of-the-venv")


def test_ft_launcher_is_looked_for(refuse: Refuse, venv: Path) -> None:
    make_program(venv / "bin/python3", "echo nvidia_resiliency_ext")
    told = refuse("python", "x.py", keys=(f"site.venv={venv}", "site.starter=ft_launcher"))
    assert "  site.venv (command line): /venv has no nvidia_resiliency_ext\n" in told
    assert "to do: `/venv/bin/pip install nvidia-resiliency-ext`" in told
    assert "nvidia" not in refuse("python", "x.py", keys=(f"site.venv={venv}", "site.starter=mpirun"))


@pytest.mark.parametrize(
    "unknown",
    [
        ("site.modules=['Python']",),
        ("site.environment={PYTHONPATH='/x', PATH='/y'}",),
        ("site.container=podman", "site.image=docker.io/library/torch:2"),
    ],
)
def test_what_the_job_may_bring_is_not_missed(unknown: tuple[str, ...], refuse: Refuse, venv: Path) -> None:
    keys = (f"site.venv={venv}", *unknown)
    assert refuse("python", "-m", "no_module", keys=keys) == ""
    assert refuse("no-program", keys=keys) == ""


@pytest.mark.parametrize("answer", ["exit 1", "kill -9 $$"])
def test_an_environment_that_does_not_answer_is_not_blamed(answer: str, refuse: Refuse, venv: Path) -> None:
    make_program(venv / "bin/python3", f"echo torch; {answer}")
    assert refuse("python", "-m", "no_module", keys=(f"site.venv={venv}",)) == ""


def test_a_conda_environment_is_looked_for(refuse: Refuse, tmp_path: Path) -> None:
    assert refuse("./program", keys=("site.venv=conda:nope",)) == ""  # no conda: nobody knows
    make_program(tmp_path / "tools/conda", f"cat <<'END'\n{CONDA}END")
    assert "there is no conda environment nope on this machine" in refuse("./program", keys=("site.venv=conda:nope",))
    assert refuse("./program", keys=("site.venv=conda:train",)) == ""
    assert "no conda environment /gone" in refuse("./program", keys=("site.venv=conda:/gone",))
    assert refuse("./program", keys=(f"site.venv=conda:{tmp_path}",)) == ""


def test_the_names_of_conda_environments() -> None:
    assert parse_conda_environments(CONDA) >= {"base", "train", "own"}


def test_relative_data_are_looked_for_where_the_job_runs(refuse: Refuse, tmp_path: Path) -> None:
    keys = ("data.path=text.txt",)
    assert "data.path (command line): there is no file text.txt in /code" in refuse(keys=keys)
    (tmp_path / "code/text.txt").write_text("x")
    assert refuse(keys=keys) == ""
    told = refuse(keys=(*keys, "site.venv=none"), host=Elsewhere())  # no repository, so no code goes there
    assert "data.path (command line): there is no /run/text.txt on alice@login" in told


def test_what_a_snapshot_holds(tmp_path: Path) -> None:
    for name in ("project/sub/a.py", "project/secret.env", "b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    plan = SnapshotPlan(tmp_path / "project", "sub", None, (), (), (LeftOut("secret.env", "a secret"),), ())
    code = Code(tmp_path / "project/sub", plan)
    reasons = {path: code.why_missing(path) for path in ("a.py", "./a.py", "c.py", "../secret.env", "../../b.py")}
    assert [path for path, why in reasons.items() if not why] == ["a.py", "./a.py"]
    assert "there is no file c.py" in reasons["c.py"]
    assert "not in the snapshot that the job runs in (a secret)" in reasons["../secret.env"]
    assert f"leads out of {tmp_path}/project" in reasons["../../b.py"]
    assert replace(code, snapshot=None).why_missing("../../b.py") == ""
    assert os.fspath(code.here) not in replace(code, is_there=False).why_missing("c.py")
