"""A job and its ranks behave as from an empty shell, whatever variables the shell of a submission had.

Variables of other jobs, launchers and tools are drawn together, and names that mean something to bash or to the
commands of a job script. What a job does among fake commands is then what it does without them.
"""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from job_cases import OWN, Cluster, make_job

from recorded_launchers import RECORDED
from shardway.inherited import find_family, strip
from shardway.launch.job import Job
from shardway.ranks.launcher import find_placement
from variables_of_jobs import OF_JOBS

OF_TOOLS = (  # noqa: SIM905
    "CONDA_PREFIX CONDA_DEFAULT_ENV VIRTUAL_ENV PYTHONPATH PYTHONSTARTUP https_proxy no_proxy JPY_PARENT_PID "
    "JUPYTERHUB_USER RAY_ADDRESS RAY_JOB_ID SM_HOSTS SM_CURRENT_HOST KUBERNETES_SERVICE_HOST OMP_NUM_THREADS "
    "CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES NCCL_DEBUG OMPI_MCA_btl OMPI_MCA_pml UCX_TLS FI_PROVIDER "
    "HYDRA_IFACE APPTAINER_BIND SINGULARITY_CACHEDIR ENROOT_CONFIG_PATH TMUX STY SSH_CONNECTION DISPLAY EDITOR "
    "LS_COLORS"
).split()
OF_THE_SCRIPT = (  # noqa: SIM905
    "run attempt here after token scheduler walltime status asked job nodes started deadline prints clocks ranks "
    "starts carry carried carries loaded exported suffix resolve secrets mpirun_options of_ranks of_jobs node "
    "name index id end state reason folder line fields sleeping counts_steps last_attempt"
).split()
OF_BASH = {
    "BASH_ENV": "/dev/null",
    "ENV": "/dev/null",
    "CDPATH": "/tmp:/",
    "SHELLOPTS": "errexit:nounset",
    "BASHOPTS": "nocasematch:failglob",
    "POSIXLY_CORRECT": "1",
    "GREP_OPTIONS": "--color=always",
    "GREP_COLOR": "1",
    "LC_ALL": "C.UTF-8",
    "TZ": "Asia/Kathmandu",
    "PS4": "+ ",
    "IFS": ",",
    "COLUMNS": "20",
    "TIMEFORMAT": "%R",
    "BASH_FUNC_module%%": "() {  echo of a module; }",
    "BASH_FUNC_cd%%": '() {  builtin cd "$@"; }',
}
VALUES = st.sampled_from(
    ["", "0", "1", "7", "3,4", "n[1-2]", "NONE", "127.0.0.1", "/no/such/place", "a b", "*", "$HOME"]
)
ENVIRONS = st.builds(
    lambda recorded, drawn, bash: {**recorded, **drawn, **bash},
    st.sampled_from([{}, *(ranks[-1] for ranks in RECORDED.values())]),
    st.dictionaries(st.sampled_from([*OF_JOBS, *OF_TOOLS, *OF_THE_SCRIPT]), VALUES, max_size=25),
    st.lists(st.sampled_from(sorted(OF_BASH)), max_size=3).map(lambda names: {name: OF_BASH[name] for name in names}),
)
JOBS = {
    "slurm, srun": make_job("slurm", "srun"),
    "slurm, torchrun": make_job("slurm", "torchrun"),
    "slurm, an agent a node": make_job("slurm", "agent"),
    "pbs, mpirun": make_job("pbs", "mpirun", program=OWN),
    "pbs, torchrun": make_job("pbs", "torchrun"),
    "this machine, mpirun": make_job("local", "mpirun"),
}
PATHS = ("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TMPDIR")
"""What a person means for the job, which goes by it."""
NUMBERS = itertools.count()


def act(folder: Path, job: Job, environ: Mapping[str, str]) -> dict[str, Any]:
    """What a job does: its state, its calls, and of each rank the words and the variables that place it."""
    cluster = Cluster.make(folder)
    run = cluster.path / "run"
    job = replace(job, run=run, around=replace(job.around, workdir=run, venv=""), warn_s=0.0)
    if job.program is OWN:
        job = replace(job, program=replace(OWN, words=("-m", "shardway", "train", str(run))))
    cluster.prepare(job)
    meant = {name: value for name, value in environ.items() if name not in PATHS}
    done = subprocess.run(
        ["bash", str(job.folder.job_script)],
        cwd=cluster.path,
        env={**meant, **cluster.variables("101")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        timeout=180,
    )
    result = job.folder.read_result()
    ranks = sorted((rank.words, sorted(placing(rank.variables).items())) for rank in cluster.list_ranks())
    state = str(result.state) if result else ""
    told = {"state": state, "code": done.returncode, "ranks": ranks, "calls": sorted(cluster.list_calls())}
    return dict(json.loads(json.dumps(told).replace(str(folder), "FOLDER")))


def placing(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of a rank's variables that mean something for one job or rank alone, but for a job's number here."""
    kept = {name: value for name, value in variables.items() if find_family(name) is not None}
    return {name: value for name, value in kept.items() if name not in ("SHARDWAY_JOB", "MASTER_PORT")}


@functools.cache
def act_without(name: str, folder: Path) -> dict[str, Any]:
    return act(folder / f"empty-{next(NUMBERS)}", JOBS[name], {})


def check(name: str, environ: Mapping[str, str], folder: Path) -> None:
    found = act(folder / f"drawn-{next(NUMBERS)}", JOBS[name], strip(environ))
    expected = act_without(name, folder)
    for what in expected:
        assert found[what] == expected[what], (name, what)


def settle(examples: int) -> settings:
    fixtures = HealthCheck.function_scoped_fixture
    return settings(max_examples=examples, deadline=None, suppress_health_check=[fixtures, HealthCheck.too_slow])


@settle(12)
@example("pbs, torchrun", {"prints": "/no/such/place", "clocks": "1"})
@example("slurm, srun", {**RECORDED["openmpi5"][-1], "SBATCH_EXPORT": "NONE"})
@example("pbs, mpirun", OF_BASH)
@example("slurm, srun", {"SHELLOPTS": "errexit:nounset"})
@given(st.sampled_from(list(JOBS)), ENVIRONS)
def test_a_job_does_what_it_does_from_an_empty_shell(tmp_path: Path, name: str, environ: dict[str, str]) -> None:
    check(name, environ, tmp_path)


@pytest.mark.exhaustive
@settle(2000)
@given(st.sampled_from(list(JOBS)), ENVIRONS)
def test_two_thousand_shells(tmp_path: Path, name: str, environ: dict[str, str]) -> None:
    check(name, environ, tmp_path)


@given(ENVIRONS)
def test_a_process_that_nothing_started_has_no_place(environ: dict[str, str]) -> None:
    """Of the shell of a submission nothing is left that would make it one of several ranks."""
    assert find_placement(strip(environ)).launcher == "none"
