"""The loop of `plain_loops` as the documentation of other libraries writes it: Accelerate, Fabric, DeepSpeed.

Each function takes a `turns.Task`, needs its library when it is called, and yields the loss of each step of this
rank's samples. Model, initial weights, samples, optimizer and clipping are those of every other loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from plain_loops import Case, open_case
from turns import Task


def accelerate_ddp(task: Task) -> Iterator[float]:
    """Accelerate with its defaults."""
    return _accelerate(open_case(task), None)


def accelerate_fsdp2(task: Task) -> Iterator[float]:
    """Accelerate's FSDP2, each block a unit."""
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    return _accelerate(open_case(task), plugin)


def _accelerate(case: Case, plugin: Any) -> Iterator[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = case.build_model()
    model, optimizer = accelerator.prepare(model, case.build_optimizer(model))
    if plugin is not None and not isinstance(next(model.parameters()), DTensor):
        raise NotImplementedError("its weights are whole on every rank: on CPU ranks it replicates instead")
    for inputs, targets in case.batches(case.task.ranks):
        loss = loss_of(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), float(case.values.optim.clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def fabric_ddp(task: Task) -> Iterator[float]:
    """Lightning Fabric with its strategy "ddp"."""
    return _fabric(open_case(task), "ddp")


def fabric_fsdp2(task: Task) -> Iterator[float]:
    """Lightning Fabric's strategy for FSDP2, each block a unit."""
    from lightning_fabric.strategies import ModelParallelStrategy

    return _fabric(
        open_case(task), ModelParallelStrategy(_shard, data_parallel_size=task.ranks, tensor_parallel_size=1)
    )


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks.children():  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def _fabric(case: Case, strategy: Any) -> Iterator[float]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=case.task.ranks, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(case.build_model())
    optimizer = fabric.setup_optimizers(case.build_optimizer(model))
    for inputs, targets in case.batches(case.task.ranks):
        loss = loss_of(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=float(case.values.optim.clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def deepspeed_1(task: Task) -> Iterator[float]:
    """DeepSpeed, ZeRO 1: optimizer states are shared over the ranks."""
    return _deepspeed(open_case(task), 1)


def deepspeed_2(task: Task) -> Iterator[float]:
    """DeepSpeed, ZeRO 2: gradients as well."""
    return _deepspeed(open_case(task), 2)


def deepspeed_3(task: Task) -> Iterator[float]:
    """DeepSpeed, ZeRO 3: weights as well."""
    return _deepspeed(open_case(task), 3)


def _deepspeed(case: Case, stage: int) -> Iterator[float]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = case.build_model()
    config = {
        "train_micro_batch_size_per_gpu": case.values.train.batch.largest // case.task.ranks,
        "gradient_clipping": float(case.values.optim.clip),
        "zero_optimization": {"stage": stage},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=case.build_optimizer(model), config=config)
    for inputs, targets in case.batches(case.task.ranks):
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        yield loss.item()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over this rank's targets."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
