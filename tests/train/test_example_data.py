"""The examples of images from tar shards, of conversations and of an adapter train, on data made here."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pool import ranks
from runs import lone_rank, read_column, read_named
from shardway.data.convert import WRITERS
from shardway.data.formats import parquet
from shardway.data.open import open_described
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.runfile.load import load_run
from shardway.train.run import LiveRun, train_run
from shardway.train.session import hold_session
from tiny_hf import save_tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ("train.validate_every=off", "checkpoint.every=off", "optim.warmup=2 steps", "optim.schedule=constant")


def train_example(name: str, folder: Path, *words: str) -> list[float]:
    """Train an example with further words; its losses."""
    resolution = resolve_request(ResolveRequest(EXAMPLES / name, (*QUICK, *words), folder, False), 1, 1)
    with hold_session(resolution, lone_rank(), None) as session:
        run = LiveRun(session)
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
def test_conversations_are_learnt_by_an_adapter(rank: int, tmp_path: Path) -> None:
    """The loss counts what the assistant says; the tokenizer is the model's."""
    write_conversations(tmp_path / "chat.jsonl")
    base = save_tiny(tmp_path / "base", "llama", vocab_size=300, max_position_embeddings=128)
    save_byte_tokenizer(base)
    words = (f"model.hf={base}", f"data.path={tmp_path / 'chat.jsonl'}", f"data.cache={tmp_path / 'cache'}")
    # The output layer too: weights here are random, and a frozen one of these says little.
    small = ("data.seq_len=128", "optim.lr=3e-2", 'model.lora_targets=["all-linear", "lm_head"]')
    losses = train_example("lora.toml", tmp_path / "run", *words, *small, "train.steps=40 steps")
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    resolved = load_run(tmp_path / "run" / "resolved.toml").values
    assert resolved.data.tokenizer == str(base / "tokenizer.json")


def save_byte_tokenizer(folder: Path) -> None:
    """A tokenizer.json of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_images(kind: str, folder: Path, count: int) -> None:
    """Pictures of two classes, each with more of one colour."""
    drawn = np.random.default_rng(0)

    def make(number: int) -> dict[str, object]:
        pixels = drawn.integers(0, 100, (40, 48, 3), dtype=np.uint8)
        pixels[:, :, number % 2] += 120
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG")
        return {"jpg": stream.getvalue(), "cls": number % 2}

    WRITERS[kind](iter(make(number) for number in range(count)), folder)


SMALL_IMAGES = ("model.classes=2", "data.shape=[3, 32, 32]", "model.channels=[8, 8]", "train.global_batch=16")


@ranks(1)
def test_images_of_tar_shards_are_learnt(rank: int, tmp_path: Path) -> None:
    write_images("webdataset", tmp_path / "shards", 64)
    words = (f"data.path={tmp_path / 'shards'}", *SMALL_IMAGES)
    losses = train_example("webdataset.toml", tmp_path / "run", *words, "train.steps=25 steps")
    assert np.mean(losses[-5:]) < 0.3 * losses[0]
    assert not read_named(tmp_path / "run", "data_slow")


@ranks(1)
def test_a_format_that_is_slow_in_random_order_is_said_once(rank: int, tmp_path: Path) -> None:
    write_images("parquet", tmp_path / "rows", 64)
    words = ("data.kind=parquet", f"data.path={tmp_path / 'rows'}", *SMALL_IMAGES, "train.steps=2 steps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "GROUP_BYTES", 1)
        patch.setattr(parquet, "_QUICK_BYTES", 1)
        train_example("webdataset.toml", tmp_path / "random", *words)
        train_example("webdataset.toml", tmp_path / "in_order", *words, "data.shuffle=false")
    (noted,) = read_named(tmp_path / "random", "data_slow")
    assert noted["reason"].startswith("samples come slowly in random order (data.shuffle): a row group of ")
    assert "`shardway data prepare`" in noted["reason"]
    assert not read_named(tmp_path / "in_order", "data_slow")
