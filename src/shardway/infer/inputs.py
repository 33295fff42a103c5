"""What a model is given: prompts of a text or a file, and questions with answers to choose from.

Invariants:
- Files are read before a model is opened, so without torch. All mistakes of a file are reported at once, each with its
  line.
- What else stands in a line is kept, and comes back with the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardway.data.chat import read_messages
from shardway.errors import Problem, check_no_problems

if TYPE_CHECKING:
    from shardway.infer.tokenizer import Message, ModelTokenizer

COMMAND_LINE = "command line"


def read_lines(option: str, path: Path, remedy: str) -> list[tuple[int, str]]:
    """The lines of a file that are not empty, each with its number. Raises UserError about the option that names it
    where it cannot be read, is no text, or has none."""
    what = ""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        what, lines = f"{path} is not text: {error.reason} at byte {error.start}", []
    except OSError as error:
        what, lines = f"{path} cannot be read: {error.strerror}", []
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        what = what or f"{path} is empty"
        check_no_problems("the command line", [Problem(option, what, COMMAND_LINE, remedy=remedy)])
    return found


# --- prompts


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and what it was made of ({"prompt": ...} or {"messages": ...}, and other keys of its
    line, which is `line` of its file; 0 without one)."""

    ids: tuple[int, ...]
    given: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True)
class PromptText:
    """A prompt before it is tokens: a text to continue, or the messages of a conversation; otherwise as `Prompt`."""

    text: str
    messages: tuple[Message, ...]
    given: Mapping[str, Any]
    line: int = 0

    def encode(self, tokenizer: ModelTokenizer) -> Prompt:
        """The prompt. Raises UserError if there is no template for a conversation, or it refuses the messages."""
        ids = tokenizer.render_chat(self.messages) if self.messages else tokenizer.encode(self.text)
        return Prompt(tuple(ids), self.given, self.line)


def make_prompt(text: str, *, chat: bool = False, system: str = "", line: int = 0) -> PromptText:
    """The prompt of a text; with `chat`, of a user's turn with it."""
    if not chat:
        return PromptText(text, (), {"prompt": text}, line)
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
    return PromptText("", tuple(messages), {"messages": messages}, line)


def read_prompts(path: Path, *, chat: bool = False, system: str = "") -> list[PromptText]:
    """The prompts of a file: a line of text each, or of a .jsonl file an object with "prompt" or "messages" each; empty
    lines are left out. Raises UserError that lists what is wrong with which line."""
    prompts, problems = list[PromptText](), list[Problem]()
    for number, line in read_lines("--file", path, "name a file with a prompt on each line"):
        if path.suffix != ".jsonl":
            prompts.append(make_prompt(line, chat=chat, system=system, line=number))
            continue
        try:
            prompts.append(_read_object(line, number, chat, system))
        except ValueError as error:
            problems.append(Problem(f"line {number}", str(error), allowed='{"prompt": TEXT} or {"messages": [...]}'))
    check_no_problems(str(path), problems)
    return prompts


def _read_object(line: str, number: int, chat: bool, system: str) -> PromptText:
    """The prompt of a line of JSON. Raises ValueError with a sentence."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(given, dict) or not {"prompt", "messages"} & given.keys():
        raise ValueError('is no object with "prompt" or "messages"')
    if "messages" in given:
        return PromptText("", tuple(read_messages(given["messages"])), given, number)
    if not isinstance(given["prompt"], str):
        raise ValueError('has a "prompt" that is no text')
    made = make_prompt(given["prompt"], chat=chat, system=system)
    return PromptText(made.text, made.messages, given, number)


# --- questions


@dataclass(frozen=True)
class Question:
    """A question of a file, with its line there: answers to choose from, and the number of the right one."""

    line: int
    text: str
    choices: tuple[str, ...]
    answer: int


_QUESTION = '{"question": "...", "choices": ["...", "..."], "answer": 0}'


def read_questions(path: Path) -> list[Question]:
    """The questions of a file of JSON lines: {"question" (or "prompt"): text, "choices": [text, ...], "answer": number
    from 0}. Raises UserError with every line that is no such question, and where there is none."""
    found, problems = list[Question](), list[Problem]()
    for number, line in read_lines("--choices", path, f"write one question a line: {_QUESTION}"):
        what, question = _read_question(number, line)
        problems += [Problem(f"line {number}", what, allowed=_QUESTION)] if question is None else []
        found += [] if question is None else [question]
    check_no_problems(str(path), problems)
    return found


def _read_question(number: int, line: str) -> tuple[str, Question | None]:
    """What is wrong with a line, or its question."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is no JSON: {error}", None
    if not isinstance(entry, dict):
        return "is no JSON object", None
    text = entry.get("question", entry.get("prompt"))
    choices, answer = entry.get("choices"), entry.get("answer")
    if not isinstance(text, str) or not text.strip():
        return 'has no text under "question" or "prompt"', None
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        return 'has no list of texts under "choices"', None
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        return f'has "answer" {json.dumps(answer)}, and {len(choices)} choices: 0 to {len(choices) - 1}', None
    return "", Question(number, text, tuple(choices), answer)
