"""DeepSpeed's library brought up inside Shardway's ranks: their process group, their device, their silence.

Invariant: DeepSpeed makes no process group, reads this rank's placement and nothing else, and says on stderr what a
user has to know. The only module that imports deepspeed. It must not train.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardway.compat import library_collectives
from shardway.errors import UserError
from shardway.models.contract import Balancing
from shardway.ranks.environment import variables_for_libraries
from shardway.ranks.start import Ranks, is_lost_contact

_SHARED_MEMORY = "deepspeed_shm_comm"
"""An all-reduce for inference that DeepSpeed would compile at the first start on CPUs, and training never calls."""


@dataclass(frozen=True)
class _Units:
    """The ranks as DeepSpeed asks for them (its `mpu`): all of them share the data, none a model.

    Without it, DeepSpeed makes a process group of its own with all ranks in it.
    """

    ranks: Ranks

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The default process group."""
        return dist.group.WORLD

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Every rank."""
        return list(range(self.ranks.world))

    def get_data_parallel_rank(self) -> int:
        """This rank."""
        return self.ranks.rank

    def get_data_parallel_world_size(self) -> int:
        """How many ranks there are."""
        return self.ranks.world

    def get_model_parallel_group(self) -> None:
        """No model is split."""

    def get_model_parallel_rank(self) -> int:
        """The only one."""
        return 0

    def get_model_parallel_world_size(self) -> int:
        """The only one."""
        return 1


@contextlib.contextmanager
def started_zero(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], ranks: Ranks
) -> Iterator[Any]:
    """A `deepspeed.DeepSpeedEngine` over these ranks. Raises UserError where DeepSpeed does not take the settings."""
    with variables_for_libraries(ranks.placement, _variables(ranks)):  # ZeRO 3 reads them while it trains, too
        with quiet(), ranks.contact("while DeepSpeed started"):
            deepspeed = _import()
            _join(deepspeed, ranks)
            _keep_experts_together(deepspeed, model)
            engine = _initialize(deepspeed, model, optimizer, settings, ranks)
        try:
            yield engine
        finally:
            # An error that ends the run must not be hidden by one of tidying up after it.
            with contextlib.suppress(Exception), quiet():
                engine.destroy()
            _forget_group(deepspeed)


def _variables(ranks: Ranks) -> dict[str, str]:
    """What DeepSpeed reads besides: the kind of device, and a check of CUDA that its import would set otherwise."""
    return {"DS_ACCELERATOR": ranks.device.type, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def _import() -> Any:
    """deepspeed, logging to stderr, and errors alone at first: it would warn of what Shardway has chosen for it."""
    import deepspeed

    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    return deepspeed


def _initialize(
    deepspeed: Any, model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], ranks: Ranks
) -> Any:
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=_Units(ranks))
    except Exception as error:
        if is_lost_contact(error):
            raise
        raise UserError(
            f"DeepSpeed {deepspeed.__version__} does not start: {_first_lines(error)}\n"
            "  `shardway config show --deepspeed` prints what it was given. To do: change what is wrong in "
            "deepspeed.settings, or the key that a setting comes from."
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return engine


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings of what DeepSpeed calls in PyTorch; a user cannot mend those."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _join(deepspeed: Any, ranks: Ranks) -> None:
    """Let DeepSpeed's communication work on the default process group."""
    _forget_group(deepspeed)
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    deepspeed.comm.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    for name, function in library_collectives().items():
        setattr(deepspeed.comm.comm.cdb, name, function)


def _keep_experts_together(deepspeed: Any, model: nn.Module) -> None:
    """ZeRO 3 gathers a mixture of experts as one: an expert that no token of a rank is sent to must be gathered there
    as well, and its hooks do not see what a router returns."""
    for module in model.modules():
        if any(isinstance(child, Balancing) for child in module.children()):
            deepspeed.utils.set_z3_leaf_module(module, True)


def _forget_group(deepspeed: Any) -> None:
    """What an earlier run of this process has left, whose process group is gone."""
    deepspeed.comm.comm.cdb = None
    deepspeed.utils.groups._release_process_group_references()


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:3]) or type(error).__name__
