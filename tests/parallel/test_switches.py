"""Switches of the process: set from a run, every time, and what determinism gives on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config

from shardway.parallel.blocks import apply_backend_switches
from shardway.runfile.schema import PrecisionSection, RecomputeSection, RunFile, TrainSection
from small_stack import build_stack, gradients, stack_loss, token_batch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts torch's switches back."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    precision = torch.get_float32_matmul_precision()
    budget = torch._functorch.config.activation_memory_budget
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    torch._functorch.config.activation_memory_budget = budget
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn


def run_file(**sections: dict[str, Any]) -> RunFile:
    kinds = {"train": TrainSection, "precision": PrecisionSection, "recompute": RecomputeSection}
    return RunFile(**{name: kinds[name](**keys) for name, keys in sections.items()})


def test_every_switch_follows_the_run_and_the_next_one_undoes_it(tmp_path: Path) -> None:
    cuda = torch.device("cuda")
    apply_backend_switches(
        run_file(
            train={"compile": "blocks", "compile_cache": str(tmp_path), "cudnn_benchmark": True},
            precision={"tf32": True},
            recompute={"mode": "budget", "budget": 0.25},
        ),
        cuda,
    )
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.benchmark is True
    assert torch._functorch.config.activation_memory_budget == 0.25
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    apply_backend_switches(run_file(recompute={"budget": 0.25}), cuda)
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.benchmark is False
    assert torch._functorch.config.activation_memory_budget == 1.0


def test_a_run_that_does_not_compile_needs_no_folder() -> None:
    apply_backend_switches(run_file(train={"compile_cache": "/proc/no/such"}), CPU)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_deterministic_run_switches_all_of_it_on_and_leaves_what_cublas_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply_backend_switches(run_file(train={"deterministic": True}), CPU)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    apply_backend_switches(run_file(train={"deterministic": True}), CPU)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    apply_backend_switches(run_file(), CPU)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


def test_a_deterministic_run_refuses_an_operation_without_one_result() -> None:
    apply_backend_switches(run_file(train={"deterministic": True}), CPU)
    values = torch.zeros(4)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        values.put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)


def test_two_deterministic_runs_on_a_cpu_are_the_same_bits() -> None:
    apply_backend_switches(run_file(train={"deterministic": True}), CPU)
    first, second = (_train() for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def _train() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = build_stack(2, dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        gradients(model, token_batch(4, 16, seed=step))
        optimizer.step()
    return {**model.state_dict(), "loss": stack_loss(model, token_batch()).detach()}


def _kept_bytes(budget: float) -> int:
    """Bytes that the forward pass of a compiled stack keeps for the backward pass, its weights aside."""
    torch._dynamo.reset()
    apply_backend_switches(run_file(recompute={"mode": "budget", "budget": budget}), CPU)
    model = build_stack(2)
    for block in model.blocks:
        block.compile(backend="aot_eager_decomp_partition")
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        loss = stack_loss(model, token_batch())
    loss.backward()
    return sum(tensor.nbytes for tensor in kept if tensor.data_ptr() not in weights)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_smaller_budget_keeps_less() -> None:
    kept = [_kept_bytes(budget) for budget in (1.0, 0.5, 0.0)]
    torch._dynamo.reset()
    assert kept[0] > kept[1] > kept[2]
