"""The how-to pages: every block that they mark as `sh` runs as it stands, every key that they name exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from page_shell import list_blocks, reader_environ
from shardway.runfile.schema import all_keys, sections

FOLDER = Path(__file__).parents[2] / "docs" / "howto"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md"))
OUTCOMES = {
    "job-waits": "#SBATCH --time=0-00:30:00",
    "wall-time": "finished",
    "out-of-memory": "fits",
    "idle-gpu": "report.html",
    "slow-data": "500 samples",
    "other-nodes": "24/24",
    "own-script": "",
    "container": "",
    "no-internet": "internet.nodes",
    "hang": "finished at step 20",
    "loss-jumps": "tokens",
    "full-disk": "runs/my/checkpoints",
    "scaling": "GPU-hours",
    "new-site": "leonardo-booster",
}
"""Page -> words that its blocks print."""


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    return reader_environ()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Path:
    """A folder with the run that the pages work on, made as the first page has it."""
    folder = tmp_path_factory.mktemp("howto")
    (command,) = list_blocks((FOLDER / "index.md").read_text(encoding="utf-8"), "text")
    words = command.split()[1:]
    with warm.starts():
        done = subprocess.run(
            [sys.executable, "-m", "shardway", *words],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTCOMES)
def test_the_blocks_of_a_page_run(trained: Path, environ: dict[str, str], tmp_path: Path, name: str) -> None:
    shutil.copytree(trained, tmp_path / "here")
    script = "\n".join(list_blocks((FOLDER / f"{name}.md").read_text(encoding="utf-8")))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path / "here", env=environ, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert OUTCOMES[name] in done.stdout
    assert done.stdout.strip()


def test_every_page_is_listed_and_its_blocks_are_run() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert set(PAGES) - {"index"} == set(OUTCOMES)
    assert [name for name in OUTCOMES if f"({name}.md)" not in index] == []
    assert [name for name in OUTCOMES if not list_blocks((FOLDER / f"{name}.md").read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_keys_that_exist(name: str) -> None:
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    named = re.findall(rf"\b(?:{'|'.join(sections())})\.[a-z_0-9]+\b(?!\.\w)", text)
    methods = {f"run.{name}" for name in ("shard", "optimizer", "loader", "steps", "step")}
    assert [key for key in named if key not in {*all_keys(), *methods} and not key.endswith(".md")] == []
