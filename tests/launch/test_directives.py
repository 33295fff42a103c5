"""What a job asks of Slurm: cores and hardware threads, typed accelerators, the account of the shell."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from job_cases import Cluster, make_job

from shardway.errors import UserError
from shardway.launch.hosts import LocalHost
from shardway.launch.job import JobEnvironment, QueueTerms, Shape
from shardway.launch.job_script import render_job_script, render_library
from shardway.launch.schedulers.pbs import Pbs
from shardway.launch.submission.prepare import Prepared, SubmitRequest, prepare
from shardway.resolve.request import ResolveRequest
from shardway.runfile.load import load_run

THREADS = Shape(2, 4, 48, 4, threads_per_core=2)


@pytest.mark.parametrize(("launcher", "tasks", "cpus"), [("srun", 4, 24), ("torchrun", 1, 96), ("agent", 1, 96)])
def test_a_task_gets_all_threads_of_its_cores(launcher: str, tasks: int, cpus: int) -> None:
    """As Slurm fills the threads of the same cores, half of them would be half of the cores."""
    script = render_job_script(make_job("slurm", launcher, shape=THREADS))
    assert f"#SBATCH --ntasks-per-node={tasks}\n#SBATCH --cpus-per-task={cpus}\n" in script
    assert set(re.findall(r"--cpus-per-task=\d+", script)) == {f"--cpus-per-task={cpus}"}
    assert "export OMP_NUM_THREADS=12  # " in script


@pytest.mark.parametrize(
    ("form", "kind", "line"),
    [
        ("gres", "", "--gres=gpu:4"),
        ("gres", "a100", "--gres=gpu:a100:4"),
        ("gpus-per-node", "a100", "--gpus-per-node=a100:4"),
    ],
)
def test_accelerators_may_have_a_type(form: str, kind: str, line: str) -> None:
    job = make_job("slurm", "srun")
    terms: QueueTerms = replace(job.terms, accelerators=form, accelerator_type=kind)
    assert f"#SBATCH {line}\n" in render_job_script(replace(job, terms=terms))


def prepare_on_slurm(tmp_path: Path, *words: str) -> Prepared:
    """What `submit` of a training on two nodes of a Slurm without a profile would do."""
    asked = ("site.name=generic-slurm", "site.nodes=2", "site.ranks_per_node=4", "site.walltime=5m", "site.venv=none")
    (tmp_path / "run.toml").write_text('format = 1\n[data]\nkind = "synthetic"\n')
    return prepare(
        SubmitRequest(ResolveRequest(tmp_path / "run.toml", (*asked, *words), tmp_path / "run"), here=tmp_path),
        LocalHost(),
    )


@pytest.mark.parametrize(
    ("form", "gres", "lines"),
    [
        ("gres", "lscratch:100", ["--gres=gpu:4,lscratch:100"]),
        ("gres", ["localtmp:1024", "craynetwork:0"], ["--gres=gpu:4,localtmp:1024,craynetwork:0"]),
        ("gpus-per-node", "nvme:1", ["--gres=nvme:1", "--gpus-per-node=4"]),
        ("none", "nvme:1", ["--gres=nvme:1"]),
    ],
)
def test_other_generic_resources_stand_beside_the_accelerators(form: str, gres: object, lines: list[str]) -> None:
    """Of two lines Slurm takes the last (Snakemake-Profiles/slurm#86)."""
    job = make_job("slurm", "srun")
    terms = replace(
        job.terms, accelerators=form, accelerator_type="", options={"--gres": gres, "reservation": "course"}
    )
    script = render_job_script(replace(job, terms=terms))
    assert re.findall(r"^#SBATCH (--g\S+)", script, re.MULTILINE) == lines
    assert "#SBATCH --reservation=course\n" in script


def test_generic_resources_that_are_no_gpus_are_asked_for_by_options(tmp_path: Path) -> None:
    prepared = prepare_on_slurm(tmp_path, 'site.options={gres = "lscratch:100"}')
    assert "#SBATCH --gres=lscratch:100\n" in prepared.script
    with pytest.raises(UserError, match=r"site\.ranks_per_node and site.accelerator_type"):
        prepare_on_slurm(tmp_path, 'site.options={gres = "lscratch:100,gpu:a100:4"}')


@pytest.mark.parametrize(
    ("launcher", "option", "cpus", "threads"),
    [("srun", "cpus-per-task", 8, 8), ("srun", "c", 8, 8), ("agent", "--cpus-per-task", 8, 2)],
)
def test_cores_that_options_ask_for_are_those_of_the_steps(
    launcher: str, option: str, cpus: int, threads: int, tmp_path: Path
) -> None:
    """srun has them not from the job (Slurm 22.05), and ranks would share a core; redmod-team/profit#179."""
    script = prepare_on_slurm(tmp_path, f'site.options={{"{option}" = {cpus}}}', f"site.launcher={launcher}").script
    assert set(re.findall(r"--cpus-per-task=(\d+)", script)) == {str(cpus)}
    assert f"export OMP_NUM_THREADS={threads}  # " in script


@pytest.mark.parametrize("option", ["mem-per-cpu", "--mem-per-gpu"])
def test_memory_is_said_in_one_way(option: str, tmp_path: Path) -> None:
    """sbatch refuses a job that says it in two."""
    options = f'site.options={{"{option}" = "4G"}}'
    site = ("site.name=leonardo-booster", "site.account=a")
    assert "#SBATCH --mem=" in prepare_on_slurm(tmp_path, *site).script
    assert re.findall(r"#SBATCH (--mem\S*)", prepare_on_slurm(tmp_path, *site, options).script) == [
        f"--{option.lstrip('-')}=4G"
    ]
    with pytest.raises(UserError, match=r"and site\.memory both say the memory of the job, and Slurm takes one"):
        prepare_on_slurm(tmp_path, options, "site.memory=8GiB")


def test_steps_have_the_environment_of_the_job() -> None:
    assert "export SLURM_EXPORT_ENV=ALL" in render_library("slurm")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("site.environment.X=1", "1"),
        ("site.environment.X=true", "true"),
        ('site.environment.X="a b"', "a b"),
        ("site.environment.X=[1]", "[1]"),
        ("site.environment.X=a=b", "a=b"),
    ],
)
def test_a_variable_of_the_command_line_is_its_text(word: str, value: str) -> None:
    loaded = load_run(None, ['site.environment={Y = "kept"}', word])
    assert loaded.values.site.environment == {"Y": "kept", "X": value}
    assert loaded.origins["site.environment"] == "command line"


def test_a_script_of_pbs_is_submitted_as_a_program(tmp_path: Path) -> None:
    """With the words of its #PBS lines as PBS reads them there: quotes go, and nothing is expanded."""
    job = make_job("pbs", "mpirun", run=tmp_path / "a run's" / "base", around=JobEnvironment(tmp_path))
    terms = replace(job.terms, options={"W": "umask=022", "l": ["filesystems=home:eagle", "model=a(b)$HOME"]})
    job = replace(job, terms=terms)
    job.folder.make()
    job.folder.job_script.write_text(render_job_script(job))
    cluster = Cluster.make(tmp_path / "cluster")
    script = str(job.folder.job_script)
    command = Pbs().submit(script, job.log_for_scheduler, "7.server")
    done = subprocess.run(command, env=cluster.variables("1"), capture_output=True, text=True, check=True)
    assert Pbs().read_job_id(done.stdout) == "101.server"
    (words,) = cluster.list_calls("qsub")
    assert words[:3] == ["qsub", "-W", "depend=afterany:7.server"]
    assert words[-4:] == ["--", "/bin/bash", "-l", script]
    assert words[3:-4] == [
        word for line in Pbs().directives(job) for word in shlex.split(line.text.removeprefix("#PBS "))
    ]
    assert {"umask=022", "filesystems=home:eagle", "model=a(b)$HOME", "walltime=02:00:00"} < set(words)
