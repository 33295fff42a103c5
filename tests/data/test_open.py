from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardway.data.open import Data, find_kind, may_draw, open_data
from shardway.data.sources.base import DataSource, Slice
from shardway.errors import UserError
from shardway.runfile.schema import DataSection

pytestmark = pytest.mark.usefixtures("warm_starts")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    np.save(tmp_path / "t.npy", np.arange(401, dtype=np.uint16))
    return tmp_path / "t.npy"


def read(wants: Any = "tokens", vocab: int | None = None, classes: int | None = None, **keys: Any) -> Data:
    return open_data(DataSection(**{"seq_len": 4, **keys}), 0, wants, vocab, classes)


def refused(wants: Any = "tokens", **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(wants, **keys)
    return str(caught.value)


def test_code_of_others_may_draw_random_numbers_when_data_are_opened() -> None:
    web = {"path": "web", "weight": 1.0}
    ours: list[dict[str, Any]] = [{}, {"kind": "synthetic"}, {"blend": [web, {**web, "kind": "jsonl"}]}]
    others: list[dict[str, Any]] = [
        {"kind": "dataset", "dataset": "mine:Rows"},
        {"kind": "images", "transform": "mine:crop"},
        {"blend": [web, {**web, "kind": "dataset"}]},
    ]
    assert [may_draw(DataSection.model_validate(keys)) for keys in (*ours, *others)] == [False] * 3 + [True] * 3


def test_the_last_part_is_held_out(tokens: Path) -> None:
    data = read(kind="tokens", path=str(tokens), validation_fraction=0.1)
    assert data.validation is not None
    assert (len(data.train), len(data.validation)) == (90, 10)
    assert data.train.batch(np.array([89]))["inputs"].tolist() == [[356, 357, 358, 359]]
    assert data.validation.batch(np.array([0]))["inputs"].tolist() == [[360, 361, 362, 363]]
    assert data.train.facts.description.endswith(", samples 0 to 89")
    assert data.train.facts.fingerprint != data.validation.facts.fingerprint
    assert data.validation.tokens_per_sample == 4


def test_at_least_one_sample_is_held_out_and_none_where_none_is_wanted(tokens: Path) -> None:
    data = read(kind="tokens", path=str(tokens), validation_fraction=0.001)
    assert data.validation is not None
    assert (len(data.train), len(data.validation)) == (99, 1)
    whole = read(kind="tokens", path=str(tokens), validation_fraction=0.0)
    assert (len(whole.train), whole.validation) == (100, None)


def test_a_validation_file_leaves_the_training_file_whole(tokens: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.arange(41, dtype=np.uint16))
    data = read(kind="tokens", path=str(tokens), validation=str(tmp_path / "v.npy"))
    assert data.validation is not None
    assert (len(data.train), len(data.validation)) == (100, 10)


def test_every_source_keeps_the_protocol(tokens: Path) -> None:
    sources = [
        read(kind="tokens", path=str(tokens)).train,
        read(kind="synthetic", vocab=9).train,
        read("images", kind="synthetic", classes=3).train,
    ]
    assert all(isinstance(source, DataSource) and isinstance(source, Slice) for source in sources)
    assert not isinstance([1, 2], DataSource)


def test_idx_validates_on_its_test_files(tmp_path: Path) -> None:
    for part, count in (("train", 40), ("t10k", 7)):
        dims = count.to_bytes(4, "big")
        images = b"\0\0\x08\x03" + dims + (2).to_bytes(4, "big") * 2 + bytes(4 * count)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(images)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + dims + bytes(count))
    data = read("images", kind="idx", path=str(tmp_path), classes=10)
    assert data.validation is not None
    assert (len(data.train), len(data.validation)) == (40, 7)
    again = read("images", kind="idx", path=str(tmp_path), validation=str(tmp_path), classes=10)
    assert again.validation is not None
    assert len(again.validation) == 7
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    held = read("images", kind="idx", path=str(tmp_path), validation_fraction=0.25, classes=10)
    assert held.validation is not None
    assert (len(held.train), len(held.validation)) == (30, 10)


def test_a_kind_that_the_model_cannot_take_is_refused(tokens: Path) -> None:
    assert refused("images", kind="tokens", path=str(tokens)) == (
        "1 problem in the data\n"
        '  data.kind: "tokens" gives tokens, but the model takes images\n'
        "      allowed: jsonl, parquet, arrow, webdataset, mds, energon, hdf5, lmdb, arrays, images, idx, shards, "
        "dataset, synthetic"
    )
    assert refused("tokens", kind="idx") == (
        "1 problem in the data\n"
        '  data.kind: "idx" gives images, but the model takes tokens\n'
        "      allowed: text, jsonl, tokens, megatron, parquet, arrow, webdataset, mds, energon, hdf5, lmdb, shards, "
        "dataset, synthetic"
    )


def test_a_validation_path_for_made_up_data_is_refused() -> None:
    assert refused(kind="synthetic", validation="v.npy", vocab=9) == (
        "1 problem in the data\n"
        '  data.validation: "v.npy" cannot go with data.kind = "synthetic", which reads no files\n'
        "      to do: leave it out; data.validation_fraction of the samples is held out"
    )


def test_too_few_samples_to_hold_one_out_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(5, dtype=np.uint16))
    assert refused(kind="tokens", path=str(tmp_path / "t.npy")) == (
        "1 problem in the data\n"
        "  data.path: has too few samples (1) to hold out data.validation_fraction = 0.01 of them\n"
        "      allowed: at least one sample to train on and one to validate on\n"
        "      to do: give more data, or set data.validation_fraction = 0.0"
    )


def test_a_problem_of_the_validation_file_names_its_key(tokens: Path, tmp_path: Path) -> None:
    assert refused(kind="tokens", path=str(tokens), validation=str(tmp_path / "v.npy")) == (
        "1 problem in the data\n"
        f'  data.validation: "{tmp_path / "v.npy"}" does not exist\n'
        "      allowed: a .npy or .bin token file"
    )


def test_validation_of_another_shape_is_refused(tmp_path: Path) -> None:
    for name, width in (("t", 3), ("v", 4)):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((5, width), np.uint8), y=np.zeros(5, np.uint8))
    assert refused(
        "images", kind="arrays", path=str(tmp_path / "t.npz"), validation=str(tmp_path / "v.npz"), classes=2
    ) == (
        "1 problem in the data\n"
        "  data.validation: has samples of shape [4]\n"
        "      allowed: [3], the shape of the training samples"
    )


def test_a_file_that_the_system_refuses_is_one_problem(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    # By a stand-in for open(2), because a test that runs as root may read everything.
    monkeypatch.setattr(Path, "open", deny)
    assert refused(kind="tokens", path=str(tokens)) == (
        f'1 problem in the data\n  data.path: "{tokens}" cannot be read: Permission denied at "{tokens}"'
    )


def test_data_is_opened_without_torch_and_without_tokenizers(tokens: Path) -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'tokenizers', 'sentencepiece']))\n"
        "from shardway.data.open import open_data\n"
        "from shardway.runfile.schema import DataSection\n"
        f"data = open_data(DataSection(kind='tokens', path={str(tokens)!r}, seq_len=4), 0, 'tokens')\n"
        "print(len(data.train))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert (done.stdout, done.stderr) == ("99\n", "")


def test_real_mnist_opens() -> None:
    root = os.environ.get("SHARDWAY_TEST_DATA")
    if root is None:
        pytest.skip("SHARDWAY_TEST_DATA does not name a folder of real data")
    data = read("images", kind="idx", path=f"{root}/mnist", classes=10, mean=0.1307, std=0.3081)
    assert data.validation is not None
    assert (len(data.train), len(data.validation)) == (60000, 10000)
    pixels = data.train.batch(np.arange(0, 60000, 7))["inputs"]
    assert abs(float(pixels.mean())) < 0.01
    assert abs(float(pixels.std()) - 1.0) < 0.01
    assert data.train.batch(np.arange(5))["targets"].tolist() == [5, 0, 4, 1, 9]


def test_an_address_is_refused_with_the_command_that_copies_it() -> None:
    assert refused("tokens", kind="jsonl", path="s3://bucket/chat.jsonl") == (
        "1 problem in the data\n"
        '  data.path: "s3://bucket/chat.jsonl" is an address, and a run reads files\n'
        "      to do: copy it to this machine first: `shardway data prepare s3://bucket/chat.jsonl OUT`"
    )


@pytest.mark.parametrize(("name", "there"), [("a-{0..1}.tar", True), ("a-*.tar", True), ("b-*.tar", False)])
def test_a_pattern_is_there_if_a_file_of_it_is(tmp_path: Path, name: str, there: bool) -> None:
    (tmp_path / "a-1.tar").touch()
    section = DataSection(kind="webdataset", path=str(tmp_path / name))
    assert find_kind(section).exists(section) is there
