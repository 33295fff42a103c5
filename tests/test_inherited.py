"""What a job and its ranks inherit: the table, and that shell and Python go by it alike."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from page_tables import check_table
from shardway.inherited import (
    Family,
    describe_options,
    find_family,
    list_families,
    list_options,
    list_patterns,
    list_unfit_for_ranks,
    strip,
)
from shardway.launch.schedulers.local import ThisMachine
from shardway.launch.script import read_block
from variables_of_jobs import OF_JOBS

PASSES = (  # noqa: SIM905
    "PATH HOME LANG PYTHONPATH VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH https_proxy NCCL_SOCKET_IFNAME NCCL_DEBUG "
    "GLOO_SOCKET_IFNAME OMP_NUM_THREADS CUDA_VISIBLE_DEVICES OMPI_MCA_btl_tcp_if_include OMPI_MCA_pml PMIX_MCA_gds "
    "I_MPI_FABRICS UCX_NET_DEVICES FI_PROVIDER SLURM_CONF SLURM_CLUSTERS SLURM_JWT SLURM_MPI_TYPE "
    "PMI_NO_FORK PALS_RPC_TIMEOUT PMIX_HOME PBS_PRIMARY PBS_SCHEDULER_SERVICE_PORT PBS_DEFAULT PBS_CONF_FILE "
    "LSF_ENVDIR FLUX_URI HF_HOME WANDB_MODE SM_HOSTS RAY_ADDRESS JUPYTERHUB_USER KUBERNETES_SERVICE_HOST TORCH_LOGS "
    "SHARDWAY_CACHE APPTAINER_BIND RANKING WORLD_SIZES MYRANK"
).split()


@pytest.mark.parametrize("name", OF_JOBS)
def test_what_is_of_another_job_reaches_none(name: str) -> None:
    assert strip({name: "1"}) == {}


@pytest.mark.parametrize("name", PASSES)
def test_what_a_person_has_set_for_all_passes(name: str) -> None:
    assert strip({name: "1"}) == {name: "1"}


def test_families_do_not_overlap() -> None:
    for name in OF_JOBS:
        assert sum(family.has(name) for family in list_families()) == 1, name


def test_ranks_of_an_agent_are_no_tasks_of_mpi() -> None:
    environ = {"PMI_RANK": "0", "SLURM_JOB_ID": "7", "RANK": "3", "PATH": "/bin", "PMIX_MCA_gds": "hash"}
    assert list_unfit_for_ranks(environ) == ["PMI_RANK", "RANK"]


def test_ranks_of_an_agent_get_no_variable_that_a_scheduler_of_another_package_keeps_from_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other(ThisMachine):
        inherited = (
            Family("a task of it", ("OTHER_TASK_*",), "of the task", kept=("OTHER_TASK_HOME",)),
            Family("a job of it", ("OTHER_JOB",), "of the job", reaches_ranks=True),
        )

    monkeypatch.setattr("shardway.inherited.make_installed", lambda group: (Other(),))
    list_families.cache_clear()
    try:
        found = list_unfit_for_ranks(dict.fromkeys(("OTHER_TASK_ID", "OTHER_TASK_HOME", "OTHER_JOB", "RANK"), "1"))
    finally:
        list_families.cache_clear()
    assert found == ["OTHER_TASK_ID", "RANK"]


VALUES = st.text(st.characters(blacklist_characters="\x00", blacklist_categories=("Cs",)), max_size=8)
ENVIRONS = st.dictionaries(st.sampled_from([*OF_JOBS, *PASSES]), VALUES, max_size=30)
KEPT_BY_BASH = ("PATH", "HOME", "PWD", "OLDPWD", "SHLVL", "_")


def drop_in_shell(environs: list[dict[str, str]]) -> list[dict[str, str]]:
    """What the function of job scripts leaves of each environment, in one bash."""
    words = [pattern for of_ranks in (True, False) for pattern in list_patterns(of_ranks=of_ranks)]
    script = read_block("lib", "drop_variables").text + '\ndrop_variables "$@"; exec /usr/bin/env -0'
    found = []
    for environ in environs:
        done = subprocess.run(["/bin/bash", "-c", script, "x", *words], env=environ, capture_output=True, check=True)
        entries = (entry.split("=", 1) for entry in os.fsdecode(done.stdout).split("\0") if entry)
        found.append({name: value for name, value in entries if name not in KEPT_BY_BASH})
    return found


@settings(max_examples=40, deadline=None)
@given(ENVIRONS)
def test_shell_and_python_drop_the_same(environ: dict[str, str]) -> None:
    (found,) = drop_in_shell([environ])
    assert found == {name: value for name, value in strip(environ).items() if name not in KEPT_BY_BASH}


ASKED = {"site.account": "proj", "site.queue": "gpu", "site.walltime": "1800 s", "site.options.qos": "high"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, []),
        ({"SBATCH_ACCOUNT": "proj"}, ["the account is proj, as SBATCH_ACCOUNT of this shell says"]),
        (
            {"SBATCH_ACCOUNT": "other"},
            ["SBATCH_ACCOUNT=other of this shell is left out: the job has proj (site.account)"],
        ),
        (
            {"SBATCH_TIMELIMIT": "3"},
            ["SBATCH_TIMELIMIT=3 of this shell is left out: the job has 1800 s (site.walltime)"],
        ),
        ({"SBATCH_QOS": "high"}, []),
        ({"SBATCH_MEM_BIND": "local"}, ["is left out: to ask for it, set site.options.mem-bind"]),
        ({"SLURM_ACCOUNT": "other"}, []),
        ({"SBATCH_TIMELIMIT": "30"}, []),
        ({"SBATCH_TIMELIMIT": "00:30:00"}, []),
        ({"SBATCH_TIMELIMIT": "0-00:30"}, []),
        ({"SBATCH_OUTPUT": "x"}, ["SBATCH_OUTPUT=x of this shell is left out: the job script says it"]),
        ({"SBATCH_GRES": "gpu:2"}, ["is left out: to ask for it, set site.ranks_per_node"]),
    ],
)
def test_options_for_sbatch_are_told(options: Mapping[str, str], told: list[str]) -> None:
    found = list(describe_options(list_options(options), ASKED))
    assert len(found) == len(told)
    assert all(text in sentence for text, sentence in zip(told, found, strict=True)), found


def test_the_page_shows_the_table(request: pytest.FixtureRequest) -> None:
    rows: list[tuple[str, ...]] = [("what", "variables", "but not", "a run may set", "why", "ranks of an agent see it")]
    for family in list_families():
        parts = (family.names, family.kept, family.settings)
        shown = (" ".join(f"`{name}`" for name in part) for part in parts)
        rows.append((family.subject, *shown, family.reason, "yes" if family.reaches_ranks else "no"))
    check_table(request, "environment.md", "variables", rows)
    assert find_family("PATH") is None
