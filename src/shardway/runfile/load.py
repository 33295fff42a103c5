"""Reads a run file, its parent and the overrides into one typed value with the line or option of each key.

Invariants:
- `key_lines` is never wrong for text that `tomllib` accepts: keys in a form that it does not parse (quoted, in an
  inline table, in an array of tables) are left out rather than guessed. It reads no values.
- No file is changed, and all problems of a run file are reported at once.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from shardway.earlier_names import EARLIER_KEYS, rename_entry
from shardway.errors import Problem, UserError, check_no_problems
from shardway.runfile.problems import find_problems
from shardway.runfile.schema import RunFile, all_keys, open_tables, sections

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


# --- the line of each key

_TABLE = re.compile(r"\s*\[\s*([A-Za-z0-9_.\-\s]+?)\s*\]\s*(#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*=.*")
_TOKEN = re.compile(
    r"""
      \"{3} (?: \\. | [^\\] )*? \"{3} \"{0,2}   # strings over several lines
    | '{3} .*? '{3} '{0,2}
    | " (?: \\. | [^"\\] )* "                   # strings on one line
    | ' [^']* '
    | \# [^\n]*
    | [\[\]{}\n]
    """,
    re.VERBOSE | re.DOTALL,
)


def key_lines(text: str) -> dict[str, int]:
    """Dotted key -> line number (from 1) of every key and table head in a valid TOML text."""
    found: dict[str, int] = {}
    lines, table = text.split("\n"), ""
    for number in _statement_lines(text):
        line = lines[number - 1]
        if head := _TABLE.fullmatch(line):
            table = re.sub(r"\s", "", head[1])
            found.setdefault(table, number)
        elif line.lstrip().startswith("["):
            table = "?"  # a head of another form: its keys get a name that no key has
        elif (pair := _KEY.fullmatch(line)) and table != "?":
            found.setdefault(f"{table}.{pair[1]}".lstrip("."), number)
    return found


def _statement_lines(text: str) -> Iterator[int]:
    """The lines that no string and no bracket of an earlier line reaches into."""
    number, depth = 1, 0
    yield number
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        number += token[0].count("\n")
        if token[0] == "\n" and depth == 0:
            yield number


# --- files, parents and overrides

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True)
class LoadedRunFile:
    """A run file as asked for: its values, the origin of each key, the user's own text and file name."""

    values: RunFile
    origins: Mapping[str, str]
    text: str
    path: Path | None = None

    def with_default(self, dotted: str, value: Any, origin: str) -> LoadedRunFile:
        """The same run with `value` for a key that is not set. Raises UserError for a wrong value."""
        return self if self.origins[dotted] != DEFAULT else self.with_value(dotted, value, origin)

    def with_value(self, dotted: str, value: Any, origin: str) -> LoadedRunFile:
        """The same run with another value of one key. Raises UserError for a wrong value."""
        section, name = dotted.split(".")
        raw = {**self.values.model_dump(mode="json")[section], name: value}
        try:
            table = type(getattr(self.values, section)).model_validate(raw)
        except ValidationError as error:
            found = [{**problem, "loc": (section, *problem["loc"])} for problem in error.errors()]
            check_no_problems(origin, find_problems(cast("list[ErrorDetails]", found), {dotted: origin}, origin))
            raise
        values = self.values.model_copy(update={section: table})
        return replace(self, values=values, origins=MappingProxyType({**self.origins, dotted: origin}))

    def with_origin(self, dotted: str, origin: str) -> LoadedRunFile:
        """The same run, where an option stands in for the value of a key."""
        return replace(self, origins=MappingProxyType({**self.origins, dotted: origin}))


@dataclass
class _Draft:
    """Raw values and origins while files are merged."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def lay_over(self, dotted: str, value: Any, origin: str) -> None:
        dotted, value = rename_entry(dotted, value)
        section, _, name = dotted.partition(".")
        if not name:
            self.values[section] = value
        else:
            table = self.values.setdefault(section, {})
            if isinstance(table, dict):  # anything else is a problem that the schema reports
                name, value = _into_table(table, section, name, value)
                table[name] = value
            dotted = f"{section}.{name}"
        self.origins[dotted] = origin


def _into_table(section: Mapping[str, Any], of: str, name: str, value: Any) -> tuple[str, Any]:
    """Key and value of `site.environment.NAME=value`: an entry of a table with names of the user's own."""
    key, _, entry = name.partition(".")
    held = section.get(key, {})
    if not entry or f"{of}.{key}" not in open_tables() or not isinstance(held, dict):
        return name, value
    return key, {**held, entry: value}


def load_run(path: Path | None, overrides: Sequence[str] = ()) -> LoadedRunFile:
    """The run of a file (None: all defaults) with `key.path=value` overrides laid over it.

    Raises UserError with every problem of the file, its parent and the overrides.
    """
    draft = _Draft()
    text = _merge_file(draft, path) if path else ""
    problems = _lay_overrides(draft, overrides)
    title = str(path) if path else "the command line"
    try:
        values = RunFile.model_validate(draft.values)
    except ValidationError as error:
        problems += find_problems(error.errors(), draft.origins, title)
        check_no_problems(title, problems)
        raise
    check_no_problems(title, problems)
    origins = {name: draft.origins.get(name, DEFAULT) for name in all_keys()}
    return LoadedRunFile(values, MappingProxyType(origins), text, path)


def _merge_file(draft: _Draft, path: Path) -> str:
    """Lay a file over its parent; returns the file's own text."""
    text = _read_text(path)
    table = _parse(text, path)
    parent = table.pop("extends", None)
    if parent is not None:
        _merge_parent(draft, path, parent)
    lines, keys = key_lines(text), dict(_flatten(table))
    for earlier in EARLIER_KEYS.keys() & keys.keys():
        if EARLIER_KEYS[earlier] in keys:
            raise UserError(
                f"{path} sets {earlier} (line {lines.get(earlier, '?')}), the earlier name of {EARLIER_KEYS[earlier]}, "
                f"which it sets too.\n  To do: remove {earlier}."
            )
    for dotted, value in keys.items():
        line = lines.get(dotted) or lines.get(dotted.split(".")[0])
        draft.lay_over(dotted, value, f"{path.name}:{line}" if line else path.name)
    return text


def _merge_parent(draft: _Draft, path: Path, parent: Any) -> None:
    if not isinstance(parent, str):
        raise UserError(f"extends in {path} is {parent!r}; allowed: the path of one run file as a string.")
    parent_path = path.parent / parent
    parent_text = _read_text(parent_path, wanted_by=f"extends in {path}")
    if parent_path.resolve() == path.resolve():
        raise UserError(f"{path} extends itself; allowed: the path of another run file.")
    if "extends" in _parse(parent_text, parent_path):
        raise UserError(
            f"{path} extends {parent_path}, which extends another file itself; allowed: one parent.\n"
            f"  To do: copy the keys that you need from {parent_path}'s parent into {path}."
        )
    _merge_file(draft, parent_path)


def _read_text(path: Path, wanted_by: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors put a byte order mark first
    except UnicodeDecodeError as error:
        raise UserError(
            f"the run file {path} is not UTF-8 text (byte {error.start}): is it a run file?\n"
            "  To do: name a run file; where it is one, save it as UTF-8 in your editor."
        ) from None
    except (OSError, ValueError) as error:  # a ValueError for a name that no file can have
        source = f" ({wanted_by})" if wanted_by else ""
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"the run file {path}{source} cannot be read: {reason}.\n"
            "  To do: check the path, or write a new run file with `shardway init`."
        ) from None


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for a number or a nesting that Python cannot hold
        raise UserError(
            f"{path} is not valid TOML: {error}.\n"
            "  To do: correct it there: strings stand in quotes, keys below their [section]; `shardway init` writes a "
            "file with every key."
        ) from None


def _flatten(table: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Dotted key and value of each entry; only sections are taken apart, and an empty one says nothing."""
    for name, value in table.items():
        if isinstance(value, dict) and name in sections():
            yield from ((f"{name}.{inner}", entry) for inner, entry in value.items())
        else:
            yield name, value


def _lay_overrides(draft: _Draft, overrides: Sequence[str]) -> list[Problem]:
    """Lay `key.path=value` texts over the draft; those without this form are problems."""
    problems = []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or "." not in dotted:
            problems.append(
                Problem(override, "is not an override", COMMAND_LINE, "section.key=value, such as train.steps=500")
            )
            continue
        if not is_text(override):
            what = f"{text!a} is not UTF-8 text"
            problems.append(Problem(ascii(dotted)[1:-1], what, COMMAND_LINE, "text in UTF-8"))
            continue
        is_variable = dotted.strip().startswith("site.environment.")  # whose value is a text, whatever it looks like
        value = _unquote(text.strip()) if is_variable else parse_override_value(text.strip())
        draft.lay_over(dotted.strip(), value, COMMAND_LINE)
    return problems


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def is_text(word: str) -> bool:
    """Whether a word is text in UTF-8: stray bytes come from Python as lone surrogates."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_override_value(text: str) -> Any:
    """A value as TOML reads it (`3`, `true`, `[1, 2]`, `"x"`), or else the text itself (`500 steps`, `2026-01-31`)."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, date | time) else value
