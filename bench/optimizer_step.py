"""One optimizer step of sharded weights: ours on local tensors against torch's on DTensors.

    python bench/optimizer_step.py [--ranks 2] [--rounds 15] [--dim 512] [--layers 8]

Ranks are gloo processes with one thread each; gradients are made up, and all optimizers take turns in each round. The
figure is the median CPU time of a step on rank 0: other processes of the machine do not count, nor does waiting for
the other ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from shardway.models.transformer import Transformer, TransformerShape
from shardway.runfile.schema import OptimSection
from shardway.train.optim.base import decay_groups
from shardway.train.optim.kinds import build_optimizer

LR = 1e-5
SECTIONS = {
    "adamw fused": OptimSection(),
    "adamw foreach": OptimSection(kernel="foreach"),
    "adamw bf16 states": OptimSection(state_dtype="bf16"),
    "sgd": OptimSection(name="sgd"),
    "adafactor": OptimSection(name="adafactor"),
    "muon": OptimSection(name="muon"),
}


@dataclass(frozen=True)
class Setting:
    """Ranks, rounds, and the size of the model."""

    ranks: int
    rounds: int
    dim: int
    layers: int


def build_model(setting: Setting) -> torch.nn.Module:
    """A transformer under FSDP2 with a gradient for every parameter."""
    width = setting.dim * 8 // 3 // 32 * 32
    shape = TransformerShape(vocab=8192, dim=setting.dim, layers=setting.layers, heads=8, kv_heads=8, ffn_dim=width)
    model = Transformer(shape)
    model.init_weights(0)
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def build_all(model: torch.nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Every optimizer of the run file, and torch's two forms of AdamW."""
    ours = {f"ours   {name}": build_optimizer(section, model, LR) for name, section in SECTIONS.items()}
    theirs = {
        "torch  adamw fused": torch.optim.AdamW(decay_groups(model, 0.1), lr=LR, fused=True),
        "torch  adamw foreach": torch.optim.AdamW(decay_groups(model, 0.1), lr=LR, foreach=True),
    }
    return {**theirs, **ours}


def measure_s(step: Callable[[], object]) -> float:
    """CPU seconds of one step that all ranks start together."""
    dist.barrier()
    start = time.process_time()
    step()
    return time.process_time() - start


def run_rank(rank: int, setting: Setting, store: str) -> None:
    """What every rank does; rank 0 prints."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=setting.ranks)
    model = build_model(setting)
    optimizers = build_all(model)
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(setting.rounds + 1):
        for name, optimizer in optimizers.items():
            times[name].append(measure_s(optimizer.step))
    if rank == 0:
        held = sum(parameter.to_local().numel() for parameter in model.parameters())  # type: ignore[attr-defined]
        print(f"{held / 1e6:.1f} M parameters a rank, {setting.ranks} ranks, torch {torch.__version__}")
        for name, seconds in times.items():
            print(f"{name:26} {1e3 * statistics.median(seconds[1:]):8.1f} ms")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("rounds", 15), ("dim", 512), ("layers", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    setting = Setting(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (setting, os.path.join(folder, "store")), setting.ranks)


if __name__ == "__main__":
    main()
