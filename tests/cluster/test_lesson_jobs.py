"""The block of lesson 8 that needs a scheduler, on the real Slurm, and the check that finds its job."""

from __future__ import annotations

import json
import re

from submitting import Person

from page_shell import list_blocks
from shardway.learn.lessons import find_lesson


def test_the_slurm_block_of_lesson_8_runs_and_its_check_finds_the_job(alice: Person) -> None:
    lesson = find_lesson("8")
    assert alice.told("learn", "8") == lesson.text
    folder = alice.folder / "learn" / lesson.name
    (block,) = list_blocks(lesson.text, "slurm")
    submit, follow = block.splitlines()
    for line in (f"{submit.replace('SITE', 'generic-slurm')} data.path=gpt.toml data.include=*", follow):
        program, *words = line.split()
        assert program == "shardway"
        alice.told(*words, folder=folder)
    checked = alice.shardway("learn", "check", "8", "--json", folder=folder)
    assert checked.returncode == 1  # the other requirements are still missing
    (found,) = json.loads(checked.stdout)["lessons"]
    evidence = {each["what"]: each["evidence"] for each in found["findings"]}
    assert re.fullmatch(r"runs/slurm: job \d+ of the scheduler slurm, finished", evidence["a job that ran to its end"])
