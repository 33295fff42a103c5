from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from shardway.launch.hosts.base import MISSING, Done

DATA = Path(__file__).parents[2] / "data/transcripts"
SLURMS = ("slurm", "slurm-24", "slurm-26")
"""Folders of transcripts of Slurm 22.05, 24.11 and 26.05."""


def said(folder: str, case: str, command: str) -> str:
    """What a command printed in a recorded session, through whatever filter."""
    text = (DATA / folder / f"{case}.txt").read_text(encoding="utf-8")
    [after] = re.split(rf"^\$ {re.escape(command)}(?: \|[^\n]*)?\n", text, flags=re.MULTILINE)[1:]
    return after.split("\n[exit ", 1)[0] + "\n"


def read(folder: str, name: str) -> str:
    return (DATA / folder / name).read_text(encoding="utf-8")


class TalkingHost:
    """A host that knows the answers to some commands, by their first words; any other program is missing."""

    name = ""

    def __init__(self, answers: Mapping[tuple[str, ...], str | Done]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, ...]] = []

    def run(self, words: Sequence[str], *, timeout_s: float = 30.0, stdin: str = "") -> Done:
        assert timeout_s <= 30
        self.asked.append(tuple(words))
        for start, answer in self.answers.items():
            if tuple(words[: len(start)]) == start:
                return Done(tuple(words), 0, answer, "") if isinstance(answer, str) else answer
        return Done(tuple(words), MISSING, "", f"{words[0]}: no such program\n")

    def run_many(self, commands: Sequence[Sequence[str]], *, timeout_s: float = 60.0) -> list[Done]:
        return [self.run(words, timeout_s=min(timeout_s, 30)) for words in commands]

    def follow(self, words: Sequence[str]) -> Any:
        raise NotImplementedError

    def read_files(self, paths: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
        raise NotImplementedError

    def write_files(self, files: Mapping[PurePosixPath, str], *, executable: Sequence[PurePosixPath] = ()) -> None:
        raise AssertionError("a survey changes nothing")

    def copy_tree(self, source: Path, target: PurePosixPath) -> None:
        raise AssertionError("a survey changes nothing")

    def expand(self, path: str) -> PurePosixPath:
        raise NotImplementedError

    def expand_many(self, paths: Sequence[str]) -> list[PurePosixPath]:
        raise NotImplementedError
