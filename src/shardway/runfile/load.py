"""Reads a run file, its parent and overrides with the origin of each key, states its problems in sentences, and writes
run files.

Invariants:
- What is written here loads again to the same values.
- `key_lines` is never wrong for text that `tomllib` accepts: keys in a form that it does not parse (quoted, in an
  inline table, in an array of tables) are left out rather than guessed. It reads no values.
- No file is changed, and all problems of a run file are reported at once.
- Every key named here is one of the schema's; a peer's name with two meanings has a row for each.
- Every problem names the key, the value, its origin and what is allowed; an unknown key gets its nearest match.
- The doc of a key comes from the schema that enforces it.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardway.earlier_names import EARLIER_KEYS, rename_entry
from shardway.errors import Problem, UserError, check_no_problems
from shardway.runfile.schema import RunFile, all_keys, open_tables, sections

# --- run files as text: the commented one of `shardway init` and the resolved one of a run directory


def render_value(value: Any) -> str:
    """One value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _escape(json.dumps(value, ensure_ascii=False))
    if isinstance(value, list):
        return f"[{', '.join(map(render_value, value))}]"
    if isinstance(value, dict):
        names = (name if re.fullmatch("[A-Za-z0-9_-]+", name) else render_value(name) for name in value)
        pairs = zip(names, map(render_value, value.values()), strict=True)
        return f"{{{', '.join(f'{name} = {entry}' for name, entry in pairs)}}}"
    return repr(value)


def render_run(values: RunFile, origins: Mapping[str, str], keep: Callable[[str], bool]) -> str:
    """A run file with every key that `keep` wants, each with its origin beside it."""
    lines = [f"format = {values.format}"]
    for section, table in _tables(values):
        kept = {name: value for name, value in table.items() if keep(f"{section}.{name}")}
        lines += ["", f"[{section}]"] if kept else []
        for name, value in kept.items():
            origin = _escape(origins[f"{section}.{name}"])  # of a file whose name may hold any byte
            lines.append(f"{f'{name} = {render_value(value)}':<40} # {origin}")
    return "\n".join(lines) + "\n"


def render_commented(values: RunFile, chosen: Mapping[str, Any]) -> str:
    """A run file for a newcomer: the `chosen` keys set, every other key as a comment with its default."""
    lines = [
        "# A Shardway run file. Keys that are commented out stand at their defaults.",
        "# `shardway config explain KEY` says more of a key; `shardway train THIS_FILE` runs it.",
        f"format = {values.format}",
    ]
    for section, table in _tables(values):
        model = sections()[section]
        lines += ["", *_comment((model.__doc__ or "").strip()), f"[{section}]"]
        for name, default in table.items():
            lines += _comment(model.model_fields[name].description or "")
            dotted = f"{section}.{name}"
            entry = f"{name} = {render_value(chosen.get(dotted, default))}"
            lines.append(entry if dotted in chosen else f"# {entry}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    """A text without characters that a terminal would obey, or that are none in UTF-8: as TOML writes them."""
    return "".join(char if char.isprintable() else _escape_one(ord(char)) for char in text)


def _escape_one(code: int) -> str:
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"


def _tables(values: RunFile) -> list[tuple[str, dict[str, Any]]]:
    dump = values.model_dump(mode="json")
    return [(name, table) for name, table in dump.items() if isinstance(table, dict)]


def _comment(text: str) -> list[str]:
    return [f"## {line}" for line in textwrap.wrap(text, 100)]


# --- the line of each key

_TABLE = re.compile(r"\s*\[\s*([A-Za-z0-9_.\-\s]+?)\s*\]\s*(#.*)?")
_TABLES = re.compile(r"\s*\[\[\s*([A-Za-z0-9_\-]+\s*\.\s*[A-Za-z0-9_\-]+)\s*\]\]\s*(#.*)?")
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
    # Statements begin on lines that no string and no bracket of an earlier line reaches into.
    number, depth, begins = 1, 0, [1]
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        number += token[0].count("\n")
        if token[0] == "\n" and depth == 0:
            begins.append(number)
    found: dict[str, int] = {}
    lines, table = text.split("\n"), ""
    for number in begins:
        line = lines[number - 1]
        if head := _TABLE.fullmatch(line):
            table = re.sub(r"\s", "", head[1])
            found.setdefault(table, number)
        elif line.lstrip().startswith("["):
            table = "?"  # a head of another form: its keys get a name that no key has
            if head := _TABLES.fullmatch(line):  # an entry of a list in a section, such as [[data.blend]]
                found.setdefault(re.sub(r"\s", "", head[1]), number)
        elif (pair := _KEY.fullmatch(line)) and table != "?":
            found.setdefault(f"{table}.{pair[1]}".lstrip("."), number)
    return found


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

    @property
    def file_name(self) -> str:
        """What a run without a name is called."""
        return self.path.stem if self.path else "default"

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
            self.origins[section] = origin
            return
        table = self.values.setdefault(section, {})
        if isinstance(table, dict):  # anything else is a problem that the schema reports
            key, _, entry = name.partition(".")
            held = table.get(key, {})
            if entry and f"{section}.{key}" in open_tables() and isinstance(held, dict):
                name, value = key, {**held, entry: value}  # site.environment.NAME=value
            table[name] = value
        self.origins[f"{section}.{name}"] = origin


def load_run(path: Path | None, overrides: Sequence[str] = ()) -> LoadedRunFile:
    """The run of a file (None: all defaults) with `key.path=value` overrides laid over it. Raises UserError with every
    problem of the file, its parent and the overrides."""
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
    if (parent := table.pop("extends", None)) is not None:
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
    lines, keys = key_lines(text), dict[str, Any]()
    for name, value in table.items():  # only sections are taken apart, and an empty one says nothing
        inside = isinstance(value, dict) and name in sections()
        keys |= {f"{name}.{inner}": entry for inner, entry in value.items()} if inside else {name: value}
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


def _lay_overrides(draft: _Draft, overrides: Sequence[str]) -> list[Problem]:
    """Lay `key.path=value` texts over the draft; those without this form are problems."""
    problems = []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or "." not in dotted:
            allowed = "section.key=value, such as train.steps=500"
            problems.append(Problem(override, "is not an override", COMMAND_LINE, allowed))
        elif not is_text(override):
            what = f"{text!a} is not UTF-8 text"
            problems.append(Problem(ascii(dotted)[1:-1], what, COMMAND_LINE, "text in UTF-8"))
        else:
            dotted, text = dotted.strip(), text.strip()
            value: Any = text
            if not dotted.startswith("site.environment."):
                value = parse_override_value(text)
            elif len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
                value = text[1:-1]  # of a variable, whose value is a text, whatever it looks like
            draft.lay_over(dotted, value, COMMAND_LINE)
    return problems


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


# --- names in other trainers


@dataclass(frozen=True)
class PeerName:
    """A name in `peer` for `keys`; `note` is the difference."""

    name: str
    peer: str
    keys: tuple[str, ...]
    note: str = ""

    def render(self) -> str:
        note = f"; {self.note}" if self.note else ""
        return f"{self.name} ({self.peer}) is {', '.join(self.keys)} here{note}"


@cache
def list_peers() -> tuple[PeerName, ...]:
    """Names that users may be familiar with (peers.toml)."""
    tables = tomllib.loads(files(__package__).joinpath("peers.toml").read_text(encoding="utf-8"))
    rows = []
    for peer, names in tables.items():
        for name, entry in names.items():
            keys, note = (entry["keys"], entry["note"]) if isinstance(entry, dict) else (entry, "")
            rows.append(PeerName(name, peer, tuple(keys), note))
    return tuple(rows)


def plain_name(word: str) -> str:
    """A name in the table's form: "--tensor-model-parallel-size" -> "tensor_model_parallel_size"."""
    return word.strip().lstrip("-").replace("-", "_").lower()


def find_peers(word: str) -> list[PeerName]:
    """The rows of a name, with or without the section that the peer has it in, or a person has put it in here; of such
    a section alone those of its names."""
    name = plain_name(word)
    name = name.partition("(")[0]  # EarlyStopping(patience=3)
    exact = [row for row in list_peers() if row.name.lower() == name]
    exact = exact or [row for row in list_peers() if row.name.startswith(f"{name}.")]
    return exact or [row for row in list_peers() if "." in name and row.name == name.rpartition(".")[2]]


# --- problems found by pydantic

_WORDS = {
    "int_type": ("is not an integer", "an integer"),
    "float_type": ("is not a number", "a number"),
    "bool_type": ("is neither true nor false", "true or false"),
    "string_type": ("is not a string", "a string in quotes"),
    "list_type": ("is not a list", "a list such as [1, 2]"),
    "finite_number": ("is not a finite number", "a finite number"),
    "greater_than_equal": ("is too small", "at least {ge}"),
    "greater_than": ("is too small", "more than {gt}"),
    "less_than_equal": ("is too large", "at most {le}"),
    "less_than": ("is too large", "less than {lt}"),
    "string_pattern_mismatch": ("is not the name of a folder", "a string without / that is more than dots"),
    "string_too_short": ("is too short", "a string of at least {min_length} character"),
    "too_short": ("has {actual_length} entries", "at least {min_length} entries"),
    "too_long": ("has {actual_length} entries", "at most {max_length} entries"),
}
"""Type of an error -> what is wrong with the value and what is allowed, with the error's context filled in."""


def find_problems(errors: Sequence[ErrorDetails], origins: Mapping[str, str], default_origin: str) -> list[Problem]:
    """One problem per key, in pydantic's order."""
    problems: dict[str, Problem] = {}
    for error in errors:
        location = [str(part) for part in error["loc"]]
        dotted = ".".join(location[:2])
        # A problem with a section as a whole is where its first key stands.
        of_section = (origin for name, origin in origins.items() if name.split(".")[0] == location[0])
        origin = origins.get(dotted) or next(of_section, "") or default_origin
        if error["type"] == "extra_forbidden":
            problem = unknown_key(dotted, origin)
        elif error["type"] == "model_type":
            names = ", ".join(sections()[dotted].model_fields)
            what = f"{error['input']!r} is not a section"
            problem = Problem(dotted, what, origin, f"a table [{dotted}] with {names}")
        else:
            what, allowed = _describe(error)
            problem = Problem(dotted, what, origin, allowed)
        if before := problems.get(dotted):  # of a key whose type is a choice, what either branch says is allowed
            both = [text for text in dict.fromkeys((before.allowed, problem.allowed)) if text]
            problem = replace(before, allowed=" or ".join(both))
        problems[dotted] = problem
    return list(problems.values())


def unknown_key(dotted: str, origin: str) -> Problem:
    """The problem of a key that does not exist; its nearest match stands before the full list."""
    section, _, name = dotted.partition(".")
    known = list(sections()[section].model_fields) if section in sections() and name else [*sections(), "format"]
    near = difflib.get_close_matches(name or section, known, n=1, cutoff=0.6)
    elsewhere = [other for other in all_keys() if name and other.split(".")[1] == name]
    if not name:
        elsewhere = [other for other in all_keys() if other.split(".")[1] == section]
        near = [] if elsewhere else near
    guess = f"{section}.{near[0]}" if near and name else near[0] if near else next(iter(elsewhere), "")
    kind = "key" if name else "section"
    match = f"; did you mean {guess}?" if guess else ""
    if rows := find_peers(dotted) or find_peers(name or section):
        match = "".join(f"; {row.render()}" for row in rows[:2])
    within = f"in [{section}]: " if name and section in sections() else ""
    return Problem(dotted, f"there is no {kind} of this name{match}", origin, f"{within}{', '.join(known)}")


def _describe(error: ErrorDetails) -> tuple[str, str]:
    value, context = error["input"], error.get("ctx", {})
    if error["type"] == "value_error":
        sentence, _, allowed = str(context["error"]).partition("; allowed: ")
        return sentence, allowed
    shown = render_value(value) if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value}"
    if error["type"] == "literal_error":
        return f"{shown} is not one of the choices", str(context["expected"]).replace("'", '"')
    if error["type"] == "list_type" and isinstance(value, str):
        words = ", ".join(f'"{word.strip()}"' for word in value.split(","))
        return f"{shown} is not a list", f"a list such as [{words}]"
    if error["type"] not in _WORDS:
        return error["msg"], ""
    bounds = {name: render_bound(bound) for name, bound in context.items()}
    what, allowed = (words.format(**bounds) for words in _WORDS[error["type"]])
    return f"{shown} {what}", allowed


def render_bound(bound: Any) -> str:
    """A bound as a user writes it: 1.0 -> "1"."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


# --- the doc of a key


@dataclass(frozen=True)
class KeyDoc:
    """What a key means, what it allows, and its default as it stands in TOML."""

    key: str
    doc: str
    allowed: str
    default: str

    def render(self) -> str:
        return f"{self.key}\n  {self.doc}\n  allowed: {self.allowed}\n  default: {self.default}"


def search_keys(word: str) -> list[PeerName | KeyDoc]:
    """The key or section of that name; else what other trainers call so, and its keys; else what has the word in its
    name or doc. Raises UserError where there is none."""
    name = plain_name(word)
    if name in all_keys() or name in sections():
        return [*explain_key(name)]
    if rows := find_peers(word):
        keys = dict.fromkeys(key for row in rows for key in row.keys)
        return [*rows, *(doc for key in keys for doc in explain_key(key))]
    docs = [doc for section in sections() for doc in explain_key(section)]
    by_name = [doc for doc in docs if name in doc.key]
    text = " ".join(word.lower().split())
    by_doc = [doc for doc in docs if doc not in by_name and len(text) > 1 and text in doc.doc.lower()]
    near = [row for row in list_peers() if len(name) > 3 and name in row.name][:12]
    return [*near, *by_name, *by_doc] or [*explain_key(word)]


def explain_key(name: str) -> list[KeyDoc]:
    """The docs of a key, or of all keys of a section. Raises UserError for a name that is neither."""
    keys = [dotted for dotted in all_keys() if dotted == name or dotted.split(".")[0] == name]
    if not keys:
        near = difflib.get_close_matches(name, [*all_keys(), *sections()], n=3, cutoff=0.5)
        guess = f"; did you mean {' or '.join(near)}?\n  " if near else "; "
        raise UserError(f"there is no key {name}{guess}allowed: a section ({', '.join(sections())}) or section.key.")
    docs, all_defaults = [], RunFile().model_dump(mode="json")
    for section in dict.fromkeys(dotted.partition(".")[0] for dotted in keys):
        allowed = sections()[section].model_json_schema()["properties"]
        for key, info in sections()[section].model_fields.items():
            default = render_value(all_defaults[section][key])
            docs.append(KeyDoc(f"{section}.{key}", info.description or "", _allowed(allowed[key]), default))
    return [doc for doc in docs if doc.key in keys]


def _allowed(prop: dict[str, Any]) -> str:
    if "anyOf" in prop:
        return " or ".join(_allowed(choice) for choice in prop["anyOf"])
    if "enum" in prop:
        return ", ".join(render_value(choice) for choice in prop["enum"])
    if "const" in prop:
        return render_value(prop["const"])
    if "examples" in prop:
        return f"such as {', '.join(render_value(example) for example in prop['examples'])}"
    if prop.get("type") == "array":
        return "a list of tables" if "properties" in prop["items"] else f"a list of {_allowed(prop['items'])}"
    words = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a string"}
    bounds = {"minimum": "at least", "exclusiveMinimum": "more than"}
    bounds |= {"maximum": "at most", "exclusiveMaximum": "less than"}
    said = [f"{word} {render_bound(prop[bound])}" for bound, word in bounds.items() if bound in prop]
    return words.get(prop["type"], "a table") + (f", {' and '.join(said)}" if said else "")
