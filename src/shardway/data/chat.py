"""Conversations as tokens, of which only those of the assistant's turns count as targets.

Invariants:
- The text of a conversation is what its template renders, and its tokens are those of that text; marking which tokens
  count changes none of them.
- What counts of a turn is its content and the end-of-turn token behind it, not the role before it, nor the space after.
- A template runs in a sandbox and sees the messages only; the same messages give the same text on every day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shardway.data.content import DataPath, data_error, fingerprint
from shardway.data.tokenizers import Marked, Spans, Tokenizer
from shardway.errors import UserError

Message = dict[str, Any]
"""A turn: "role" and "content", and what else a template may want of it."""

CHATML = "chatml"
"""The name of the built-in template."""

ASSISTANT = "assistant"
ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}
"""Roles of ShareGPT's "from" and their usual names."""

_CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_OPENS, _CLOSES = "\udc80", "\udc81"
"""Stand around a part that the template marks. No text of a message holds a lone surrogate."""

_TODAY = datetime(2024, 7, 26)
"""What `strftime_now` formats: a fixed day, so that the tokens do not depend on when they were made."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template as Hugging Face models have it.

    `name`: the built-in one or the file, for messages. `tokens`: "bos_token" and "eos_token" as it may refer to them.
    """

    name: str
    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """What identifies the text it renders."""
        return fingerprint(self.source, *(f"{name}={text}" for name, text in sorted(self.tokens.items())))

    @property
    def marks(self) -> bool:
        """Whether it marks the assistant's parts itself, by `{% generation %}`."""
        return _has_marks(self.source)

    def render(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the parts of it that count, as (first, after the last) character.

        The parts are those between `{% generation %}` and `{% endgeneration %}`, or without these what the assistant's
        turn adds to the text behind the prompt for it. Raises ValueError with a sentence if that cannot be found, or if
        the template refuses the messages.
        """
        whole = self._render(messages)
        if self.marks:
            text, spans = _take_marks(whole)
            return text, [(start, stop) for start, stop in spans if stop > start]
        return whole, [
            self._find_turn(messages, number, whole)
            for number, message in enumerate(messages)
            if message["role"] == ASSISTANT
        ]

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """The text of a conversation up to where the assistant is to write. Raises ValueError as `render` does."""
        return _take_marks(self._render(messages, prompt=True))[0]

    def _find_turn(self, messages: Sequence[Message], number: int, whole: str) -> tuple[int, int]:
        before = self._render(messages[:number], prompt=True)
        after = whole if number + 1 == len(messages) else self._render(messages[: number + 1])
        self._check_start(before, after, f"the prompt for turn {number + 1} is not how the text with that turn begins")
        self._check_start(after, whole, f"turn {number + 1} is another text where further turns follow it")
        start, turn = len(before), after[len(before) :]
        closed = start + len(turn.rstrip())
        asks = "add_generation_prompt" in self.source
        if asks and closed == len(after):
            return start, closed
        first, last = self._find_content(messages[: number + 1], after, start)
        # An end-of-turn token may follow the content, and the role stand before it where no prompt is asked for.
        return start if asks else first, closed if closed > last else len(after)

    def _find_content(self, messages: Sequence[Message], text: str, start: int) -> tuple[int, int]:
        """Where the content of the last message lies in the text from `start` on; (start, end of it) if it is not
        there as it is."""
        *others, last = messages
        marked, spans = _take_marks(self._render([*others, {**last, "content": f"{_OPENS}{last['content']}{_CLOSES}"}]))
        if marked == text and len(spans) == 1 and spans[0][0] >= start:
            return spans[0]
        content = str(last["content"]).strip()
        at = text.find(content, start)
        return (at, at + len(content)) if content and at >= 0 else (start, len(text.rstrip()))

    def _check_start(self, start: str, text: str, what: str) -> None:
        if text.startswith(start):
            return
        same = next(
            (at for at, (a, b) in enumerate(zip(start, text, strict=False)) if a != b), min(map(len, (start, text)))
        )
        raise ValueError(
            f"the chat template {self.name} does not show what the assistant writes: {what}. "
            f"They differ at character {same}: {_show(start, same)} and {_show(text, same)}. "
            "Mark it in the template: {% generation %} before and {% endgeneration %} after it"
        )

    def _render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        import jinja2

        try:
            rendered = _compile(self.source).render(
                messages=list(messages), add_generation_prompt=prompt, tools=None, documents=None, **self.tokens
            )
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"the chat template {self.name} refuses it: {error}") from error
        return str(rendered)


def open_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """The template "chatml", of a file with Jinja text, or of the "chat_template" of a .json file such as
    tokenizer_config.json. Raises UserError if it is missing or no template."""
    if name == CHATML:
        return ChatTemplate(CHATML, _CHATML, tokenizer.names)
    place = DataPath("data.chat_template", name)
    path = place.path
    if not path.is_file():
        remedy = ""
        if path.is_dir():
            found = [file for file in ("chat_template.jinja", "tokenizer_config.json") if (path / file).is_file()]
            remedy = f"name {path / found[0]}" if found else ""
        raise place.error(
            "is a folder" if path.is_dir() else "does not exist",
            allowed='"chatml", a file with a Jinja template, or a tokenizer_config.json that has one',
            remedy=remedy,
        )
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise place.error(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise place.error(f"is not text: {error.reason} at byte {error.start}") from error
    if path.suffix == ".json":
        source = _find_in_config(source, place)
    if not source.strip():
        raise place.error("is empty")
    _check_syntax(source, place)
    return ChatTemplate(Path(name).name, source, tokenizer.names)


def _find_in_config(text: str, place: DataPath) -> str:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise place.error(f"is not JSON: {error}") from error
    found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, list):  # several templates, each with a name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise place.error(
            'has no "chat_template" that is a text',
            remedy="many models keep it in chat_template.jinja beside: name that file",
        )
    return found


def _check_syntax(source: str, place: DataPath) -> None:
    try:
        import jinja2
    except ImportError as error:
        raise UserError(
            "data.chat_template needs the Python package jinja2, which is not installed\n"
            "      to do: pip install jinja2"
        ) from error
    try:
        _compile(source)
    except jinja2.TemplateSyntaxError as error:
        raise data_error(place.key, f'"{place.text}" is not a Jinja template: line {error.lineno}: {error}') from error


# --- Jinja as templates expect it


@cache
def _compile(source: str) -> Any:
    """The compiled template."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` ... `{% endgeneration %}`: puts signs around what stands between."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain set

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_OPENS}{caller()}{_CLOSES}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def as_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment.from_string(source)


def _has_marks(source: str) -> bool:
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None


def _take_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without signs, and the parts that they enclosed. A part inside another belongs to that."""
    pieces = re.split(f"([{_OPENS}{_CLOSES}])", text)
    spans, length, open_at, depth = [], 0, 0, 0
    for piece in pieces:
        if piece == _OPENS:
            open_at, depth = (open_at if depth else length), depth + 1
        elif piece == _CLOSES:
            depth -= 1
            if not depth:
                spans.append((open_at, length))
        else:
            length += len(piece)
    return "".join(pieces[::2]), spans


def _show(text: str, at: int) -> str:
    return json.dumps(text[max(0, at - 10) : at + 20], ensure_ascii=False) if at < len(text) else "its end"


# --- what a record holds


def read_messages(value: Any) -> list[Message]:
    """The messages of a conversation: a list of mappings with "role" and "content", or ShareGPT's "from" and "value";
    or that list as JSON text. Raises ValueError with a sentence for anything else."""
    if isinstance(value, bytes | str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not a conversation: its text is not JSON ({error})") from error
    if isinstance(value, Mapping):
        if value.get("tools"):
            raise ValueError("names tools, which are not supported; drop them from the records first")
        value = next((value[name] for name in ("messages", "conversations") if name in value), None)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"is not a conversation but {_name_type(value)}; allowed: a list of messages")
    if not value:
        raise ValueError("is an empty conversation")
    return [_read_message(message, number) for number, message in enumerate(value, 1)]


def _read_message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f'has {_name_type(message)} as message {number}; allowed: a mapping with "role" and "content"')
    given = {name: value for name, value in message.items() if value is not None}
    if given.get("tool_calls") or given.get("function_call"):
        raise ValueError(f"calls tools in message {number}, which is not supported; drop such records first")
    if "role" not in given and "from" in given:
        role = ROLES.get(given["from"], given["from"]) if isinstance(given["from"], str) else given["from"]
        given = {"role": role, **({"content": given["value"]} if "value" in given else {})}
    for name in ("role", "content"):
        if name not in given:
            found = ", ".join(map(str, message)) or "nothing"
            raise ValueError(f'has no "{name}" in message {number} (it has {found})')
    if not isinstance(given["role"], str):
        raise ValueError(f'has {_name_type(given["role"])} as "role" of message {number}; allowed: a text')
    if given["role"] in ("tool", "function", "observation", "function_call"):
        raise ValueError(
            f'has the role "{given["role"]}" in message {number}; tools are not supported, drop such records first'
        )
    content = _join_parts(given["content"], number)
    return {name: _clean(value) for name, value in given.items()} | {"content": make_scalar(content)}


def _join_parts(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, np.ndarray):
        content = content.tolist()
    if not isinstance(content, Sequence):
        raise ValueError(f'has {_name_type(content)} as "content" of message {number}; allowed: a text')
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(text, str):
            raise ValueError(f'has a part of type "{kind}" in message {number}; allowed: parts of text, no images')
        texts.append(text)
    return "".join(texts)


def _clean(value: Any) -> Any:
    return make_scalar(value) if isinstance(value, str) else value


def make_scalar(text: str) -> str:
    """A text as it can be written in UTF-8: pairs of surrogates joined, lone ones (as JSON's \\ud800) as U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _name_type(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


# --- tokens


def encode_conversations(
    conversations: Sequence[Sequence[Message]], template: ChatTemplate, tokenizer: Tokenizer
) -> list[tuple[Marked, int]]:
    """Of each conversation its tokens, whether each counts as a target, and how many UTF-8 bytes of text count.

    Raises ValueError as `ChatTemplate.render` does.
    """
    rendered = [template.render(messages) for messages in conversations]
    return encode_rendered(rendered, tokenizer)


def encode_rendered(rendered: Sequence[tuple[str, Spans]], tokenizer: Tokenizer) -> list[tuple[Marked, int]]:
    """`encode_conversations` of what was rendered."""
    sizes = [sum(len(text[start:stop].encode()) for start, stop in spans) for text, spans in rendered]
    encoded = tokenizer.encode_spans([text for text, _ in rendered], [spans for _, spans in rendered])
    return list(zip(encoded, sizes, strict=True))
