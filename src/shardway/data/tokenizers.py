"""Tokenizers: one interface for bytes and for the libraries that read a tokenizer.json or a sentencepiece model.

Invariants:
- The tokens of a text depend on the text and the tokenizer file alone, not on cores or threads.
- The libraries are imported when a tokenizer is opened, so byte data need none.
- A token that covers a character of a marked span is marked, and so is every token between two of one span.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from shardway.data.content import DataPath
from shardway.errors import UserError

Tokens = npt.NDArray[Any]
Spans = Sequence[tuple[int, int]]
"""Parts of a text as (first character, character after the last), in rising order, not overlapping."""
Marked = tuple[Tokens, npt.NDArray[np.bool_]]
"""The tokens of a text, and whether each belongs to one of its spans."""

BYTES = "bytes"
"""The name of the tokenizer that needs no file: a token is a byte of UTF-8."""

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""Usual names of the token that ends a document; the first that a tokenizer.json has is used."""

_PACKAGES = {".json": "tokenizers", ".model": "sentencepiece"}
_IN_A_FOLDER = ("tokenizer.json", "tokenizer.model", "spiece.model")


class Tokenizer(Protocol):
    """What a tokenizer does for the data."""

    @property
    def vocab(self) -> int:
        """One more than the largest token."""

    @property
    def end(self) -> int | None:
        """The token that ends a document."""

    def encode(self, pieces: Sequence[str]) -> list[Any]:
        """The tokens of each text: a list or an array of integers. Special tokens are not added."""

    def encode_spans(self, texts: Sequence[str], spans: Sequence[Spans]) -> list[Marked]:
        """The tokens of each text, and which of them belong to its spans."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, special ones included; U+FFFD for what is no UTF-8."""

    @property
    def names(self) -> dict[str, str]:
        """ "bos_token" and "eos_token", as a chat template refers to them; "" where they are not known."""

    def describe(self) -> dict[str, Any]:
        """What identifies it: "name" of its file, "xxh3" of the content in hex ("" for bytes), "vocab", "end"."""


@dataclass(frozen=True)
class ByteTokenizer:
    """The bytes of a text in UTF-8; a zero byte ends a document."""

    vocab: int = 256
    end: int | None = 0

    def encode(self, pieces: Sequence[str]) -> list[Any]:
        return [np.frombuffer(piece.encode(), np.uint8) for piece in pieces]

    def encode_spans(self, texts: Sequence[str], spans: Sequence[Spans]) -> list[Marked]:
        made = []
        for text, inside in zip(texts, spans, strict=True):
            tokens = np.frombuffer(text.encode(), np.uint8)
            marked = np.zeros(len(tokens), np.bool_)
            for start, stop in inside:
                first = len(text[:start].encode())
                marked[first : first + len(text[start:stop].encode())] = True
            made.append((tokens, marked))
        return made

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < self.vocab).decode(errors="replace")

    @property
    def names(self) -> dict[str, str]:
        return {"bos_token": "", "eos_token": ""}

    def describe(self) -> dict[str, Any]:
        return {"name": BYTES, "xxh3": "", "vocab": self.vocab, "end": self.end}


@dataclass(frozen=True)
class JsonTokenizer:
    """A tokenizer.json, through the `tokenizers` package. Added tokens in a text are recognised."""

    inner: Any
    path: Path

    @cached_property
    def vocab(self) -> int:
        return int(max(self.inner.get_vocab(with_added_tokens=True).values())) + 1

    @cached_property
    def end(self) -> int | None:
        found = (self.inner.token_to_id(name) for name in (*END_TOKENS, self.names["eos_token"]) if name)
        return next((token for token in found if token is not None), None)

    def encode(self, pieces: Sequence[str]) -> list[Any]:
        return [encoding.ids for encoding in self.inner.encode_batch_fast(list(pieces), add_special_tokens=False)]

    def encode_spans(self, texts: Sequence[str], spans: Sequence[Spans]) -> list[Marked]:
        made = []
        for encoding, inside in zip(self.inner.encode_batch(list(texts), add_special_tokens=False), spans, strict=True):
            tokens = np.array(encoding.ids, np.int64)
            marked = np.zeros(len(tokens), np.bool_)
            starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            for start, stop in inside:
                marked[np.searchsorted(stops, start, side="right") : np.searchsorted(starts, stop, side="left")] = True
            made.append((tokens, marked))
        return made

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(list(tokens), skip_special_tokens=False))

    @cached_property
    def names(self) -> dict[str, str]:
        return _read_names(self.path.with_name("tokenizer_config.json"))

    def describe(self) -> dict[str, Any]:
        return {"name": self.path.name, "xxh3": sum_file(self.path), "vocab": self.vocab, "end": self.end}


@dataclass(frozen=True)
class SentencePiece:
    """A .model file, through the `sentencepiece` package. Its control pieces are recognised in conversations alone."""

    inner: Any
    path: Path

    @property
    def vocab(self) -> int:
        return int(self.inner.get_piece_size())

    @property
    def end(self) -> int | None:
        token = int(self.inner.eos_id())
        return token if token >= 0 else None

    def encode(self, pieces: Sequence[str]) -> list[Any]:
        encoded: list[list[int]] = self.inner.encode(list(pieces))
        return encoded

    def encode_spans(self, texts: Sequence[str], spans: Sequence[Spans]) -> list[Marked]:
        """Parts inside and outside of spans, and between control pieces, are encoded apart."""
        made = []
        for text, inside in zip(texts, spans, strict=True):
            edges = [0, *(edge for span in inside for edge in span), len(text)]
            tokens: list[int] = []
            marked: list[bool] = []
            for number, (start, stop) in enumerate(itertools.pairwise(edges)):
                before = len(tokens)
                for piece in self._controls.split(text[start:stop]):
                    control = self._control_ids.get(piece)
                    tokens += ([] if not piece else self.inner.encode(piece)) if control is None else [control]
                marked += [number % 2 == 1] * (len(tokens) - before)
            made.append((np.array(tokens, np.int64), np.array(marked, np.bool_)))
        return made

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode([token for token in tokens if token < self.vocab]))

    @cached_property
    def _control_ids(self) -> dict[str, int]:
        found = (token for token in range(self.vocab) if self.inner.is_control(token))
        return {self.inner.id_to_piece(token): token for token in found}

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    @cached_property
    def names(self) -> dict[str, str]:
        found = _read_names(self.path.with_name("tokenizer_config.json"))
        for name, token in (("bos_token", self.inner.bos_id()), ("eos_token", self.inner.eos_id())):
            found[name] = found[name] or (self.inner.id_to_piece(token) if token >= 0 else "")
        return found

    def describe(self) -> dict[str, Any]:
        return {"name": self.path.name, "xxh3": sum_file(self.path), "vocab": self.vocab, "end": self.end}


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer "bytes", of a .json or .model file, or of a folder that holds one (a Hugging Face snapshot).

    Raises UserError if the file is missing or damaged, or if its package is missing.
    """
    if name == BYTES:
        return ByteTokenizer()
    place = DataPath("data.tokenizer", name)
    path = find_tokenizer(name)
    kind = path.suffix
    try:
        library = importlib.import_module(_PACKAGES[kind])
        if kind == ".model":
            return SentencePiece(library.SentencePieceProcessor(model_file=str(path)), path)
        inner = library.Tokenizer.from_file(str(path))
        # A tokenizer.json may carry the truncation and padding of the model it was made for; a corpus needs neither.
        # What follows the model adds special tokens, which is not asked for, and cuts spaces off the offsets of a
        # token.
        inner.no_truncation()
        inner.no_padding()
        inner.post_processor = None
        return JsonTokenizer(inner, path)
    except ImportError as error:
        raise UserError(
            f"data.tokenizer needs the Python package {_PACKAGES[kind]}, which is not installed\n"
            '      to do: pip install "shardway[tokenizers]"'
        ) from error
    except Exception as error:  # both libraries raise bare Exception, RuntimeError or OSError for a damaged file
        raise place.error(f"is not a {kind} tokenizer that can be read: {error}") from error


def find_tokenizer(name: str) -> Path:
    """The file of a tokenizer: the one named, or that of a folder. Raises UserError if there is none."""
    place = DataPath("data.tokenizer", name)
    allowed = '"bytes", a tokenizer.json file or a .model file'
    path = place.path
    if path.is_dir():
        found = [path / file for file in _IN_A_FOLDER if (path / file).is_file()]
        if not found:
            raise place.error(f"is a folder without {_IN_A_FOLDER[0]} or {_IN_A_FOLDER[1]}", allowed=allowed)
        return found[0]
    if path.suffix not in _PACKAGES:
        raise place.error("is not a tokenizer", allowed=allowed)
    if not path.is_file():
        raise place.error("does not exist", allowed=allowed)
    return path


def sum_file(path: Path) -> str:
    """The xxh3-128 of a small file, in hex."""
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _read_names(path: Path) -> dict[str, str]:
    """The names of special tokens in a tokenizer_config.json, each a text or a mapping with "content"."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    found = {}
    for name in ("bos_token", "eos_token"):
        value = config.get(name) if isinstance(config, dict) else None
        value = value.get("content") if isinstance(value, dict) else value
        found[name] = value if isinstance(value, str) else ""
    return found
