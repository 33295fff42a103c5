"""The same job from whatever shell: one full of variables of other jobs, one of salloc, one that exports nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from real_cluster import wait_for
from submitting import SHARDWAY, START_S, Person, Submitted

LEFT_OVER = {
    "SBATCH_EXPORT": "NONE",
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_JOB_NAME": "another",
    "SBATCH_OUTPUT": "/tmp/elsewhere.out",
    "SBATCH_REQUEUE": "1",
    "SLURM_JOB_ID": "999999",
    "SLURM_MEM_PER_CPU": "400",
    "SLURM_NTASKS": "7",
    "SLURM_NTASKS_PER_NODE": "7",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_EXPORT_ENV": "NONE",
    "SQUEUE_FORMAT": "%i",
    "RANK": "3",
    "WORLD_SIZE": "9",
    "LOCAL_RANK": "3",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
    "OMPI_COMM_WORLD_RANK": "2",
    "PMI_RANK": "2",
    "PBS_JOBID": "7.other",
    "TORCHELASTIC_RUN_ID": "none",
}


def submit_from(
    alice: Person, before: tuple[str, ...], variables: Mapping[str, str], *words: str
) -> tuple[Submitted, str]:
    """What was submitted behind these words and with these variables, and what was told."""
    command = (*before, SHARDWAY, "submit", "--json", "tiny.toml", "site.memory=1500MiB", *words)
    done = alice.cluster.run(*command, folder=alice.folder, variables=variables, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return Submitted(alice.cluster, Path(json.loads(done.stdout)["run"])), done.stderr


@pytest.mark.parametrize("launcher", ["srun", "agent"])
def test_a_shell_full_of_other_jobs(busy_alice: Person, launcher: str) -> None:
    run, told = submit_from(busy_alice, (), LEFT_OVER, f"run.name=left-over-{launcher}", f"site.launcher={launcher}")
    shown = busy_alice.cluster.output("scontrol", "show", "job", run.job())
    assert "TimeLimit=00:05:00" in shown
    assert f"JobName=left-over-{launcher}." in shown
    assert "SBATCH_TIMELIMIT=1 of this shell is left out: the job has 300 s (site.walltime)" in told
    assert "SBATCH_EXPORT=NONE of this shell is left out" in told
    result = run.ended()
    assert (result.state, result.step) == ("finished", 20), run.printed()


def test_a_shell_of_salloc(busy_alice: Person) -> None:
    """Its memory is asked for in another way than that of the job, which srun refuses to have both of."""
    run, _ = submit_from(busy_alice, ("salloc", "-N1", "--mem-per-cpu=400"), {}, "run.name=in-salloc")
    result = run.ended()
    assert (result.state, result.step) == ("finished", 20), run.printed()


def test_a_job_that_exports_nothing(busy_alice: Person) -> None:
    run, _ = submit_from(busy_alice, (), {}, "run.name=exports-nothing", 'site.options={export = "NONE"}')
    result = run.ended()
    assert (result.state, result.step) == ("finished", 20), run.printed()


def test_ranks_of_its_own_in_a_step_of_one_task(busy_alice: Person) -> None:
    """As in `srun --pty bash`, or a terminal of Jupyter in a job."""
    words = ("train", "tiny.toml", "--nproc", "2", "--dir", "in-a-step", "site.nodes=1")
    done = busy_alice.cluster.run(
        *("srun", "-N1", "-n1", "-c2", SHARDWAY, *words), folder=busy_alice.folder, timeout_s=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = Submitted(busy_alice.cluster, busy_alice.folder / "in-a-step")
    started = next(event for event in run.directory.events(0) if event["event"] == "started")
    assert (started["world"], started["launcher"]) == (2, "shardway")
    assert max(run.losses()) == 20


def test_ranks_of_mpirun_in_a_script_by_hand_meet(busy_alice: Person) -> None:
    """mpirun starts its daemons by srun on all nodes but the first, whose own step the ranks there then see."""
    folder = busy_alice.folder
    script = f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 -c2 --mem=1500\ncd {folder}\n"
    script += f"mpirun {SHARDWAY} train tiny.toml --dir {folder}/by-mpirun run.start_timeout=60s\n"
    job = busy_alice.cluster.submit(script, folder=folder)
    assert busy_alice.cluster.wait_until(job, timeout_s=START_S) == "COMPLETED"
    run = Submitted(busy_alice.cluster, folder / "by-mpirun")
    started = next(event for event in run.directory.events(0) if event["event"] == "started")
    assert (started["world"], started["launcher"], max(run.losses())) == (2, "mpirun", 20)


def test_a_signal_that_slurm_sends_by_request_is_a_stop(busy_alice: Person) -> None:
    """`#SBATCH --signal=USR1@...` by hand: sent to the tasks, which nobody wrote a trap for."""
    folder = busy_alice.folder
    words = f"{SHARDWAY} train tiny.toml --dir {folder}/asked-early train.steps=1000000 data.samples=65536"
    script = f"#!/bin/bash\n#SBATCH -N1 -n1 -c2 --mem=1500\ncd {folder}\nsrun -n1 -c2 {words}\n"
    job = busy_alice.cluster.submit(script, folder=folder)
    run = Submitted(busy_alice.cluster, folder / "asked-early")
    wait_for("ten steps", lambda: int(run.directory.read_status().get("step", 0)) >= 10, START_S)
    busy_alice.cluster.output("scancel", "--signal=USR1", job)
    busy_alice.cluster.wait_until(job)
    assert run.directory.read_status()["state"] == "stopped"
    assert run.directory.checkpoint_steps()[-1] == max(run.losses())


ODD = ["a b%j$HOME", "caf\udce9 'q\" \\ ^x^", "new\nline"]
PRINTS = "import os, sys; open('arrived', 'wb').write(b'\\0'.join(map(os.fsencode, [os.getcwd(), *sys.argv[1:]])))"


@pytest.mark.parametrize("name", ODD)
def test_names_of_any_bytes(busy_alice: Person, name: str) -> None:
    """Of the project's folder, the run, the script and its arguments."""
    project = busy_alice.cluster.folder(f"project {name}")
    (project / f"{name}.py").write_text(PRINTS)
    owner = project.stat()
    words = ("--dir", project / name, "--on", "generic-slurm", "--walltime", "5m", "--nodes", "1")
    command = ("python3", f"./{name}.py", name, "", f"--x={name}")
    submit = (SHARDWAY, "submit", "--json", "site.memory=1500MiB", *words, "--", *command)
    done = busy_alice.cluster.run(*submit, folder=project, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    run = Submitted(busy_alice.cluster, Path(json.loads(done.stdout)["run"]))
    assert (run.ended().state, run.path.stat().st_uid) == ("finished", owner.st_uid), run.printed()
    arrived = (run.path / "work/arrived").read_bytes().split(b"\0")
    assert list(map(os.fsdecode, arrived)) == [str(run.path / "work"), *command[2:]]
