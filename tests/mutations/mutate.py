"""Damages a file as disks, editors and careless people do: bytes, lines, values, keys, and what stands in its place.

Invariant: the same number damages the same file in the same way, and the damage is never none. This module must not
know what a file is for.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trees import change_json, change_json_line, change_toml

MOST_TRIES = 50

Change = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Mutant:
    """A damaged file: its new content, or what has taken its place, and what was done in a few words."""

    what: str
    data: bytes | None = None
    place: Callable[[Path], None] | None = None

    def put(self, path: Path) -> None:
        """Put the damage where the file is."""
        remove(path)
        if self.place is not None:
            self.place(path)
        else:
            path.write_bytes(self.data or b"")


def remove(path: Path) -> None:
    """Whatever is there is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def restore(source: Path, path: Path) -> None:
    """Put a file or folder back as it was."""
    remove(path)
    if source.is_dir():
        shutil.copytree(source, path, symlinks=True)
    elif source.exists():
        shutil.copy2(source, path)


def form_of(path: Path) -> str:
    """What a file of that name holds."""
    return {".json": "json", ".jsonl": "jsonl", ".toml": "toml", ".lock": "json"}.get(path.suffix, "")


def mutate(data: bytes, dice: random.Random, form: str = "") -> Mutant:
    """One damage of a file of that form ("toml", "json", "jsonl", "" for bytes alone)."""
    kinds = {**BYTES, **(TEXT if form else {}), **TREES.get(form, {})}
    if dice.random() < PLACE_SHARE:
        name = dice.choice(list(PLACES))
        return Mutant(name, place=PLACES[name])
    for _ in range(MOST_TRIES):
        name = dice.choice(list(kinds))
        changed = kinds[name](data, dice)
        if changed != data:
            return Mutant(name, changed)
    return Mutant("a byte more", data + b"\0")


# --- what stands in the place of the file

PLACE_SHARE = 0.08
PLACES: Mapping[str, Callable[[Path], None]] = {
    "nothing in its place": lambda path: None,
    "a folder in its place": lambda path: path.mkdir(),
    "a link to itself in its place": lambda path: path.symlink_to(path.name),
    "a link to nothing in its place": lambda path: path.symlink_to("nowhere"),
    "a link to an empty device in its place": lambda path: path.symlink_to("/dev/null"),
}


# --- bytes


def _flip(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 8))):
        if changed:
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.choice((0, 1, len(data) // 2, max(0, len(data) - 1), dice.randrange(len(data) + 1)))]


def _zero(data: bytes, dice: random.Random) -> bytes:
    start, end = _block(data, dice)
    return data[:start] + bytes(end - start) + data[end:]


def _double(data: bytes, dice: random.Random) -> bytes:
    start, end = _block(data, dice)
    return data[:end] + data[start:end] + data[end:]


def _swap(data: bytes, dice: random.Random) -> bytes:
    size = dice.choice((1, 16, 512))
    one, other = (dice.randrange(len(data) // size + 1) * size for _ in range(2))
    one, other = sorted((one, other))
    if one + size > other:
        return data
    first, second = data[one : one + size], data[other : other + size]
    return data[:one] + second + data[one + size : other] + first + data[other + size :]


def _noise(data: bytes, dice: random.Random) -> bytes:
    start, end = _block(data, dice)
    return data[:start] + dice.randbytes(end - start) + data[end:]


def _append(data: bytes, dice: random.Random) -> bytes:
    return data + dice.choice((b"\0", b"\n", b"x", dice.randbytes(100), data))


def _replace_all(data: bytes, dice: random.Random) -> bytes:
    return dice.choice((b"", b"\0" * len(data), dice.randbytes(300), b"[" * 20_000, b"{" * 20_000, b'{"a":' * 20_000))


def _block(data: bytes, dice: random.Random) -> tuple[int, int]:
    start = dice.randrange(len(data) + 1)
    return start, min(len(data), start + dice.choice((1, 16, 512, 4096)))


BYTES: Mapping[str, Change] = {
    "bits flipped": _flip,
    "truncated": _truncate,
    "a block zeroed": _zero,
    "a block doubled": _double,
    "blocks swapped": _swap,
    "a block of noise": _noise,
    "bytes appended": _append,
    "all replaced": _replace_all,
}


# --- text


def _drop_line(data: bytes, dice: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    if lines:
        start = dice.randrange(len(lines))
        del lines[start : start + dice.choice((1, 1, 5))]
    return b"".join(lines)


def _double_line(data: bytes, dice: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    if lines:
        lines.insert(dice.randrange(len(lines) + 1), dice.choice(lines))
    return b"".join(lines)


def _shuffle_lines(data: bytes, dice: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    dice.shuffle(lines)
    return b"".join(lines)


STRANGE = (
    b"\0",
    b"\xff\xfe",
    b"\x80",
    "\ufeff".encode(),
    "\u2028\u202e\U0001d518".encode(),
    b"\x1b[31m",
    b"\r",
    b'"',
    b"'''",
    b'"""',
    b"\\",
    b"#",
    b"\xed\xa0\x80",
)


def _insert_strange(data: bytes, dice: random.Random) -> bytes:
    place = dice.choice((0, len(data), dice.randrange(len(data) + 1)))
    return data[:place] + dice.choice(STRANGE) + data[place:]


def _other_encoding(data: bytes, dice: random.Random) -> bytes:
    text = data.decode("utf-8", "replace")
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: text.encode("utf-16"),
        lambda: text.encode("utf-8-sig"),
        lambda: text.replace("\n", "\r\n").encode(),
        lambda: text.replace("\n", "\r").encode(),
        lambda: text.replace(" ", "\u00a0").encode(),
        lambda: text.upper().encode(),
    )
    return dice.choice(ways)()


TEXT: Mapping[str, Change] = {
    "a line dropped": _drop_line,
    "a line doubled": _double_line,
    "lines reordered": _shuffle_lines,
    "strange bytes inserted": _insert_strange,
    "in another encoding": _other_encoding,
}

TREES: Mapping[str, Mapping[str, Change]] = {
    "toml": {f"a value or key changed ({number})": change_toml for number in range(12)},
    "json": {f"a value or key changed ({number})": change_json for number in range(12)},
    "jsonl": {f"a value or key changed ({number})": change_json_line for number in range(12)},
}
"""Of each form one damage in two keeps the form and changes what it says: that gets furthest."""
