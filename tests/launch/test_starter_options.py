"""Who starts the ranks where nobody says it; what keys of [run] become of ft_launcher's options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.launch.hosts.local import LocalHost
from shardway.launch.submission.prepare import SubmitRequest, prepare
from shardway.ranks.heartbeat import CPU_MASKS
from shardway.resolve.request import parse_words
from shardway.sites.load import load_site

ASKED = ("site.launcher=ft_launcher", "site.walltime=2h", "site.nodes=2", "site.ranks_per_node=4")


def prepared(tmp_path: Path, *words: str) -> str:
    """The job script for a cluster of which nothing is known."""
    request = replace(parse_words([*ASKED, *words]), directory=tmp_path / "run")
    return prepare(SubmitRequest(request, site="generic-slurm", here=tmp_path), LocalHost()).script


def launcher_of(site: str, *words: str) -> str:
    """The program that a job of this site starts on each node or rank, by its script; for Shardway's own training."""
    request = replace(parse_words(["site.nodes=2", "site.walltime=2h", *words]), directory=Path("/runs/mine"))
    script = prepare(SubmitRequest(request, site=site, here=Path("/code")), LocalHost()).script
    return next(name for name, sign in SIGNS.items() if sign in script)


SIGNS = {
    "agent": ' --nodes "$SHARDWAY_NODES" ',
    "torchrun": "torch.distributed.run",
    "srun": "--label",
    "mpirun": "mpirun",
}


@pytest.mark.parametrize(
    ("site", "words", "launcher"),
    [
        ("generic-slurm", (), "agent"),
        ("jupiter", ("site.account=a",), "agent"),
        ("jupiter", ("site.account=a", "site.launcher=srun"), "srun"),
        ("generic-pbs", (), "mpirun"),
        ("generic-pbs", ("run.elastic=[1, 2]",), "agent"),
    ],
)
def test_our_own_agent_starts_a_training_under_slurm(site: str, words: tuple[str, ...], launcher: str) -> None:
    assert launcher_of(site, *words) == launcher


def test_a_site_may_have_another_starter(tmp_path: Path) -> None:
    """A default of its profile is as if each run file had said it."""
    profile = tmp_path / "mine.toml"
    lines = ('extends = "generic-slurm"', 'name = "mine"', "[defaults]", 'launcher = "srun"')
    profile.write_text("\n".join(("format = 1", 'title = "mine"', 'scheduler = "slurm"', *lines[:2], *lines[2:])))
    assert launcher_of(str(profile)) == "srun"


def test_ranks_of_an_agent_are_bound_where_the_site_binds_tasks() -> None:
    """srun's own option would bind the agent."""
    request = replace(parse_words(["site.account=a", "site.walltime=2h"]), directory=Path("/runs/mine"))
    script = prepare(SubmitRequest(request, site="lumi-g", here=Path("/code")), LocalHost()).script
    masks = load_site("lumi-g").start.masks
    assert len(masks) == 8
    assert f"export {CPU_MASKS}={','.join(masks)}" in script
    assert "--cpu-bind=mask_cpu" not in script


def options_of(script: str) -> set[str]:
    """Those of ft_launcher that torchrun has not, and the restarts."""
    return {word for word in script.split() if word.startswith(("--max-restarts", "--ft-"))}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {"--max-restarts=3", "--ft-initial-rank-heartbeat-timeout=600"}),
        (
            ("run.max_restarts=0", "run.hang_timeout=90s", "run.start_timeout=20min"),
            {"--max-restarts=0", "--ft-initial-rank-heartbeat-timeout=1200", "--ft-rank-heartbeat-timeout=90"},
        ),
        (
            ("run.max_restarts=7", "run.hang_timeout=off"),
            {"--max-restarts=7", "--ft-initial-rank-heartbeat-timeout=inf", "--ft-rank-heartbeat-timeout=inf"},
        ),
    ],
)
def test_keys_of_the_run_become_options(words: tuple[str, ...], expected: set[str], tmp_path: Path) -> None:
    always = {"--ft-workload-check-interval=1", "--ft-enable-nic-monitor=false"}
    assert options_of(prepared(tmp_path, *words)) == expected | always


def test_torchrun_has_none_of_them(tmp_path: Path) -> None:
    assert options_of(prepared(tmp_path, "site.launcher=torchrun", "run.max_restarts=7")) == set()


def test_the_doctor_is_started_by_torchrun(tmp_path: Path) -> None:
    script = prepared(tmp_path, "site.preflight=true")
    modules = [line.split()[3] for line in script.splitlines() if "exec python3 -m " in line]
    assert modules == ["torch.distributed.run", "nvidia_resiliency_ext.fault_tolerance.launcher"]


def test_fewer_nodes_are_not_asked_of_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='"ft_launcher" ends the job where a node is lost'):
        prepared(tmp_path, "run.elastic=[1, 2]")


def test_it_is_no_command_of_a_job(tmp_path: Path) -> None:
    order = SubmitRequest(parse_words([]), command=("ft_launcher", "--nnodes=2", "train.py"), here=tmp_path)
    with pytest.raises(UserError, match="it begins with ft_launcher, and the job script starts the ranks itself"):
        prepare(order, LocalHost())
