"""What a job asks of Slurm: cores and hardware threads, typed accelerators, the account of the shell."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from job_cases import make_job

from shardway.launch.job import QueueTerms, Shape
from shardway.launch.job_script import render_job_script
from shardway.runfile.load import load_run

THREADS = Shape(2, 4, 48, 4, threads_per_core=2)


@pytest.mark.parametrize(("starter", "tasks", "cpus"), [("srun", 4, 24), ("torchrun", 1, 96), ("agent", 1, 96)])
def test_a_task_gets_all_threads_of_its_cores(starter: str, tasks: int, cpus: int) -> None:
    """As Slurm fills the threads of the same cores, half of them would be half of the cores."""
    script = render_job_script(make_job("slurm", starter, shape=THREADS))
    assert f"#SBATCH --ntasks-per-node={tasks}\n#SBATCH --cpus-per-task={cpus}\n" in script
    assert set(re.findall(r"--cpus-per-task=\d+", script)) == {f"--cpus-per-task={cpus}"}
    assert "export OMP_NUM_THREADS=12\n" in script


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


def test_steps_have_the_environment_of_the_job() -> None:
    assert "export SLURM_EXPORT_ENV=ALL" in render_job_script(make_job("slurm", "srun"))


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
