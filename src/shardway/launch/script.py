"""A script as a value: lines with their purpose, the only place that quotes shell, and functions of `launch/shell`.

Invariant: `quote` gives a word that bash passes on unchanged, whatever it contains.

A function of `launch/shell` begins with `#: NAME ARGUMENTS: what it is for` and ends before the next, or at the heading
of a section (`# ---`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from shardway.errors import Bug

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_VARIABLE = re.compile(r"(\$[A-Za-z_][A-Za-z0-9_]*|\$\{[A-Za-z_][A-Za-z0-9_]*\})")
_HOME = re.compile(r"~(/|$)")
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "'": "\\'", "\\": "\\\\"}
_WIDTH = 100


@dataclass(frozen=True)
class ScriptLine:
    """One line (or one command over several lines) of a script, and what it is for.

    Lines in a row with the same purpose share one comment; an empty purpose is that of the line before.
    """

    text: str
    purpose: str = ""


@dataclass(frozen=True)
class ScriptSection:
    """Lines of a script that belong together, under a heading; an empty heading prints none."""

    heading: str
    lines: tuple[ScriptLine, ...]


def script_lines(*rows: tuple[object, str]) -> tuple[ScriptLine, ...]:
    """A line for each row of text and purpose; a row whose text is anything empty or false is left out."""
    lines = [(text, purpose) for text, purpose in rows if text]
    if wrong := [text for text, _ in lines if not isinstance(text, str)]:
        raise Bug(f"a line of a script is {wrong[0]!r}; please report this")
    return tuple(ScriptLine(str(text), purpose) for text, purpose in lines)


def quote(word: str) -> str:
    """One word for bash: as it is where that is safe, else in quotes; control characters as `$'...'`.

    Raises ValueError for a NUL, which no argument of a program can hold.
    """
    if "\x00" in word:
        raise ValueError("a NUL character cannot be part of an argument")
    if _PLAIN.fullmatch(word):
        return word
    if _CONTROL.search(word):
        inside = "".join(_ESCAPES.get(c) or (f"\\x{ord(c):02x}" if _CONTROL.match(c) else c) for c in word)
        return f"$'{inside}'"
    return "'" + word.replace("'", "'\\''") + "'"


def quote_comment(text: str) -> str:
    """Text of a comment, which ends with its line: control characters as escapes."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def quote_shell(text: str) -> str:
    """Shell for another bash, as one word that keeps its lines: for our own text, not for what people wrote."""
    return "'" + text.replace("'", "'\\''") + "'"


def quote_expanding(text: str) -> str:
    """A word in which bash replaces `$NAME` and `${NAME}`, and a `~/` at its start, and nothing else."""
    home, rest = ("$HOME", text[1:]) if text == "~" or text.startswith("~/") else ("", text)
    if _CONTROL.search(rest):
        raise ValueError("a text whose $NAMES are replaced cannot hold control characters")
    parts = [
        part if _VARIABLE.fullmatch(part) else re.sub(r'([\\"$`])', r"\\\1", part) for part in _VARIABLE.split(rest)
    ]
    return f'"{home}{"".join(parts)}"'


def quote_place(path: str) -> str:
    """A path as a person or a site writes it: `~/` at its start and each `$NAME` are replaced by the job."""
    is_open = _HOME.match(path) or _VARIABLE.search(path)
    return quote_expanding(path) if is_open and not _CONTROL.search(path) else quote(path)


def quote_all(words: Iterable[str]) -> str:
    """Words for bash, with a blank between them."""
    return " ".join(map(quote, words))


def wrap_command(words: Sequence[str], indent: str = "  ") -> str:
    """Words that are quoted already as one command, cut at about 100 columns with backslashes."""
    lines, line = [], ""
    for word in words:
        if line and len(line) + 1 + len(word.split("\n")[0]) > _WIDTH:
            lines.append(f"{line} \\")
            line = indent + word
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


def render_function(name: str, parts: Iterable[ScriptSection]) -> ScriptLine:
    """Parts as the body of a shell function."""
    lines = render_script(parts, behind=True)[:-1].split("\n")  # splitlines() would cut at U+0085 in an argument
    body = "\n".join(f"  {line}" if line else "" for line in lines)
    return ScriptLine(f"{name}() {{\n{body}\n}}")


def render_script(parts: Iterable[ScriptSection], *, behind: bool = False) -> str:
    """The text of a script, with a blank line between parts. A purpose is a comment above its lines, or `behind` it
    where it belongs to one short command."""
    blocks = []
    for part in parts:
        groups: list[tuple[str, list[str]]] = []
        for line in part.lines:
            if groups and line.purpose in ("", groups[-1][0]):
                groups[-1][1].append(line.text)
            else:
                groups.append((line.purpose, [line.text]))
        lines = [f"# --- {part.heading}"] if part.heading and groups else []
        for purpose, texts in groups:
            whole = f"{texts[0]}  # {purpose}"
            is_short = len(texts) == 1 and len(whole) <= _WIDTH and "\n" not in whole and whole[0] != "#"
            if behind and purpose and is_short:
                lines.append(whole)
            else:
                lines += [*([f"# {purpose}"] if purpose else []), *texts]
        blocks += ["\n".join(lines)] if lines else []
    return "\n\n".join(blocks) + "\n"


# --- shell functions kept in `launch/shell/*.sh`

_HEAD = re.compile(r"^#: (?P<name>\w+)", re.MULTILINE)


def read_shell(file: str | Traversable) -> str:
    """The text of `launch/shell/FILE.sh`, or of a file of another package."""
    path = files("shardway.launch") / "shell" / f"{file}.sh" if isinstance(file, str) else file
    return path.read_text(encoding="utf-8")


def read_block(file: str | Traversable, name: str) -> ScriptLine:
    """The function `name` of `launch/shell/FILE.sh`, with its purpose. Raises KeyError for a name that is not there."""
    return read_blocks(file)[name]


def read_blocks(file: str | Traversable) -> dict[str, ScriptLine]:
    """Every function of `launch/shell/FILE.sh`, or of a file of another package, in the order of the file."""
    blocks = {}
    for text in re.split(r"^(?=#: )", read_shell(file), flags=re.MULTILINE):
        if head := _HEAD.match(text):
            purpose, _, body = text.partition("\n# --- ")[0].partition("\n")
            blocks[head["name"]] = ScriptLine(body.strip("\n"), purpose.removeprefix("#: "))
    return blocks
