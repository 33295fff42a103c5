from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardway.errors import UserError

CODE = """
import atexit
from shardway.errors import UserError
from shardway.ranks.stop import left_at_once
atexit.register(print, "tidied up")
print("before", end=" ")
{line}
"""
RAISE = "with left_at_once({world}): raise {error}"


def run(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CODE.format(line=line)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("KeyError(3)", 1),
        ("UserError('wrong')", UserError.exit_code),
        ("KeyboardInterrupt", 130),
    ],
)
def test_a_rank_among_others_leaves_at_once(error: str, code: int) -> None:
    """What it printed and its traceback are there; what would run at the end of an interpreter does not."""
    ended = run(RAISE.format(world=2, error=error))
    assert (ended.returncode, ended.stdout) == (code, "before ")
    interrupted = "shardway: ended at once by a second signal\n"
    assert ended.stderr.startswith(interrupted if code == 130 else "Traceback (most recent call last):")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (RAISE.format(world=1, error="KeyError(3)"), 1),
        ("try:\n  with left_at_once(1): raise KeyboardInterrupt\nexcept KeyboardInterrupt: pass", 0),
        ("with left_at_once(2): pass", 0),
        ("with left_at_once(2): raise SystemExit(7)", 7),
        ("try:\n  with left_at_once(2): raise KeyError(3)\nexcept KeyError: pass", 0),
    ],
    ids=["alone", "interrupt caught", "well", "exit", "caught"],
)
def test_others_end_as_always(line: str, code: int) -> None:
    ended = run(line)
    assert (ended.returncode, ended.stdout) == (code, "before tidied up\n")


LAST = """
import atexit, ctypes, sys
from shardway.ranks.outputs import Shutdown
last = Shutdown()
sys.modules["torch"] = sys  # whose destructors they are
library = ctypes.CDLL(None)
library.printf(b" and printed")
library.__cxa_atexit(library.abort, None, None)  # as a destructor of C++ that fails
atexit.register(print, "tidied up", end="")
print("before", end=" ")
{line}
"""


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("last.leave_with(0)", 0, ""),
        ("last.leave_with(3)", 3, ""),
        ("pass", -6, ""),
        ("raise KeyError(3)", -6, "KeyError: 3"),
    ],
)
def test_the_end_of_a_rank_comes_before_destructors_and_after_all_else(line: str, code: int, said: str) -> None:
    """Without a word it ends as any Python does."""
    ended = subprocess.run(
        [sys.executable, "-c", LAST.format(line=line)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code
    assert ended.stdout == "before tidied up and printed" or code < 0, "what C has printed is not lost"
    assert said in ended.stderr


SCRIPT = """
import atexit, ctypes, sys
from shardway.ranks.stop import left_at_once
atexit.register(print, "tidied up", end=" ")
library = ctypes.CDLL(None)
library.__cxa_atexit(library.abort, None, None)  # as a destructor of C++ that fails
library.printf(b"printed by C ")
with left_at_once({world}):
    print("trained", end=" ")
atexit.register(print, "later", end=" ")
{line}
"""


@pytest.mark.parametrize(
    ("line", "code", "world"),
    [
        ("pass", 0, 2),
        ("sys.exit(3)", 3, 2),
        ("raise SystemExit(4)", 4, 2),
        ("raise KeyError(5)", 1, 2),
        ("pass", -6, 1),
    ],
    ids=["end", "exit", "raised exit", "error", "alone"],
)
def test_a_script_among_others_ends_before_destructors_with_its_own_code(line: str, code: int, world: int) -> None:
    """All that was registered in Python runs, whenever it was; a rank alone has no peer that left before."""
    text = SCRIPT.format(line=line, world=world)
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    if world > 1:
        assert sorted(ended.stdout.split()) == sorted(["trained", "later", "tidied", "up", "printed", "by", "C"])
    assert ("KeyError: 5" in ended.stderr) == (code == 1)
