"""The page on jobs from Python: its blocks run as they are printed, one after the other in one program."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import shardway
from page_shell import list_blocks
from shardway.api.jobs import OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "python-jobs.md").read_text(encoding="utf-8")
BLOCKS = list_blocks(PAGE, "python")


def test_the_blocks_of_the_page_do_what_it_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for block in BLOCKS:
        out = io.StringIO()
        with redirect_stdout(out):
            exec(compile(block, "docs/python-jobs.md", "exec"), program)
        printed.append(out.getvalue())
    call, broken, several, table, ranks = printed
    job = program["job"]
    assert call.startswith(f"15 finished {job.job_id} {tmp_path}/runs/area-")
    assert "computing\n" in call
    assert broken.startswith("no data ")
    assert 'raise ValueError("no data")' in broken or "in broken" in broken
    assert sorted(eval(several.splitlines()[0])) == [2, 4]
    assert several.splitlines()[1] == "[6, 8, 10]"
    assert table.startswith("finished ")
    assert sorted(ranks.splitlines()) == ["0: hello 0 of 2", "1: hello 1 of 2", "HELLO"]


def test_every_option_and_every_name_is_on_the_page() -> None:
    for name in (*OPTIONS, "open_job", "notebook_launch", "LiveRun", "Executor"):
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", PAGE), name
    tables = [name for name, kind in vars(shardway.Run).items() if isinstance(kind, property)]
    for name in tables:
        assert name in ("path", "name", "state") or f"`{name}`" in PAGE, name
