"""MNIST with a small ConvNet on one device.

    python single.py --data FOLDER        # without --data: on made-up images

Data: the four files of the MNIST database (train-images-idx3-ubyte.gz and so on) in one folder, from
http://yann.lecun.com/exdb/mnist/ or one of its mirrors.
"""

from __future__ import annotations

import argparse
import gzip
import struct
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.data as tud
from torch import nn


class ConvNet(nn.Module):
    """Images [batch, 1, 28, 28] -> logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3)
        self.fc1 = nn.Linear(32 * 5 * 5, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def read_idx(path: Path) -> torch.Tensor:
    """The numbers of an idx file: a header of 4 bytes, as many sizes as its last byte says, and the values."""
    content = gzip.decompress(path.read_bytes())
    start = 4 + 4 * content[3]
    sizes = struct.unpack(f">{content[3]}I", content[4:start])
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(sizes)


def load_part(folder: Path, part: str) -> tud.TensorDataset:
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")[:, None] / 255
    return tud.TensorDataset((images - 0.1307) / 0.3081, read_idx(folder / f"{part}-labels-idx1-ubyte.gz").long())


def make_up(samples: int, seed: int) -> tud.TensorDataset:
    """Ten patterns under noise."""
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=generator)
    return tud.TensorDataset(patterns[labels] + torch.randn(samples, 1, 28, 28, generator=generator), labels)


def load(folder: Path | None) -> tuple[tud.TensorDataset, tud.TensorDataset]:
    """Images to train on and images to test on."""
    if folder is None:
        return make_up(1024, 1), make_up(256, 2)
    return load_part(folder, "train"), load_part(folder, "t10k")


@torch.no_grad()
def evaluate(model: nn.Module, data: tud.TensorDataset, device: str) -> float:
    """The part of the images that the model names right."""
    right = 0
    for images, labels in tud.DataLoader(data, batch_size=1000):
        right += int((model(images.to(device)).argmax(1) == labels.to(device)).sum())
    return right / len(data)


parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, help="folder of the four files; made-up images without it")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

torch.manual_seed(0)
train_data, test_data = load(args.data)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = ConvNet().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
loader = tud.DataLoader(train_data, batch_size=64, shuffle=True)
for epoch in range(1, args.epochs + 1):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {evaluate(model, test_data, device):.4f}")
