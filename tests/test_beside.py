from __future__ import annotations

import sys

import pytest

from beside import commands, run_beside
from pool import RankPool


def program(word: str, code: int) -> list[str]:
    return [sys.executable, "-Ic", f"print({word!r}, flush=True); raise SystemExit({code})"]


@pytest.mark.parametrize("codes", [(0, 0), (1, 0), (0, 2), (3, 1)])
def test_both_have_to_pass(capfd: pytest.CaptureFixture[str], codes: tuple[int, int]) -> None:
    code = run_beside(program("one", codes[0]), program("two", codes[1]))
    assert code == (codes[0] or codes[1])
    out, _ = capfd.readouterr()
    assert "one\n" in out
    assert "two\n" in out
    assert f"exit codes {codes[0]} and {codes[1]}" in out


def test_what_is_killed_has_not_passed() -> None:
    killed = [sys.executable, "-Ic", "import os; os.kill(os.getpid(), 9)"]
    assert run_beside(program("one", 0), killed) == 9


def test_every_test_is_in_one_of_both() -> None:
    assert [command[-1] for command in commands("")] == ["ranks", "not ranks"]
    assert [command[-1] for command in commands("slow or hypothesis")] == [
        "ranks and (slow or hypothesis)",
        "not ranks and (slow or hypothesis)",
    ]


def test_what_needs_the_pool_is_marked(request: pytest.FixtureRequest, rank_pool: RankPool) -> None:
    assert request.node.get_closest_marker("ranks") is not None


def test_what_needs_no_pool_is_not(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("ranks") is None
