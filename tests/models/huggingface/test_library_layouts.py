"""A model of the library in layouts of every axis: loaded, trained and exported, it is the library's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pool import ranks
from runs import pool_ranks
from shardway.checkpoint.export import save_weights
from shardway.models.huggingface.model import build_huggingface, form_of
from shardway.parallel.apply import ApplyOptions, ParallelModel, apply_parallelism
from shardway.parallel.axes.tensor import sum_partial_gradients
from shardway.parallel.mesh import build_mesh
from shardway.runfile.schema import ParallelSection
from shardway.train.loss import token_cross_entropy
from shardway.train.passes import BatchSplit, Passes
from speed import picked
from tiny_hf import TOKENS, load_reference, logits_of, save_tiny
from trained import FP32

BATCH = torch.cat((TOKENS, TOKENS + 11)) % 50
INPUTS, TARGETS = BATCH, BATCH.roll(-1, dims=1)
LR = 0.02  # ten times as much and fp32 comes apart from float64 within five steps

FIVE: dict[str, dict[str, int]] = {
    "fsdp x tensor": {"dp_shard": 2, "tp": 2},
    "tensor, fewer key/value heads than ranks": {"tp": 4},
    "tensor x context": {"tp": 2, "cp": 2},
    "pipeline x fsdp": {"pp": 2, "dp_shard": 2},
    "pipeline x tensor": {"pp": 2, "tp": 2},
}
LAYOUTS = {
    **{f"{family}, {name}": (family, FIVE[name]) for family in ("llama", "qwen3", "mixtral") for name in FIVE},
    "mixtral, experts x tensor": ("mixtral", {"dp_shard": 2, "tp": 2, "ep": 2}),
    "qwen2, tensor": ("qwen2", {"tp": 4}),
    "qwen3_moe, experts": ("qwen3_moe", {"dp_shard": 4, "ep": 4}),
    "qwen2_moe, tensor with a shared expert": ("qwen2_moe", {"dp_shard": 2, "tp": 2}),
}
STEPS = 3


def section(degrees: dict[str, int]) -> ParallelSection:
    staged = {"pp_stages_per_rank": 1, "pp_micro_batches": 2} if "pp" in degrees else {}
    return ParallelSection(**{"dp_replicate": 1, "reshard_after_forward": "pp" not in degrees, **degrees, **staged})


def make_parallel(folder: Path, degrees: dict[str, int]) -> ParallelModel:
    parallel = section(degrees)
    model = build_huggingface(folder, vocab=50, seq_len=16)
    on = pool_ranks()
    return apply_parallelism(model, build_mesh(on, parallel), on.device, ApplyOptions(parallel, FP32))


def train_one(parallel: ParallelModel) -> float:
    """A step of plain descent on this rank's share; the sum of losses over all samples."""
    mesh = parallel.mesh
    share = slice(mesh.data_rank * 4 // mesh.data_ranks, (mesh.data_rank + 1) * 4 // mesh.data_ranks)
    rows = 4 // mesh.data_ranks
    batch_split = BatchSplit(4, rows // 2 if parallel.pipeline else rows, 2 if parallel.pipeline else 1, 2)
    passes = Passes(parallel, batch_split, FP32, torch.device("cpu"))
    sums = passes.train(parallel.call, (INPUTS[share], TARGETS[share]), token_cross_entropy)
    if parallel.partial:
        sum_partial_gradients(parallel.module, parallel.partial, mesh.group("tp"))
    with torch.no_grad():
        for parameter in parallel.module.parameters():
            parameter -= LR * parameter.grad
            parameter.grad = None
    dist.all_reduce(sums)
    return sums[0].item()


def train_reference(folder: Path, steps: int) -> tuple[list[float], torch.Tensor]:
    """The library's model on all samples at once: the sums of losses, and its logits at the end."""
    model, losses = load_reference(folder), []
    for _ in range(steps):
        loss = token_cross_entropy(model(INPUTS).logits, TARGETS).total
        (loss / 4).backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
    with torch.no_grad():
        return losses, model(TOKENS).logits


PICKED = ("llama, fsdp x tensor", "mixtral, experts x tensor", "qwen3, pipeline x tensor", "llama, pipeline x fsdp")


@pytest.fixture(params=picked(LAYOUTS, *PICKED))
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@ranks(4, timeout_s=120)
def test_a_model_in_any_layout_is_that_of_the_library(rank: int, layout: str, tmp_path: Path) -> None:
    """Rank 0 alone imports the library, which takes seconds."""
    family, degrees = LAYOUTS[layout]
    written = tmp_path / "model"
    if rank == 0:
        save_tiny(written, family, pad_token_id=None, tie_word_embeddings=False, vocab_size=52)
    dist.barrier()
    parallel = make_parallel(written, degrees)
    found = [train_one(parallel) for _ in range(STEPS)]
    reference = [train_reference(written, STEPS) if rank == 0 else None]
    dist.broadcast_object_list(reference, src=0)
    assert reference[0] is not None
    losses, expected = reference[0]
    assert found == pytest.approx(losses, rel=1e-5)
    state = dict(parallel.module.named_parameters())
    form = form_of(parallel.module, max_positions=16)
    folder = save_weights(state, form, tmp_path / "out", pool_ranks(), dtype=torch.float32)
    if rank == 0:
        torch.testing.assert_close(logits_of(folder), expected, rtol=0, atol=1e-4)
    dist.barrier()
