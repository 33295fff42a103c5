"""Runs on a blend: which samples they take on any world, how weights may change, what they tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pool import RankPool
from runs import TINY, lone_rank, open_tiny, pool_ranks, read_column, read_named, signal_at, train_tiny, used_by_step
from shardway.data.order import BlendOrder
from shardway.errors import UserError
from shardway.rundir.directory import RunDir
from shardway.watch.words import describe

BASE = tuple(word for word in TINY if not word.startswith(("data.kind", "data.samples")))
WORDS = (
    "data.kind=tokens",
    "data.validation_fraction=0.0",
    "data.record_ids=true",
    "train.steps=12",
    "checkpoint.every=100 steps",
    "optim.schedule=constant",
    "optim.warmup=0 steps",
)
SIZES = (30, 20)
"""Samples of the two parts; twelve steps of eight take 96, so both are read more than once."""


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Token files "a", "b" and "c" of 30, 20 and 10 samples of 12 tokens."""
    folder = tmp_path / "parts"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name, samples in (("a", 30), ("b", 20), ("c", 10)):
        np.save(folder / f"{name}.npy", draw.integers(0, 32, 12 * samples + 1).astype(np.uint16))
    return folder


def blend(parts: Path, *weights: Any) -> str:
    named = zip("abc", weights, strict=False)
    tables = (f'{{path = "{parts / f"{name}.npy"}", weight = {weight}, name = "{name}"}}' for name, weight in named)
    return f"data.blend=[{', '.join(tables)}]"


def train_on(folder: Path, replicate: int, words: Sequence[str], last: int | None) -> None:
    """Train on the ranks of the pool, or alone; stopped after step `last`."""
    ranks = pool_ranks() if replicate > 1 else lone_rank()
    before = signal_at(last, rank=replicate - 1) if last is not None else None
    layout = (f"parallel.dp_replicate={replicate}", "parallel.dp_shard=1")
    train_tiny(folder, ranks, *words, *layout, base=BASE, before_step=before)


def on_ranks(rank: int, folder: Path, replicate: int, words: Sequence[str], last: int | None) -> None:
    train_on(folder, replicate, words, last)


def attempt(pool: RankPool, folder: Path, replicate: int, *words: str, last: int | None = None) -> None:
    pool.run(on_ranks, replicate, {"folder": folder, "replicate": replicate, "words": words, "last": last})


def order_of(*weights: Any, sizes: tuple[int, ...] = SIZES) -> BlendOrder:
    steps = tuple(tuple(map(tuple, each)) if isinstance(each, list) else ((0, each),) for each in weights)
    return BlendOrder(sizes, steps, 0)


def expected(order: BlendOrder, positions: Sequence[int] = range(96)) -> list[list[int]]:
    return order.ids(np.array(positions)).reshape(-1, 8).tolist()


def test_a_blend_goes_on_exactly_on_one_two_and_three_ranks(rank_pool: RankPool, parts: Path, tmp_path: Path) -> None:
    words = (*WORDS, blend(parts, 0.7, 0.3))
    for replicate, last in ((1, 4), (2, 7), (3, None)):
        attempt(rank_pool, tmp_path / "run", replicate, *words, last=last)
    assert [event["step"] for event in read_named(tmp_path / "run", "started")] == [0, 4, 7]
    order = order_of(0.7, 0.3)
    assert used_by_step(tmp_path / "run") == expected(order)
    numbers = json.loads((RunDir(tmp_path / "run").checkpoint_path(12) / "manifest.json").read_text())["numbers"]
    assert numbers["blend"]["segments"] == [[0, [7, 3]]]
    assert numbers["blend"]["weights"] == [[[0, 0.7]], [[0, 0.3]]]
    told = read_named(tmp_path / "run", "blend")
    assert [event["step"] for event in told] == [0, 4, 7]
    assert told[2]["parts"] == [
        {"name": "a", "samples": 30, "shares": [[56, 0.7]]},
        {"name": "b", "samples": 20, "shares": [[56, 0.3]]},
    ]


def test_a_run_tells_its_parts_and_their_epochs(parts: Path, tmp_path: Path, quiet_threads: None) -> None:
    words = (*WORDS, blend(parts, [[0, 0.7], [40, 0.5]], 0.3), "data.skip=[[16, 24]]")
    train_tiny(tmp_path / "run", lone_rank(), *words, base=BASE)
    order = order_of([[0, 0.7], [40, 0.5]], 0.3)
    assert used_by_step(tmp_path / "run") == expected(order, [*range(16), *range(24, 104)])
    (told,) = read_named(tmp_path / "run", "blend")
    assert told["parts"][0] == {"name": "a", "samples": 30, "shares": [[0, 0.7], [40, 0.625]]}
    line = describe(told)
    assert line is not None
    assert line.words == (
        "trains on 70 % a (30 samples; 62.5 % from position 40 on), 30 % b (20 samples; 37.5 % from position 40 on)"
    )
    (ended,) = read_named(tmp_path / "run", "blend_epochs")
    used = np.concatenate(used_by_step(tmp_path / "run"))
    counts = [int((used < 30).sum()), int((used >= 30).sum())]
    assert [part["samples"] for part in ended["parts"]] == counts
    assert ended["parts"][1]["epochs"] == counts[1] / 20
    assert ended["reason"] == (
        f"took a {counts[0] / 30:.2f} epochs ({counts[0]} samples), b {counts[1] / 20:.2f} epochs ({counts[1]} samples)"
    )


def test_weights_may_change_where_the_run_goes_on(parts: Path, tmp_path: Path, quiet_threads: None) -> None:
    """And a part may be added behind the others; the past stays as it was."""
    train_tiny(tmp_path / "run", lone_rank(), *WORDS, blend(parts, 0.7, 0.3), "train.steps=4", base=BASE)
    later = blend(parts, [[0, 0.7], [32, 0.2]], [[0, 0.3], [32, 0.8]])
    train_tiny(tmp_path / "run", lone_rank(), *WORDS, later, "train.steps=6", base=BASE)
    order = order_of([[0, 0.7], [32, 0.2]], [[0, 0.3], [32, 0.8]])
    assert used_by_step(tmp_path / "run") == expected(order)[:6]
    assert read_named(tmp_path / "run", "started")[1]["changed"]["data.blend"][1][0]["weight"] == [[0, 0.7], [32, 0.2]]
    weights = [[0, 0.7], [32, 0.2]], [[0, 0.3], [32, 0.8], [60, 0.3]], [[0, 0], [60, 0.5]]
    train_tiny(tmp_path / "run", lone_rank(), *WORDS, blend(parts, *weights), base=BASE)
    order = order_of(*weights, sizes=(30, 20, 10))
    assert used_by_step(tmp_path / "run") == expected(order)
    (last,) = (event for event in read_named(tmp_path / "run", "blend") if event["step"] == 6)
    assert last["parts"][2]["shares"] == [[48, 0.0], [60, 0.5]]


def refuse(folder: Path, *words: str) -> str:
    before = sorted(path.name for path in RunDir(folder).checkpoints.iterdir())
    with pytest.raises(UserError) as told:
        train_tiny(folder, lone_rank(), *WORDS, *words, base=BASE)
    assert sorted(path.name for path in RunDir(folder).checkpoints.iterdir()) == before
    return str(told.value)


def test_the_past_of_a_blend_is_not_changed(parts: Path, tmp_path: Path, quiet_threads: None) -> None:
    run = tmp_path / "run"
    train_tiny(run, lone_rank(), *WORDS, blend(parts, 0.7, 0.3), "train.steps=4", base=BASE)
    assert refuse(run, blend(parts, 0.2, 0.3)) == (
        "data.blend has other weights before position 32, where the run goes on, than the first 4 steps were trained "
        "with.\n"
        "  The position in the data would mean other samples, so nothing was trained. To do: keep those weights "
        'and let the new ones begin at 32 or later: weight = [[0, 0.7], [32, 0.2]] of "a".'
    )
    assert "weight = [[0, 0.3], [32, 0.4]] of" in refuse(run, blend(parts, [[0, 0.7], [31, 0.6]], 0.4))
    assert 'weight = [[0, 0.0], [32, 1.0]] of "c"' in refuse(run, blend(parts, 0.7, 0.3, 1))
    assert refuse(run, blend(parts, 1)).startswith(
        "the training data is not what the first 4 steps were trained on: data.blend[1] has changed."
    )
    swapped = f'data.blend=[{{path = "{parts}/b.npy", weight = 0.7}}, {{path = "{parts}/a.npy", weight = 0.3}}]'
    assert f'data.blend[0] "{parts}/b.npy", [1] "{parts}/a.npy" has changed.' in refuse(run, swapped)
    assert "the fingerprint of data.path is" in refuse(run, f"data.path={parts}/a.npy")
    # The same ratio in other words is no change.
    train_tiny(
        run, lone_rank(), *WORDS, blend(parts, [[0, 7], [16, 70], [40, 140]], [[0, 3], [16, 30], [40, 60]]), base=BASE
    )
    assert used_by_step(run) == expected(order_of(0.7, 0.3))


def test_a_run_on_one_path_does_not_go_on_as_a_blend(parts: Path, tmp_path: Path, quiet_threads: None) -> None:
    run = tmp_path / "run"
    train_tiny(run, lone_rank(), *WORDS, f"data.path={parts}/a.npy", "train.steps=4", base=BASE)
    assert "the fingerprint of data.blend is" in refuse(run, blend(parts, 0.7, 0.3))


def test_a_blend_is_validated_on_all_parts(parts: Path, tmp_path: Path, quiet_threads: None) -> None:
    words = (*WORDS, blend(parts, 0.7, 0.3), "data.validation_fraction=0.1", "train.validate_every=6")
    train_tiny(tmp_path / "run", lone_rank(), *words, base=BASE)
    assert [event["step"] for event in read_named(tmp_path / "run", "validation")] == [6, 12]
    assert used_by_step(tmp_path / "run") == expected(order_of(0.7, 0.3, sizes=(27, 18)))
    assert all(map(torch.isfinite, torch.tensor(read_column(tmp_path / "run"))))


def test_loader_processes_take_the_same_samples(parts: Path, tmp_path: Path, quiet_threads: None) -> None:
    words = (*WORDS, blend(parts, 0.7, 0.3), "data.workers=1", "train.steps=4")
    train_tiny(tmp_path / "run", lone_rank(), *words, base=BASE)
    assert used_by_step(tmp_path / "run") == expected(order_of(0.7, 0.3))[:4]


def test_a_blend_without_shuffle_reads_its_parts_in_order(parts: Path, tmp_path: Path, quiet_threads: None) -> None:
    words = (*WORDS, blend(parts, 0.75, 0.25), "data.shuffle=false", "train.steps=2")
    train_tiny(tmp_path / "run", lone_rank(), *words, base=BASE)
    assert used_by_step(tmp_path / "run") == [[0, 1, 30, 2, 3, 4, 31, 5], [6, 7, 32, 8, 9, 10, 33, 11]]


def test_the_resolved_run_names_the_parts_and_no_path(parts: Path, tmp_path: Path) -> None:
    with open_tiny(tmp_path / "run", lone_rank(), *WORDS, blend(parts, 0.7, 0.3), base=BASE) as run:
        text = run.resolved.render()
    assert f'blend = [{{path = "{parts}/a.npy", weight = 0.7, name = "a"}}, ' in text
    assert "\npath = " not in text
