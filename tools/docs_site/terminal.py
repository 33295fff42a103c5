"""Records a session of a terminal, and puts it on the start page as a player.

    python tools/docs_site/terminal.py docs/session.json docs/session.svg

Every command is executed in a pseudo-terminal of a scratch folder; what it prints is read as a terminal reads it, and
the screen is kept whenever it has changed. Nothing is typed by hand but the commands of `SESSION`.

Invariants:
- The recording holds what was on the screen and in which order. A command that took longer than `LONGEST_S` is shown
  that much faster, and the recording has the factor.
- The player starts by itself only for a reader that has not asked for reduced motion, and can be paused; without
  scripts the last screen is a picture.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import json
import os
import platform
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

COLUMNS, ROWS = 92, 26
LONGEST_S, FRAME_S, TYPED_S, READ_S = 10.0, 0.4, 0.04, 2.0
SESSION = (
    "shardway init my.toml --minimal",
    "shardway plan my.toml --gpu a100-sxm4-80gb --gpus 8 | head -n 22",
    "shardway train my.toml train.steps=20 model.dim=32",
    "shardway status runs/my",
)

# --- the screen

_PART = re.compile(r"\x1b\[([0-9;?<>=]*)[ -/]*([@-~])|\x1b[P\]_^].*?(?:\x07|\x1b\\)|\x1b[^\[P\]_^]|[^\x1b]", re.DOTALL)
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
Cell = tuple[str, str]
"""A character and the classes of its style."""


@dataclass
class Screen:
    """What stands on a terminal, fed with what programs print."""

    columns: int = COLUMNS
    rows: int = ROWS
    cells: list[list[Cell]] = field(default_factory=list)
    at: tuple[int, int] = (0, 0)
    style: frozenset[str] = frozenset()
    rest: str = ""

    def __post_init__(self) -> None:
        self.cells = [self._empty() for _ in range(self.rows)]

    def _empty(self) -> list[Cell]:
        return [(" ", "")] * self.columns

    def feed(self, text: str) -> None:
        """Take what was printed; a control sequence that is not whole waits for its rest."""
        text, self.rest, place = self.rest + text, "", 0
        while place < len(text):
            part = _PART.match(text, place)
            if part is None:
                self.rest = text[place:]
                return
            place = part.end()
            if part[2]:
                self._control(part[2], [int(each) if each.isdigit() else 0 for each in part[1].split(";")], part[1])
            elif len(part[0]) == 1:
                self._print(part[0])

    def _print(self, char: str) -> None:
        row, column = self.at
        if char == "\r":
            column = 0
        elif char == "\n":
            row += 1
        elif char == "\b":
            column = max(0, column - 1)
        elif char >= " ":
            if column == self.columns:
                row, column = row + 1, 0
                row = self._scroll(row)
            self.cells[row][column] = (char, " ".join(sorted(self.style)))
            column += 1
        self.at = (self._scroll(row), column)

    def _scroll(self, row: int) -> int:
        while row >= self.rows:
            self.cells = [*self.cells[1:], self._empty()]
            row -= 1
        return row

    def _control(self, kind: str, numbers: list[int], words: str) -> None:
        row, column = self.at
        first = numbers[0]
        match kind:
            case "A":
                self.at = (max(0, row - max(1, first)), column)
            case "B":
                self.at = (min(self.rows - 1, row + max(1, first)), column)
            case "C":
                self.at = (row, min(self.columns - 1, column + max(1, first)))
            case "H":
                self.at = (max(0, first - 1), max(0, [*numbers, 1][1] - 1))
            case "J":
                for each in range(row if first == 0 else 0, self.rows):
                    self.cells[each] = self._empty()
            case "K":
                start = column if first == 0 else 0
                self.cells[row][start:] = self._empty()[start:]
            case "m":
                self._style(numbers if words else [0])

    def _style(self, numbers: Sequence[int]) -> None:
        rest = iter(numbers)
        for number in rest:
            if number == 0:
                self.style = frozenset()
            elif number in (1, 2, 3, 4):
                self.style |= {("b", "d", "i", "u")[number - 1]}
            elif number == 22:
                self.style -= {"b", "d"}
            elif number == 39 or 30 <= number <= 37 or 90 <= number <= 97:
                self.style = frozenset(each for each in self.style if not each.startswith("c-"))
                if number != 39:
                    self.style |= {f"c-{_COLOURS[number % 10]}"}
            elif number in (38, 48):
                kind = next(rest, 5)
                values = [next(rest, 0) for _ in range(1 if kind == 5 else 3)]
                if number == 38:
                    self.style = frozenset(each for each in self.style if not each.startswith("c-"))
                    self.style |= {f"c-{_nearest(values) if kind == 2 else _COLOURS[values[0] % 8]}"}

    def lines(self) -> list[list[list[str]]]:
        """Each line as runs of [text, classes], without what is empty at its end."""
        return [_runs(line) for line in self.cells]


def _nearest(rgb: Sequence[int]) -> str:
    """The name of a colour near to it."""
    most, least = max(rgb), min(rgb)
    if most - least < 40:
        return "white" if most > 90 else "black"
    bits = sum(1 << place for place, value in enumerate(rgb) if value > (most + least) / 2)
    return _COLOURS[bits]


def _runs(line: list[Cell]) -> list[list[str]]:
    runs: list[list[str]] = []
    for char, style in line:
        if runs and runs[-1][1] == style:
            runs[-1][0] += char
        else:
            runs.append([char, style])
    while runs and not runs[-1][0].strip():
        runs.pop()
    if runs:
        runs[-1][0] = runs[-1][0].rstrip()
    return runs


# --- recording

Lines = list[list[list[str]]]


@dataclass
class Recording:
    """Screens with their times; each frame has the lines that differ from those of the one before. `faster`: by which
    factor each command is shown faster than it ran."""

    frames: list[list[object]] = field(default_factory=list)
    faster: list[float] = field(default_factory=list)
    time_s: float = 0.0
    _last: Lines = field(default_factory=lambda: [[] for _ in range(ROWS)])

    def keep(self, lines: Lines) -> None:
        """Keep the screen if it has changed."""
        changed = {str(number): line for number, line in enumerate(lines) if line != self._last[number]}
        if changed:
            self.frames.append([round(self.time_s * 1000), changed])
            self._last = lines

    def keep_all(self, screens: Sequence[tuple[float, Lines]]) -> None:
        """Keep what a command showed: seconds since its start, and screens. The last one is always kept."""
        start, took = self.time_s, screens[-1][0]
        factor = max(1.0, took / LONGEST_S)
        self.faster.append(round(factor, 1))
        for number, (seconds, lines) in enumerate(screens):
            at = start + seconds / factor
            if at - self.time_s >= FRAME_S or number == len(screens) - 1:
                self.time_s = at
                self.keep(lines)


def record(commands: Sequence[str], folder: Path) -> Recording:
    """The session of these commands, executed one after another in a folder, each on an empty screen but the last."""
    recording, screen = Recording(), Screen()
    for number, command in enumerate(commands):
        if 0 < number < len(commands) - 1:
            screen = Screen()
        screen.style = frozenset({"c-green"})
        screen.feed("$ ")
        screen.style = frozenset({"b"})
        for start in range(0, len(command), 4):
            screen.feed(command[start : start + 4])
            recording.keep(screen.lines())
            recording.time_s += 4 * TYPED_S
        screen.style = frozenset()
        screen.feed("\r\n")
        recording.keep_all(run_on_screen(command, folder, screen))
        recording.time_s += READ_S
    return recording


def run_on_screen(command: str, folder: Path, screen: Screen) -> list[tuple[float, Lines]]:
    """Execute a command; the seconds and screens that it made, each when nothing more came for a moment. Ends the
    program where the command fails."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    words = ["bash", "-o", "pipefail", "-c", command]
    started = time.monotonic()
    process = subprocess.Popen(words, cwd=folder, env=env, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    screens = []
    for data in _read(mine):
        screen.feed(data)
        if not select.select([mine], [], [], 0.05)[0]:
            screens.append((time.monotonic() - started, screen.lines()))
    os.close(mine)
    code = process.wait()
    screens.append((time.monotonic() - started, screen.lines()))
    if code not in (0, 141):  # `head` closes the pipe of what it has seen enough of
        sys.exit(f"{command} ended with code {code}: {screens[-1][1]}")
    return screens


def _read(file: int) -> Iterator[str]:
    rest = b""
    while True:
        select.select([file], [], [])
        try:
            data = os.read(file, 65536)
        except OSError:  # the program has ended
            return
        if not data:
            return
        rest += data
        text = rest.decode("utf-8", "ignore")
        rest = b"" if text.encode() == rest else rest[len(text.encode()) :]
        yield text


def main() -> None:
    """Record the session and write it, and the last screen as a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session", type=Path, help="the JSON to write")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recording = record(SESSION, Path(folder))
    machine = f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}"
    head = {"date": date.today().isoformat(), "machine": machine, "columns": COLUMNS, "rows": ROWS}
    lines = ",\n".join(json.dumps(frame, separators=(",", ":"), ensure_ascii=False) for frame in recording.frames)
    text = (
        json.dumps({**head, "commands": SESSION, "faster": recording.faster}, ensure_ascii=False)[:-1]
        + f', "frames": [\n{lines}\n]}}\n'
    )
    words.session.write_text(text, encoding="utf-8")
    words.picture.write_text(render_svg(json.loads(text)), encoding="utf-8")
    print(f"{words.session}: {len(recording.frames)} frames, {len(text) / 1000:.0f} kB")


# --- the page

_FILL = {"green": "#98e024", "red": "#fb8ea9", "yellow": "#f4bf75", "blue": "#8fb8ff", "magenta": "#c9a3ff",
         "cyan": "#66d9ef", "white": "#d9d9d9", "black": "#9a9a9a"}  # fmt: skip


def last_screen(session: dict[str, object]) -> list[list[list[str]]]:
    """The lines of the last frame."""
    lines: list[list[list[str]]] = [[] for _ in range(int(str(session["rows"])))]
    frames: list[tuple[int, dict[str, list[list[str]]]]] = session["frames"]  # type: ignore[assignment]
    for _, changed in frames:
        for number, line in changed.items():
            lines[int(number)] = line
    return lines


def render_svg(session: dict[str, object]) -> str:
    """The last screen as a picture, without any font of another host."""
    width, height = int(str(session["columns"])) * 8.4 + 24, int(str(session["rows"])) * 18 + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        "<title>A terminal after the commands init, plan, train and status of shardway</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="6" fill="#14161a"/>',
        '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14" '
        'style="white-space:pre">',
    ]
    for number, line in enumerate(last_screen(session)):
        column = 0
        for text, style in line:
            colour = next((_FILL[each[2:]] for each in style.split() if each.startswith("c-")), "#e6e6e6")
            weight = ' font-weight="bold"' if "b" in style.split() else ""
            place = f'x="{12 + column * 8.4:.1f}" y="{28 + number * 18}" textLength="{len(text) * 8.4:.1f}"'
            parts += [f'<text {place} fill="{colour}"{weight}>{html.escape(text)}</text>'] * bool(text.strip())
            column += len(text)
    return "\n".join([*parts, "</g></svg>", ""])


MARK = "<!-- the recording of the terminal -->"


def lay_player(text: str) -> str:
    """The start page with the player around its picture: the picture stays where there are no scripts."""
    before, mark, after = text.partition(MARK)
    if not mark:
        return text
    picture, rest = after.lstrip("\n").split("\n\n", 1)
    return f'{before}<div class="terminal" data-session markdown="1">\n\n{picture}\n\n</div>\n\n{rest}'


def write_script(session: Path, script: Path) -> None:
    """The recording as a script, since a page that was opened as a file may not fetch JSON."""
    text = session.read_text(encoding="utf-8") if session.is_file() else '{"frames": []}'
    script.write_text(f"window.shardwaySession = {text.strip()};\n", encoding="utf-8")


if __name__ == "__main__":
    main()
