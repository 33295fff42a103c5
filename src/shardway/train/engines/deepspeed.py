"""DeepSpeed as the engine, started inside Shardway's ranks: ZeRO shards and offloads states, gradients or weights.

Invariants:
- Only this module imports deepspeed. DeepSpeed makes no process group, reads only this rank's placement, and prints to
  stderr only what a user needs.
- Loss, gradient norm, clipping and decisions are those of `train.step`, to rounding.

DeepSpeed averages gradients over ranks and can divide them by a loss scale just before it clips and updates. That
divisor carries the factor from samples to targets, which is available only after the passes, and the fp16 loss scale:
both are Shardway's own (decision 0012).
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardway.checkpoint.state import CheckpointState, needs_closure
from shardway.checkpoint.zero import ZeroState
from shardway.compat import library_collectives
from shardway.errors import UserError
from shardway.models.contract import Balancing
from shardway.parallel.axes.expert import balance
from shardway.parallel.axes.replicate import send
from shardway.ranks.launcher import variables_for_libraries
from shardway.ranks.start import Ranks, is_lost_contact
from shardway.ranks.stop import read_decision
from shardway.resolve.rules.deepspeed import Settings, render_settings, resolve_ds_config
from shardway.train.engines import EngineParts
from shardway.train.passes import Loss, Passes
from shardway.train.step import StepContext, StepResult

# --- the library inside Shardway's ranks

_SHARED_MEMORY = "deepspeed_shm_comm"
"""An all-reduce for inference that DeepSpeed would compile at the first start on CPUs, and training never calls."""


@contextlib.contextmanager
def started_zero(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], ranks: Ranks
) -> Iterator[Any]:
    """A `deepspeed.DeepSpeedEngine` over these ranks. Raises UserError if DeepSpeed refuses the settings."""
    # The kind of device, and a check of CUDA that its import would set otherwise.
    variables = {"DS_ACCELERATOR": ranks.device.type, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with variables_for_libraries(ranks.placement, variables), _linear_put_back():  # ZeRO 3 reads them in training too
        # A user cannot remedy warnings of DeepSpeed's calls into PyTorch.
        with warnings.catch_warnings(action="ignore"), ranks.contact("while DeepSpeed started"):
            import deepspeed

            # It logs to stderr, and only errors at first: it would warn of Shardway's own choices.
            logger = logging.getLogger("DeepSpeed")
            logger.setLevel(logging.ERROR)
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler):
                    handler.setStream(sys.stderr)
            # Its communication runs on the default process group.
            _forget_group(deepspeed)
            deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
            backend = "nccl" if ranks.device.type == "cuda" else "gloo"
            deepspeed.comm.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
            for name, function in library_collectives().items():
                setattr(deepspeed.comm.comm.cdb, name, function)
            for module in model.modules():
                # ZeRO 3 gathers a mixture of experts as one: an expert without tokens on this rank must be gathered
                # as well, and its hooks do not see what a router returns.
                if any(isinstance(child, Balancing) for child in module.children()):
                    deepspeed.utils.set_z3_leaf_module(module, True)
            engine = _initialize(deepspeed, model, optimizer, settings, ranks)
        try:
            yield engine
        finally:
            # An error that ends the run must not be hidden by one of tidying up after it.
            with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
                engine.destroy()
            _forget_group(deepspeed)


@contextlib.contextmanager
def _linear_put_back() -> Iterator[None]:
    """ZeRO 3 puts a product of its own in the place of torch's, and leaves it there for later runs of the process."""
    linear = nn.functional.linear
    try:
        yield
    finally:
        nn.functional.linear = linear


def _initialize(
    deepspeed: Any, model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], ranks: Ranks
) -> Any:
    # All ranks are data parallel, and no model is split. Without it, DeepSpeed makes a process group of its own.
    units = SimpleNamespace(
        get_data_parallel_group=lambda: dist.group.WORLD,
        get_data_parallel_group_ranks=lambda: list(range(ranks.world)),
        get_data_parallel_rank=lambda: ranks.rank,
        get_data_parallel_world_size=lambda: ranks.world,
        get_model_parallel_group=lambda: None,
        get_model_parallel_rank=lambda: 0,
        get_model_parallel_world_size=lambda: 1,
    )
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=units)
    except Exception as error:
        if is_lost_contact(error):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(
            f"DeepSpeed {deepspeed.__version__} does not start: {'; '.join(lines[:3]) or type(error).__name__}\n"
            "  `shardway config show --deepspeed` prints what it was given. To do: change what is wrong in "
            "deepspeed.settings, or the key that a setting comes from."
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return engine


def _forget_group(deepspeed: Any) -> None:
    """Drop the state of an earlier run of this process, whose process group is gone."""
    deepspeed.comm.comm.cdb = None
    deepspeed.utils.groups._release_process_group_references()


# --- the engine


@dataclass(frozen=True)
class ZeroPasses(Passes):
    """Passes whose gradients DeepSpeed reduces while they are computed."""

    engine: Any = None

    def count_averaged(self, model: nn.Module) -> int:
        """DeepSpeed takes the mean over all ranks."""
        return self.parallel.mesh.data_ranks

    @contextlib.contextmanager
    def around(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Tell DeepSpeed whether this micro-batch ends the step."""
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        """DeepSpeed's own; the loss is a part of the mean over the global batch already."""
        self.engine.backward(loss, scale_wrt_gas=False)


class DeepSpeedEngine:
    """The engine for train.engine = "deepspeed"."""

    can_void = False  # DeepSpeed has reduced the gradients before the ranks agree

    def __init__(self, parts: EngineParts) -> None:
        if needs_closure(parts.optimizer):
            raise UserError(
                f"{type(parts.optimizer).__name__} evaluates the loss itself, which DeepSpeed does not allow.\n"
                '  To do: set train.engine = "torch", or use another optimizer.'
            )
        self._ranks, self._optimizer = parts.ranks, parts.optimizer
        self._parameters = sum(parameter.numel() for parameter in parts.parallel.module.parameters())
        # A script's own model is clipped only if the script asks for it.
        settings: Settings = {**resolve_ds_config(parts.resolved), "gradient_clipping": parts.clip or 0.0}
        text = render_settings(settings)
        parts.to_write.append(lambda run: run.write_ds_config(text))
        module, optimizer, ranks = parts.parallel.module, parts.optimizer, parts.ranks
        self._engine = parts.at_end.enter_context(started_zero(module, optimizer, settings, ranks))
        parallel = replace(parts.parallel, call=self._engine)
        # Its weights have the format of products already.
        precision = replace(parts.precision, autocast_dtype=None)
        compiles = parts.resolved.values.train.compiles
        self.passes: Passes = ZeroPasses(
            parallel, parts.batch_split, precision, parts.ranks.device, compiles=compiles, engine=self._engine
        )
        self.state: CheckpointState = ZeroState(self._engine, parts.optimizer, self._parameters, parts.ranks)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def count_parameters(self) -> int:
        """Rank 0 counts all: once they are sharded, their shapes are gone."""
        return self._parameters if self._ranks.is_first else 0

    def step(self, model: nn.Module, batch: Any, loss_fn: Loss, context: StepContext) -> StepResult:
        """One step; `model` is the script's, and DeepSpeed's wrapper of it is what runs."""
        scale = context.loss_scale
        factor = scale.scale if scale is not None else 1.0
        with self._ranks.contact("during a step"):
            self._engine.optimizer.override_loss_scale(1.0)  # the passes multiply
            sums = self.passes.train(
                self._engine, batch, loss_fn, position=context.position, loss_scale=factor, rows=context.rows
            )
            requests = send(context.requests.as_numbers(), torch.float64, sums.device)
            total, targets, _, _, *wanted = self._ranks.sum(torch.cat([sums, requests])).tolist()
            overflow, norm = False, 0.0
            if targets:  # else gradients are 0, and may stay: momentum and weight decay would move weights all the same
                self._engine.optimizer.override_loss_scale(factor * targets / self.passes.batch_split.global_batch)
                self._engine.step()
                overflow = not self._engine.was_step_applied()
                norm = math.inf if overflow else float(self._engine.get_global_grad_norm())
            if self.passes.routers:
                balance(self.passes.routers, self.passes.parallel.mesh)
        return StepResult(
            loss=total / targets if targets else float("nan"),
            grad_norm=norm,
            targets=targets,
            decision=read_decision(wanted),
            skipped=not targets or (overflow and scale is not None),
            loss_scale=scale.after(overflow) if scale is not None else None,
        )
