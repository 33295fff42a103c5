"""What a job script makes of a stop file that is already there, and how it writes a path into a hint."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

LIB = Path(__file__).parents[2] / "src/shardway/launch/shell/lib.sh"
WARNED = "deadline the wall-time is about to end"
TERM = "signal came: SIGTERM"


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [
        (None, WARNED, WARNED),
        (None, TERM, TERM),
        # The agent got the same signal and was faster: the script knows that the wall-time ends, the agent does not.
        ("signal asked for a stop", WARNED, WARNED),
        ("signal asked for a stop", TERM, "signal asked for a stop"),
        (WARNED, TERM, WARNED),
        ("preempted by a job of more worth", WARNED, "preempted by a job of more worth"),
        ("alice wants to look at it", WARNED, "alice wants to look at it"),
        ("", WARNED, ""),
    ],
)
def test_the_request_that_says_most_stays(before: str | None, asked: str, after: str, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    if before is not None:
        stop.write_text(before and f"{before}\n", encoding="utf-8")
    words = f'run={tmp_path}; . "{LIB}"; ask_to_stop {asked}; printf %s "$asked"'
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert stop.read_text(encoding="utf-8").strip() == after
    first = after.partition(" ")[0]
    assert done.stdout == (first if first in ("deadline", "preempted", "signal") else "stopped")


@pytest.mark.parametrize("path", ["/a/b-c_1.2", "/tmp/kürs 1/x", "it's", "a$b `c` \\d", "", "~x", "a;b&c"])
def test_a_path_in_a_hint_is_one_word_of_a_shell(path: str) -> None:
    words = f'. "{LIB}"; eval "set -- $(word "$given")"; printf "%s\\n" "$#" "$1"'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", words],
        capture_output=True,
        text=True,
        timeout=60,
        env={"given": path, "PATH": "/usr/bin:/bin"},
    )
    assert (done.stdout, done.stderr) == (f"1\n{path}\n", "")
