"""Whole texts that a test compares with files under tests/golden: `golden(text, "errors/unknown-key.txt")`.

A text that changed on purpose is written again with

    python -m pytest tests/cli tests/resolve --renew-golden

and then read as a diff before it is committed.

Invariant: without that option no golden file is ever written, and one that is missing fails its test.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"
OPTION = "--renew-golden"

Golden = Callable[[str, str], None]
"""Called with the text and the name of its file below tests/golden."""


def add_option(parser: pytest.Parser) -> None:
    """For `pytest_addoption` of the conftest at the top."""
    parser.addoption(OPTION, action="store_true", help="write what the tests see into the files of tests/golden")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a whole text with its golden file, or write that file under --renew-golden."""
    renew = bool(request.config.getoption(OPTION))

    def check(text: str, name: str) -> None:
        path = FOLDER / name
        if renew:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.is_file():
            pytest.fail(f"there is no {path}; write it with {OPTION} and read it:\n{text}", pytrace=False)
        elif (kept := path.read_text(encoding="utf-8")) != text:
            diff = difflib.unified_diff(kept.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="")
            pytest.fail("\n".join([f"{name} has changed; if that is meant: {OPTION}", *diff]), pytrace=False)

    return check


def golden_names(folder: str) -> set[str]:
    """The files in a folder of tests/golden, so that a test can find those that nothing compares with."""
    return {path.name for path in (FOLDER / folder).iterdir()}
