from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from job_cases import Cluster, Ran, make_job

from shardway.launch.hosts.local import LocalHost
from shardway.launch.job import Job
from shardway.launch.job_script import render_job_script, render_library
from shardway.launch.schedulers.local import ThisMachine
from shardway.launch.submission.prepare import SubmitRequest, prepare
from shardway.resolve.request import ResolveRequest
from shardway.rundir.attempts import Submission


class Hand:
    """A script that was printed, among fakes, and started by a person."""

    def __init__(self, path: Path, scheduler: str) -> None:
        self.cluster = Cluster.make(path / "cluster")
        job = make_job(scheduler, run=path / "run")
        self.job: Job = replace(job, around=replace(job.around, workdir=path, venv=""), warn_s=0.0)
        self.script = path / "hand.sh"

    def start(self, job_id: str = "7", variables: Mapping[str, str] = MappingProxyType({})) -> Ran:
        """Run the script to its end."""
        self.script.write_text(render_job_script(self.job))
        self.job.folder.path.mkdir(parents=True, exist_ok=True)
        self.job.folder.job_library.write_text(render_library(self.job.scheduler))
        process = self.cluster.start(self.job, job_id, script=str(self.script), variables=variables)
        out, _ = process.communicate(timeout=180)
        return Ran(process.returncode, out, self.job.folder.read_result())


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_a_script_that_was_printed_runs_once(scheduler: str, tmp_path: Path) -> None:
    hand = Hand(tmp_path, scheduler)
    first = hand.start()
    ranks = len(hand.cluster.list_ranks())
    assert (first.code, first.state, ranks > 0) == (0, "finished", True), first.said
    folder = hand.job.folder
    submission, started = folder.read_submission(), folder.read_started()
    assert submission is not None
    assert started is not None
    assert (submission.scheduler, submission.job) == (scheduler, started.job)
    assert folder.job_script.read_text() == hand.script.read_text()  # of which a chain makes the next
    second = hand.start("8")
    assert (second.code, len(hand.cluster.list_ranks())) == (0, ranks)
    assert f"attempt 0001 belongs to job {started.job} (finished)" in second.said
    assert f"shardway status {hand.job.run}" in second.said


def test_an_attempt_that_was_submitted_is_not_begun_by_hand(tmp_path: Path) -> None:
    hand = Hand(tmp_path, "slurm")
    hand.cluster.prepare(hand.job)
    hand.job.folder.write_submission(Submission("slurm", "a1b2c3", job="6"))
    ran = hand.start("7")
    assert (ran.code, ran.result, hand.cluster.list_ranks()) == (0, None, [])
    assert "attempt 0001 belongs to job 6 (no end yet)" in ran.said
    assert hand.start("6").state == "finished"


def test_without_a_snapshot_the_code_itself_runs(tmp_path: Path) -> None:
    """Only where nothing was submitted: a snapshot that is gone is an error."""
    hand = Hand(tmp_path, "slurm")
    source = tmp_path / "it's here"
    source.mkdir()
    hand.job = replace(hand.job, around=replace(hand.job.around, workdir=tmp_path / "gone", source=source))
    ran = hand.start()
    assert ran.state == "finished"
    assert f"no snapshot was made: it runs in {source}" in ran.said
    assert {rank.folder for rank in hand.cluster.list_ranks()} == {source}
    (hand.job.run / "attempts/0002").mkdir()
    (hand.job.run / "attempts/0002/order.json").write_text("{}")
    hand.job = replace(hand.job, attempt=2)
    assert hand.start().state == "crashed"


def test_a_printed_script_knows_the_code_that_it_is_of(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("")
    words = ("site.venv=none", "site.ranks_per_node=1")
    order = SubmitRequest(ResolveRequest(None, words, tmp_path / "run"), command=("python", "train.py"), here=project)
    prepared = prepare(order, LocalHost())
    around, run = prepared.job.around, prepared.job.run
    assert (around.source, around.code, around.workdir) == (project, prepared.job.folder.code, run / "work")
    line = f"enter_work {run}/attempts/0001/code {run}/work {project}"
    assert line in " ".join(prepared.script.replace("\\\n", " ").split())


def test_a_run_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    hand = Hand(tmp_path, "slurm")
    hand.job.folder.path.mkdir(parents=True)
    hand.job.folder.log_folder.write_text("a file")
    ran = hand.start()
    assert (ran.code, hand.cluster.list_ranks()) == (1, [])
    assert "attempt 0001 cannot be claimed" in ran.said


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_a_script_without_its_functions_says_what_is_missing(scheduler: str, tmp_path: Path) -> None:
    hand = Hand(tmp_path, scheduler)
    hand.script.write_text(render_job_script(hand.job))
    process = hand.cluster.start(hand.job, "7", script=str(hand.script))
    out, _ = process.communicate(timeout=60)
    library = hand.job.folder.job_library
    assert (process.returncode, out) == (1, f"shardway: {library} is missing, see line 3 of this script\n")
    assert "shardway submit ... --dry-run --lib" in hand.script.read_text().splitlines()[2]


def test_the_cores_of_a_step_in_which_a_script_was_submitted_are_not_those_of_the_job(tmp_path: Path) -> None:
    """`srun --cpus-per-task=1 --pty bash`, and sbatch there (nebius/soperator#2316)."""
    left = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_LIST": "0x1", "SLURM_MEM_BIND": "local"}
    for name, variables, kept in (("left", left, set()), ("meant", {"SLURM_CPU_BIND": "cores"}, {"SLURM_CPU_BIND"})):
        (tmp_path / name).mkdir()
        hand = Hand(tmp_path / name, "slurm")
        assert hand.start(variables=variables).state == "finished"
        seen = {name for rank in hand.cluster.list_ranks() for name in rank.variables}
        assert {name for name in seen if "_BIND" in name} == kept


# --- a script of an earlier version, which was queued before this one was installed


def test_a_script_of_before_is_whole_and_so_is_its_successor(tmp_path: Path) -> None:
    hand, run = Hand(tmp_path, "slurm"), tmp_path / "run"
    folder, kept = hand.job.folder, Path(__file__).parents[1] / "kept/2026-11/runs/slurm/attempts/0001/job.sh"
    text = (
        kept.read_text().replace("/scratch/kept/runs/slurm", str(run)).replace("/scratch/kept/project", str(tmp_path))
    )
    folder.make()
    folder.job_script.write_text(text.replace("/opt/venv/bin/activate", "/dev/null"))
    hand.cluster.write("submitted", "x\n")
    hand.cluster.write("program", "exit 3")
    ran = hand.cluster.run(hand.job)
    assert (ran.code, ran.state, len(hand.cluster.list_ranks())) == (3, "crashed", 1), ran.said
    successor = hand.job.successor().folder
    assert "\nattempt=0002\nafter=0001\n" in successor.job_script.read_text()
    assert not folder.job_library.exists()
    hand.cluster.write("program", "exit 0")
    ran = hand.cluster.run(hand.job.successor(), "102")
    assert (ran.code, ran.state) == (0, "finished"), ran.said


# --- what a job needs before its ranks start


@pytest.mark.parametrize(
    ("around", "line"),
    [
        ({"venv": "/gone/it's"}, r". '/gone/it'\''s/bin/activate' failed"),
        ({"venv": "conda:torch"}, "conda activate torch failed"),
        ({"modules": ("GCC/1", "Gone/2")}, "module load Gone/2 failed"),
    ],
)
def test_surroundings_that_fail_end_the_job(around: dict[str, str], line: str, tmp_path: Path) -> None:
    hand = Hand(tmp_path, "slurm")
    (hand.cluster.path / "bin/module").write_text('#!/bin/bash\n[ "$2" != Gone/2 ]\n')
    (hand.cluster.path / "bin/module").chmod(0o755)
    hand.job = replace(hand.job, around=replace(hand.job.around, **around))
    ran = hand.start()
    assert (ran.code, ran.state, hand.cluster.list_ranks()) == (1, "crashed", []), ran.said
    assert ran.result is not None
    assert ran.result.reason.startswith(line)
    assert json.loads(hand.job.folder.result_path.read_text())["exit_code"] == 1


def test_a_job_of_this_machine_is_submitted_with_the_functions_of_its_script() -> None:
    words = ThisMachine().submit("/job.sh", "/job.out", "12.34")
    assert words[-3:] == ("/job.sh", "12.34", "/job.out")
