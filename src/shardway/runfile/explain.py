"""The doc of a key, from the schema alone.

Invariant: what is said here is what the schema enforces. This module must not know any key by name.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass
from typing import Any

from shardway.errors import UserError
from shardway.runfile.peers import PEERS, PeerName, find_peers, plain_name
from shardway.runfile.problems import render_bound
from shardway.runfile.schema import RunFile, all_keys, sections
from shardway.runfile.write import render_value

_MOST = 12


@dataclass(frozen=True)
class KeyDoc:
    """What a key means, what it allows, and its default as it stands in TOML."""

    key: str
    doc: str
    allowed: str
    default: str

    def render(self) -> str:
        """A few lines for a terminal."""
        return f"{self.key}\n  {self.doc}\n  allowed: {self.allowed}\n  default: {self.default}"

    def as_json(self) -> dict[str, str]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class KeyMatches:
    """What a word led to: the docs of keys, and in a line each what other trainers call by it."""

    docs: list[KeyDoc]
    peers: tuple[PeerName, ...] = ()

    def render(self) -> str:
        """What a terminal shows."""
        return "\n\n".join([*(row.render() for row in self.peers), *(doc.render() for doc in self.docs)])


def search_keys(word: str) -> KeyMatches:
    """The key or section of that name; else what other trainers call so; else keys whose name or doc has the word.

    Raises UserError where there is none.
    """
    name = plain_name(word)
    if name in all_keys() or name in sections():
        return KeyMatches(explain_key(name))
    if rows := find_peers(word):
        keys = dict.fromkeys(key for row in rows for key in row.keys)
        return KeyMatches([doc for key in keys for doc in explain_key(key)], tuple(rows))
    docs = [doc for section in sections() for doc in _explain_section(section)]
    by_name = [doc for doc in docs if name in doc.key]
    text = " ".join(word.lower().split())
    by_doc = [doc for doc in docs if doc not in by_name and len(text) > 1 and text in doc.doc.lower()]
    near = [row for row in PEERS if len(name) > 3 and name in row.name][:_MOST]
    if by_name or by_doc or near:
        return KeyMatches([*by_name, *by_doc], tuple(near))
    return KeyMatches(explain_key(word))


def explain_key(name: str) -> list[KeyDoc]:
    """The docs of a key, or of all keys of a section. Raises UserError for a name that is neither."""
    keys = [dotted for dotted in all_keys() if dotted == name or dotted.split(".")[0] == name]
    if not keys:
        near = difflib.get_close_matches(name, [*all_keys(), *sections()], n=3, cutoff=0.5)
        guess = f"\n  Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"there is no key {name}; allowed: a section ({', '.join(sections())}) or section.key.{guess}")
    named = dict.fromkeys(dotted.partition(".")[0] for dotted in keys)
    return [doc for section in named for doc in _explain_section(section) if doc.key in keys]


def _explain_section(section: str) -> list[KeyDoc]:
    model = sections()[section]
    allowed = model.model_json_schema()["properties"]
    defaults = RunFile().model_dump(mode="json")[section]
    return [
        KeyDoc(f"{section}.{name}", field.description or "", _allowed(allowed[name]), render_value(defaults[name]))
        for name, field in model.model_fields.items()
    ]


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
        return f"a list of {_allowed(prop['items'])}"
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "a text"}
    words["object"] = "a table"
    return words[prop["type"]] + _bounds(prop)


def _bounds(prop: dict[str, Any]) -> str:
    names = {
        "minimum": "at least",
        "exclusiveMinimum": "more than",
        "maximum": "at most",
        "exclusiveMaximum": "less than",
    }
    said = [f"{words} {render_bound(prop[bound])}" for bound, words in names.items() if bound in prop]
    return f", {' and '.join(said)}" if said else ""
