"""Runs the `sh` blocks of a page or a lesson as a reader would: one after another, in one folder.

Simple lines (a program and its words, also with `&` behind it) start warm, so that pages need no minutes of imports;
any line with a character of the shell's is given to `bash` as it stands, and fails where a command of a pipe does.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import warm

MODULES = {"shardway": "shardway", "torchrun": "torch.distributed.run"}


def list_blocks(text: str, language: str = "sh") -> list[str]:
    """The blocks of a page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def reader_environ() -> dict[str, str]:
    """A reader's variables: the commands of this environment first. Threads that wait for each other do not spin,
    which takes the cores from other tests."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_WAIT_POLICY": "passive"}


@dataclass
class PageShell:
    """A reader's shell in a folder; `printed` is what its commands wrote."""

    folder: Path
    printed: list[str] = field(default_factory=list)
    _behind: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environ(self) -> dict[str, str]:
        return {**reader_environ(), "COLUMNS": "120"}

    def run_block(self, block: str) -> str:
        """Run a block; fails where a command does. What it printed to the standard output."""
        return "".join(self.run_line(line).stdout for line in block.replace("\\\n", "").splitlines())

    def run_line(self, line: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(line, comments=True)
        if not words:
            return subprocess.CompletedProcess([], 0, "", "")
        is_ours = words[0] in (*MODULES, "python")
        if is_ours and words[-1] == "&":
            self._behind.append(self._start_behind(words[:-1]))
            return subprocess.CompletedProcess(words, 0, "", "")
        if words == ["wait"]:  # as in a shell, however they ended
            for process in self._behind:
                process.wait(300)
            self._behind.clear()
            return subprocess.CompletedProcess(words, 0, "", "")
        if words[0] == "cd":
            self.folder = (self.folder / words[1]).resolve(strict=True)
            return subprocess.CompletedProcess(words, 0, "", "")
        if re.search(r"[|&;<>$*`]", line) or not is_ours:
            return self._start(["bash", "-euo", "pipefail", "-c", line], line)
        return self._start(_name_program(words), line)

    def try_line(self, line: str) -> subprocess.CompletedProcess[str]:
        """As `run_line`, for a command that may fail."""
        with warm.starts():
            return subprocess.run(
                _name_program(shlex.split(line)),
                cwd=self.folder,
                env=self.environ,
                capture_output=True,
                text=True,
                timeout=300,
            )

    def _start(self, words: list[str], shown: str) -> subprocess.CompletedProcess[str]:
        with warm.starts():
            done = subprocess.run(words, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=300)
        self.printed += [done.stdout, done.stderr]
        assert done.returncode == 0, f"{shown}\n{done.stdout}\n{done.stderr}"
        return done

    def _start_behind(self, words: list[str]) -> subprocess.Popen[bytes]:
        nowhere = subprocess.DEVNULL
        with warm.starts():
            return subprocess.Popen(
                _name_program(words), cwd=self.folder, env=self.environ, stdin=nowhere, stdout=nowhere, stderr=nowhere
            )


def _name_program(words: list[str]) -> list[str]:
    """The same words for this Python, where they are a program of this environment."""
    program, *rest = words
    return [sys.executable, *(["-m", MODULES[program]] if program in MODULES else []), *rest]
