"""Documents of records: which field holds them, and their tokens.

Invariants:
- Document i is record i: its tokens depend on the record, the tokenizer and the template alone.
- A field is found once, by its name and the first values; a record in which it is missing, or of another type, is an
  error that names the record and its file. An empty text, or null, is an empty document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from shardway.data.chat import ChatTemplate, encode_rendered, make_scalar, read_messages
from shardway.data.content import DataPath
from shardway.data.formats.base import Record, Records
from shardway.data.tokenizers import ByteTokenizer, Tokenizer, Tokens, open_tokenizer
from shardway.errors import UserError, list_some

DocumentSort = Literal["text", "tokens", "conversation"]

AUTO = "auto"

CONVERSATION_NAMES = ("messages", "conversations", "conversation")
TEXT_NAMES = ("text", "content", "txt", "document", "body", "article", "story", "raw_content")
TOKEN_NAMES = ("input_ids", "tokens", "token_ids")
"""Usual names of fields with a document, the most usual first."""

CHARACTERS_AT_ONCE = 2**22
"""A tokenizer gets texts of about so many characters at once, so that memory stays bounded."""

PIECE_CHARACTERS = 2**20
"""A longer text is encoded in pieces of about this many characters that end at a line."""

ESTIMATED_CHARACTERS = 2**14
"""Of a longer text so much is encoded to estimate its tokens."""

_LOOKED_AT = 16
"""So many records show what a field holds, if the first ones are empty."""


@dataclass(frozen=True)
class Document:
    """Tokens of one record; whether each counts as a target (None: all do), and the UTF-8 bytes of what counts."""

    tokens: Tokens
    counted: npt.NDArray[np.bool_] | None
    text_bytes: int


class TooLarge(Exception):
    """A token does not fit into the type that was chosen for it."""

    def __init__(self, token: int) -> None:
        super().__init__(token)
        self.token = token


@dataclass(frozen=True)
class DocumentField:
    """A field of records, and what its values are. "json.caption": the part "caption" of the field "json"."""

    name: str
    sort: DocumentSort

    def pick(self, record: Record) -> Any:
        """Its value in a record. Raises KeyError with the name of what is missing."""
        return _pick(record, self.name)

    def top(self, names: Mapping[str, str]) -> str:
        """The field that has to be read for it."""
        return _find_top(self.name, names)


def _pick(record: Record, name: str) -> Any:
    if name in record:
        return record[name]
    top, *below = name.split(".")
    value = record[top]
    for part in below:
        if isinstance(value, bytes | str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f'has no JSON in the field "{top}": {error}') from error
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value


def _find_top(name: str, names: Mapping[str, str]) -> str:
    return name if name in names else name.partition(".")[0]


def choose_field(records: Records, wanted: str, place: DataPath) -> DocumentField:
    """The field with documents: the one that is wanted, or of "auto" the first of a usual name whose values are such.

    Raises UserError if there is none.
    """
    names = records.fields
    if wanted != AUTO:
        if _find_top(wanted, names) not in names:
            raise place.error(f'has no field "{wanted}"', allowed=list_some(list(names), 20))
        sort = _find_sort(records, wanted)
        if sort is None:
            raise place.error(
                f'has no documents in the field "{wanted}"', allowed="text, a list of tokens, or a list of messages"
            )
        return DocumentField(wanted, sort)
    others = [name for name, kind in names.items() if kind == "text" and not name.startswith("__")]
    # One field of text alone may have any name.
    for name in (*CONVERSATION_NAMES, *TEXT_NAMES, *TOKEN_NAMES, *(others if len(others) == 1 else ())):
        sort = _find_sort(records, name) if name in names else None
        if sort is not None:
            return DocumentField(name, sort)
    raise place.error(
        f"has no field of a usual name with text, tokens or messages; it has {list_some(list(names), 20)}",
        remedy="name the field: --field of `shardway data prepare`, data.inputs of a run file",
    )


def _find_sort(records: Records, name: str) -> DocumentSort | None:
    """What the first value that is not empty shows; of only empty ones, text."""
    seen = False
    for number in range(min(len(records), _LOOKED_AT)):
        record = records.read([number], [_find_top(name, records.fields)])[0]
        try:
            value = _pick(record, name)
        except (KeyError, ValueError):
            continue
        seen = True
        if value is not None and len(value if hasattr(value, "__len__") else "x"):
            return _judge(value, name)
    return "text" if seen else None


def _judge(value: Any, name: str) -> DocumentSort | None:
    if isinstance(value, bytes | str):
        begins = value[:64].lstrip()
        opens = begins[:1] in (b"[", b"{") if isinstance(begins, bytes) else begins[:1] in ("[", "{")
        return "conversation" if opens and name.rpartition(".")[2] in CONVERSATION_NAMES else "text"
    if isinstance(value, Mapping):
        return "conversation" if any(each in value for each in CONVERSATION_NAMES) else None
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return "tokens" if value.ndim == 1 and value.dtype.kind in "iu" else None
    first = value[0] if isinstance(value, Sequence | np.ndarray) else None
    if isinstance(first, Mapping):
        return "conversation"
    return "tokens" if isinstance(first, int | np.integer) and not isinstance(first, bool) else None


@dataclass(frozen=True)
class DocumentMaker:
    """Makes documents of records; pickled without its tokenizer, which each process opens.

    `tokenizer`: its name. `vocab`: one more than the largest token that is allowed. `dtype`: of a token. `ends`:
    whether the tokenizer's end of document stands behind each text.
    """

    records: Records
    place: DataPath
    field: DocumentField
    tokenizer: str
    template: ChatTemplate | None
    ends: bool
    dtype: str
    vocab: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "opened"}

    @cached_property
    def opened(self) -> Tokenizer:
        """The tokenizer."""
        return open_tokenizer(self.tokenizer)

    def make(self, numbers: Sequence[int]) -> Iterator[Document]:
        """The documents of these records, in their order.

        Raises UserError for a record that has none, TooLarge for a token that is larger than the type of tokens holds,
        DamagedData as `Records.read` does.
        """
        yield from self._make(numbers, self._read(numbers))

    def _make(self, numbers: Sequence[int], values: Sequence[Any]) -> Iterator[Document]:
        if self.field.sort == "tokens":
            yield from (self._take_tokens(value, number) for number, value in zip(numbers, values, strict=True))
        elif self.field.sort == "conversation":
            yield from self._make_conversations(numbers, values)
        else:
            yield from self._make_texts(numbers, values)

    def estimate(self, number: int) -> tuple[float, int]:
        """How many tokens a record has (of a long text estimated from its beginning), and the largest of them."""
        value, share = self._read([number])[0], 1.0
        if self.field.sort == "text" and value is not None and hasattr(value, "__len__"):
            share = max(1.0, len(value) / ESTIMATED_CHARACTERS)
            value = value[:ESTIMATED_CHARACTERS]
        document = next(iter(self._make([number], [value])))
        return len(document.tokens) * share, int(document.tokens.max(initial=0))

    def error(self, number: int, what: str) -> UserError:
        """The error for one record."""
        return self.place.error(f"cannot be prepared: record {number} ({self.records.extent(number)}) {what}")

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        names, sort = self.records.fields, self.field.sort
        asked = [self.field.top(names), *(["tools"] if sort == "conversation" and "tools" in names else [])]
        values = []
        for number, record in zip(numbers, self.records.read(numbers, asked), strict=True):
            if len(asked) > 1 and _holds_tools(record.get("tools")):
                raise self.error(number, "names tools, which are not supported; drop them from the records first")
            try:
                values.append(self.field.pick(record))
            except KeyError:
                raise self.error(number, f'has no field "{self.field.name}"') from None
            except ValueError as error:
                raise self.error(number, str(error)) from error
        return values

    def _take_tokens(self, value: Any, number: int) -> Document:
        try:
            tokens = np.asarray([] if value is None else value)
        except ValueError:
            what = f'has rows of different lengths in the field "{self.field.name}" and not a row of integers'
            raise self.error(number, what) from None
        if not tokens.size:
            return Document(np.zeros(0, self.dtype), None, 0)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            shown = f"{tokens.dtype.name} of shape {list(tokens.shape)}"
            raise self.error(number, f'has {shown} in the field "{self.field.name}" and not a row of integers')
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0:
            raise self.error(number, f"holds the token {lowest}; allowed: 0 and above")
        if self.vocab is not None and highest >= self.vocab:
            raise self.error(number, f"holds the token {highest}; allowed: 0 to {self.vocab - 1}, as the tokenizer has")
        if highest >= 2**32:
            raise self.error(number, f"holds the token {highest}; allowed: 0 to {2**32 - 1}")
        if highest > np.iinfo(self.dtype).max:
            raise TooLarge(highest)
        return Document(tokens.astype(self.dtype), None, 0)

    def _make_conversations(self, numbers: Sequence[int], values: Sequence[Any]) -> Iterator[Document]:
        template = cast(ChatTemplate, self.template)
        group: list[tuple[str, list[tuple[int, int]]]] = []
        characters = 0
        for number, value in zip(numbers, values, strict=True):
            try:
                group.append(template.render(read_messages(value)))
            except ValueError as error:
                raise self.error(number, str(error)) from error
            characters += len(group[-1][0])
            if characters >= CHARACTERS_AT_ONCE:
                yield from self._encode_rendered(group)
                group, characters = [], 0
        yield from self._encode_rendered(group)

    def _encode_rendered(self, group: Sequence[tuple[str, list[tuple[int, int]]]]) -> Iterator[Document]:
        for (tokens, counted), size in encode_rendered(group, self.opened):
            yield Document(tokens.astype(self.dtype), counted, size)

    def _make_texts(self, numbers: Sequence[int], values: Sequence[Any]) -> Iterator[Document]:
        group: list[str] = []
        characters = 0
        for number, value in zip(numbers, values, strict=True):
            if isinstance(self.opened, ByteTokenizer):
                yield self._make_bytes(value, number)
                continue
            text = self._read_text(value, number)
            if characters and characters + len(text) > CHARACTERS_AT_ONCE:
                yield from self._encode(group)
                group, characters = [], 0
            group.append(text)
            characters += len(text)
        yield from self._encode(group)

    def _make_bytes(self, value: Any, number: int) -> Document:
        content = value if isinstance(value, bytes) else self._read_text(value, number).encode()
        end = b"\0" if self.ends and content else b""
        return Document(np.frombuffer(content + end, np.uint8).astype(self.dtype, copy=False), None, len(content))

    def _read_text(self, value: Any, number: int) -> str:
        if isinstance(value, str):
            return make_scalar(value)
        if value is None:
            return ""
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value).decode("utf-8", errors="replace")
        raise self.error(number, f'has a {type(value).__name__} in the field "{self.field.name}" and not a text')

    def _encode(self, texts: Sequence[str]) -> Iterator[Document]:
        """Documents of texts that are together short, or of one long text."""
        if not texts:
            return
        end = self.opened.end if self.ends else None
        if len(texts) == 1 and len(texts[0]) > CHARACTERS_AT_ONCE:
            yield Document(self._encode_long(texts[0], end), None, _count_bytes(texts[0]))
            return
        pieces = [list(split_at_lines(text)) if len(text) > PIECE_CHARACTERS else [text] for text in texts]
        encoded = iter(self.opened.encode([piece for each in pieces for piece in each]))
        for text, each in zip(texts, pieces, strict=True):
            tokens = next(encoded)
            for _ in each[1:]:
                tokens = [*tokens, *next(encoded)]
            if end is not None and text:
                tokens.append(end)
            yield Document(np.array(tokens, self.dtype), None, _count_bytes(text))

    def _encode_long(self, text: str, end: int | None) -> Tokens:
        pieces, group = [], []
        for piece in split_at_lines(text):
            group.append(piece)
            if len(group) * PIECE_CHARACTERS >= CHARACTERS_AT_ONCE:
                pieces += [np.array(tokens, self.dtype) for tokens in self.opened.encode(group)]
                group = []
        pieces += [np.array(tokens, self.dtype) for tokens in self.opened.encode(group)] if group else []
        return np.concatenate([*pieces, *([] if end is None else [np.array([end], self.dtype)])])


def split_at_lines(text: str) -> Iterator[str]:
    """Consecutive pieces of a text, each of at least PIECE_CHARACTERS and up to the next end of line."""
    start = 0
    while start < len(text):
        line_end = text.find("\n", start + PIECE_CHARACTERS)
        stop = len(text) if line_end < 0 else line_end + 1
        yield text[start:stop]
        start = stop


def _count_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _holds_tools(value: Any) -> bool:
    if isinstance(value, bytes | str):
        return value.strip() not in ("", "[]", "null", b"", b"[]", b"null")
    return value is not None and len(value) > 0
