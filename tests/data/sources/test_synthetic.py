from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shardway.data.sources.base import DataRequest
from shardway.data.sources.synthetic import NOISE, open_synthetic
from shardway.errors import UserError
from shardway.runfile.schema import DataSection

SECTION = DataSection(kind="synthetic", samples=500, seq_len=32, shape=[1, 6, 5])


def test_a_sample_depends_on_its_id_and_the_seed_alone() -> None:
    for wants in ("tokens", "images"):
        source = open_synthetic(DataRequest(SECTION, 3, wants, vocab=50, classes=4))
        together = source.batch(np.array([7, 499, 7]))
        alone = source.batch(np.array([499]))
        for name, array in together.items():
            assert np.array_equal(array[0], array[2])
            assert np.array_equal(array[1], alone[name][0])
        other = open_synthetic(DataRequest(SECTION, 4, wants, vocab=50, classes=4)).batch(np.array([499]))
        assert not np.array_equal(other["inputs"], alone["inputs"])
        assert source.batch(np.empty(0, np.int64))["inputs"].shape == (0, *source.facts.sample_shape)


def test_tokens_follow_one_successor_table_but_for_the_noise() -> None:
    source = open_synthetic(DataRequest(SECTION, 3, "tokens", vocab=50))
    batch = source.batch(np.arange(500))
    assert batch["inputs"].shape == (500, 32)
    assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert batch["targets"].min() == 0
    assert batch["targets"].max() == 49
    pairs = Counter(zip(batch["inputs"].ravel().tolist(), batch["targets"].ravel().tolist(), strict=True))
    table = {token: max(range(50), key=lambda after: pairs[token, after]) for token in range(50)}
    assert sorted(table.values()) == list(range(50))
    followed = sum(pairs[pair] for pair in table.items()) / batch["targets"].size
    # A random token is the successor by chance once in 50; 16000 draws have a standard error of 0.0024.
    assert abs(followed - (1 - NOISE * 49 / 50)) < 0.01


def test_the_class_of_an_image_sets_its_mean() -> None:
    source = open_synthetic(DataRequest(SECTION, 3, "images", classes=4))
    batch = source.batch(np.arange(500))
    inputs, labels = batch["inputs"], batch["targets"]
    assert inputs.dtype == np.float32
    assert sorted(set(labels.tolist())) == [0, 1, 2, 3]
    means = np.stack([inputs[:400][labels[:400] == label].mean(axis=0).ravel() for label in range(4)])
    nearest = np.argmin(((inputs[400:].reshape(100, 1, -1) - means) ** 2).sum(axis=2), axis=1)
    assert np.mean(nearest == labels[400:]) > 0.95


def test_facts() -> None:
    facts = open_synthetic(DataRequest(SECTION, 3, "tokens", vocab=50)).facts
    assert facts.description == "500 made-up samples of 32 tokens, vocabulary 50"
    assert (facts.vocab, facts.classes, facts.sample_shape) == (50, None, (32,))
    facts = open_synthetic(DataRequest(SECTION, 3, "images", classes=4)).facts
    assert facts.description == "500 made-up images of shape [1, 6, 5], 4 classes"
    assert (facts.vocab, facts.classes, facts.sample_shape) == (None, 4, (1, 6, 5))


def test_tokens_need_a_vocabulary() -> None:
    with pytest.raises(UserError) as caught:
        open_synthetic(DataRequest(SECTION, 3, "tokens"))
    assert str(caught.value) == (
        "1 problem in the data\n"
        '  data.kind: "synthetic" has no vocabulary of its own\n'
        "      to do: set model.vocab to a number of tokens"
    )


def test_images_need_classes() -> None:
    with pytest.raises(UserError) as caught:
        open_synthetic(DataRequest(SECTION, 3, "images"))
    assert str(caught.value) == (
        '1 problem in the data\n  data.kind: "synthetic" has no classes of its own\n      to do: set model.classes'
    )
