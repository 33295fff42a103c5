"""An LSTM over sequences of different lengths, put together by a function of the script's own."""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import Dataset

import shardway


class Sequences(Dataset):
    """Digits; the target says whether their sum is odd."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * 1000 + index)
        digits = torch.randint(0, 10, (3 + index % 9,), generator=generator)
        return digits, int(digits.sum()) % 2


def together(samples: list[tuple[torch.Tensor, int]]) -> dict[str, object]:
    return {
        "digits": pack_sequence([digits for digits, _ in samples], enforce_sorted=False),
        "odd": torch.tensor([odd for _, odd in samples]),
        "names": [f"a sequence of {len(digits)}" for digits, _ in samples],
    }


class Reader(nn.Module):
    """The mean over an LSTM's outputs, each sequence by its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, dropout=0.1)
        self.head = nn.Linear(12, 2)

    def forward(self, digits: PackedSequence) -> torch.Tensor:
        embedded = PackedSequence(self.embedding(digits.data), *digits[1:])
        outputs, lengths = pad_packed_sequence(self.lstm(embedded)[0])
        return self.head(outputs.sum(0) / lengths.unsqueeze(1))


def loss_of(model: nn.Module, batch: dict[str, object]) -> shardway.LossSum:
    lengths = pad_packed_sequence(batch["digits"])[1]
    assert batch["names"] == [f"a sequence of {length}" for length in lengths]
    logits = model(batch["digits"])
    right = (logits.argmax(1) == batch["odd"]).sum()
    return shardway.LossSum(F.cross_entropy(logits, batch["odd"], reduction="sum"), len(lengths), right)


words = ("checkpoint.every=4 steps", "train.validate_every=10 steps", "train.micro_batch=4")
with shardway.start(*words, *sys.argv[1:], directory="run") as run:
    torch.manual_seed(6)
    model = run.shard(Reader())
    run.optimizer(torch.optim.RMSprop, model, lr=0.01)
    validation = run.validation(Sequences(30, 2), loss_of, collate_fn=together)
    for batch in run.steps(run.loader(Sequences(120, 1), batch_size=12, collate_fn=together), "3 epochs", validation):
        run.step(model, batch, loss_of)
    if run.is_first:
        Path("results.json").write_text(json.dumps({"validations": validation.results}), encoding="utf-8")
