"""Text -> tokens by a tokenizer file, behind one small interface for both libraries.

Invariant: the tokens of a text depend on the file alone, not on cores or threads. The libraries are imported when
a tokenizer is opened, so that byte data works without them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from shardway.data.sources.base import DataPath, fingerprint
from shardway.errors import UserError

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""Usual names of the token that ends a document; the first that a tokenizer.json has is used."""

PIECE_CHARACTERS = 2**20
"""Text is encoded in pieces that end at a line and have about this length, so that memory stays bounded."""


class Tokenizer(Protocol):
    """`vocab` is one more than the largest token; `end` is the token between documents, where there is one."""

    @property
    def vocab(self) -> int: ...

    @property
    def end(self) -> int | None: ...

    def encode(self, pieces: Sequence[str]) -> list[list[int]]: ...


@dataclass(frozen=True)
class JsonTokenizer:
    """A tokenizer.json, through the `tokenizers` package."""

    inner: Any

    @property
    def vocab(self) -> int:
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end(self) -> int | None:
        found = (self.inner.token_to_id(name) for name in END_TOKENS)
        return next((token for token in found if token is not None), None)

    def encode(self, pieces: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.inner.encode_batch(list(pieces), add_special_tokens=False)]


@dataclass(frozen=True)
class SentencePiece:
    """A .model file, through the `sentencepiece` package."""

    inner: Any

    @property
    def vocab(self) -> int:
        return int(self.inner.get_piece_size())

    @property
    def end(self) -> int | None:
        token = int(self.inner.eos_id())
        return token if token >= 0 else None

    def encode(self, pieces: Sequence[str]) -> list[list[int]]:
        encoded: list[list[int]] = self.inner.encode(list(pieces))
        return encoded


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a .json or .model file; UserError where it is missing, damaged or its package is."""
    place = DataPath("data.tokenizer", name)
    openers = {".json": _open_json, ".model": _open_sentencepiece}
    if place.path.suffix not in openers:
        raise place.error("is not a tokenizer", allowed='"bytes", a tokenizer.json file or a .model file')
    if not place.path.is_file():
        raise place.error("does not exist", allowed='"bytes", a tokenizer.json file or a .model file')
    try:
        return openers[place.path.suffix](place.path)
    except UserError:
        raise
    except Exception as error:  # both libraries raise bare Exception, RuntimeError or OSError for a damaged file
        raise place.error(f"is not a {place.path.suffix} tokenizer that can be read: {error}") from error


def identify_tokenizer(name: str) -> str:
    """A fingerprint of the tokenizer's content; "bytes" stays itself."""
    return name if name == "bytes" else fingerprint(DataPath("data.tokenizer", name).path.read_bytes().hex())


def split_pieces(text: str) -> Iterator[str]:
    """Consecutive pieces of a text, each of at least PIECE_CHARACTERS and up to the next end of line."""
    start = 0
    while start < len(text):
        line_end = text.find("\n", start + PIECE_CHARACTERS)
        stop = len(text) if line_end < 0 else line_end + 1
        yield text[start:stop]
        start = stop


def _open_json(path: Path) -> Tokenizer:
    inner = _import_package("tokenizers").Tokenizer.from_file(str(path))
    # A tokenizer.json may carry the truncation and padding of the model it was made for; a corpus needs neither.
    inner.no_truncation()
    inner.no_padding()
    return JsonTokenizer(inner)


def _open_sentencepiece(path: Path) -> Tokenizer:
    return SentencePiece(_import_package("sentencepiece").SentencePieceProcessor(model_file=str(path)))


def _import_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"data.tokenizer needs the Python package {name}, which is not installed\n"
            '      to do: pip install "shardway[tokenizers]"'
        ) from error
