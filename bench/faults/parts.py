"""What the peers' scripts share: model, data, records and checkpoints, as a careful user would write them.

The generator of random numbers is set from step and rank before each step, so that it need not be saved: a run that
goes on has the masks of one that was never cut off. A checkpoint is written beside its name, made durable and then
renamed; the newest three stay. Every step that was done is a line of `rank-R.jsonl`, with a monotonic time.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from harm import HalfWritten, Harm
from torch import nn
from torch.utils.data import Dataset

SAMPLES, SEQ_LEN, VOCAB, BATCH, STEPS, EVERY, KEEP = 96, 12, 32, 8, 160, 20, 3


class Tokens(Dataset[torch.Tensor]):
    """Sequences that are made up, the same ones each time."""

    def __init__(self) -> None:
        self._all = torch.randint(VOCAB, (SAMPLES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._all[index]


class Model(nn.Module):
    """A decoder of two layers of width 16."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, 16), nn.Embedding(SEQ_LEN, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Sequences [batch, SEQ_LEN + 1] to the mean loss of predicting each next token."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(SEQ_LEN)
        hidden = self.tokens(inputs) + self.places.weight
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Order:
    """Which samples a rank takes at a step (1 is the first), from a distributed sampler, without going through it."""

    def __init__(self, sampler: Any, ranks: int) -> None:
        self._sampler, self._batch = sampler, BATCH // ranks
        self._epoch, self._ids = -1, [0]

    def ids(self, step: int) -> list[int]:
        epoch, place = divmod(step - 1, SAMPLES // BATCH)
        if epoch != self._epoch:
            self._sampler.set_epoch(epoch)
            self._epoch, self._ids = epoch, list(self._sampler)
        return self._ids[place * self._batch : (place + 1) * self._batch]


class Records:
    """What a rank has done, a line each."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8")
        self._rank = rank
        self.write("began")

    def write(self, event: str, **facts: Any) -> None:
        line = {"event": event, "time": time.monotonic(), "rank": self._rank, "life": str(os.getpid()), **facts}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there, oldest first."""
    return sorted(int(path.stem.split("-")[1]) for path in folder.glob("step-*.pt"))


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.pt"


def save(folder: Path, step: int, state: dict[str, Any], harm: Harm) -> None:
    """Write a checkpoint; one that is not whole never has its name."""
    final = checkpoint_path(folder, step)
    partial = final.with_suffix(f".{os.getpid()}.partial")
    with partial.open("wb") as file:
        torch.save(state, HalfWritten(file, harm, step))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(final)
    for old in checkpoint_steps(folder)[:-KEEP]:
        checkpoint_path(folder, old).unlink(missing_ok=True)


def load(folder: Path, step: int) -> dict[str, Any]:
    return torch.load(checkpoint_path(folder, step), weights_only=True)
