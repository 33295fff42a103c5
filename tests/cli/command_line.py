"""What tests of the command line share: how a command ended, and the words of a run of a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


Shardway = Callable[..., Ended]
"""The fixture `shardway`: called with the words of a command line."""

TINY = (
    "model.dim=16",
    "model.layers=1",
    "model.heads=2",
    "data.seq_len=8",
    "data.path=text.txt",
    "train.steps=2",
    "train.global_batch=2",
    "train.validate_every=off",
    "train.validation_samples=4",
    "run.threads=1",
)
"""Words that train on the text of `write_text` for a fraction of a second."""


def write_text(folder: Path) -> None:
    """The text that TINY names, of 2,150 bytes."""
    (folder / "text.txt").write_text("To be, or not to be, that is the question.\n" * 50, encoding="utf-8")
