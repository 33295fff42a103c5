"""The examples of images from tar shards and of conversations train, on data made here."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
from PIL import Image

from pool import ranks
from runs import lone_rank, read_column
from shardway.data.convert import WRITERS
from shardway.data.open import open_described
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.train.run import Run, train_run
from shardway.train.session import hold_session

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ("train.validate_every=off", "checkpoint.every=off", "optim.warmup=2 steps", "optim.schedule=constant")


def train_example(name: str, folder: Path, *words: str) -> list[float]:
    """Train an example with further words; its losses."""
    resolution = resolve_request(ResolveRequest(EXAMPLES / name, (*QUICK, *words), folder, False), 1, 1)
    with hold_session(resolution, lone_rank(), None) as session:
        run = Run(session)
        outcome = train_run(run)
        run.close()
    assert outcome.state == "finished"
    return read_column(folder)


def write_conversations(path: Path) -> None:
    """Sums that an assistant answers."""
    dice = random.Random(0)
    with path.open("w") as stream:
        for _ in range(300):
            first, second = dice.randint(0, 4), dice.randint(0, 4)
            turns = [
                {"role": "user", "content": f"{first}+{second}?"},
                {"role": "assistant", "content": f"It is {first + second}."},
            ]
            stream.write(json.dumps({"messages": turns}) + "\n")


@ranks(1)
def test_conversations_are_learnt(rank: int, tmp_path: Path) -> None:
    write_conversations(tmp_path / "chat.jsonl")
    words = (f"data.path={tmp_path / 'chat.jsonl'}", f"data.cache={tmp_path / 'cache'}")
    small = ("model.dim=32", "model.layers=1", "model.heads=2", "data.seq_len=128", "optim.lr=1e-2")
    losses = train_example("chat.toml", tmp_path / "run", *words, *small, "train.steps=40 steps")
    assert np.mean(losses[-5:]) < 0.5 * losses[0]

    resolved = resolve_request(ResolveRequest(EXAMPLES / "chat.toml", (*words, *small))).resolved
    batch = open_described(resolved.values).train.batch(np.arange(4))
    counted = batch["targets"] != -100
    answers = bytes(batch["targets"][counted].astype(np.uint8)).decode()
    assert set(answers.split("<|im_end|>")[:-1]) <= {f"It is {number}." for number in range(9)}
    assert b"<|im_start|>user" in bytes(batch["inputs"][~counted].astype(np.uint8))


@ranks(1)
def test_images_of_tar_shards_are_learnt(rank: int, tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)

    def make(number: int) -> dict[str, object]:
        pixels = drawn.integers(0, 100, (40, 48, 3), dtype=np.uint8)
        pixels[:, :, number % 2] += 120
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG")
        return {"jpg": stream.getvalue(), "cls": number % 2}

    WRITERS["webdataset"](iter(make(number) for number in range(64)), tmp_path / "shards")
    words = (f"data.path={tmp_path / 'shards'}", "model.classes=2", "data.shape=[3, 32, 32]", "model.channels=[8, 8]")
    losses = train_example("webdataset.toml", tmp_path / "run", *words, "train.steps=25 steps", "train.global_batch=16")
    assert np.mean(losses[-5:]) < 0.3 * losses[0]
