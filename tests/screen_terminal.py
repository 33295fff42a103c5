"""A pseudo-terminal of a size, with a process in it, and what stands on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path


class ScreenTerminal:
    """A pseudo-terminal with a process in it, and what stands on its screen."""

    def __init__(self, words: Sequence[str], folder: Path, columns: int, rows: int, **variables: str) -> None:
        self.rows = rows
        self._screen = [[" "] * columns for _ in range(rows)]
        self._at = (0, 0)
        self._rest = ""
        mine, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": str(rows), **variables}
        self.process = subprocess.Popen(
            [*words], stdin=its, stdout=its, stderr=its, cwd=folder, env=env, start_new_session=True
        )
        os.close(its)
        self._file = mine

    def press(self, keys: str) -> None:
        os.write(self._file, keys.encode())

    def text(self) -> str:
        return "\n".join("".join(row).rstrip() for row in self._screen)

    def wait(self, words: str, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while words not in self.text():
            assert time.monotonic() < end, self.text()
            self._read()

    def close(self) -> int:
        end = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < end:
            self._read()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self._file)
        return self.process.wait()

    _PART = re.compile(
        r"\x1b\[([0-9;?<>=]*)[ -/]*([@-~])|\x1b[P\]_^].*?(?:\x07|\x1b\\)|\x1b[^\[P\]_^]|[^\x1b]", re.DOTALL
    )

    def _read(self) -> None:
        if not select.select([self._file], [], [], 0.1)[0]:
            return
        try:
            data = os.read(self._file, 65536)
        except OSError:
            return
        text, self._rest = self._rest + data.decode("utf-8", "ignore"), ""
        place = 0
        while place < len(text):
            part = self._PART.match(text, place)
            if part is None:
                self._rest = text[place:]
                return
            place = part.end()
            self._apply(part)

    def _apply(self, part: re.Match[str]) -> None:
        row, column = self._at
        if part[2] is None:
            char = part[0]
            if char == "\r":
                self._at = (row, 0)
            elif char == "\n":
                self._at = (min(row + 1, self.rows - 1), column)
            elif len(char) == 1 and char >= " " and column < len(self._screen[0]):
                self._screen[row][column] = char
                self._at = (row, column + 1)
            return
        numbers = [int(each) if each.isdigit() else 1 for each in part[1].split(";")]
        if part[2] == "H":
            self._at = (numbers[0] - 1, [*numbers, 1][1] - 1)
        elif part[2] == "A":
            self._at = (max(0, row - numbers[0]), column)
        elif part[2] == "K":
            self._screen[row] = [" "] * len(self._screen[row])
        elif part[2] == "J":
            self._screen = [[" "] * len(line) for line in self._screen]
