"""Signals that Slurm sends on request to every process of a job: nothing is lost, whatever starts the ranks."""

from __future__ import annotations

import subprocess

import pytest
from submitting import Person

ENDED_BY_SRUN = ("TERM", "HUP")
"""For these srun itself kills its ranks at once where it gets them, whatever the ranks and the script would do."""

CASES = [
    (launcher, signal)
    for launcher in ("torchrun", "srun", "agent", "mpirun")
    for signal in ("TERM", "INT", "HUP", "USR1", "USR2")
    if launcher == "mpirun" or signal not in ENDED_BY_SRUN
]
OFTEN = (("torchrun", "USR1"), ("srun", "INT"), ("mpirun", "TERM"))


@pytest.mark.parametrize(
    ("launcher", "signal"),
    [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.exhaustive) for case in CASES],
)
def test_a_signal_to_every_process_of_a_job_saves_its_last_step(busy_alice: Person, launcher: str, signal: str) -> None:
    run = busy_alice.train_slowly(f"{launcher}-{signal}", 0.5, f"site.launcher={launcher}")
    run.until_step(3)
    busy_alice.cluster.output("scancel", "--full", f"--signal={signal}", run.job())
    result = run.ended()
    assert (result.state, result.by) == ("deadline" if signal == "USR2" else "stopped", "rank 0"), run.printed()
    assert run.directory.checkpoint_steps()[-1] == max(run.losses()) == result.step


def test_a_stop_where_no_stop_file_can_be_made(busy_alice: Person) -> None:
    """In the run directory no name can be made, as with a quota of files that counts links."""
    run = busy_alice.train_slowly("no-stop-file", 0.5)
    run.until_step(3)
    subprocess.run(["chattr", "+i", run.path], check=True)
    try:
        done = busy_alice.shardway("stop", run.path)
    finally:
        subprocess.run(["chattr", "-i", run.path], check=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"asked by a signal: {run.path}/stop cannot be written: Operation not permitted." in done.stdout
    result = run.ended()
    assert (result.state, result.by) == ("stopped", "rank 0"), run.printed()
    assert run.directory.checkpoint_steps()[-1] == max(run.losses()) == result.step
