"""The commands of docs/generate.md, on a run as the README's `shardway train` leaves it."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path

import pytest
from command_line import TINY, Shardway, write_text

from page_shell import list_blocks
from runs import lone_rank, train_tiny

PAGE = Path(__file__).parents[2] / "docs" / "generate.md"


def list_commands() -> list[str]:
    blocks = list_blocks(PAGE.read_text(encoding="utf-8"))
    return "".join(blocks).splitlines()


def test_the_commands_of_the_page(shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path)
    train_tiny(
        tmp_path / "runs/try",
        lone_rank(),
        "data.seq_len=128",
        "optim.warmup=1 steps",
        base=(*TINY, "checkpoint.background=false"),
    )
    commands = list_commands()
    assert len(commands) == 4
    for command in commands:
        before, _, after = command.rpartition(" | ")
        if before:
            monkeypatch.setattr(sys, "stdin", io.StringIO(eval_printf(before)))
        program, *words = shlex.split(after)
        if program == "printf":
            Path(words[-1]).write_text(eval_printf(after.partition(" > ")[0]))
            continue
        ended = shardway(*words)
        assert (program, ended.code) == ("shardway", 0), ended.err
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [each["prompt"] for each in answers] == ["def ", "class ", "import "]
    shown = json.loads(list_blocks(PAGE.read_text(), "json")[0])
    assert all(each.keys() == shown.keys() for each in answers)
    assert len(json.loads((tmp_path / "chat.jsonl").read_text())["messages"]) == 2


def eval_printf(command: str) -> str:
    """What a shell's printf of one word prints."""
    program, word = shlex.split(command)
    assert program == "printf"
    return word.replace("\\n", "\n")
