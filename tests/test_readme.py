"""The blocks of the README and of its first page run as they stand: `sh` in a shell (the README's in one where every
process starts cold, as a newcomer's do), `python` as a script.

Every link of a page leads somewhere, and the README's picture is what `tools/live_view.py` draws.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from page_shell import PageShell, list_blocks, reader_environ
from shardway.rundir.directory import RunDir
from test_architecture import FORBIDDEN

ROOT = Path(__file__).parents[1]
README, START = ROOT / "README.md", ROOT / "docs" / "start.md"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def blocks(language: str, *pages: Path) -> list[str]:
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    return list_blocks(text, language)


@pytest.fixture(name="shell")
def _shell(tmp_path: Path) -> dict[str, object]:
    """Where and with which variables a block runs. A run takes a thread a core, as a reader's does."""
    return {"cwd": tmp_path, "env": reader_environ(), "capture_output": True, "text": True}


def test_every_shell_block_of_the_readme_runs(shell: dict[str, object]) -> None:
    script = "\n".join(blocks("sh", README))
    assert script.count("shardway train") == 1
    done = subprocess.run(["sh", "-euc", script], timeout=900, **shell)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout


def test_every_shell_block_of_the_first_page_runs(tmp_path: Path) -> None:
    reader = PageShell(tmp_path)
    for block in blocks("sh", START):
        reader.run_block(block)
    runs = sorted((tmp_path / "runs").iterdir())
    states = {run.name: json.loads((run / "status.json").read_text(encoding="utf-8"))["state"] for run in runs}
    assert states == dict.fromkeys(("my", "shard", "tensor", "two"), "finished")


def test_every_python_block_runs_and_learns(shell: dict[str, object], tmp_path: Path) -> None:
    (block,) = blocks("python", README)
    script = tmp_path / "script.py"
    script.write_text(block + "print(loss)\n", encoding="utf-8")
    with warm.starts():
        done = subprocess.run([sys.executable, str(script)], timeout=600, **shell)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    variance_of_the_targets = 4 / 45  # of x*x for x uniform in 0..1
    assert float(done.stdout) < variance_of_the_targets / 4


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 120


def test_the_pages_of_faults_are_short() -> None:
    assert len((ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()) < 80


def test_every_link_of_a_page_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            found = page.parent / path if path else page
            if not found.exists() or (anchor and anchor not in anchors(found)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_speak_of_software_as_it() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    found = [
        f"{page.name}:{number} {match[0]}"
        for page in pages
        if page.name != "CHANGELOG.md"  # a record of earlier words
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for match in FORBIDDEN.finditer(line)
    ]
    assert found == []


def test_every_page_is_named_by_the_readme() -> None:
    text = README.read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    named = {page for page in pages if f"docs/{page}" in text}
    assert pages - named == {"fault-tests.md"}, "which docs/faults.md names"


def test_the_picture_of_the_live_view_is_drawn_from_the_events_of_a_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    with run.event_writer(0) as events:
        events.write("started", step=0, total_steps=4)
        for step in range(1, 4):
            events.write("step", step=step, loss=1 / step, seconds=0.1)
    picture = tmp_path / "view.svg"
    tool = [sys.executable, str(ROOT / "tools" / "live_view.py")]
    subprocess.run([*tool, str(run.path), str(picture), "--step", "2"], check=True, timeout=60)
    drawn = picture.read_text(encoding="utf-8")
    assert "2/4" in drawn
    assert "running" in drawn
    for svg in (drawn, (ROOT / "docs" / "live-view.svg").read_text(encoding="utf-8")):
        assert svg.startswith("<svg")
        assert "url(https:" not in svg.replace('"', "")
