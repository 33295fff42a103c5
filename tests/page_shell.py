"""Runs the `sh` blocks of a page or a lesson as a reader would: one after another, in one folder.

Simple lines (a program and its words) start warm, so that pages need no minutes of imports; a block that puts a
command into the background, and any line with a character of the shell's, is given to `sh` as it stands.
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

    @property
    def environ(self) -> dict[str, str]:
        return {**reader_environ(), "COLUMNS": "120"}

    def run_block(self, block: str) -> None:
        """Run a block; fails where a command does."""
        if " &\n" in block:
            self._start(["sh", "-euc", block], block)
            for folder in re.findall(r"^cd (\S+)$", block, re.MULTILINE):
                self.folder /= folder
            return
        for line in block.splitlines():
            self.run_line(line)

    def run_line(self, line: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(line, comments=True)
        if not words:
            return subprocess.CompletedProcess([], 0, "", "")
        if words[0] == "cd":
            self.folder = (self.folder / words[1]).resolve(strict=True)
            return subprocess.CompletedProcess(words, 0, "", "")
        if re.search(r"[|&;<>$*`]", line) or words[0] not in (*MODULES, "python"):
            return self._start(["sh", "-euc", line], line)
        start = ["-m", MODULES[words[0]]] if words[0] in MODULES else []
        return self._start([sys.executable, *start, *words[1:]], line)

    def try_line(self, line: str) -> subprocess.CompletedProcess[str]:
        """As `run_line`, for a command that may fail."""
        program, *words = shlex.split(line)
        with warm.starts():
            return subprocess.run(
                [sys.executable, "-m", MODULES[program], *words],
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
