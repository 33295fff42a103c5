"""What a checkpoint of ZeRO holds: DeepSpeed's own files, in the folder of a Shardway checkpoint.

Invariant: DeepSpeed writes only into a folder that is not a checkpoint yet, and reads only what was compared with the
manifest. Optimizer settings stay those of today's run file. This module must not import deepspeed: it gets an engine.

The folder is what DeepSpeed's tools expect: `python zero_to_fp32.py . OUTPUT` in it makes fp32 weights, except if
optimizer states are on disk (nvme), which those tools do not read. DeepSpeed 0.19.8 does not read these back correctly
either: a new process goes on without their moments, without an error. So they are written and read here, group by
group.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardway.checkpoint.file_format import list_files
from shardway.checkpoint.state import CheckpointState, settings_kept
from shardway.errors import JobError
from shardway.ranks.start import Ranks, is_lost_contact
from shardway.rundir.directory import START_OVER

TAG = "zero"  # folder of DeepSpeed's files inside a checkpoint
_FP32_BYTES = 4


@dataclass(frozen=True)
class ZeroState(CheckpointState):
    """The state of a `deepspeed.DeepSpeedEngine` whose model has `parameters` parameters. It has no tensors:
    only DeepSpeed can interpret its flat parts."""

    engine: Any
    optimizer: torch.optim.Optimizer
    parameters: int
    ranks: Ranks

    def count_file_bytes(self) -> int:
        """Weights as they are trained, their fp32 copy, and the optimizer's states (as many numbers on each rank)."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        held = sum(value.numel() * value.element_size() for value in states if isinstance(value, torch.Tensor))
        return 2 * _FP32_BYTES * self.parameters + held * self.ranks.world

    def write_files(self, folder: Path) -> None:
        """Let DeepSpeed save, and make its files durable, each by one rank."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.engine.save_checkpoint(str(folder), tag=TAG)
            if self.engine.zero_nvme_offload_optimizer():
                self._write_groups(folder / TAG)
        except RuntimeError as error:  # torch's zip writer reports a full disk so
            if is_lost_contact(error):
                raise
            raise OSError(str(error)) from error
        for name in list_files(folder)[self.ranks.rank :: self.ranks.world]:
            with open(folder / name, "rb") as file:
                os.fsync(file.fileno())

    def read_files(self, folder: Path, world: int) -> None:
        """Let DeepSpeed load. Raises JobError if another number of ranks, or another engine, has saved."""
        if world != self.ranks.world:
            raise JobError(
                f"the checkpoint {folder} was saved by {world} ranks, and ZeRO's parts of it fit {world} ranks alone; "
                f"there are {self.ranks.world}.\n  Nothing was changed. To do: start {world} ranks; or take the "
                f"weights out with `python zero_to_fp32.py . OUTPUT` in that folder."
            )
        with self.ranks.contact("while loading"), warnings.catch_warnings(), settings_kept(self.optimizer):
            warnings.simplefilter("ignore")
            try:
                path, _ = self.engine.load_checkpoint(str(folder), tag=TAG, load_lr_scheduler_states=False)
            except (RuntimeError, KeyError, ValueError, AssertionError) as error:
                if is_lost_contact(error):
                    raise
                raise JobError(
                    f"the checkpoint {folder} is whole but does not fit this model, optimizer or stage of ZeRO: "
                    f"{error}\n  To do: use the run file that it was saved with, or {START_OVER}."
                ) from error
            if path is None:
                raise JobError(f"the checkpoint {folder} holds nothing that DeepSpeed has saved.")
            if self.engine.zero_nvme_offload_optimizer():
                self._read_groups(folder / TAG)

    def _write_groups(self, folder: Path) -> None:
        """The fp32 weights and optimizer states of this rank, read from disk group by group."""
        zero = self.engine.optimizer

        def copied(value: Any) -> Any:
            # With memory of its own: saving a view would save all that it is a view of.
            return value.clone() if isinstance(value, torch.Tensor) else value

        for number, weights in enumerate(zero.fp32_partitioned_groups_flat):
            swapped = zero._swappable_optimizer_subgroup(number)
            if swapped:
                zero._optimizer_states_and_gradient_swap_in(number)
            state = {name: copied(value) for name, value in self.optimizer.state[weights].items()}
            torch.save({"weights": copied(weights.data), "state": state}, folder / self._group_name(number))
            if swapped:
                zero._release_swap_buffers(number)

    def _read_groups(self, folder: Path) -> None:
        """Restore what `_write_groups` has written, and the weights that are trained with it."""
        zero = self.engine.optimizer
        zero.checkpoint_event_prologue()
        for number, weights in enumerate(zero.fp32_partitioned_groups_flat):
            swapped = zero._swappable_optimizer_subgroup(number)
            if swapped:
                zero._optimizer_states_and_gradient_swap_in(number)
            saved = torch.load(folder / self._group_name(number), map_location=weights.device, weights_only=True)
            weights.data.copy_(saved["weights"])
            self.optimizer.state[weights].update(saved["state"])
            zero._reassign_or_swap_out_partitioned_parameters(number)
            if swapped:
                zero._optimizer_states_and_gradient_swap_out(number)
        zero.checkpoint_event_epilogue()

    def _group_name(self, number: int) -> str:
        return f"rank_{self.ranks.rank}_group_{number}.pt"
