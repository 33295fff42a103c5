"""Tables and blocks of docs/ that a test computes: they stand between two comment lines, and --renew-golden writes them
anew.

Invariant: without that option no page is ever written, and a part that is not what the test computes fails it.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import pytest

from golden_files import OPTION

DOCS = Path(__file__).parent.parent / "docs"


def check_table(request: pytest.FixtureRequest, page: str, name: str, rows: Sequence[Sequence[object]]) -> None:
    """Compare the table `name` of a page of docs/ with these rows (the first is the head), or write it."""
    check_part(request, page, name, render_table(rows))


def check_block(request: pytest.FixtureRequest, page: str, name: str, language: str, lines: Sequence[str]) -> None:
    """Compare the code block `name` of a page of docs/ with these lines, or write it."""
    check_part(request, page, name, "".join(f"{line}\n" for line in (f"```{language}", *lines, "```")))


def check_part(request: pytest.FixtureRequest, page: str, name: str, text_now: str) -> None:
    """Compare the part `name` of a page of docs/ with a text, or write it."""
    path, start, end = DOCS / page, f"<!-- {name}: computed by a test -->\n", f"<!-- end of {name} -->"
    text = path.read_text(encoding="utf-8")
    before, found, rest = text.partition(start)
    kept, also_found, after = rest.partition(end)
    assert found, f"{path} lacks the line {start}"
    assert also_found, f"{path} lacks the line {end}"
    if request.config.getoption(OPTION):
        path.write_text(f"{before}{start}{text_now}{end}{after}", encoding="utf-8")
    elif kept != text_now:
        diff = difflib.unified_diff(kept.splitlines(), text_now.splitlines(), page, "now", lineterm="")
        pytest.fail("\n".join([f"{page} has changed; if that is meant: {OPTION}", *diff]), pytrace=False)


def render_table(rows: Sequence[Sequence[object]]) -> str:
    """Rows as a Markdown table; numbers to the right, with commas."""
    head, *body = rows
    aligned = ["---:" if isinstance(cell, int | float) else "---" for cell in body[0]]
    lines = [head, aligned, *([_render_cell(cell) for cell in row] for row in body)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _render_cell(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
