"""The product of the degrees against an oracle that tries every pair."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from resolving import resolve_or_refuse

from shardway.resolve.draft import nearest_divisor

DEGREES = st.one_of(st.just("auto"), st.integers(1, 12))


def possible(ranks: int, replicate: int | str, shard: int | str) -> set[tuple[int, int]]:
    """All (dp_replicate, dp_shard) that multiply to the ranks and are what was asked for."""
    pairs = itertools.product(range(1, ranks + 1), repeat=2)
    return {(r, s) for r, s in pairs if r * s == ranks and replicate in ("auto", r) and shard in ("auto", s)}


@given(st.integers(1, 24), DEGREES, DEGREES)
@settings(max_examples=60)
def test_degrees_are_the_one_pair_that_fits_or_refused(ranks: int, replicate: int | str, shard: int | str) -> None:
    words = (f"parallel.dp_replicate={replicate}", f"parallel.dp_shard={shard}", "train.global_batch=144")
    fitting = possible(ranks, replicate, shard)
    resolved = resolve_or_refuse(*words, ranks=ranks)
    if isinstance(resolved, str):
        assert not fitting
        assert resolved.startswith("1 problem in the run\n  parallel.dp_")
    else:
        parallel = resolved.values.parallel
        expected = {(1, ranks)} if replicate == shard == "auto" else fitting
        assert {(parallel.dp_replicate, parallel.dp_shard)} == expected


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 60), st.integers(1, 9))
def test_the_micro_batches_of_a_step_hold_every_sample_once(r: int, s: int, batch: int, micro: int) -> None:
    """Each rank has at most ceil(batch / ranks) samples, in `accumulation` portions of at most `micro_batch`."""
    words = (f"parallel.dp_replicate={r}", f"parallel.dp_shard={s}", f"train.global_batch={batch}")
    share = -(-batch // (r * s))
    resolved = resolve_or_refuse(*words, f"train.micro_batch={micro}", ranks=r * s)
    if isinstance(resolved, str):
        assert batch < r * s or micro > share
    else:
        derived = resolved.derived
        assert derived.replicas == r * s
        assert derived.accumulation * micro >= share > (derived.accumulation - 1) * micro


@given(st.integers(1, 400), st.integers(1, 500))
def test_thenearest_divisor(number: int, wanted: int) -> None:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    assert nearest_divisor(number, wanted) == min(divisors, key=lambda d: (abs(d - wanted), d))
