"""What one CUDA device can show: NCCL, bf16, FSDP2, compile, resume, and the same numbers as a CPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from runs import TINY, place, worst_difference
from shardway.checkpoint.manager import Staging
from shardway.errors import SiteError
from shardway.models.initialise import normal_
from shardway.parallel.axes.shard import shard
from shardway.parallel.blocks import find_units
from shardway.parallel.mesh import build_mesh
from shardway.parallel.precision import Precision
from shardway.ranks.launcher import find_placement
from shardway.ranks.start import Ranks, StartOptions, start_ranks
from shardway.resolve.request import ResolveRequest
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import ParallelSection
from shardway.train import step
from shardway.train.loss import compiling_losses, token_cross_entropy
from shardway.train.run import train

pytestmark = pytest.mark.gpu

FP32 = Precision(None, torch.float32)
EXACT = ("precision.compute=fp32", "precision.tf32=false", "train.compile=off")


def curve(directory: Path, *overrides: str) -> list[float]:
    """The losses of a tiny run, in fp32 where nothing else is said."""
    train(ResolveRequest(None, (*TINY, *EXACT, *overrides), directory))
    return [event["loss"] for event in RunDir(directory).events() if event["event"] == "step"]


@pytest.fixture(name="nccl")
def _nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """One rank in a process group, as torchrun would start it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": port}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    ranks = start_ranks(find_placement(os.environ), StartOptions("cuda", threads=torch.get_num_threads()))
    yield ranks
    ranks.end()


def test_a_queued_update_has_the_bits_of_one_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("run.device=cuda", "train.deterministic=true", "optim.clip=0.1")
    queued = curve(tmp_path / "queued", *words)
    monkeypatch.setattr(step, "QUEUED_ON", ())
    assert queued == curve(tmp_path / "waiting", *words)


def test_fp32_has_the_losses_of_a_cpu(tmp_path: Path) -> None:
    on_cpu = curve(tmp_path / "cpu")
    on_cuda = curve(tmp_path / "cuda", "run.device=cuda")
    assert worst_difference(on_cuda, on_cpu) < 1e-4


def test_bf16_learns_and_stays_near_fp32(tmp_path: Path) -> None:
    fp32 = curve(tmp_path / "fp32", "run.device=cuda")
    bf16 = curve(tmp_path / "bf16", "run.device=cuda", "precision.compute=bf16")
    assert bf16 != fp32
    assert worst_difference(bf16, fp32) < 2e-2


def test_what_is_left_to_the_device_is_what_it_does_fast(tmp_path: Path) -> None:
    train(ResolveRequest(None, (*TINY, "run.device=cuda"), tmp_path / "left"))
    keys = RunDir(tmp_path / "left").read_resolved()
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    assert keys["precision"]["compute"] == ("bf16" if native else "fp32")
    assert keys["precision"]["tf32"] == (torch.cuda.get_device_capability() >= (8, 0))
    assert keys["train"]["compile"] == "off", "20 steps are too few"
    assert torch.cuda.get_device_name() in RunDir(tmp_path / "left").resolved_path.read_text(encoding="utf-8")
    assert torch.get_float32_matmul_precision() == "highest", "as it was before"


def test_a_run_that_began_in_fp32_goes_on_in_it(tmp_path: Path) -> None:
    settings = ("run.device=cuda", "optim.schedule=constant", "checkpoint.every=10 steps")
    curve(tmp_path / "cut", *settings, "train.steps=10")
    train(ResolveRequest(None, (*TINY, *settings), tmp_path / "cut"))
    assert RunDir(tmp_path / "cut").read_resolved()["precision"]["compute"] == "fp32"


@pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
def test_compiled_blocks_have_the_losses_of_eager_ones(tmp_path: Path) -> None:
    eager = curve(tmp_path / "eager", "run.device=cuda")
    compiled = curve(tmp_path / "compiled", "run.device=cuda", "train.compile=blocks")
    assert worst_difference(compiled, eager) < 1e-3


def test_a_resumed_run_goes_on_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with this alone
    settings = ("run.device=cuda", "train.deterministic=true", "optim.schedule=constant")
    whole = curve(tmp_path / "whole", *settings)
    curve(tmp_path / "cut", *settings, "train.steps=10", "checkpoint.every=10 steps")
    assert curve(tmp_path / "cut", *settings, "checkpoint.every=10 steps") == whole


def replayed(directory: Path) -> list[str]:
    """What the run said of passes that it replays."""
    return [event["reason"] for event in RunDir(directory).events() if event["event"] == "passes_replayed"]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("words", [("precision.compute=fp32",), ("precision.compute=bf16", "train.compile=blocks")])
def test_replayed_passes_have_the_losses_of_those_one_by_one(words: tuple[str, ...], tmp_path: Path) -> None:
    settings = ("run.device=cuda", "train.micro_batch=2", "train.global_batch=8", *words)
    plain = curve(tmp_path / "plain", *settings, "train.cuda_graphs=false")
    graphs = curve(tmp_path / "graphs", *settings)
    assert (replayed(tmp_path / "plain"), len(replayed(tmp_path / "graphs"))) == ([], 1)
    assert replayed(tmp_path / "graphs")[0].startswith("passes are replayed as CUDA graphs: ")
    assert worst_difference(graphs, plain) < 1e-6


def test_a_run_with_replayed_passes_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    settings = ("run.device=cuda", "optim.schedule=constant", "checkpoint.every=10 steps")
    whole = curve(tmp_path / "whole", *settings)
    curve(tmp_path / "cut", *settings, "train.steps=10")
    assert worst_difference(curve(tmp_path / "cut", *settings), whole) < 1e-6
    assert len(replayed(tmp_path / "cut")) == 2


@pytest.mark.filterwarnings("default")
def test_a_compiled_loss_is_that_of_its_formula() -> None:
    logits = torch.randn(3, 50, 997, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 997, (3, 50), device="cuda")
    targets[0, :7] = -100
    found = []
    for wanted in (False, True):
        leaf = logits.clone().requires_grad_()
        with compiling_losses(wanted):
            loss = token_cross_entropy(leaf, targets)
        loss.total.backward()
        found.append((loss.total, loss.count, leaf.grad))
    (plain, count, gradient), (compiled, same, other) = found
    assert int(count) == int(same) == 143
    torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(other, gradient, rtol=1e-2, atol=1e-4)


def test_nccl_adds_and_gathers_on_one_device(nccl: Ranks) -> None:
    assert "nccl" in str(dist.get_backend_config())
    assert nccl.sum(torch.ones(3, device="cuda")).tolist() == [1.0, 1.0, 1.0]
    assert nccl.gather("here") == ["here"]


def test_fsdp2_on_one_device_trains_like_the_plain_model(nccl: Ranks) -> None:
    mesh = build_mesh(nccl, ParallelSection(dp_replicate=1))
    plain, sharded = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)) for _ in "ab")
    sharded.load_state_dict(plain.state_dict())
    units = find_units(sharded, None)
    shard(sharded.cuda(), units, [], mesh, ParallelSection(), FP32, nccl.device)
    plain.cuda()
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    inputs = torch.randn(16, 8, device="cuda")
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(inputs).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs)


def test_initial_values_have_the_bits_of_a_cpu() -> None:
    on_cpu, on_cuda = torch.empty(1000, 7), torch.empty(1000, 7, device="cuda")
    for tensor in (on_cpu, on_cuda):
        normal_(tensor, seed=3, name="weight", std=0.02)
    assert torch.equal(on_cuda.cpu(), on_cpu)


def test_more_ranks_than_devices_are_refused_with_the_reason() -> None:
    devices = torch.cuda.device_count()
    with pytest.raises(SiteError, match=f"sees {devices} CUDA devices"):
        start_ranks(place(devices, devices + 1), StartOptions("cuda"))


@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_goes_on_on_another_kind_of_device(first: str, then: str, tmp_path: Path) -> None:
    settings = ("optim.schedule=constant", "checkpoint.every=10 steps")
    curve(tmp_path / "moved", *settings, f"run.device={first}", "train.steps=10")
    moved = curve(tmp_path / "moved", *settings, f"run.device={then}")
    assert len(moved) == 20
    assert worst_difference(moved, curve(tmp_path / "stayed", *settings, f"run.device={first}")) < 1e-4


def test_copies_of_a_state_are_its_bits_and_are_made_once() -> None:
    """Into page-locked memory, which is filled while the device goes on."""
    staging, tensors = Staging(), {"weights": torch.randn(1000, 33, device="cuda"), "step": torch.tensor(3.0)}
    first = staging.stage(tensors)
    assert first["weights"].is_pinned()
    assert torch.equal(first["weights"], tensors["weights"].cpu())
    kept, address = tensors["weights"].clone(), first["weights"].data_ptr()
    again = staging.stage(tensors)
    tensors["weights"].add_(1.0)  # as the next step does
    assert again["weights"].data_ptr() == address
    assert torch.equal(again["weights"], kept.cpu())
