"""The script of an array of jobs for each scheduler, and the ids of its tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from job_cases import make_job

from golden_files import Golden
from shardway.launch.job import Job
from shardway.launch.schedulers.base import find_scheduler
from shardway.launch.submission.array import group_alike, render_array_script
from shardway.rundir.sweep import SweepDir

PLACE = SweepDir(Path("/scratch/alice/runs/my")).array(1)


def make_jobs(scheduler: str, count: int = 3) -> list[Job]:
    return [replace(make_job(scheduler), run=Path(f"/scratch/alice/runs/my/{index:03d}")) for index in range(count)]


def render(scheduler: str, at_once: int = 2, count: int = 3) -> str:
    jobs = make_jobs(scheduler, count)
    return render_array_script(replace(jobs[0], name="my", token="abc123"), jobs, at_once, PLACE)


@pytest.mark.parametrize("scheduler", ["local", "slurm", "pbs"])
def test_the_script_of_an_array(scheduler: str, golden: Golden) -> None:
    golden(render(scheduler), f"array_scripts/{scheduler}.sh")


@pytest.mark.parametrize("scheduler", ["local", "slurm", "pbs"])
def test_a_limit_that_limits_nothing_is_left_out(scheduler: str) -> None:
    assert render(scheduler, at_once=0) == render(scheduler, at_once=3) == render(scheduler, at_once=9)
    assert render(scheduler, at_once=2) != render(scheduler, at_once=0)


def test_ids_of_tasks_are_those_of_the_scheduler() -> None:
    slurm, pbs, here = (find_scheduler(name) for name in ("slurm", "pbs", "local"))
    assert slurm.read_task_ids("Submitted batch job 58\n", 2) == ("58_0", "58_1")
    assert pbs.read_task_ids("11[].pbshead\n", 3) == ("11[0].pbshead", "11[1].pbshead", "11[2].pbshead")
    assert here.read_task_ids("7.70\n8.71\n", 2) == ("7.70", "8.71")
    assert here.read_task_ids("7.70\n", 2) == (), "not all have begun"
    assert slurm.read_task_ids("sbatch: error\n", 2) == ()


def test_jobs_that_ask_for_something_else_are_an_array_of_their_own() -> None:
    first, second, third = make_jobs("slurm")
    wider = replace(second, shape=replace(second.shape, nodes=7))
    assert group_alike([first, wider, third]) == [[0, 2], [1]]
    named = [replace(job, name=f"run-{index}", token=str(index)) for index, job in enumerate((first, third))]
    assert group_alike(named) == [[0, 1]], "names and folders make no other kind"
