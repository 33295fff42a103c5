"""A transformer of bytes, built on the meta device and filled where it is needed, on one device.

    python single.py --data text.txt        # without --data: on the text of this script's own folder

Data: any file; its bytes are the tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.data as tud
from model import Transformer

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
args = parser.parse_args()

data = load(args.data)
device = "cuda" if torch.cuda.is_available() else "cpu"
with torch.device("meta"):
    model = Transformer(256, SEQUENCE, args.dim, args.layers, heads=args.dim // 32)
model.to_empty(device=device)
model.init_weights(seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = tud.DataLoader(data, batch_size=16, shuffle=True)
for epoch in range(1, args.epochs + 1):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_of(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
