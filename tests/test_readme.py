"""The blocks of the README run as they stand: `sh` blocks in a shell, `python` blocks as a script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(name="shell")
def _shell(tmp_path: Path) -> dict[str, object]:
    """Where and with which environment a block runs: the commands of this environment first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"cwd": tmp_path, "env": {**os.environ, "PATH": path}, "capture_output": True, "text": True}


def test_every_shell_block_runs(shell: dict[str, object]) -> None:
    script = "\n".join(blocks("sh"))
    assert script.count("shardway train") == 4
    done = subprocess.run(["sh", "-euc", script], timeout=900, **shell)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout


def test_every_python_block_runs_and_learns(shell: dict[str, object], tmp_path: Path) -> None:
    (block,) = blocks("python")
    script = tmp_path / "script.py"
    script.write_text(block + "print(loss)\n", encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], timeout=600, **shell)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    variance_of_the_targets = 4 / 45  # of x*x for x uniform in 0..1
    assert float(done.stdout) < variance_of_the_targets / 4


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 200
