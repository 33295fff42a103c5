"""A language model of words with torch's own transformer layers, on any number of devices: what single.py becomes.

    python with_shardway.py --data train.txt --valid valid.txt        # without --data: on made-up text
    torchrun --nproc-per-node 2 with_shardway.py --data train.txt --valid valid.txt parallel.dp_shard=2

Data: WikiText-2 (Merity et al., arXiv:1609.07843; CC BY-SA) as plain text, one file a split, from the Hugging Face hub
(Salesforce/wikitext, configuration wikitext-2-raw-v1) or a mirror; any other text of words will do.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.data as tud
from torch import nn

import shardway

SEQUENCE = 32
UNKNOWN = "<unk>"


class LanguageModel(nn.Module):
    """Word numbers [batch, seq] -> logits [batch, seq, words], each of what comes next."""

    def __init__(self, words: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, dim)
        self.positions = nn.Embedding(SEQUENCE, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        length = words.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=words.device).triu(1)
        x = self.embedding(words) + self.positions(torch.arange(length, device=words.device))
        return self.head(self.layers(x, mask=later, is_causal=True))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all words."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_up(words: int, seed: int) -> str:
    """Text in which each word has three that may follow it."""
    dice = random.Random(seed)
    word, text = 0, []
    for _ in range(words):
        word = (3 * word + dice.randrange(3)) % 50
        text.append(f"word{word}")
    return " ".join(text)


def cut(text: str, numbers: dict[str, int]) -> tud.TensorDataset:
    """Sequences of words, and the same one word on."""
    ids = torch.tensor([numbers.get(word, 0) for word in text.split()])
    rows = (len(ids) - 1) // SEQUENCE
    inputs, targets = (ids[start : start + rows * SEQUENCE].view(rows, SEQUENCE) for start in (0, 1))
    return tud.TensorDataset(inputs, targets)


def load(train: Path | None, valid: Path | None) -> tuple[tud.TensorDataset, tud.TensorDataset, int]:
    """Sequences to train on, sequences to validate on, and how many words there are."""
    text = train.read_text(encoding="utf-8") if train else make_up(20_000, 1)
    held_out = valid.read_text(encoding="utf-8") if valid else make_up(2_000, 2)
    words = [word for word, times in Counter(text.split()).most_common() if times > 1 and word != UNKNOWN]
    numbers = {word: number for number, word in enumerate([UNKNOWN, *words])}
    return cut(text, numbers), cut(held_out, numbers), len(numbers)


parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, help="text to train on; made-up text without it")
parser.add_argument("--valid", type=Path, help="text to validate on")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
args, settings = parser.parse_known_args()

torch.manual_seed(0)
train_data, valid_data, words = load(args.data, args.valid)
with shardway.start("optim.clip=1.0", *settings, directory="runs/wikitext2") as run:
    model = run.shard(LanguageModel(words, args.dim, args.layers, heads=4))
    optimizer = run.optimizer(torch.optim.AdamW, model, lr=1e-3)
    loader = run.loader(train_data, batch_size=16)
    for batch in run.steps(loader, f"{args.epochs} epochs", run.validation(valid_data, loss_of)):
        run.step(model, batch, loss_of)
