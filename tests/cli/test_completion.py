"""What a shell completes: verbs, options, keys, runs; quickly, and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Shardway

from shardway.cli.options import complete_example, complete_gpu, complete_key, complete_run, complete_words
from shardway.rundir.directory import RunDir


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE", "CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)


def test_keys_and_run_files(tmp_path: Path) -> None:
    for name in ("my.toml", "my.txt", ".my.toml"):
        (tmp_path / name).touch()
    (tmp_path / "mine").mkdir()
    assert complete_words("optim.l") == ["optim.lr=", "optim.lr_scaling="]
    assert complete_words("my") == ["my.toml"]
    assert complete_words("mi") == ["mine/"]
    assert complete_words("./m") == ["./mine/", "./my.toml"]
    assert complete_words("gone/x") == []
    assert complete_key("gua")[0] == "guard"


def test_runs_by_directory_and_name(tmp_path: Path) -> None:
    RunDir(tmp_path / "runs/one").create()
    RunDir(tmp_path / "runs/other").create()
    assert complete_run("runs/o") == ["runs/one", "runs/other", "runs/one/", "runs/other/"]
    assert complete_run("on") == ["one"]
    assert complete_run("zz") == []


def test_examples_and_gpus() -> None:
    assert complete_example("m") == ["mnist"]
    assert "h100-sxm5-80gb" in complete_gpu("h1")


def test_the_shell_gets_a_script(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "--install-completion" in shardway("--help").out


def test_a_completion_is_quick_and_without_torch() -> None:
    """In a process of its own, as a shell asks for it."""
    code = (
        "import sys\n"
        "from shardway.cli.main import app\n"
        "try:\n"
        "    app(prog_name='shardway')\n"
        "except SystemExit:\n"
        "    pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    asked = {"_SHARDWAY_COMPLETE": "complete_bash", "COMP_WORDS": "shardway train optim.mom", "COMP_CWORD": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["optim.momentum="]
