"""The loop of `plain_loops` as the documentation of other libraries writes it: Accelerate, Fabric, DeepSpeed, and the
trainers of transformers and Lightning, which own their loop.

Each function takes a `turns.Task`, needs its library when it is called, and yields the loss of each step of this
rank's samples. Model, initial weights, samples, optimizer and clipping are those of every other loop. A trainer logs,
saves and shows nothing here, and runs in a thread, which waits after each step until it is this loop's turn again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
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


STEPS = 1_000_000
"""More than any comparison takes."""


def trainer_ddp(task: Task) -> Iterator[float]:
    """The Trainer of transformers, which copies the weights."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    case = open_case(task)
    model = case.build_model()
    optimizer = case.build_optimizer(model)
    arguments = TrainingArguments(
        output_dir=task.folder,
        use_cpu=True,
        max_steps=STEPS,
        max_grad_norm=float(case.values.optim.clip),
        per_device_train_batch_size=case.values.train.batch.largest // task.ranks,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
    )

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return Batches(case)

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            found = loss_of(model(inputs[0]), inputs[1])
            seen.append(found.detach())
            return found

        def _prepare_inputs(self, inputs: Any) -> Any:
            return inputs

    class Report(TrainerCallback):
        def __init__(self, report: Callable[[float], None]) -> None:
            self._report = report

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._report(seen.pop().item())

    seen: list[torch.Tensor] = []

    def run(report: Callable[[float], None]) -> None:
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        Own(model, arguments, optimizers=(optimizer, constant), callbacks=[Report(report)]).train()

    return step_by_step(run)


def lightning_ddp(task: Task) -> Iterator[float]:
    """Lightning's Trainer with its strategy "ddp"."""
    return _lightning(open_case(task), "ddp")


def lightning_fsdp2(task: Task) -> Iterator[float]:
    """Lightning's Trainer with its strategy for FSDP2, each block a unit."""
    from pytorch_lightning.strategies import ModelParallelStrategy

    return _lightning(open_case(task), ModelParallelStrategy(data_parallel_size=task.ranks, tensor_parallel_size=1))


def _lightning(case: Case, strategy: Any) -> Iterator[float]:
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self, report: Callable[[float], None]) -> None:
            super().__init__()
            self.model, self._report_loss = case.build_model(), report

        def configure_model(self) -> None:
            if self.device_mesh is not None:
                _shard(self.model, self.device_mesh)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return loss_of(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return case.build_optimizer(self.model)

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self._report_loss(outputs["loss"].item())

    def run(report: Callable[[float], None]) -> None:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=case.task.ranks,
            strategy=strategy,
            max_steps=STEPS,
            gradient_clip_val=float(case.values.optim.clip),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=case.task.folder,
        )
        trainer.fit(Module(report), Batches(case))

    return step_by_step(run)


class Batches(torch.utils.data.IterableDataset[Any]):
    """The batches of this rank, as a loader that needs no library."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __iter__(self) -> Iterator[Any]:
        return self._case.batches(self._case.task.ranks)


def step_by_step(run: Callable[[Callable[[float], None]], None]) -> Iterator[float]:
    """The losses that `run` reports, which goes on from a report when the next loss is asked for."""
    losses: queue.Queue[float | BaseException] = queue.Queue()
    turns: queue.Queue[None] = queue.Queue()

    def report(loss: float) -> None:
        losses.put(loss)
        turns.get()

    def work() -> None:
        torch.set_num_threads(1)
        try:
            run(report)
        except BaseException as error:
            losses.put(error)

    threading.Thread(target=work, daemon=True).start()
    while not isinstance(found := losses.get(), BaseException):
        yield found
        turns.put(None)
    raise found


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
