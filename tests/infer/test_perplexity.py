"""Perplexity: what transformers computes by itself, what a run's own validation was, and the same on several ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pool import ranks
from runs import COMMON, lone_rank, pool_ranks, read_named, train_tiny
from shardway.errors import UserError
from shardway.infer import evaluate
from shardway.infer.evaluate import TokenData, measure_perplexity, open_validation, open_whole
from shardway.infer.model import ModelRequest, OpenedModel, open_model
from shardway.runfile.load import load_run
from shardway.runfile.schema import DataSection
from tiny_hf import load_reference, save_tiny

QUIET = tuple(word for word in COMMON if not word.startswith("data."))
SIZES = ("model.dim=16", "model.layers=2", "model.heads=2", "model.ffn_dim=32", "data.seq_len=24", "data.kind=text")
LINES = [f"def f({number}): the value of x is {number * 7 % 13}\n" for number in range(90)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Passes of a few rows have nothing for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_on_files(folder: Path, *words: str) -> Path:
    """A run on a folder of small files, of which one checkpoint, of step 6, is saved and validated."""
    files = folder / "files"
    if not files.exists():
        files.mkdir(parents=True)
        for number in range(0, len(LINES), 2):
            (files / f"{number:03}.py").write_text(LINES[number] + LINES[number + 1])
    base = (*QUIET, *SIZES, f"data.path={files}", f"data.cache={folder / 'cache'}", "data.validation_fraction=0.3")
    saved = ("train.steps=6", "train.validate_every=6 steps", "checkpoint.every=6 steps", "optim.lr=0.01")
    train_tiny(folder / "run", lone_rank(), *saved, *words, base=base)
    return folder / "run"


def own_validation(run: Path) -> tuple[TokenData, dict[str, float]]:
    """What the run validates on, and its last result."""
    data = open_validation(load_run(run / "resolved.toml").values, str(run))
    return data, read_named(run, "validation")[-1]


KINDS = [(), ("data.pack=true",), ("data.group_tokens=96",)]


@pytest.mark.parametrize("words", KINDS, ids=["windows", "bins", "groups"])
def test_a_run_has_the_loss_of_its_own_validation(tmp_path: Path, words: tuple[str, ...]) -> None:
    run = train_on_files(tmp_path, *words)
    opened = open_model(ModelRequest(str(run), device="cpu"))
    data, validated = own_validation(run)
    found = measure_perplexity(opened, data, rows=3)
    assert found.loss == pytest.approx(validated["loss"], abs=1e-6)
    assert found.bits_per_byte == pytest.approx(validated["bits_per_byte"], abs=1e-6)
    assert found.perplexity == math.exp(found.loss)
    assert measure_perplexity(opened, data).loss == pytest.approx(found.loss, abs=1e-6)  # by memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama", vocab_size=256)


@pytest.fixture(scope="module")
def opened(folder: Path) -> OpenedModel:
    return open_model(ModelRequest(str(folder), device="cpu"))


def section(path: Path, **more: object) -> DataSection:
    return DataSection(kind="text", path=str(path), seq_len=20, cache=str(path.parent / "cache"), **more)  # type: ignore[arg-type]


def text_of(folder: Path, length: int) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(LINES)[:length])
    return path


@pytest.mark.parametrize("length", [101, 100, 87, 21])
def test_each_token_is_predicted_once_as_transformers_does(
    folder: Path, opened: OpenedModel, tmp_path: Path, length: int
) -> None:
    """Also those behind the last whole window, and none for data that end with one."""
    path = text_of(tmp_path, length)
    found = measure_perplexity(opened, open_whole(section(path), 256), rows=2)
    tokens, model = torch.tensor(list(path.read_bytes())), load_reference(folder)
    total = 0.0
    for start in range(0, length - 1, 20):
        part = tokens[start : start + 21]
        with torch.no_grad():
            logits = model(part[None, :-1]).logits[0].double()
        total += float(F.cross_entropy(logits, part[1:], reduction="sum"))
    assert found.tokens == length - 1
    assert found.loss == pytest.approx(total / (length - 1), abs=1e-6)
    assert found.bits_per_byte == pytest.approx(total / (length - 1) / math.log(2), abs=1e-6)


def test_documents_of_one_row_do_not_see_each_other(folder: Path, opened: OpenedModel, tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    texts = ["a first text", "second", "the third of them is long"[:20], "x = 4"]
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    data = open_whole(section(path, pack=True).model_copy(update={"kind": "jsonl"}), 256)
    found, model, total, count = measure_perplexity(opened, data), load_reference(folder), 0.0, 0
    for each in texts:
        tokens = torch.tensor([*each.encode(), 0])  # with the end of a document
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0].double()
        total += float(F.cross_entropy(logits, tokens[1:], reduction="sum"))
        count += len(tokens) - 1
    assert (found.tokens, found.samples < len(texts)) == (count, True)
    assert found.loss == pytest.approx(total / count, abs=1e-6)


@ranks(2)
def test_ranks_find_what_one_finds(rank: int, tmp_path: Path) -> None:
    """Bit for bit, also if the last pass is one rank's alone."""
    on = pool_ranks()
    path = on.first_then_all(lambda: text_of(tmp_path, 500) if rank == 0 else tmp_path / "text.txt")
    folder = on.first_then_all(
        lambda: tmp_path / "tiny" if rank else save_tiny(tmp_path / "tiny", "qwen3", vocab_size=256)
    )
    opened = open_model(ModelRequest(str(folder), device="cpu"))
    data = open_whole(section(path), 256)
    both, alone = measure_perplexity(opened, data, on, rows=5), measure_perplexity(opened, data, rows=5)
    assert both.results == alone.results
    assert both.tokens == alone.tokens == 499


def test_a_pass_that_does_not_fit_is_halved(
    opened: OpenedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, compute = open_whole(section(text_of(tmp_path, 200)), 256), evaluate.compute_logits
    expected = measure_perplexity(opened, data, rows=8)

    def limited(model: OpenedModel, inputs: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if len(inputs) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return compute(model, inputs, positions)

    monkeypatch.setattr(evaluate, "compute_logits", limited)
    assert measure_perplexity(opened, data, rows=8).loss == pytest.approx(expected.loss, abs=1e-6)
    monkeypatch.setattr(evaluate, "estimate_pass_bytes", lambda opened, length: 2**62)
    assert evaluate.choose_rows(opened, 20) == 1


def test_what_cannot_be_evaluated_is_refused(opened: OpenedModel, tmp_path: Path) -> None:
    refusals = []

    def refuse(path: Path, vocab: int = 256, **more: object) -> None:
        with pytest.raises(UserError) as refused:
            measure_perplexity(opened, open_whole(section(path).model_copy(update=more), vocab))
        refusals.append(str(refused.value))

    (tmp_path / "empty.txt").touch()
    np.save(tmp_path / "large.npy", np.full(300, 999, np.uint16))
    refuse(tmp_path / "empty.txt")
    refuse(tmp_path / "no.txt")
    refuse(tmp_path / "large.npy", kind="tokens")
    refuse(text_of(tmp_path, 200), vocab=50)
    refuse(text_of(tmp_path, 200), seq_len=65)
    refuse(text_of(tmp_path, 10))
    expected = (
        "is empty",
        "does not exist",
        "999",
        "50 is less than the 256 tokens",
        "data.seq_len = 65 is more than the 64 positions",
        "holds 10 tokens, too few for one sample",
    )
    for words, message in zip(expected, refusals, strict=True):
        assert words in message
        assert "Traceback" not in message
