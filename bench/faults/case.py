"""One run of one tool: started, watched from outside, ended.

Invariant: only processes that were started here are signalled (each has `MARK` in its environment), and none is left
when a case is closed.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
from judge import Record
from tools import Program, Tool

MARK = "FAULT_CASE"
STEPS = 160
LONGEST_S = 240.0
STALL_S = 40.0
"""After so long without a step and without a start of a rank a person ends the run by hand."""


@dataclass(frozen=True)
class Line:
    """What a launcher or a rank has said, and when (monotonic seconds)."""

    time: float
    text: str


class Case:
    """`start` starts the tool in `folder`, again if it was started before."""

    def __init__(self, tool: Tool, folder: Path, environ: Mapping[str, str]) -> None:
        self.tool, self.folder = tool, folder
        self._environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._environ |= {**environ, MARK: str(folder), "TMPDIR": str(folder)}
        self.launchers: list[subprocess.Popen[str]] = []
        self._services: list[subprocess.Popen[str]] = []
        self.lines: list[Line] = []
        self.deadline = time.monotonic() + LONGEST_S

    def start(self) -> None:
        self.launchers = []
        for program in self.tool.programs(self.folder):
            if not program.is_service:
                self.launchers.append(self._run(program))
            elif not self._services or self._services[-1].poll() is not None:
                self._services.append(self._run(program))

    def _run(self, program: Program) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            program.words,
            env={**self._environ, **program.environ},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        threading.Thread(target=self._listen, args=(process.stdout,), daemon=True).start()
        return process

    def _listen(self, stream: IO[str]) -> None:
        for text in stream:
            self.lines.append(Line(time.monotonic(), text.rstrip()))

    # --- what is seen

    def records(self) -> list[Record]:
        return self.tool.read(self.folder)

    def last_step(self) -> int:
        return max((record.step for record in self.records()), default=0)

    def is_done(self) -> bool:
        return self.last_step() == STEPS

    def processes(self) -> list[psutil.Process]:
        """All that were started here and live, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks that live, by number: the oldest, where spares wait for their places."""
        found: dict[int, psutil.Process] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                words, environ = " ".join(process.cmdline()), process.environ()
                if "RANK" in environ and self.tool.script in words and "multiprocessing" not in words:
                    rank = int(environ[self.tool.number])
                    found[rank] = min((process, found.get(rank, process)), key=psutil.Process.create_time)
        return found

    def has_ended(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers)

    def find_line(self, since: float, signs: re.Pattern[str]) -> Line | None:
        """The first line after that time in which one of the signs is."""
        return next((line for line in list(self.lines) if line.time > since and signs.search(line.text)), None)

    # --- what is waited for

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Raises TimeoutError where it takes too long, or the run ends first."""
        while not holds():
            if time.monotonic() > self.deadline or self.has_ended():
                raise TimeoutError(f"{self.tool.name}: {[line.text for line in self.lines[-30:]]}")
            time.sleep(0.03)

    def wait_for_end(self) -> bool:
        """Until all launchers have ended; False where no step was done and no rank started for `STALL_S` instead."""
        seen, since = self._progress(), time.monotonic()
        while not self.has_ended():
            time.sleep(0.3)
            if (now := self._progress()) != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() > min(since + STALL_S, self.deadline):
                return False
        return True

    def _progress(self) -> tuple[int, int]:
        return len(self.records()), self.tool.lives(self.folder)

    # --- how it ends

    def end_ranks_and_launchers(self) -> None:
        """kill -9 all but services."""
        services = {service.pid for service in self._services}
        self._kill([process for process in self.processes() if process.pid not in services])

    def close(self) -> None:
        """kill -9 all."""
        self._kill(self.processes())

    def _kill(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            try:
                process.kill()
            except psutil.Error:
                continue
        for launcher in (*self.launchers, *self._services):
            if launcher.pid in {process.pid for process in processes}:
                launcher.wait(timeout=20)
        psutil.wait_procs(processes, timeout=20)
