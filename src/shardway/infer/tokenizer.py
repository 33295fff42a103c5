"""Text to tokens and back, as a model in use needs it: transformers' tokenizer of a folder, or that of a run's data.

Invariants:
- Tokens of a model's folder are those that transformers gives, special tokens included; tokens of a run are those that
  its data were made of. A conversation is rendered by the template that the model has, or was trained with.
- A decoded piece never ends inside a character: `Pieces` keeps back bytes that are the beginning of one.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardway.data.chat import ChatTemplate, open_template, read_messages
from shardway.data.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer, open_tokenizer
from shardway.errors import UserError
from shardway.hfconfig import TOKENIZER_FILES, import_extra
from shardway.places import expand_place

Message = Mapping[str, Any]
"""A turn of a conversation: "role" and "content"."""

_NEEDS_TEMPLATE = (
    "  To do: `shardway generate` continues plain text; for a conversation name a template with --template: "
    '"chatml", a file with a Jinja template, or a tokenizer_config.json that has one.'
)


class ModelTokenizer(ABC):
    """What a verb needs of a tokenizer. `ends`: tokens that end what a model writes. `stops`: texts that do, where a
    template ends a turn by a text that is no single token."""

    ends: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model expects around it."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones; bytes that are no character as U+FFFD."""

    @abstractmethod
    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation up to where the assistant is to write. Raises UserError if there is no template,
        or it refuses the messages."""

    @property
    @abstractmethod
    def has_template(self) -> bool:
        """Whether `render_chat` has a template."""

    @abstractmethod
    def as_library(self) -> Any:
        """The same tokenizer as an object of transformers', for a program that takes one. Raises UserError if there is
        none."""


class Pieces:
    """The text of tokens that come one after the other, in pieces that are whole characters."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._shown = 0
        self.text = ""
        """All text so far."""

    def add(self, ids: Iterable[int]) -> str:
        """The text that these tokens add; empty while a character is not complete."""
        self._ids += ids
        # Some tokens have another text at the beginning of a text, so those of the last piece are decoded with them.
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        after = self._tokenizer.decode(self._ids[self._start :])
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return self._keep(after[len(before) :])

    def finish(self) -> str:
        """What was kept back, at the end: an incomplete character is shown as U+FFFD."""
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        after = self._tokenizer.decode(self._ids[self._start :])
        self._start = self._shown = len(self._ids)
        return self._keep(after[len(before) :])

    def _keep(self, piece: str) -> str:
        self.text += piece
        return piece


# --- of a model's folder: transformers' own


class LibraryTokenizer(ModelTokenizer):
    """The tokenizer of a folder, through transformers."""

    def __init__(self, inner: Any, ends: frozenset[int]) -> None:
        self._inner = inner
        self.ends = ends

    def encode(self, text: str) -> list[int]:
        return [int(each) for each in self._inner(text)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def has_template(self) -> bool:
        return bool(getattr(self._inner, "chat_template", None))

    def as_library(self) -> Any:
        return self._inner

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        if not self.has_template:
            raise UserError(f"the tokenizer of {self._inner.name_or_path} has no chat template.\n{_NEEDS_TEMPLATE}")
        plain = [dict(each) for each in messages]
        try:
            ids = self._inner.apply_chat_template(plain, add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as error:  # jinja2's errors, and what templates raise
            raise UserError(
                f"the chat template of {self._inner.name_or_path} refuses the conversation: {error}\n"
                "  To do: change its roles or their order; some templates take no system prompt."
            ) from error
        return [int(each) for each in ids]

    def use_template(self, name: str) -> None:
        """Take a template of `open_template`. Raises UserError."""
        self._inner.chat_template = open_template(name, ByteTokenizer()).source


def open_library_tokenizer(folder: Path, *, trust_remote_code: bool) -> LibraryTokenizer | None:
    """The tokenizer of a folder; None if it holds none. Raises UserError if it is damaged or needs a package."""
    if not _has_tokenizer(folder):
        return None
    library = import_extra("transformers")
    try:
        inner = library.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the libraries behind it share no class of errors
        raise UserError(
            f"the tokenizer in {folder} cannot be read: {' '.join(str(error).split())}\n"
            "  To do: fetch the model again, or install what is missing."
        ) from error
    ends = {inner.eos_token_id, *_read_ends(folder / "generation_config.json"), *_read_ends(folder / "config.json")}
    return LibraryTokenizer(inner, frozenset(int(each) for each in ends if isinstance(each, int)))


def check_tokenizer(name: str) -> None:
    """Raise UserError if a name on the command line is no tokenizer: "bytes", a file, or a folder that has one."""
    place = expand_place(name)
    if not (place.is_dir() and _has_tokenizer(place)):
        open_tokenizer(name)


def _has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds what transformers reads a tokenizer from."""
    return any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES if not pattern.startswith("chat"))


def _read_ends(path: Path) -> list[Any]:
    """The "eos_token_id" of a file, one or several; none if there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return []
    return found if isinstance(found, list) else [found]


# --- of a run of ours: that of its data


class DataTokenizer(ModelTokenizer):
    """The tokenizer that a run's data were made with, and the template of its conversations (None: plain text)."""

    def __init__(self, inner: Tokenizer, template: ChatTemplate | None) -> None:
        self._inner, self._template = inner, template
        self.ends = frozenset([inner.end] if inner.end is not None else [])
        if template is not None:
            self._find_end_of_turn(template)

    def _find_end_of_turn(self, template: ChatTemplate) -> None:
        """What follows an assistant's words: a token, or a text of several."""
        text, _ = template.render([{"role": "user", "content": "u"}, {"role": "assistant", "content": "\x02"}])
        after = text.rpartition("\x02")[2].strip()
        ids = self._encode_text(after) if after else []
        if len(ids) == 1:
            self.ends |= {ids[0]}
        elif ids:
            self.stops = (after,)

    def _encode_text(self, text: str) -> list[int]:
        ((tokens, _),) = self._inner.encode_spans([text], [[]])  # control pieces are recognised here alone
        return [int(each) for each in tokens]

    def encode(self, text: str) -> list[int]:
        return [int(each) for each in self._inner.encode([text])[0]]

    def decode(self, ids: Sequence[int]) -> str:
        plain = [each for each in ids if each not in self.ends and each < self._inner.vocab]
        if isinstance(self._inner, ByteTokenizer):
            return bytes(plain).decode("utf-8", errors="replace")
        if isinstance(self._inner, JsonTokenizer):
            return str(self._inner.inner.decode(plain, skip_special_tokens=True))
        return str(getattr(self._inner, "inner").decode(plain))  # noqa: B009 - sentencepiece has no other way

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def as_library(self) -> Any:
        made = self._make_library()
        if self._template is not None:
            made.chat_template = self._template.source
        return made

    def _make_library(self) -> Any:
        fast = import_extra("transformers").PreTrainedTokenizerFast
        if isinstance(self._inner, ByteTokenizer):
            return _wrap_bytes(fast)
        if isinstance(self._inner, JsonTokenizer):
            inner = self._inner.inner
            end = inner.id_to_token(self._inner.end) if self._inner.end is not None else None
            return fast(tokenizer_object=inner, **({} if end is None else {"eos_token": end}))
        raise UserError(
            "a sentencepiece model is no tokenizer that other programs take from here.\n"
            "  To do: convert it to a tokenizer.json with transformers, and name that with --tokenizer."
        )

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            raise UserError(f"this run was trained on plain text, without a chat template.\n{_NEEDS_TEMPLATE}")
        try:
            return self._encode_text(self._template.render_prompt(read_messages(list(messages))))
        except ValueError as error:
            raise UserError(f"the conversation {error}") from error

    def use_template(self, name: str) -> None:
        """Take a template of `open_template`. Raises UserError."""
        self._template = open_template(name, self._inner)
        self._find_end_of_turn(self._template)


def _wrap_bytes(fast: Any) -> Any:
    """The byte tokenizer as a byte-level BPE without merges, whose token of a byte is that byte."""
    library = import_extra("tokenizers")
    # The printable characters that stand for bytes in byte-level BPE (Radford et al., GPT-2, `bytes_to_unicode`).
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    names = {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(others)}
    inner = library.Tokenizer(library.models.BPE(vocab=names, merges=[]))
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = library.decoders.ByteLevel()
    made = fast(tokenizer_object=inner)
    # Not by name, which would take that character out of texts.
    end = next(name for name, byte in names.items() if byte == ByteTokenizer().end)
    made._special_tokens_map |= {"eos_token": end, "pad_token": end}
    return made


def open_data_tokenizer(name: str, template: str) -> DataTokenizer:
    """The tokenizer of a run by its `data.tokenizer` and `data.chat_template`. Raises UserError."""
    inner = open_tokenizer(name)
    return DataTokenizer(inner, open_template(template, inner) if template else None)
