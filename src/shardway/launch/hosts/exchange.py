"""Several commands in one script for the shell of another machine, and their outputs taken apart again.

Invariant: what a command prints comes back byte for byte, whatever login shells print around it: each output ends
with a random mark that also carries the exit code. This module must not run anything.

The script is read by bash from its standard input: no word of it is on a command line that `ps` shows or that a login
shell (csh, fish, zsh) takes apart. Shells that read a script from a pipe take no byte more than they need (POSIX.1,
sh, INPUT FILES), so that a payload may follow the script.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardway.inherited import OPTIONS, list_patterns
from shardway.launch.blocks import read_block
from shardway.launch.script import quote, quote_all, quote_shell

BOOTSTRAP = "exec bash --norc -s"
"""What the login shell is asked to run: words that every shell reads alike."""

_KILLED = (124, 137)
"""Codes of coreutils' `timeout`: it ended the command, or had to kill it."""

_PROLOGUE = """\
mark={mark}
{functions}
# Commands of a scheduler stand in PATH only after a login. A profile may print, read or run what it likes: only the
# variables that it leaves are taken.
eval "$(bash --login -c 'echo; echo '$mark'; export -p' </dev/null 2>/dev/null | sed "1,/$mark/d")" 2>/dev/null
left_out=$(for name in $(compgen -e); do
  case $name in {options}) printf '%s=%s\\n' "$name" "${{!name//$'\\n'/ }}" ;; esac
done)
drop_variables {patterns}
limit=; command -v timeout >/dev/null 2>&1 && limit="timeout -k 5 {limit_s}"
ends() {{ set -- "$1" $? $SECONDS; printf %s:%s:%s:%s: $mark "$@"; printf %s:%s:%s:%s: $mark "$@" >&2; SECONDS=0; }}
ends 0
"""


@dataclass(frozen=True)
class Command:
    """A command as text of a script, and the words that it came from."""

    words: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class ScriptCommandResult:
    """How one command of a script ended; `whole` is False where its end never came back."""

    code: int
    out: bytes
    err: bytes
    whole: bool = True
    timed_out: bool = False


@dataclass(frozen=True)
class Exchange:
    """A script with its mark; `limit_s` is the time of each of its commands."""

    commands: tuple[Command, ...]
    limit_s: float
    mark: str = field(default_factory=lambda: f"shardway-{secrets.token_hex(16)}")

    def render(self) -> bytes:
        """The script, after which nothing is read of the input but by its commands."""
        limit = math.ceil(self.limit_s)
        lines = [f"{command.text}\nends {number}" for number, command in enumerate(self.commands, 1)]
        drop = read_block("inherited", "drop_variables").text
        words = " ".join(quote_shell(pattern) for ranks in (True, False) for pattern in list_patterns(of_ranks=ranks))
        prologue = _PROLOGUE.format(
            mark=self.mark, limit_s=limit, options="|".join(OPTIONS), functions=drop, patterns=words
        )
        return "\n".join([prologue + "{", *lines, "exit 0", "}", ""]).encode("utf-8", "surrogateescape")

    def parse(self, out: bytes, err: bytes) -> list[ScriptCommandResult] | None:
        """How each command ended, as far as the outputs reach; None where the script was never begun."""
        outs, errs = parse_marked(self.mark, out), parse_marked(self.mark, err)
        if not outs.ends:
            return None
        found = []
        for number in range(1, len(outs.ends)):
            end = outs.ends[number]
            late = end.code in _KILLED and end.seconds >= math.ceil(self.limit_s)
            found.append(ScriptCommandResult(end.code, outs.text(number), errs.text(number), timed_out=late))
        if len(found) < len(self.commands):
            number = len(found) + 1
            found.append(ScriptCommandResult(-1, outs.text(number), errs.text(number), whole=False))
        return found


@dataclass(frozen=True)
class CommandEnd:
    """One mark in an output: exit code, and seconds that the command took."""

    code: int
    seconds: int


@dataclass(frozen=True)
class Marked:
    """An output cut at its marks: `texts[0]` is what stood before the first, `texts[i]` belongs to command i."""

    texts: tuple[bytes, ...]
    ends: tuple[CommandEnd, ...]

    def text(self, number: int) -> bytes:
        """The output of a command, empty where there is none."""
        return self.texts[number] if number < len(self.texts) else b""


def parse_marked(mark: str, output: bytes) -> Marked:
    """Cut an output at the marks that `ends` of a script printed."""
    pieces = re.split(re.escape(mark.encode()) + rb":\d+:(\d+):(\d+):", output)
    ends = tuple(CommandEnd(int(code), int(s)) for code, s in zip(pieces[1::3], pieces[2::3], strict=True))
    return Marked(tuple(pieces[::3]), ends)


def run_command(words: Sequence[str], stdin: str = "") -> Command:
    """A command of a script, within the time limit, with a text as its input (none: an empty input)."""
    source = f"printf %s {quote(stdin)} | " if stdin else ""
    empty = "" if stdin else " </dev/null"
    return Command(tuple(words), f"{source}$limit {quote_all(words)}{empty}")


def options_command() -> Command:
    """What stood in the environment for sbatch: NAME=VALUE, a line each."""
    return Command(("left_out",), 'printf %s "$left_out"')


def follow_command(words: Sequence[str]) -> Command:
    """A command that ends when the input of the script does: nothing is left running behind a lost connection."""
    watch = "{ cat <&3; kill -- -$child; } >/dev/null 2>&1 & watch=$!"
    # Job control gives the command a process group of its own, which ends as one.
    start = f"exec 3<&0; set -m; {{ exec {quote_all(words)} </dev/null 2>/dev/null 3<&-; }} & child=$!"
    # The watch ends first: it must never kill a process that was given the same number since.
    end = "{ wait $child; code=$?; kill -- -$watch; } 2>/dev/null; (exit $code)"
    return Command(tuple(words), f"{start}\n{watch}\n{end}")


def write_command(path: str, text: str, executable: bool, token: str) -> Command:
    """Write a file under another name in its folder, and give it its own when it is complete."""
    folder, _, name = path.rpartition("/")
    temporary = quote(f"{folder}/.{name}.{token}.tmp")
    mode = f" && chmod +x {temporary}" if executable else ""
    return Command(
        ("write", path),
        f"mkdir -p -- {quote(folder or '/')} && printf %s {quote(text)} >{temporary}{mode} && "
        f"mv -f -- {temporary} {quote(path)} || {{ rm -f -- {temporary}; false; }}",
    )


def unpack_command(target: str, token: str) -> Command:
    """Unpack what follows the script (tar, gzip) beside a folder that does not exist yet, and give it its name.

    Code 17 (EEXIST) where the folder exists.
    """
    folder, _, name = target.rpartition("/")
    there, temporary = quote(target), quote(f"{folder}/.{name}.{token}.tmp")
    unpack = f"gzip -dc | tar -x -o -f - -C {temporary}"
    return Command(
        ("unpack", target),
        f"if [ -e {there} ] || [ -L {there} ]; then (exit 17); else mkdir -p -- {temporary} && "
        f"(set -o pipefail; {unpack}) && mv -- {temporary} {there} || {{ rm -rf -- {temporary}; false; }}; fi",
    )
