"""The how-to pages: every block that they mark as `sh` runs as it stands, every key that they name exists."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from page_shell import PageShell, list_blocks
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
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run that the pages work on, made as the first page has it."""
    folder = tmp_path_factory.mktemp("howto")
    (command,) = list_blocks((FOLDER / "index.md").read_text(encoding="utf-8"), "text")
    PageShell(folder).run_line(command.strip())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTCOMES)
def test_the_blocks_of_a_page_run(trained: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(trained, tmp_path / "here")
    shell = PageShell(tmp_path / "here")
    blocks = list_blocks((FOLDER / f"{name}.md").read_text(encoding="utf-8"))
    printed = "".join(map(shell.run_block, blocks))
    assert OUTCOMES[name] in printed
    assert printed.strip()


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
