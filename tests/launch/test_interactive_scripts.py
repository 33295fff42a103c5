"""The scripts behind which a person sits, run with fake commands: where they go, and what a command finds there."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from job_cases import Cluster, Rank, list_combinations, make_job, with_literals

from shardway.launch.job import Job
from shardway.launch.job_script import render_enter_script, render_job_script, render_library, render_shell_script
from shardway.launch.schedulers.base import find_scheduler
from shardway.rundir.attempts import AttemptStart

ODD = "a b$c'd"


@pytest.fixture(name="cluster")
def _cluster(tmp_path: Path) -> Cluster:
    made = Cluster.make(tmp_path)
    made.secrets.write_text("SECRET=of mine\n")
    return made


def prepare(cluster: Cluster, job: Job) -> Job:
    """A job of an attempt that has begun on two nodes."""
    run = cluster.path / "run"
    around = replace(job.around, workdir=run / "work", venv="", secret_names=("SECRET",))
    job = with_literals(replace(job, run=run, around=around), {"OWN": ODD})
    cluster.prepare(job)
    job.folder.enter_script.write_text(render_enter_script(job))
    job.folder.write_started(AttemptStart("101", "n1", "n1 n2"))
    (job.folder.path / "environment.sh").write_text('declare -x OWN="of the job"\n')
    return job


def enter(cluster: Cluster, job: Job, node: str, *command: str, rank: str = "", **variables: str) -> Rank:
    """Run a command by `enter.sh`; what it was started with."""
    words = ["bash", str(job.folder.enter_script), str(job.folder.path), "101", node, rank, "", *command]
    environment = {**cluster.variables("900"), **variables}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    [started] = cluster.list_ranks()
    return started


@pytest.mark.parametrize(("scheduler", "launcher", "runtime"), list_combinations())
def test_the_environment_is_that_of_the_job_script(scheduler: str, launcher: str, runtime: str) -> None:
    """Each line that a job sets its environment with stands in both scripts, in the same order."""
    job = with_literals(make_job(scheduler, launcher, runtime), {"OWN": ODD})
    job = replace(job, around=replace(job.around, modules=("gcc/12", "cuda"), expanded={"PLACE": "$HOME/x"}))
    section = render_job_script(job).partition("# --- what the ranks find")[2].partition("# --- run")[0]
    found = [line for line in section.splitlines() if re.match(r" *(load_modules|\. |export|read_secrets)", line)]
    assert len(found) >= 5
    for other in (render_enter_script(job), render_shell_script(job, Path("/s"))):
        lines = other.splitlines()
        places = [lines.index(line) for line in found]
        assert places == sorted(places)


def test_a_command_of_slurm_is_a_step_beside_the_others(cluster: Cluster) -> None:
    job = prepare(cluster, make_job("slurm"))
    started = enter(cluster, job, "n2", "rank-program", ODD, "{pid}", SLURM_PROCID="7")
    assert started.words == [ODD, "{pid}"]
    assert started.folder == job.around.workdir
    wanted = {"OWN": ODD, "SECRET": "of mine", "SHARDWAY_JOB": "101", "SHARDWAY_ATTEMPT_DIR": str(job.folder.path)}
    assert wanted.items() <= started.variables.items()
    step = next(call for call in cluster.list_calls("srun") if "--jobid=101" in call)
    assert {"--nodelist=n2", "--nodes=1", "--ntasks=1", "--mem=0"} < set(step)
    assert "--pty" not in step


def test_the_node_of_a_rank_follows_from_its_number(cluster: Cluster) -> None:
    job = prepare(cluster, make_job("slurm"))
    words = ["bash", str(job.folder.enter_script), str(job.folder.path), "101", "-", "", "", "true"]
    for rank, node in (("3", "n1"), ("4", "n2")):
        words[5] = rank
        done = subprocess.run(words, env=cluster.variables("900"), capture_output=True, text=True, check=False)
        assert (done.returncode, "has no process on" in done.stderr) == (3, True), done.stderr
        assert f"--nodelist={node}" in cluster.list_calls("srun")[-1]
    words[5] = "8"
    done = subprocess.run(words, env=cluster.variables("900"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "shardway: there is no rank 8: the job has 8 ranks, 0 to 7\n")


def test_the_process_of_a_rank_stands_for_a_word(cluster: Cluster) -> None:
    """Of two that have its number, the one of this attempt."""
    job = prepare(cluster, make_job("local"))
    for place in (str(job.folder.path), "/another"):
        variables = {**cluster.variables("1"), "RANK": "1", "SHARDWAY_ATTEMPT_DIR": place}
        process = subprocess.Popen(["sleep", "60"], env=variables)
        try:
            words = ["bash", str(job.folder.enter_script), str(job.folder.path), "1.1", "-", "1", "", "echo", "<{pid}>"]
            done = subprocess.run(words, env=cluster.variables("1"), capture_output=True, text=True, check=False)
            found = f"<{process.pid}>\n" if place != "/another" else ""
            assert (done.stdout, done.returncode) == (found, 0 if found else 3), done.stderr
        finally:
            process.kill()
            process.wait()


def test_a_container_of_pyxis_is_an_option_of_the_step(cluster: Cluster) -> None:
    job = prepare(cluster, make_job("slurm", "torchrun", "pyxis"))
    started = enter(cluster, job, "n1", "rank-program", "x")
    step = next(call for call in cluster.list_calls("srun") if "--jobid=101" in call)
    assert any(word.startswith("--container-image=") for word in step)
    assert (started.words, started.variables["OWN"]) == (["x"], "of the job")


@pytest.mark.parametrize("runtime", ["apptainer", "charliecloud", "enroot", "podman"])
def test_other_containers_are_entered_on_the_node(cluster: Cluster, runtime: str) -> None:
    """The job has made the container of enroot: it is not made again."""
    job = prepare(cluster, make_job("slurm", "torchrun", runtime))
    started = enter(cluster, job, "n1", "rank-program", "x")
    assert (started.words, started.variables["OWN"]) == (["x"], "of the job")
    assert not any("create" in call for call in cluster.list_calls("enroot"))


SSH = """#!/bin/bash
printf '%s\\0' ssh "$@" > "$FAKES/calls/ssh.$$"
while [ "$1" != -- ]; do shift; done
exec env -i PATH="$PATH" HOME="$HOME" FAKES="$FAKES" sh -c "$3"
"""
ATTACH = """#!/bin/bash
printf '%s\\0' pbs_attach "$@" > "$FAKES/calls/pbs_attach.$$"
exec "${@:3}"
"""


def test_a_command_of_pbs_goes_by_ssh_into_the_job(cluster: Cluster) -> None:
    for name, text in (("ssh", SSH), ("pbs_attach", ATTACH)):
        (cluster.path / "bin" / name).write_text(text)
        (cluster.path / "bin" / name).chmod(0o755)
    job = prepare(cluster, make_job("pbs"))
    started = enter(cluster, job, "elsewhere", "rank-program", ODD, "")
    assert started.words == [ODD, ""]
    assert started.variables["OWN"] == ODD
    assert cluster.list_calls("ssh")[0][1:3] == ["--", "elsewhere"]
    assert cluster.list_calls("pbs_attach")[0][1:4] == ["-j", "101", "bash"]


def test_a_shell_of_pbs_ends_with_its_own_code(cluster: Cluster, tmp_path: Path) -> None:
    """`qsub -I` ends with 0; the script has left the code beside itself."""
    folder = tmp_path / "shell"
    folder.mkdir()
    (cluster.path / "bin" / "qsub").unlink()
    (cluster.path / "bin" / "qsub").write_text(
        f'#!/bin/bash\nprintf "%s\\0" qsub "$@" > "$FAKES/calls/qsub.1"\necho 7 > {folder}/exit_code\n'
    )
    (cluster.path / "bin" / "qsub").chmod(0o755)
    job = make_job("pbs", warn_s=0.0)
    words = find_scheduler("pbs").open_shell(job, f"{folder}/shell.sh", terminal=True)
    assert words is not None
    assert subprocess.run(words, env=cluster.variables("1"), check=False).returncode == 7
    [call] = cluster.list_calls("qsub")
    assert call[:2] == ["qsub", "-I"]
    assert call[-4:] == ["--", "/bin/bash", "-l", f"{folder}/shell.sh"]
    assert "-l" in call
    assert not {"-r", "-j", "-o", "-k", "-S"} & set(call)


def test_an_allocation_of_slurm_has_the_options_of_a_job(cluster: Cluster) -> None:
    job = make_job("slurm", warn_s=60.0)
    words = find_scheduler("slurm").open_shell(job, "/s/shell.sh", terminal=True) or ()
    assert words[0] == "salloc"
    assert words[-2:] == ("bash", "/s/shell.sh")
    assert {"--account=proj1", "--partition=gpu", "--nodes=2", "--gres=gpu:4", "--time=0-02:00:00"} < set(words)
    assert not [word for word in words if word.startswith(("--output", "--open-mode", "--no-requeue", "--signal"))]


def test_a_shell_of_this_machine_is_no_part_of_a_job(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "shell"
    folder.mkdir()
    job = prepare(cluster, make_job("local"))
    (folder / "shell.sh").write_text(render_shell_script(job, folder))
    (folder / "lib.sh").write_text(render_library("local"))
    script = 'echo "$OWN|$SECRET|$PWD|$MASTER_ADDR|$(env | grep -c ^SHARDWAY_JOB=)"; exit 7'
    words, environment = ["bash", str(folder / "shell.sh")], {**cluster.variables("1"), "RANK": "3"}
    done = subprocess.run(words, env=environment, input=script, capture_output=True, text=True, check=False)
    assert done.stdout == f"{ODD}|of mine|{job.around.workdir}|127.0.0.1|0\n", done.stderr
    assert done.returncode == 7
    assert "SECRET" not in (folder / "environment.sh").read_text()
    assert os.listdir(job.run / "attempts") == ["0001"]
