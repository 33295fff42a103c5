"""A transformer of bytes, built on the meta device and filled where it is needed: what single.py becomes.

    python with_shardway.py --data text.txt        # without --data: on the text of this script's own folder
    torchrun --nproc-per-node 2 with_shardway.py --data text.txt parallel.dp_shard=2
    torchrun --nproc-per-node 2 with_shardway.py --data text.txt parallel.tp=2      # or cp, or pp

Data: any file; its bytes are the tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.data as tud
from model import Transformer

import shardway

SEQUENCE = 64


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load(path: Path | None) -> tud.TensorDataset:
    """Sequences of bytes, and the same one byte on."""
    paths = [path] if path else sorted(Path(__file__).parent.glob("*.py"))
    tokens = torch.tensor(list(b"".join(path.read_bytes() for path in paths)))
    rows = (len(tokens) - 1) // SEQUENCE
    inputs, targets = (tokens[start : start + rows * SEQUENCE].view(rows, SEQUENCE) for start in (0, 1))
    return tud.TensorDataset(inputs, targets)


parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, help="a file to learn; the scripts of this folder without it")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--dim", type=int, default=256)
parser.add_argument("--layers", type=int, default=4)
args, settings = parser.parse_known_args()

data = load(args.data)
with shardway.start(*settings, directory="runs/fsdp2") as run:
    with torch.device("meta"):
        model = Transformer(256, SEQUENCE, args.dim, args.layers, heads=args.dim // 32)
    model = run.shard(model)
    optimizer = run.optimizer(torch.optim.AdamW, model, lr=1e-3)
    loader = run.loader(data, batch_size=16)
    for batch in run.steps(loader, f"{args.epochs} epochs"):
        run.step(model, batch, loss_of)
