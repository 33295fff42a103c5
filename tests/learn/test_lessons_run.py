"""Every lesson, executed as a learner would: its printed blocks in a fresh folder, its check before and after."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from page_shell import PageShell, list_blocks
from shardway.learn.lessons import find_lesson

EXERCISES = {
    1: ["shardway train gpt.toml --dir runs/slow optim.lr=1e-4"],
    2: ["shardway train gpt.toml --dir runs/fp16 precision.compute=fp16"],
    3: ["shardway train gpt.toml --dir runs/mine data.path=make_text.py train.steps=20"],
    4: ["shardway train gpt.toml --nproc 2 --dir runs/weak train.global_batch=16 train.steps=20"],
    5: [
        "shardway train gpt.toml --nproc 2 --dir runs/other parallel.dp_shard=2 train.steps=20",
        "shardway train gpt.toml --dir runs/other train.steps=24",
    ],
    6: [
        "shardway train gpt.toml --nproc 4 --dir runs/both model.tied=false parallel.tp=2 parallel.pp=2 train.steps=20"
    ],
    7: [],
    8: [],
    9: [],
    10: ["shardway profile gpt.toml --steps 3 --dir runs/wider model.dim=128"],
}
"""What a learner may do for the exercise of a lesson, as commands."""


@pytest.mark.parametrize("number", range(1, 11))
def test_the_lesson_runs_and_its_check_refuses_what_is_not_done(number: int, tmp_path: Path) -> None:
    shell = PageShell(tmp_path)
    undone = shell.try_line(f"shardway learn check {number}")
    assert undone.returncode == 1
    assert undone.stdout.count("missing") == len(read_check(shell, number)["findings"])
    text = shell.run_line(f"shardway learn {number}").stdout
    assert text == find_lesson(str(number)).text
    assert shell.try_line(f"shardway learn check {number}").returncode == 1  # files alone are no work
    for block in list_blocks(text):
        shell.run_block(block)
    before = read_check(shell, number)
    missing = [each["what"] for each in before["findings"] if not each["evidence"]]
    assert [what.partition(":")[0] for what in missing] == ["exercise"], before
    for line in EXERCISES[number]:
        shell.run_line(line)
    if by_hand := BY_HAND.get(number):
        by_hand(shell)
    done = shell.try_line(f"shardway learn check {number}")
    assert done.returncode == 0, done.stdout


def read_check(shell: PageShell, number: int) -> dict[str, object]:
    (found,) = json.loads(shell.try_line(f"shardway learn check {number} --json").stdout)["lessons"]
    return found


def add_a_mount(shell: PageShell) -> None:
    path = shell.folder / "cluster.toml"
    path.write_text(path.read_text().replace('["/project/data"]', '["/project/data", "/project/more"]'))
    shell.run_line("shardway submit cluster.toml --on generic-slurm site.account=course --dry-run > apptainer.sh")


def stop_and_resume_a_job(shell: PageShell) -> None:
    shell.run_line("shardway submit gpt.toml --dir runs/long train.steps=2000")
    deadline = time.monotonic() + 120
    while not list((shell.folder / "runs/long/checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    shell.run_line("shardway stop runs/long")
    shell.run_line("shardway status runs/long --watch 1")
    step = json.loads((shell.folder / "runs/long/status.json").read_text())["step"]
    shell.run_line(f"shardway resume runs/long train.steps={step + 5}")
    shell.run_line("shardway status runs/long --watch 1")


def damage_a_checkpoint(shell: PageShell) -> None:
    newest = max((shell.folder / "runs/killed/checkpoints").glob("step-*"))
    with open(newest / "rank-00000.bin", "r+b") as file:
        file.write(b"x" * 100)
    assert shell.try_line("shardway checkpoint verify runs/killed").returncode == 4
    shell.run_line("shardway train gpt.toml --dir runs/killed train.steps=44")


BY_HAND = {7: add_a_mount, 8: stop_and_resume_a_job, 9: damage_a_checkpoint}
"""Exercises that are no list of commands."""
