"""What a submission may cost, and when it is refused for that."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.launch.hosts.local import LocalHost
from shardway.launch.runs.job_status import Ledger, LedgerEntry
from shardway.launch.submission.budget import CORE_HOURS, GPU_HOURS, RunCost, check_budget, estimate_cost
from shardway.launch.submission.prepare import Prepared, SubmitRequest, prepare
from shardway.resolve.request import ResolveRequest
from shardway.rundir.attempts import Attempt, AttemptStart, Ending, Result, Submission
from shardway.rundir.directory import RunDir

PROFILE = """format = 1
name = "tiny"
title = "Tiny"
scheduler = "slurm"
[node]
cores = 32
{node}
[request]
whole_nodes = {whole}
[defaults]
venv = "none"
{defaults}
"""
GPUS = 'accelerator = "a100-sxm4-40gb"\naccelerators_per_node = 4'


def plan(folder: Path, *keys: str, node: str = "", whole: bool = False, defaults: str = "", **more: object) -> Prepared:
    (folder / "tiny.toml").write_text(PROFILE.format(node=node, whole=str(whole).lower(), defaults=defaults))
    run = ResolveRequest(None, keys, folder / "run")
    request = SubmitRequest(run, str(folder / "tiny.toml"), ("true",), here=folder, **more)  # type: ignore[arg-type]
    return prepare(request, LocalHost())


def test_the_cost_is_nodes_times_gpus_times_walltime_times_attempts(tmp_path: Path) -> None:
    cost = estimate_cost(plan(tmp_path, "site.nodes=3", "site.walltime=2h", node=GPUS))
    assert (cost.unit, cost.most, cost.limit) == (GPU_HOURS, 3 * 4 * 2, None)
    part = plan(tmp_path, "site.ranks_per_node=1", "site.walltime=2h", node=GPUS)
    assert estimate_cost(part).most == 2
    whole = plan(tmp_path, "site.ranks_per_node=1", "site.walltime=2h", node=GPUS, whole=True)
    assert estimate_cost(whole).most == 4 * 2  # the site charges what stays idle
    chain = plan(tmp_path, "site.walltime=1h", node=GPUS, until_done=True, max_attempts=5)
    assert (estimate_cost(chain).most, estimate_cost(chain).expected) == (20, None)
    assert estimate_cost(chain, runs=6).most == 120


def test_cores_are_counted_where_there_are_no_gpus(tmp_path: Path) -> None:
    cost = estimate_cost(plan(tmp_path, "site.nodes=2", "site.walltime=30m"))
    assert (cost.unit, cost.most) == (CORE_HOURS, 2 * 32 / 2)


def test_the_budget_of_a_site_holds_for_runs_that_set_none(tmp_path: Path) -> None:
    cost = estimate_cost(plan(tmp_path, "site.walltime=30m", defaults="budget = 7.5"))
    assert (cost.limit, cost.origin) == (7.5, "site tiny, defaults.budget")
    own = estimate_cost(plan(tmp_path, "site.walltime=30m", "site.budget=9", defaults="budget = 7.5"))
    assert own.limit == 9


def entry(run: Path, number: int, started: float, ended: float, nodes: int) -> LedgerEntry:
    result = Result(Ending.DEADLINE, ended=ended) if ended else None
    submission = Submission("slurm", "t", str(number), asked={"nodes": nodes})
    return LedgerEntry(Attempt(run / f"attempts/{number:04d}"), submission, AttemptStart("1", started=started), result)


def test_what_earlier_attempts_used_is_counted_and_says_what_is_to_be_expected(tmp_path: Path) -> None:
    prepared = plan(tmp_path, "site.nodes=2", "site.walltime=1h", node=GPUS, until_done=True, max_attempts=9)
    now = time.time()
    entries = (entry(tmp_path, 1, now - 9000, now - 5400, 2), entry(tmp_path, 2, now - 3540, 0.0, 1))
    ledger = Ledger(RunDir(tmp_path / "run"), entries, {"step": 200, "total_steps": 1000})
    cost = estimate_cost(replace(prepared, ledger=ledger))
    assert cost.used == pytest.approx((1 * 2 + 1 * 1) * 4, abs=0.2)
    assert cost.expected == 8  # two hours for a fifth: eight more hours for the rest
    assert "about 64 are to be expected (8 more)" in cost.describe()


def cost(name: str = "my", **changes: object) -> RunCost:
    given = {"run": Path("runs") / name, "unit": GPU_HOURS, "nodes": 4, "per_node": 4, "walltime_s": 3600.0}
    return RunCost(**{**given, "limit": 50.0, "origin": "my.toml, line 3", **changes})  # type: ignore[arg-type]


def test_what_fits_passes_and_what_a_person_agreed_to(tmp_path: Path) -> None:
    check_budget([cost(attempts=3)])
    check_budget([cost(attempts=3, limit=None)])
    check_budget([cost(attempts=100)], agreed=True)
    check_budget([])


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ([cost(attempts=100, is_chain=True)], "--max-attempts 3 fits, or for fewer nodes"),
        ([cost(walltime_s=36000.0)], "--walltime 3h7m fits"),
        ([cost(used=40.0)], "= 16 GPU-hours, and 40 used so far"),
        ([cost(used=60.0)], "ask for less wall-time"),
        ([cost(runs=6)], "x 6 runs = 96 GPU-hours"),
        ([cost(limit=None, runs=3), cost("then", nodes=1)], "this may cost 52 GPU-hours, and 50 are allowed"),
        ([cost(), cost(limit=30.0), cost(limit=40.0)], "30 are allowed"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(costs: list[RunCost], said: str) -> None:
    with pytest.raises(UserError) as refused:
        check_budget(costs)
    assert said in str(refused.value)
    assert "(site.budget, my.toml, line 3)" in str(refused.value)
    assert "or raise site.budget, or add --yes." in str(refused.value)
