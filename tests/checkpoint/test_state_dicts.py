"""The model of a script goes out as `model.safetensors` and `model.pt`, from every layout, under its own names."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from pool import ranks
from runs import layout, lone_rank, open_tiny, pool_ranks
from shardway.checkpoint import export
from shardway.checkpoint.catalog import find_checkpoint
from shardway.checkpoint.export import write_state_dicts
from shardway.checkpoint.reader import TensorReader
from shardway.checkpoint.writer import Content, shared_place, write_checkpoint
from shardway.errors import JobError, UserError
from shardway.models.contract import ModelPlan
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from shardway.train.run_weights import export_run, export_state_dicts
from trained import whole

SCRIPT = (
    "run.device=cpu",
    "run.threads=1",
    "train.steps=3",
    "checkpoint.every=100 steps",
    "checkpoint.local_every=off",
    "checkpoint.background=false",
)


class Odd(nn.Module):
    """What a `state_dict` may hold besides plain weights, and a buffer that it leaves out."""

    steps: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)])
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int16))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.seen = {"names": ["a", "b"], "deep": {"count": 2, "share": 0.5}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x) + self.table
        for block in self.blocks:
            h = block(h)
        return self.head(h) * self.scale

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


class Split(nn.Module):
    """A model that says how it splits over the tensor axis."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)

    def plan(self) -> ModelPlan:
        return ModelPlan(tensor={"mlp.0": "column", "mlp.2": "row"}, regions=("mlp",))


def train_odd(folder: Path, on: Ranks, *words: str) -> dict[str, torch.Tensor]:
    """Three steps; the tensors of the model's own `state_dict`, whole."""
    torch.manual_seed(2)
    model = Odd()
    with open_tiny(folder, on, *words, base=SCRIPT) as run:
        net = run.shard(model)
        run.optimizer(torch.optim.AdamW, net, lr=0.1)
        tokens = torch.arange(16) % 8
        for batch in run.steps(run.loader(TensorDataset(tokens, (tokens + 1) % 8), batch_size=8)):
            run.step(net, batch, F.cross_entropy)
    return {name: whole(value) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def check_out(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Both files hold just these, bit for bit."""
    safe = load_file(folder / "model.safetensors")
    plain = torch.load(folder / "model.pt")
    extra = plain.pop("_extra_state")
    assert extra == {"names": ["a", "b"], "deep": {"count": 2, "share": 0.5}}
    for found in (safe, plain):
        assert found.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
        assert all(found[name].dtype == value.dtype for name, value in expected.items())


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["replicated", "sharded"])
@ranks(2)
def test_every_layout_goes_out_under_own_names(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    expected = train_odd(tmp_path / "run", pool_ranks(), *layout(*shape))
    assert "table" not in expected
    assert torch.equal(expected["head.weight"], expected["embedding.weight"])
    if rank == 0:
        exported = export_run(RunDir(tmp_path / "run"), tmp_path / "out", None, {})
        assert exported is not None
        assert (exported.step, exported.files) == (3, ("model.safetensors", "model.pt"))
        check_out(tmp_path / "out", expected)
        state = torch.load(tmp_path / "out" / "model.pt")
        Odd().load_state_dict(state)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2)], ids=["alone", "replicated", "sharded"])
@ranks(2)
def test_each_model_of_a_script_goes_out_by_itself(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    """They have the same names inside; also one that is not trained, and one with an extra state."""
    torch.manual_seed(2)
    on = pool_ranks() if shape != (1, 1) else lone_rank()
    models: dict[str, nn.Module] = {
        "model": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        "model-judge": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        "model-teacher": nn.Sequential(nn.Linear(4, 4)).requires_grad_(False),
        "model-odd": Odd(),
    }
    with open_tiny(tmp_path / f"run{'' if on.world > 1 else rank}", on, *layout(*shape), base=SCRIPT) as run:
        first, judge, teacher, odd = (run.shard(each, name.partition("-")[2] or None) for name, each in models.items())
        for name, net in (("optimizer", first), ("judge", judge), ("odd", odd)):
            run.optimizer(torch.optim.SGD, net, name=name, lr=0.1)
        for batch in run.steps(run.loader(TensorDataset(torch.randn(32, 4)), batch_size=8)):
            run.step(judge, batch, lambda model, b: model(first(b[0]).detach()).square().mean())
            run.step(first, batch, lambda model, b: F.mse_loss(model(b[0]), teacher(b[0])))
            run.step(odd, batch, lambda model, b: model(torch.arange(len(b[0]))).square().mean())
    expected = {
        model: {name: whole(value) for name, value in each.state_dict().items() if isinstance(value, torch.Tensor)}
        for model, each in models.items()
    }
    if rank == 0:
        exported = export_run(RunDir(tmp_path / f"run{'' if on.world > 1 else rank}"), tmp_path / "out", None, {})
        assert exported is not None
        assert sorted(exported.files) == sorted(f"{name}.{kind}" for name in models for kind in ("pt", "safetensors"))
        for name, weights in expected.items():
            found = load_file(tmp_path / "out" / f"{name}.safetensors")
            plain = torch.load(tmp_path / "out" / f"{name}.pt")
            assert ("_extra_state" in plain) == (name == "model-odd")
            assert found.keys() == weights.keys()
            assert all(
                torch.equal(found[each], value) and torch.equal(plain[each], value) for each, value in weights.items()
            )


@ranks(2)
def test_weights_that_the_tensor_axis_split_are_whole(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = Split()
    with open_tiny(tmp_path / "run", pool_ranks(), "parallel.tp=2", base=SCRIPT) as run:
        net = run.shard(model)
        run.optimizer(torch.optim.SGD, net, lr=0.1)
        for batch in run.steps(run.loader(TensorDataset(torch.ones(8, 4), torch.ones(8, 4)), batch_size=8)):
            run.step(net, batch, F.mse_loss)
    expected = {name: whole(value) for name, value in model.state_dict().items()}
    if rank == 0:
        export_state_dicts(RunDir(tmp_path / "run"), tmp_path / "out", None)
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert found.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_one_rank_alone_and_another_format(tmp_path: Path) -> None:
    expected = train_odd(tmp_path / "run", lone_rank())
    run = RunDir(tmp_path / "run")
    export_state_dicts(run, tmp_path / "out", None)
    check_out(tmp_path / "out", expected)
    export_state_dicts(run, tmp_path / "half", "bf16")
    found = load_file(tmp_path / "half" / "model.safetensors")
    assert found["head.weight"].dtype is torch.bfloat16
    assert torch.equal(found["head.weight"], expected["head.weight"].bfloat16())
    assert (found["steps"].dtype, found["mask"].dtype) == (torch.int16, torch.bool)


# --- checkpoints as other parts of the program make them


def save(directory: RunDir, tensors: dict[str, Any], step: int = 1) -> RunDir:
    directory.create()
    on = lone_rank()
    write_checkpoint(shared_place(directory, on), on, Content(step, {}, tensors, 100, lambda folder: None))
    return directory


def test_several_models_are_a_file_each(tmp_path: Path) -> None:
    tensors = {
        "model": {"weight": torch.ones(2)},
        "critic": {"0.weight": torch.zeros(3, 2)},
        "optimizer": {"state": {"weight": {"step": torch.zeros(())}}},
        "optimizer-2": {"state": {"0.weight": {"step": torch.zeros(())}}},
        "scheduler": {"last_epoch": 3},
        "random": {"rank-0": {"torch": torch.zeros(1)}},
        "notes": {"words": ["no tensor", "here"]},
    }
    found = export_state_dicts(save(RunDir(tmp_path / "run"), tensors), tmp_path / "out", None)
    assert sorted(found.files) == ["critic.pt", "critic.safetensors", "model.pt", "model.safetensors"]
    assert load_file(tmp_path / "out" / "critic.safetensors")["0.weight"].shape == (3, 2)


def test_a_format_that_safetensors_lacks_is_told(tmp_path: Path) -> None:
    """Nothing is left out: the other file has it."""
    run = save(RunDir(tmp_path / "run"), {"model": {"phase": torch.ones(2, dtype=torch.complex128)}})
    found = export_state_dicts(run, tmp_path / "out", None)
    assert found.files == ("model.pt",)
    assert found.left_out == ("no model.safetensors, which has no name for that format: phase is complex128",)
    assert torch.load(tmp_path / "out" / "model.pt")["phase"].dtype is torch.complex128


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for step in (1, 2):
        save(run, {"model": {"weight": torch.full((4,), float(step))}}, step)
    shard = run.checkpoint_path(2) / "rank-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    found = export_state_dicts(run, tmp_path / "out", None)
    assert found.step == 1
    assert [each.step for each in found.passed_over] == [2]
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].tolist() == [1.0] * 4
    shard = run.checkpoint_path(1) / "rank-00000.bin"
    shard.write_bytes(b"")
    with pytest.raises(JobError, match="is whole"):
        export_state_dicts(run, tmp_path / "none", None)
    assert not (tmp_path / "none").exists()


def test_what_deepspeed_saved_is_told(tmp_path: Path) -> None:
    run = save(RunDir(tmp_path / "run"), {"random": {"rank-0": {"torch": torch.zeros(1)}}})
    with pytest.raises(UserError, match=r"zero_to_fp32.py \. OUTPUT"):
        export_state_dicts(run, tmp_path / "out", None)


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["_sync", "finish_folder", "torch.save"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    run = save(RunDir(tmp_path / "run"), {"model": {"weight": torch.ones(2)}})
    monkeypatch.setattr(f"{export.__name__}.{step}", full)
    with pytest.raises(JobError, match="No space left on device"):
        write_state_dicts(find_checkpoint(run.path), tmp_path / "out", None)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = save(RunDir(tmp_path / "run"), {"model": {name: torch.ones(2) for name in "abc"}})
    left: list[weakref.ref[torch.Tensor]] = []
    read = TensorReader.read

    def noted(self: TensorReader, name: str) -> torch.Tensor:
        assert all(each() is None for each in left), f"another tensor is still there when {name} is read"
        tensor = read(self, name)
        left.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(TensorReader, "read", noted)
    write_state_dicts(find_checkpoint(run.path), tmp_path / "out", None)
    assert len(left) == 3


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    run = save(RunDir(tmp_path / "run"), {"model": {"weight": torch.ones(2)}})
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists, and is not overwritten"):
        export_state_dicts(run, tmp_path / "out", None)


def test_a_rank_beside_the_first_has_nothing_to_do(tmp_path: Path) -> None:
    run = save(RunDir(tmp_path / "run"), {"model": {"weight": torch.ones(2)}})
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    assert export_run(run, tmp_path / "out", None, {**environ, "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "a"}) is None
    assert not (tmp_path / "out").exists()
