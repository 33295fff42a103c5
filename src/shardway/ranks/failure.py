"""A rank that ended badly, as its agent saw it end.

Invariant: a value. This module must not import torch.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path


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
