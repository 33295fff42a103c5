"""What a checkpoint holds of a run: model, optimizer and random state as tensors, counters as numbers.

Invariant: names are those of the unwrapped model and values are whole or DTensors, so that another world size or
sharding can read them. This module must not touch the disk.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

_PACKED_BYTES = 2**15
"""Room for numpy's and Python's states: 2 x 624 numbers of at most ten digits and their commas."""

Tensors = dict[str, Any]
"""Nested dict of tensors, as `torch.distributed.checkpoint` takes it."""


class State(Protocol):
    """What a checkpoint holds of a run and puts back: tensors in Shardway's form, files in that of another library.

    Every method is called on all ranks together.
    """

    def collect(self) -> Tensors:
        """The tensors of this rank; also the template into which a checkpoint is read."""
        ...

    def install(self, tensors: Tensors) -> None:
        """Take loaded tensors."""
        ...

    def count_file_bytes(self) -> int:
        """About how large the files of all ranks become."""
        ...

    def write_files(self, folder: Path) -> None:
        """Write files into the folder of a checkpoint that is no checkpoint yet, and make them durable."""
        ...

    def read_files(self, folder: Path, world: int) -> None:
        """Take what `write_files` of `world` ranks has left. Raises JobError where it does not fit."""
        ...


@dataclass(frozen=True)
class Trained:
    """The parts of a run that have tensors; the optimizer is None where only the model counts. It has no files."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None

    def collect(self) -> Tensors:
        """The tensors of model and optimizer."""
        return collect_tensors(self)

    def install(self, tensors: Tensors) -> None:
        """Put loaded tensors into model and optimizer."""
        install_tensors(self, tensors)

    def count_file_bytes(self) -> int:
        """Nothing."""
        return 0

    def write_files(self, folder: Path) -> None:
        """Nothing."""

    def read_files(self, folder: Path, world: int) -> None:
        """Nothing."""


def collect_tensors(trained: Trained) -> Tensors:
    """The tensors of model and optimizer; also the template into which a checkpoint is read."""
    tensors: Tensors = {"model": get_model_state_dict(trained.model)}
    if trained.optimizer is not None:
        # The settings of parameter groups are those of the run file of today, and how many groups there are depends
        # on the layout: neither belongs to what is saved.
        state = get_optimizer_state_dict(trained.model, trained.optimizer)
        tensors["optimizer"] = {"state": state["state"]}
    return tensors


def install_tensors(trained: Trained, tensors: Tensors) -> None:
    """Put loaded tensors into model and optimizer; the optimizer's settings stay those of the run file of today.

    Where weights came alone, the optimizer begins anew: to collect a template has made up states for it.
    """
    set_model_state_dict(trained.model, tensors["model"])
    if trained.optimizer is None:
        return
    if "optimizer" not in tensors:
        trained.optimizer.state.clear()
        return
    # Not strict: a parameter that no batch has used yet has no state.
    options = StateDictOptions(strict=False)
    today = get_optimizer_state_dict(trained.model, trained.optimizer)
    loaded = {"state": tensors["optimizer"]["state"], "param_groups": today["param_groups"]}
    with settings_kept(trained.optimizer):
        set_optimizer_state_dict(trained.model, trained.optimizer, loaded, options=options)


@contextlib.contextmanager
def settings_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Whatever is loaded meanwhile, the settings of parameter groups are afterwards what they were before."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    yield
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)


def count_bytes(tensors: Tensors) -> int:
    """Bytes of the tensors as they are saved: each whole and once, however many ranks hold parts or copies of it."""
    total = 0
    for value in tensors.values():
        if isinstance(value, dict):
            total += count_bytes(value)
        elif isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
    return total


def random_state() -> Tensors:
    """The generators of this rank: torch (CPU and the current device), numpy, Python."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy_state = [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)]
    state: Tensors = {
        "torch": torch.get_rng_state(),
        "others": _pack({"numpy": numpy_state, "python": random.getstate()}),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Tensors) -> None:
    """Put the generators of this rank back to a saved state."""
    torch.set_rng_state(state["torch"])
    others = json.loads(bytes(state["others"].tolist()))
    kind, keys, position, has_gauss, gauss = others["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = others["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(seed: int, rank: int) -> None:
    """Start every generator of this rank anew; ranks differ, so that their dropout masks do."""
    mixed = (seed * 1_000_003 + rank) % 2**63
    torch.manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)


def _pack(value: Any) -> torch.Tensor:
    """JSON as bytes of a fixed length: a template must have the shape of what it is read into."""
    return torch.tensor(list(json.dumps(value).encode().ljust(_PACKED_BYTES)), dtype=torch.uint8)
