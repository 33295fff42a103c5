"""`train.micro_batch = "auto"` where the accelerator is known: the fastest that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned_runs import H100, SMALL, TIGHT, price, resolve_on
from resolving import value_of

from shardway.plan.case import Machine
from shardway.plan.planner import NEAR
from shardway.resolve.planned import list_sizes

RUN = (*SMALL, "train.global_batch=96", "parallel.dp_shard=2")


def micro_of(machine: Machine | None, *words: str) -> int:
    resolved = resolve_on(machine, *RUN, *words, ranks=2)
    size = value_of(resolved, "train.micro_batch")
    assert isinstance(size, int)
    return size


@pytest.mark.parametrize("machine", [H100, TIGHT, replace(H100, memory_bytes=24 * 2**30)], ids=["80", "6", "24"])
def test_no_other_size_that_fits_is_faster(machine: Machine) -> None:
    chosen = price(resolve_on(machine, *RUN, ranks=2), machine)
    others = [
        price(resolve_on(machine, *RUN, f"train.micro_batch={size}", ranks=2), machine)
        for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
    ]
    assert chosen.fits
    assert chosen.time.seconds <= min(each.time.seconds for each in others if each.fits) * (1 + NEAR)


def test_less_memory_means_smaller_micro_batches() -> None:
    sizes = [micro_of(replace(H100, memory_bytes=gib * 2**30)) for gib in (6, 12, 80)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_it_says_why() -> None:
    origin = resolve_on(H100, *RUN, ranks=2).origins["train.micro_batch"]
    assert origin.startswith("derived: the fastest of 11 sizes that fit NVIDIA H100 SXM5 80 GB; ")
    assert origin.endswith(" of 74.9 GiB by the plan")


def test_where_not_even_one_sample_fits_that_is_told_and_not_refused() -> None:
    resolved = resolve_on(replace(H100, memory_bytes=2**30), *RUN, ranks=2)
    assert value_of(resolved, "train.micro_batch") == 1
    assert resolved.origins["train.micro_batch"].startswith("derived: even one sample does not fit by the plan: ")


@pytest.mark.parametrize(
    "words",
    [
        ("model.kind=mlp",),
        ("model.kind=convnet",),
        ("train.engine=deepspeed", "deepspeed.stage=1", "parallel.dp_shard=1"),
    ],
)
def test_what_the_planner_cannot_choose_for_has_its_whole_share(words: tuple[str, ...]) -> None:
    own = ("data.kind=synthetic", "train.global_batch=96", "parallel.dp_shard=2", "precision.compute=bf16")
    resolved = resolve_on(H100, *own, *words, ranks=2)
    assert value_of(resolved, "train.micro_batch") == 48
    assert resolved.origins["train.micro_batch"] == "derived: 96 samples / 2 data-parallel ranks"


def test_without_an_accelerator_and_for_a_script_it_is_the_whole_share() -> None:
    assert micro_of(None) == 48
    assert resolve_on(H100, *RUN, ranks=2, own_model=True).values.train.micro_batch == 48


def test_a_pipeline_takes_what_fills_it() -> None:
    words = ("parallel.dp_shard=1", "parallel.pp=2")
    assert micro_of(H100, *words) == micro_of(None, *words)


def test_what_is_set_stays() -> None:
    assert micro_of(TIGHT, "train.micro_batch=48") == 48


@pytest.mark.parametrize(
    ("share", "sizes"), [(1, [1]), (6, [1, 2, 3, 4, 6]), (7, [1, 2, 4, 7]), (10**15, [2**power for power in range(13)])]
)
def test_sizes(share: int, sizes: list[int]) -> None:
    assert list_sizes(share) == sizes
