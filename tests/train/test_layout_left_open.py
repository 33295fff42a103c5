"""A run whose layout is open: real ranks train it, and its checkpoint can be exported."""

from __future__ import annotations

from pathlib import Path

from pool import ranks
from runs import pool_ranks, read_steps, train_tiny
from shardway.plan.case import machine_of_site
from shardway.resolve import Circumstances, resolve
from shardway.rundir.directory import RunDir
from shardway.runfile.load import load_run
from shardway.sites.load import load_site
from shardway.train.run_weights import lay_evenly


@ranks(2)
def test_two_ranks_train_a_run_whose_layout_is_open(rank: int, tmp_path: Path) -> None:
    outcome = train_tiny(tmp_path, pool_ranks(), "parallel.layout=auto", "train.steps=2", "optim.warmup=0 steps")
    if rank != 0:
        return
    assert (outcome.state, outcome.step) == ("finished", 2)
    assert len(read_steps(tmp_path)) == 2
    saved = RunDir(tmp_path).read_resolved()["parallel"]
    assert (saved["layout"], saved["dp_replicate"], saved["dp_shard"]) == ("auto", 2, 1)


def test_an_export_is_laid_out_by_itself(tmp_path: Path) -> None:
    """Whatever machine it is on: weights are shared by all of its ranks."""
    words = ("parallel.layout=auto", "data.kind=synthetic", "model.tied=false")
    facts = Circumstances(2, 2, 8, 2, machine=machine_of_site(load_site("dgx-slurm")))
    path = tmp_path / "resolved.toml"
    path.write_text(resolve(load_run(None, words), facts).render(), encoding="utf-8")
    parallel = resolve(lay_evenly(load_run(path)), facts).values.parallel
    assert (parallel.layout, parallel.dp_replicate, parallel.dp_shard) == ("given", 1, 2)


def test_how_a_run_was_trained_does_not_keep_a_machine_without_gpus_from_an_export(tmp_path: Path) -> None:
    words = (
        *("data.kind=synthetic", "recompute.mode=budget", "recompute.budget=0.3", "train.compile=model"),
        *("train.compile_cache=cache", "run.device=cuda", "precision.compute=float8", "parallel.cpu_offload=true"),
    )
    values = resolve(lay_evenly(load_run(None, words)), Circumstances(2, 2, 8, 0)).values
    assert (values.run.device, values.train.compile, values.recompute.mode) == ("cpu", "off", "none")
    assert (values.precision.compute, values.parallel.cpu_offload) == ("fp32", False)
