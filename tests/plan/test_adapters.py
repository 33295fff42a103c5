"""The plan of a run that trains an adapter beside a frozen model, against what a step of it holds and computes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from measured_memory import Measured, measure
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pool import RankPool
from runs import COMMON, layout, open_tiny, pool_ranks
from shardway.models.huggingface.lora import LoraShape
from shardway.models.huggingface.model import build_huggingface
from shardway.plan.case import Case
from shardway.plan.huggingface import read_shape
from shardway.plan.memory import StageMemory, estimate_between_steps, estimate_memory, load_overheads
from shardway.plan.shapes import Architecture, find_adapter
from shardway.resolve.planned import case_of, shape_of_run
from shardway.runfile.schema import ModelSection, RunFile
from tiny_hf import save_tiny

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base") / "llama", "llama", **SIZES)


def plan(values: RunFile) -> Case:
    return case_of(values, shape_of_run(values, read_shape(values.model.hf)))


# --- memory


def leave_memory(rank: int, words: tuple[str, ...], folder: Path) -> None:
    """Train a step on the ranks of the pool."""
    with open_tiny(folder / "run", pool_ranks(), base=words) as run:
        measured = measure(run)
        planned = estimate_memory(plan(run.resolved.values), load_overheads())[0]
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps((measured, planned)))


TARGETS = {"all": '["all-linear"]', "attention": '["attention"]', "two": '["q_proj", "v_proj"]'}
CASES: dict[str, tuple[str, ...]] = {
    "fp32": (*layout(1, 2), "precision.compute=fp32"),
    "bf16": ("precision.compute=bf16", *layout(2, 1)),
    "bf16, attention": ("precision.compute=bf16", *layout(2, 1), f"model.lora_targets={TARGETS['attention']}"),
    "bf16, recompute": ("precision.compute=bf16", *layout(2, 1), "recompute.mode=full"),
    "fp32, two layers, dropout": (*layout(2, 1), f"model.lora_targets={TARGETS['two']}", "model.lora_dropout=0.1"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_what_the_plan_says(name: str, base: Path, rank_pool: RankPool, tmp_path: Path) -> None:
    """States within 1 %, what is kept for the backward pass within 10 % (a norm of a CPU keeps what it computes)."""
    words = (*COMMON, "train.steps=1", "train.global_batch=16", "optim.warmup=1 steps", f"model.hf={base}")
    words = (*words, "data.seq_len=64", "model.adapter=lora", *CASES[name])
    rank_pool.run(leave_memory, 2, {"words": words, "folder": tmp_path}, 120.0)
    pairs: Sequence[tuple[Measured, StageMemory]] = [
        pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(2)
    ]
    for measured, planned in pairs:
        assert planned.weights == pytest.approx(measured.parameters, rel=0.01)
        assert planned.gradients == pytest.approx(measured.gradients, rel=0.01)
        assert planned.optimizer == pytest.approx(measured.optimizer, rel=0.01)
        assert planned.activations == pytest.approx(measured.activations, rel=0.1)


# --- parameters and FLOPs


def shape(base: Path, *targets: str, rank: int = 4) -> Architecture:
    section = ModelSection(hf=str(base), adapter="lora", lora_rank=rank, lora_targets=list(targets))
    found = read_shape(str(base))
    assert isinstance(found, Architecture)
    return found.beside(find_adapter(section, any(run.layer.experts for run in found.runs)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("targets", [("attention",), ("all-linear",), ("lm_head", "*.o_proj")])
def test_parameters_are_those_of_the_model_that_is_trained(family: str, targets: Any, tmp_path: Path) -> None:
    if family == "phi3":  # its fused layers are counted where they are named
        targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    folder = save_tiny(tmp_path / family, family, tie_word_embeddings=False)
    model = build_huggingface(folder, vocab=50, seq_len=16, weights=False)
    model.add_lora(LoraShape(4, 8.0, 0.0, targets), None)
    planned = shape(folder, *targets)
    assert planned.trained_parameters == sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert planned.parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "k_proj", "v_proj", "down_proj")])
def test_flops_are_those_of_a_step(base: Path, targets: tuple[str, ...]) -> None:
    """All that torch counts, but for gradients of the first block's input, which nothing before it needs."""
    model = build_huggingface(base, vocab=256, seq_len=16, weights=False)
    model.add_lora(LoraShape(4, 8.0, 0.0, targets), None)
    model.to_empty(device="cpu")
    model.init_weights(0)
    tokens = torch.arange(32).reshape(2, 16)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).logsumexp(-1).sum().backward()
    planned = shape(base, *targets)
    first = [each for each in planned.layers[0].matrices if each.name in ("q", "kv")]
    # Of a matrix beside its adapter: the product with the frozen weight, and with the adapter's first matrix.
    inputs = sum(each.frozen_flops_per_token for each in first)
    inputs += sum(2 * 4 * 64 for name in ("q_proj", "k_proj", "v_proj") if name in targets or "all-linear" in targets)
    assert counter.get_total_flops() == tokens.numel() * (planned.flops_per_token(16, causal=False) - inputs)
    whole = read_shape(str(base))
    assert isinstance(whole, Architecture)
    assert planned.flops_per_token(16, causal=False) < 0.8 * whole.flops_per_token(16, causal=False)


# --- the answer


def test_an_adapter_takes_less_memory_and_time_than_all_weights(base: Path) -> None:
    case = Case(model=shape(base, "all-linear"), seq_len=64, global_batch=8)
    found = read_shape(str(base))
    assert isinstance(found, Architecture)
    whole = Case(model=found, seq_len=64, global_batch=8)
    adapted, all_weights = (estimate_memory(each, load_overheads())[0] for each in (case, whole))
    assert adapted.states < 0.5 * all_weights.states
    assert estimate_between_steps(case, adapted).copied < 0.2 * estimate_between_steps(whole, all_weights).copied
