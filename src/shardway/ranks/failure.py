"""A rank that ended badly, as its agent saw it end.

Invariant: a value. This module must not import torch.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended badly: its exit code, negative for a signal, and the files with what it printed.

    `by_agent`: others had failed, and the agent ended it. `for_memory`: the kernel did, since memory had run out.
    """

    rank: int
    pid: int
    exit_code: int
    printed: tuple[Path, ...] = ()
    by_agent: bool = False
    for_memory: bool = False

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it, or None."""
        return signal.Signals(-self.exit_code).name if self.exit_code < 0 else None

    @property
    def crashed(self) -> bool:
        """Whether that signal is one that a process gives itself by a mistake in native code."""
        return self.signal_name in _CRASHES

    def read_printed(self) -> str:
        """All that it printed, as far as it can be read."""
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in self.printed)
