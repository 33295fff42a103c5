"""`data at` and `data where` against the ids that runs have recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from pool import ranks
from runs import Died, die_at, lone_rank, open_tiny, pool_ranks, read_steps, train_tiny
from shardway.data.ledger import SampleLedger, open_ledger
from shardway.data.open import order_of
from shardway.data.order import Skips
from shardway.errors import UserError
from shardway.rundir.directory import RunDir

BATCH = 4
BASE = (
    *("run.device=cpu", "run.threads=1", "train.validate_every=off", "checkpoint.background=false"),
    *("model.dim=16", "model.layers=1", "model.heads=2", "model.ffn_dim=16", "data.seq_len=8", "data.record_ids=true"),
    *(f"train.global_batch={BATCH}", "train.steps=30", "checkpoint.every=10 steps", "optim.warmup=1 steps"),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As run.threads=1 sets it, from before the first test on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens in two files, and documents."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("a", 300), ("b", 200)):
        np.save(folder / f"{name}.npy", np.arange(count).astype(np.uint16) % 50)
    lines = [json.dumps({"text": "once upon " * (1 + number % 3)}) for number in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return folder


def words_of(data: Path) -> dict[str, tuple[str, ...]]:
    tokens = (f"data.path={data}/a.npy", "data.kind=tokens", "model.vocab=64")
    blend = f'data.blend=[{{path="{data}/a.npy",weight=2}},{{path="{data}/b.npy",weight=[[0,1],[40,3]]}}]'
    return {
        "shuffled": tokens,
        "in order": (*tokens, "data.shuffle=false"),
        "with spans left out": (*tokens, "data.skip=[[0, 3], [10, 15], [70, 90]]"),
        "a blend": (blend, "data.kind=tokens", "model.vocab=64", "data.skip=[[30, 33]]"),
        "packed": (f"data.path={data}/texts.jsonl", "data.kind=jsonl", "data.pack=true"),
    }


CASES = ("shuffled", "in order", "with spans left out", "a blend", "packed")


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of 30 steps that died after step 17."""
    made: dict[str, Path] = {}

    def train(case: str) -> Path:
        if case not in made:
            folder = tmp_path_factory.mktemp("run")
            with pytest.raises(Died):
                train_tiny(folder, lone_rank(), *words_of(data)[case], base=BASE, before_step=die_at(17))
            train_tiny(folder, lone_rank(), *words_of(data)[case], base=BASE)
            made[case] = folder
        return made[case]

    return train


def recorded(folder: Path, world: int = 1) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rank in range(world):
        for event in read_steps(folder, rank):
            found[event["step"]] = found.get(event["step"], []) + event["ids"]
    return found


def without_ids(ledger: SampleLedger) -> SampleLedger:
    """The same ledger, as if data.record_ids had been off."""
    ledger.__dict__["_recorded"] = {}
    return ledger


@pytest.mark.parametrize("case", CASES)
def test_each_step_had_what_it_recorded(trained: Callable[[str], Path], case: str) -> None:
    """After a death and a resume; also computed from the positions alone."""
    folder = trained(case)
    expected = recorded(folder)
    assert sorted(expected) == list(range(1, 31))
    for ledger in (open_ledger(folder), without_ids(open_ledger(folder))):
        assert {step: ledger.at(step).ids for step in expected} == expected
        assert all(ledger.at(step).taken for step in expected)


@pytest.mark.parametrize("case", CASES)
def test_where_agrees_with_at(trained: Callable[[str], Path], case: str) -> None:
    ledger = open_ledger(trained(case))
    coming = {step: ledger.at(step) for step in range(31, 80)}
    assert not any(each.taken for each in coming.values())
    had = recorded(trained(case))
    for sample in range(0, len(ledger.source), 3):  # type: ignore[arg-type]
        steps, following = ledger.where(sample)
        assert steps == [step for step, ids in had.items() if sample in ids]
        later = next((step for step, each in coming.items() if sample in each.ids), None)
        assert following == later or (later is None and following > 79)


@settings(max_examples=15)
@given(sample=st.integers(0, 10**6), step=st.integers(31, 10**5))
def test_a_step_to_come_is_where_its_samples_say(trained: Callable[[str], Path], sample: int, step: int) -> None:
    for case in ("with spans left out", "a blend"):
        ledger = open_ledger(trained(case))
        order, skips = order_of(ledger.values, ledger.source), Skips(ledger.values.data.skip)  # type: ignore[arg-type]
        positions = skips.find_kept((step - 1) * BATCH + np.arange(BATCH))
        assert ledger.at(step).ids == order.ids(positions).tolist()
        chosen = sample % len(ledger.source)  # type: ignore[arg-type]
        _, following = ledger.where(chosen)
        assert following is not None
        assert chosen in ledger.at(following).ids


def test_samples_have_places(trained: Callable[[str], Path], data: Path) -> None:
    for case, expected in (("shuffled", "a.npy"), ("a blend", ".npy"), ("packed", "texts.jsonl")):
        entry = open_ledger(trained(case)).at(3)
        assert len(entry.ids) == len(entry.sources) == BATCH
        assert all(expected in source or "document" in source for source in entry.sources), entry.sources
        assert entry.as_json() == {"step": 3, "ids": entry.ids, "sources": entry.sources, "taken": True}


def test_a_sample_that_is_not_there(trained: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match="there is no sample 10000\n  allowed: 0 to "):
        open_ledger(trained("shuffled")).where(10_000)


def test_ids_are_known_where_the_data_are_gone(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    for record in ("true", "false"):
        words = ("data.path=a.npy", "data.kind=tokens", "model.vocab=64", "train.steps=2", f"data.record_ids={record}")
        train_tiny(tmp_path / record, lone_rank(), *words, base=BASE)
    monkeypatch.chdir(tmp_path)
    ledger = open_ledger(tmp_path / "true")
    assert ledger.at(1).ids == recorded(tmp_path / "true")[1]
    assert ledger.at(1).sources[0] == f"sample {ledger.at(1).ids[0]} of data that cannot be opened from here"
    with pytest.raises(UserError, match=r'data\.path: "a\.npy" does not exist'):
        open_ledger(tmp_path / "false")


@ranks(2)
def test_all_ranks_of_an_attempt_count_once(rank: int, tmp_path: Path) -> None:
    """Two ranks die after step 15, and one alone takes steps 11 to 15 again."""
    words = (*("data.kind=synthetic", "data.samples=96", "model.vocab=32"), "parallel.dp_replicate=2")
    with pytest.raises(Died):
        train_tiny(tmp_path, pool_ranks(), *words, base=BASE, before_step=die_at(15))
    pool_ranks().barrier()
    if rank == 0:
        train_tiny(tmp_path, lone_rank(), *words[:3], base=BASE)
        ledger = open_ledger(tmp_path)
        order = order_of(ledger.values, ledger.source)  # type: ignore[arg-type]
        for step in (1, 10, 11, 15, 16, 30):
            expected = order.ids((step - 1) * BATCH + np.arange(BATCH)).tolist()
            assert ledger._recorded[step] == ledger.at(step).ids == expected
    pool_ranks().barrier()


# --- a dataset of a script


def train_script(folder: Path, *words: str, data: TensorDataset | None = None) -> None:
    inputs = torch.arange(40.0).reshape(20, 2)
    data = data or TensorDataset(inputs, inputs.sum(1, keepdim=True))
    with open_tiny(folder, lone_rank(), *words, base=BASE_OF_SCRIPT) as run:
        torch.manual_seed(4)
        net = run.shard(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD, net, lr=1e-6)
        for batch in run.steps(run.loader(data)):
            run.step(net, batch, lambda outputs, targets: (outputs - targets).square().mean())


BASE_OF_SCRIPT = (
    *("run.device=cpu", "run.threads=1", f"train.global_batch={BATCH}", "train.steps=7", "checkpoint.every=off"),
)


def test_samples_of_a_script_are_known_by_number(tmp_path: Path) -> None:
    train_script(tmp_path, "data.record_ids=true")
    ledger, had = open_ledger(tmp_path), recorded(tmp_path)
    assert {step: ledger.at(step).ids for step in range(1, 8)} == had
    assert ledger.at(1).sources[0] == f"sample {had[1][0]} of the dataset of the script"
    sample = had[2][1]
    assert ledger.where(sample) == ([step for step, ids in had.items() if sample in ids], None)
    with pytest.raises(UserError, match="the samples of this step are not known"):
        ledger.at(8)


def test_samples_of_a_script_that_were_not_recorded(tmp_path: Path) -> None:
    train_script(tmp_path)
    for ask in (lambda: open_ledger(tmp_path).at(1), lambda: open_ledger(tmp_path).where(1)):
        with pytest.raises(UserError, match=r"to do: set data\.record_ids = true in the next run"):
            ask()


class Numbers:
    """The same samples by number, as if they were data of a run file."""

    def __len__(self) -> int:
        return 400

    def locate(self, number: int) -> str:
        return f"place {number}"


def test_what_a_run_has_left_out_was_in_no_step(tmp_path: Path) -> None:
    """The run goes back to step 30 and leaves positions 120 to 135 out."""
    inputs = torch.randn(400, 2, generator=torch.Generator().manual_seed(3))
    targets = inputs.sum(1, keepdim=True)
    targets[128:136] = 1e4
    words = ("data.record_ids=true", "data.shuffle=false", "train.steps=40", "checkpoint.every=6 steps")
    back = ("guard.spike=20.0", "guard.on_spike=roll_back", "guard.spike_steps=2", "checkpoint.background=false")
    train_script(tmp_path, *words, *back, data=TensorDataset(inputs, targets))
    (span,) = (each.span for each in RunDir(tmp_path).left_out.read())
    assert list(span) == [120, 136]
    had, told = recorded(tmp_path), open_ledger(tmp_path)
    assert had[30] == [116, 117, 118, 119]
    assert had[31] == [136, 137, 138, 139]
    assert {step: told.at(step).ids for step in had} == had
    computed = SampleLedger(told.directory, told.values, Numbers())  # type: ignore[arg-type]
    computed.__dict__["_recorded"] = {}
    assert {step: computed.at(step).ids for step in had} == had
    assert computed.at(31).sources[0] == "place 136"
    assert told.where(121) == ([], None)
    assert computed.where(121) == ([], (400 + 121 - 16) // BATCH + 1)
    assert computed.where(136) == ([31], (400 + 136 - 16) // BATCH + 1)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no run in"):
        open_ledger(tmp_path)
