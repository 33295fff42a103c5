"""Recorded commands of real schedulers (`tests/data/transcripts`), as what a host hands on of a command."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardway.launch.hosts.base import Done

TRANSCRIPTS = Path(__file__).parent / "data" / "transcripts"

_PROMPT = re.compile(r"^(?:\[\w+\]|#root)?\$ (.*)$")
_STREAMS = re.compile(r"\[streams: stdout (\d+) B, stderr \d+ B")
_EXIT = re.compile(r"\[exit (\d+)\]")
_JSON = re.compile(r"^<stdout in (\S+\.json):.*>\n", re.MULTILINE)


@dataclass(frozen=True)
class Recorded:
    """One command of a transcript and how it ended."""

    case: str
    command: str
    done: Done


@cache
def read_transcript(name: str) -> tuple[Recorded, ...]:
    """Every command of a transcript: "slurm/state-COMPLETED"."""
    path = TRANSCRIPTS / f"{name}.txt"
    found: list[Recorded] = []
    command, lines, code = "", list[str](), 0
    for line in path.read_text(encoding="utf-8").split("\n"):
        if match := _PROMPT.match(line):
            command, lines, code = match[1], [], 0
        elif match := _EXIT.fullmatch(line):
            code = int(match[1])
            found.append(Recorded(name, command, _to_done(path, command, lines, code, None)))
        elif (match := _STREAMS.match(line)) and found:
            found[-1] = Recorded(name, command, _to_done(path, command, lines, code, int(match[1])))
        else:
            lines.append(line)
    return tuple(found)


def _to_done(path: Path, command: str, lines: list[str], code: int, out_length: int | None) -> Done:
    text = "".join(f"{line}\n" for line in lines)
    if match := _JSON.search(text):
        out, err = read_json(f"{path.parent.name}/{match[1]}"), _JSON.sub("", text)
    elif out_length is None:  # recorded without the lengths of the streams
        out, err = (text, "") if code == 0 else ("", text)
    else:
        out, err = text[:out_length], text[out_length:]
    try:
        words = tuple(shlex.split(command))
    except ValueError:
        words = (command,)
    return Done(words, code, out, err)


def read_json(name: str) -> str:
    """A recorded JSON, with the bytes that are no UTF-8 replaced, as hosts do; empty for one that is not kept here."""
    path = TRANSCRIPTS / name
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def find(name: str, start: str, nth: int = 0) -> Recorded:
    """The nth command of a transcript that begins so."""
    return [entry for entry in read_transcript(name) if entry.command.startswith(start)][nth]


def list_transcripts(pattern: str) -> list[str]:
    """Names of the transcripts that are here: `list_transcripts("slurm/sbatch-refused-*")`."""
    return sorted(
        path.relative_to(TRANSCRIPTS).with_suffix("").as_posix() for path in TRANSCRIPTS.glob(f"{pattern}.txt")
    )


def write_command(path: Path, done: Done, out: str | None = None) -> None:
    """A command in this place that answers as recorded; `out` stands for an output that is kept elsewhere."""
    said, wrong = shlex.quote(done.out if out is None else out), shlex.quote(done.err)
    path.write_text(f"#!/bin/sh\nprintf %s {said}\nprintf %s {wrong} >&2\nexit {done.code}\n", encoding="utf-8")
    path.chmod(0o755)
