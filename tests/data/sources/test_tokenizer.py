from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shardway.data.content import DataPath
from shardway.data.sources import tokens as text_source
from shardway.data.sources.base import DataRequest
from shardway.data.sources.tokens import TokenWindows, open_text, open_tokenizer, split_pieces
from shardway.errors import UserError
from shardway.runfile.schema import DataSection

WORDS = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3, "</s>": 4}


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer.json that knows three words, with a truncation that a corpus must not suffer."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def read(path: Path, name: Path | str, **keys: Any) -> TokenWindows:
    section = DataSection(path=str(path), tokenizer=str(name), **{"seq_len": 2, "include": "*.txt", **keys})
    return open_text(DataPath("data.path", str(path)), DataRequest(section, 0, "tokens"))


def refused(name: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        open_tokenizer(str(name))
    return str(caught.value)


def test_documents_are_tokenised_and_joined_by_the_end_token(words: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on\nthe cat")
    (tmp_path / "b.txt").write_bytes(b"sat \xff")
    source = read(tmp_path, words, cache=str(tmp_path / "cache"))
    assert source.file.open().tolist() == [1, 2, 3, 0, 1, 2, 4, 3, 0]
    assert source.file.open().dtype == "uint16"
    assert source.facts.vocab == 5
    assert source.facts.bytes_per_token == pytest.approx((22 + 5) / 9)
    assert source.facts.description == f"0.0 MB of text, 2 files in {tmp_path}, tokenizer {words} (5 tokens)"


def test_tokens_become_text_again(words: Path) -> None:
    opened, plain = open_tokenizer(str(words)), open_tokenizer("bytes")
    assert opened.decode([1, 2, 4]) == "the cat </s>"  # special tokens too
    assert plain.decode(list("naïve €".encode())) == "naïve €"
    assert plain.decode([97, 0xE2, 0x82, 300]) == "a\ufffd"  # a part of a character, and no byte at all


def test_another_tokenizer_prepares_anew(words: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat")
    first = read(tmp_path, words, cache=str(tmp_path / "cache"))
    words.write_text(words.read_text().replace('"cat"', '"dog"'))
    second = read(tmp_path, words, cache=str(tmp_path / "cache"))
    assert first.file.path != second.file.path
    assert second.file.open().tolist() == [1, 0, 3]
    assert first.facts.fingerprint != second.facts.fingerprint


def test_long_text_is_encoded_in_pieces_that_end_at_lines(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "the cat\nsat the\n\n" * 200
    monkeypatch.setattr(text_source, "PIECE_CHARACTERS", 10)
    pieces = list(split_pieces(content))
    assert "".join(pieces) == content
    assert len(pieces) > 100
    assert all(piece.endswith("\n") for piece in pieces)
    assert list(split_pieces("")) == []
    (tmp_path / "a.txt").write_text(content)
    source = read(tmp_path / "a.txt", words, cache=str(tmp_path / "cache"))
    assert source.file.open().tolist() == [1, 2, 3, 1] * 200


def test_a_sentencepiece_model_is_read(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    text = tmp_path / "a.txt"
    text.write_text("the cat sat on the mat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "tiny"), vocab_size=15, minloglevel=2
    )
    opened = open_tokenizer(str(tmp_path / "tiny.model"))
    assert (opened.vocab, opened.end) == (15, 2)
    source = read(text, tmp_path / "tiny.model", cache=str(tmp_path / "cache"))
    tokens = source.file.open().tolist()
    assert opened.inner.decode(tokens) == opened.decode([*tokens, 99]) == " ".join(["the cat sat on the mat"] * 50)
    assert source.facts.vocab == 15


@pytest.mark.parametrize(("name", "package"), [("t.json", "tokenizers"), ("t.model", "sentencepiece")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, package, None)
    assert refused(tmp_path / name) == (
        f"data.tokenizer needs the Python package {package}, which is not installed\n"
        '      to do: pip install "shardway[tokenizers]"'
    )


@pytest.mark.parametrize("name", ["gpt2", "t.json", "t.model"])
def test_a_tokenizer_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    what = "is not a tokenizer" if name == "gpt2" else "does not exist"
    path = tmp_path / name
    assert refused(path) == (
        f'1 problem in the data\n  data.tokenizer: "{path}" {what}\n'
        '      allowed: "bytes", a tokenizer.json file or a .model file'
    )


@pytest.mark.parametrize(("name", "package"), [("t.json", "tokenizers"), ("t.model", "sentencepiece")])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, name: str, package: str) -> None:
    pytest.importorskip(package)
    (tmp_path / name).write_text("{not a tokenizer")
    start = f'1 problem in the data\n  data.tokenizer: "{tmp_path / name}" is not a {Path(name).suffix} tokenizer'
    assert refused(tmp_path / name).startswith(f"{start} that can be read: ")


def test_real_tokenizers_agree_with_their_libraries(tmp_path: Path) -> None:
    root = os.environ.get("SHARDWAY_TEST_DATA")
    if root is None:
        pytest.skip("SHARDWAY_TEST_DATA does not name a folder of real data")
    tokenizers = pytest.importorskip("tokenizers")
    name = Path(root, "tokenizers/gpt2/tokenizer.json")
    text = Path(root, "wikitext-2/valid.txt").read_text(encoding="utf-8")[:200_000]
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    source = read(tmp_path / "a.txt", name, cache=str(tmp_path / "cache"))
    expected = tokenizers.Tokenizer.from_file(str(name)).encode(text).ids
    assert source.file.open().tolist() == expected
    assert source.facts.vocab == 50257
    assert open_tokenizer(str(name)).end == 50256
