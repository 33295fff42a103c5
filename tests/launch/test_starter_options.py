"""What keys of [run] become of ft_launcher's options, and what it is not asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.launch.hosts.local import LocalHost
from shardway.launch.submission.prepare import Order, prepare
from shardway.resolve.request import parse_words

ASKED = ("site.starter=ft_launcher", "site.walltime=2h", "site.nodes=2", "site.ranks_per_node=4")


def prepared(tmp_path: Path, *words: str) -> str:
    """The job script for a cluster of which nothing is known."""
    request = replace(parse_words([*ASKED, *words]), directory=tmp_path / "run")
    return prepare(Order(request, site="generic-slurm", here=tmp_path), LocalHost()).script


def options_of(script: str) -> set[str]:
    """Those of ft_launcher that torchrun has not, and the restarts."""
    return {word for word in script.split() if word.startswith(("--max-restarts", "--ft-"))}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {"--max-restarts=3", "--ft-initial-rank-heartbeat-timeout=600"}),
        (
            ("run.restarts=0", "run.hang_timeout=90s", "run.start_timeout=20min"),
            {"--max-restarts=0", "--ft-initial-rank-heartbeat-timeout=1200", "--ft-rank-heartbeat-timeout=90"},
        ),
        (
            ("run.restarts=7", "run.hang_timeout=off"),
            {"--max-restarts=7", "--ft-initial-rank-heartbeat-timeout=inf", "--ft-rank-heartbeat-timeout=inf"},
        ),
    ],
)
def test_keys_of_the_run_become_options(words: tuple[str, ...], expected: set[str], tmp_path: Path) -> None:
    always = {"--ft-workload-check-interval=1", "--ft-enable-nic-monitor=false"}
    assert options_of(prepared(tmp_path, *words)) == expected | always


def test_torchrun_has_none_of_them(tmp_path: Path) -> None:
    assert options_of(prepared(tmp_path, "site.starter=torchrun", "run.restarts=7")) == set()


def test_the_doctor_is_started_by_torchrun(tmp_path: Path) -> None:
    script = prepared(tmp_path, "site.preflight=true")
    modules = [line.split()[3] for line in script.splitlines() if "exec python3 -m " in line]
    assert modules == ["torch.distributed.run", "nvidia_resiliency_ext.fault_tolerance.launcher"]


def test_fewer_nodes_are_not_asked_of_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='"ft_launcher" ends the job where a node is lost'):
        prepared(tmp_path, "run.elastic=[1, 2]")


def test_it_is_no_command_of_a_job(tmp_path: Path) -> None:
    order = Order(parse_words([]), command=("ft_launcher", "--nnodes=2", "train.py"), here=tmp_path)
    with pytest.raises(UserError, match="it begins with ft_launcher, and the job script starts the ranks itself"):
        prepare(order, LocalHost())
