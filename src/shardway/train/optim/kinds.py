"""What Shardway needs to know of an optimizer, by name: the contract of the group `shardway.optimizers`, and our own.

Invariants:
- A kind states facts without torch, so that a plan and a run file are checked on a login node; only `build` imports it.
- Each name in the run file is one class here. This module must not contain a formula.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from shardway.plugins import HasSettings, load_plugin
from shardway.runfile.schema import OptimSection

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardway.train.optim.base import Numerics


class OptimizerKind(HasSettings):
    """One value of `optim.name`. Derive from it, state the facts and write `build`.

    The module of the class is imported without torch: import torch, and a module that needs it, in `build`.
    `shardway.train.optim.base.LocalOptimizer` is a base for the optimizer itself: it updates what a rank holds of each
    parameter, so an elementwise update written once is right in every layout, and its states are saved and resumed.
    """

    state_bytes: ClassVar[float]
    """Bytes of state for each parameter, by which the planner counts memory; with moments in fp32."""
    keys: ClassVar[tuple[str, ...]] = ()
    """Keys that have an effect ("optim.eps"), besides lr, weight_decay, clip and those of the schedule."""
    rounds: ClassVar[bool] = False
    """Whether weights in bf16 keep small updates, since they are rounded stochastically (`LocalOptimizer.run`)."""
    takes_flat_parts: ClassVar[bool] = False
    """Whether it can update flat pieces of weights that begin and end anywhere, as DeepSpeed's ZeRO hands them out."""
    needs_blocks: ClassVar[bool] = False
    """Whether it is for the matrices of a model's blocks, and refuses a model without any."""

    @abstractmethod
    def build(self, section: OptimSection, model: nn.Module, peak_lr: float) -> torch.optim.Optimizer:
        """The optimizer over the trainable parameters of a model that is sharded already, its rate at `peak_lr`.

        Groups may have rates of their own; each is the peak of its group. `section.settings` were checked with
        `read_settings`. Raises UserError where the model has nothing that the optimizer is for, or a package is
        missing.
        """


def build_optimizer(section: OptimSection, model: nn.Module, peak_lr: float) -> torch.optim.Optimizer:
    """The optimizer of a run file over the trainable parameters of a model: `OptimizerKind.build` of its name."""
    kind: OptimizerKind = load_plugin("optimizers", section.name)()
    return kind.build(section, model, peak_lr)


# --- Shardway's own


class AdamWKind(OptimizerKind):
    """AdamW; two moments in fp32."""

    state_bytes = 8.0
    keys = ("optim.kernel", "optim.state_dtype", "optim.betas", "optim.eps")
    rounds = True
    takes_flat_parts = True

    def build(self, section: OptimSection, model: nn.Module, peak_lr: float) -> torch.optim.Optimizer:
        from shardway.train.optim.base import AdamW, decay_groups

        defaults = {"lr": peak_lr, "betas": tuple(section.betas), "eps": section.eps}
        return AdamW(decay_groups(model, section.weight_decay), defaults, _numerics(section))


class SGDKind(OptimizerKind):
    """SGD; one momentum in fp32."""

    state_bytes = 4.0
    keys = ("optim.kernel", "optim.state_dtype", "optim.momentum", "optim.nesterov")
    rounds = True
    takes_flat_parts = True

    def build(self, section: OptimSection, model: nn.Module, peak_lr: float) -> torch.optim.Optimizer:
        from shardway.train.optim.base import SGD, decay_groups

        defaults = {"lr": peak_lr, "momentum": section.momentum, "nesterov": section.nesterov}
        return SGD(decay_groups(model, section.weight_decay), defaults, _numerics(section))


class AdafactorKind(OptimizerKind):
    """Adafactor; row and column sums (Shazeer and Stern, arXiv:1804.04235)."""

    state_bytes = 0.02

    def build(self, section: OptimSection, model: nn.Module, peak_lr: float) -> torch.optim.Optimizer:
        from shardway.train.optim.adafactor import Adafactor
        from shardway.train.optim.base import Numerics, decay_groups

        return Adafactor(decay_groups(model, section.weight_decay), {"lr": peak_lr}, Numerics())


class AdamW8bitKind(OptimizerKind):
    """torchao's AdamW8bit; two moments in eight bits (Dettmers et al., arXiv:2110.02861)."""

    state_bytes = 2.0
    keys = ("optim.betas", "optim.eps")

    def build(self, section: OptimSection, model: nn.Module, peak_lr: float) -> torch.optim.Optimizer:
        from shardway.train.optim.base import build_adamw8bit, decay_groups

        first, second = section.betas
        return build_adamw8bit(decay_groups(model, section.weight_decay), peak_lr, (first, second), section.eps)


class MuonKind(OptimizerKind):
    """Muon for the matrices of blocks, with one momentum (Jordan et al., 2024), and AdamW for the rest."""

    state_bytes = 4.0
    keys = (
        *AdamWKind.keys,
        *("optim.muon_lr_factor", "optim.muon_adjust", "optim.muon_momentum", "optim.muon_iterations"),
    )
    rounds = True
    needs_blocks = True

    def build(self, section: OptimSection, model: nn.Module, peak_lr: float) -> torch.optim.Optimizer:
        from shardway.train.optim.base import muon_groups
        from shardway.train.optim.muon import Muon

        matrices, others = muon_groups(model, section.weight_decay)
        block_matrices: dict[str, Any] = {
            "params": matrices,
            "muon": True,
            "lr": peak_lr * section.muon_lr_factor,
            "weight_decay": section.weight_decay,
            "momentum": section.muon_momentum,
            "iterations": section.muon_iterations,
            "adjust": section.muon_adjust,
        }
        defaults = {"muon": False, "lr": peak_lr, "betas": tuple(section.betas), "eps": section.eps}
        # The rate of the first group is what a run shows. A pipeline stage may have no block at all.
        return Muon([*others, *([block_matrices] if matrices else [])], defaults, _numerics(section))


def _numerics(section: OptimSection) -> Numerics:
    import torch

    from shardway.train.optim.base import Numerics

    return Numerics(section.kernel, torch.bfloat16 if section.state_dtype == "bf16" else None)
