"""Run pytest twice at once: the tests that need the pool's ranks, and all others beside them.

    python tests/beside.py ["slow or hypothesis"]    which tests, as after `pytest -m`; all without it

Invariant: every test runs in one of the two, and the exit code is 0 only where both passed. One process has all the
tests on ranks, since ranks that live as long as it cost seconds each to start. This module must not import what is
under test.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn


def commands(wanted: str) -> list[list[str]]:
    """What to run: first the tests on ranks, then the others."""
    also = f" and ({wanted})" if wanted else ""
    return [[sys.executable, "-m", "pytest", "-m", f"{each}{also}"] for each in ("ranks", "not ranks")]


def run_beside(shown: Sequence[str], other: Sequence[str]) -> int:
    """Run both and return an exit code; what the other one says follows what the first says."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as said:
        both = [
            subprocess.Popen(shown, stdin=subprocess.DEVNULL),
            subprocess.Popen(other, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT),
        ]
        try:
            codes = _wait(both)
        finally:
            for process in both:
                process.kill()
                process.wait()
        said.seek(0)
        sys.stdout.write(f"--- beside it:\n{said.read().decode(errors='replace')}")
    print(f"--- both: {time.monotonic() - start:.0f} s, exit codes {codes[0]} and {codes[1]}")
    return next((abs(code) for code in codes if code), 0)


def _wait(both: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """The exit codes; Ctrl-C is for both, and each ends by itself."""
    try:
        return [process.wait() for process in both]
    except KeyboardInterrupt:
        return [process.wait() for process in both]


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    raise SystemExit(run_beside(*commands(" ".join(sys.argv[1:]))))
