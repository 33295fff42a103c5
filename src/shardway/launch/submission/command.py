"""What stands after `--`, read as the program that every rank runs; `command_forms` is the table of first words.

The Python of the job's environment is `python` and `python3`; with a version or a path, it is that very interpreter.

Invariant: a word is handed on as it was typed, or the command is refused; none is dropped. This module must not ask a
host; of the folder in which the command was typed it looks at the files that the command names.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from shardway.errors import Problem, UserError, render_problems
from shardway.launch.job import Program
from shardway.launch.script import quote_all
from shardway.launch.submission.command_forms import (
    BY_NAME,
    MODULES,
    NODES,
    RANKS,
    TOTAL,
    CommandForm,
    Role,
    find_form,
    word_set,
)

_KEY, _ORIGIN = "the command", "command line"


_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?[dt]?(\.exe)?")
_PLAIN_PYTHON = ("python", "python3")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_GLUED = re.compile(r"(-[a-zA-Z])(\d+)")
_OF_THE_SHELL = frozenset((".", "source", "cd", "exec", "export", "eval", "module", "set", "ulimit"))
_MOVE = word_set("-C --chdir --directory --cwd --project")
"""Options of wrappers that run a command in another folder."""
_FEW = 4
"""Wrappers around wrappers that are looked through."""


@dataclass(frozen=True)
class CommandRead:
    """What a command was found to be: the program of the job, and what of it checks can look at.

    `script`: the Python script that runs in the end, `module` that of `-m`, "" where there is none or nobody knows.
    `texts`: what a shell runs, by where it stands: ("bash -c", "torchrun x.py"), ("run.sh", ...).
    """

    program: Program
    script: str = ""
    module: str = ""
    texts: tuple[tuple[str, str], ...] = ()


def read_command(command: Sequence[str], here: Path, nodes: int = 1) -> CommandRead:
    """The command that was typed in the folder `here`, for a job of so many nodes.

    Raises UserError for one that cannot run as a rank, with the line to type in its place where there is one.
    """
    words = list(command)
    if not words[0].strip():
        _refuse("its first word, the program, is an empty text", remedy="look whether a variable in it is set")
    if _ASSIGNMENT.fullmatch(words[0]) and "/" not in words[0].partition("=")[0]:
        _refuse(f"it begins with {words[0]}, which only a shell sets", remedy=f"`-- env {quote_all(words)}`")
    if words[0] in _OF_THE_SHELL:
        _refuse(
            f"{words[0]} is a word of the shell, and no program", remedy=f"`-- bash -c {quote_all([' '.join(words)])}`"
        )
    if len(words) == 1 and re.search(r"\s", words[0]) and not (here / words[0]).exists():
        _refuse(f'"{words[0]}" is one word', remedy=f"leave its quotes out: `-- {words[0]}`")
    start = _find_inner(words)
    inner = _read_inner(words, start, here, nodes)
    if start == 0:
        return inner
    program = Program(tuple(words), python=False, interpreter=inner.program.interpreter)
    moved = any(_plain_option(word) in _MOVE for word in words[:start]) and "numactl" not in words[:start]
    return replace(inner, program=program, script="" if moved else inner.script)


def _find_inner(words: Sequence[str]) -> int:
    """Where in a command that stands which wrappers run; the end where there is none."""
    start = 0
    for _ in range(_FEW):
        form, used = find_form(words[start:])
        if form is None or form.role is not Role.WRAPPER:
            break
        inner = start + used
        inner += _count_options(words[inner:], form)
        while form.names == ("env",) and inner < len(words) and _ASSIGNMENT.fullmatch(words[inner]):
            inner += 1
        if form.names == ("env",) and {"-i", "-", "--ignore-environment"} & set(words[start:inner]):
            _refuse("`env -i` takes from each rank what says which rank it is", remedy="leave -i out")
        if {"numactl", "taskset", "timeout"} & {os.path.basename(words[start])}:
            inner += _count_numbers(words[inner:])
        if inner > start + used and inner < len(words) and not _is_known(words[inner:]):
            # an option that the table does not know may have had a value
            inner = next((at for at in range(inner, len(words)) if _is_known(words[at:])), inner)
        if inner >= len(words):
            return start
        start = inner
    return start


def _is_known(words: Sequence[str]) -> bool:
    return find_form(words)[0] is not None or bool(_PYTHON.fullmatch(os.path.basename(words[0])))


def _count_options(words: Sequence[str], form: CommandForm) -> int:
    """How many words the options of a row take, which the command begins with."""
    return sum(map(len, _split_options(words, form)))


def _split_options(words: Sequence[str], form: CommandForm) -> list[tuple[str, ...]]:
    """The options that the words begin with, each with its value. A value that is a script of Python ends them: an
    option that the table does not know was taken for one with a value."""
    options: list[tuple[str, ...]] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        if word == "--":
            return [*options, ("--",)]
        if word in ("-mca", "--mca", "-gmca", "--gmca"):
            taken = 3
        elif _takes_value(word, form) and at + 1 < len(words) and not words[at + 1].endswith(".py"):
            taken = 2
        else:
            taken = 1
        options.append(tuple(words[at : at + taken]))
        at += taken
    return options


def _takes_value(word: str, form: CommandForm) -> bool:
    if "=" in word or (_GLUED.fullmatch(word) and word not in form.values):
        return False
    name = _plain_option(word)
    return name in form.values or (form.takes_values and name not in form.flags)


def _plain_option(word: str) -> str:
    """--nproc_per_node and --nproc-per-node are one option."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _count_numbers(words: Sequence[str]) -> int:
    return next((at for at, word in enumerate(words) if not re.fullmatch(r"[\d,.:x-]+[smhd]?", word)), len(words))


def _read_inner(words: Sequence[str], start: int, here: Path, nodes: int) -> CommandRead:
    """What a command is behind its wrappers, whose words are those before `start`."""
    inner = words[start:]
    form, used = find_form(inner)
    if form is not None and form.role is Role.LAUNCHER:
        _refuse_launcher(words, start, form, used, nodes)
    if form is not None and form.role is Role.SCHEDULER:
        _refuse(
            f"{inner[0]} submits a job of its own, which nobody here would see",
            remedy="name what its script starts: `-- python train.py`, `-- bash run.sh`",
        )
    if form is not None and form.role is Role.OWN:
        _refuse_own(inner[used:])
    if _PYTHON.fullmatch(os.path.basename(inner[0])):
        return _read_python(words, start, here, nodes)
    if form is not None and form.role is Role.SHELL:
        return CommandRead(Program(tuple(inner), python=False), texts=_read_shell(inner, form, here))
    if inner[0].endswith(".py"):
        return _read_script(inner, here)
    texts = _read_text(here, inner[0]) if "/" in inner[0] else ()
    return CommandRead(Program(tuple(inner), python=False), texts=texts)


def _read_script(words: Sequence[str], here: Path) -> CommandRead:
    """A script of Python without its interpreter: one that may be executed names its own in its first line."""
    script, path = words[0], here / words[0]
    itself = False
    if "/" in script and os.access(path, os.X_OK) and path.is_file():
        with open(path, "rb") as file:
            itself = file.read(2) == b"#!"
    return CommandRead(Program(tuple(words), python=not itself), script=script)


def _read_shell(words: Sequence[str], form: CommandForm, here: Path) -> tuple[tuple[str, str], ...]:
    """The text that a shell runs."""
    at = 1
    while at < len(words) and words[at].startswith(("-", "+")) and words[at] not in ("-", "--"):
        if words[at].startswith("-") and not words[at].startswith("--") and "c" in words[at]:
            return ((f"{os.path.basename(words[0])} -c", words[at + 1]),) if at + 1 < len(words) else ()
        at += 2 if words[at] in form.values or re.fullmatch(r"-[a-z]+o", words[at]) else 1
    return _read_text(here, words[at]) if at < len(words) else ()


def _read_text(here: Path, name: str) -> tuple[tuple[str, str], ...]:
    """A script of shell by its name, with what stands in it; none where it cannot be read, or is none."""
    try:
        with open(here / name, "rb") as file:
            data = file.read(1 << 18)
    except OSError:
        return ()
    is_shell = name.endswith((".sh", ".bash")) or re.match(rb"#!.*\b(ba|z|da|k)?sh\b", data)
    return ((name, data.decode("utf-8", "replace")),) if is_shell and b"\0" not in data else ()


# --- Python


def _read_python(words: Sequence[str], start: int, here: Path, nodes: int) -> CommandRead:
    """An interpreter with its own options, and what it runs. A launcher's module is refused as the launcher is."""
    inner = words[start:]
    options, kind = _split_python(inner)
    rest = inner[1 + len(options) :]
    if kind == "" or (kind == "file" and not (rest and rest[0].strip())) or not all(map(str.strip, options[-1:])):
        allowed = "python SCRIPT ARGUMENTS..., python -m MODULE ARGUMENTS..., python -c CODE, or a program of its own"
        _refuse(f"{quote_all(words)} names no script", allowed=allowed)
    module = (options[-1].partition("m")[2] if not _is_apart(options) else options[-1]) if kind == "module" else ""
    if MODULES.get(module):
        name = MODULES[module]
        if name == "shardway":
            _refuse_own(rest)
        _refuse_launcher(words, start, BY_NAME[name], 1 + len(options), nodes, python=inner[0])
    script = rest[0] if kind == "file" else ""
    name = os.path.basename(inner[0])
    is_plain = inner[0] == name and name in _PLAIN_PYTHON
    if is_plain and (not options or (kind == "module" and list(options) == ["-m", module])):
        return CommandRead(Program(tuple(inner[1:])), script=script, module=module)
    interpreter = "python3" if is_plain else _whole_path(inner[0], here)
    program = Program((interpreter, *inner[1:]), python=False, interpreter="" if is_plain else interpreter)
    return CommandRead(program, script=script, module=module)


def _whole_path(word: str, here: Path) -> str:
    """An interpreter by the path that it has where it was typed: one in a folder beside the code is not copied."""
    path = os.path.normpath(here / word)
    return path if "/" in word and os.path.exists(path) else word


def _split_python(words: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Python's own options with their values, and what it runs after them: "file", "module", "code", "" for nothing.

    Source: `python --help` of 3.10 to 3.14; letters may stand together ("-um").
    """
    at = 1
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        if word == "-":
            return tuple(words[1:at]), ""
        if word.startswith("--"):
            at += 2 if word == "--check-hash-based-pycs" else 1
            continue
        letters = word[1:]
        cut = next((number for number, letter in enumerate(letters) if letter in "cmWX"), None)
        if cut is None:
            if set(letters) & set("hV?"):
                return tuple(words[1:at]), ""
            at += 1
            continue
        at += 1 if letters[cut + 1 :] else 2
        if letters[cut] in "cm":
            kind = "code" if letters[cut] == "c" else "module"
            return tuple(words[1:at]), kind if at <= len(words) else ""
    return tuple(words[1:at]), "file"


def _is_apart(options: Sequence[str]) -> bool:
    """Whether the module of -m is a word of its own."""
    return len(options) > 1 and options[-2].startswith("-") and options[-2].endswith("m")


# --- what is refused, and what to type in its place


def _refuse_own(words: Sequence[str]) -> NoReturn:
    what = "it begins with shardway, which a job starts by itself"
    if words[:1] == ["train"]:
        _refuse(what, remedy=f"`shardway submit {quote_all(words[1:])}`".replace(" `", "`"))
    _refuse(what, remedy="name a run file in place of the command: `shardway submit my.toml`")


def _refuse_launcher(
    words: Sequence[str], start: int, form: CommandForm, used: int, nodes: int, python: str = "python"
) -> NoReturn:
    """Raise UserError with the line that says the same without the launcher."""
    inner = words[start:]
    name = " ".join((os.path.basename(inner[0]), *inner[1:used]))
    at = "begins with" if start == 0 else "holds"
    what = f"it {at} {name}, and the job script starts the ranks itself"
    options = _split_options(inner[used:], form)
    rest = inner[used + sum(map(len, options)) :]
    if not rest or ":" in rest:
        _refuse(what, remedy=f"leave {name} and its options out; {RANKS}, {NODES} and site.launcher say them")
    program = list(rest)
    names = {_plain_option(option[0]) for option in options}
    if form.runs == "script" and "--no-python" not in names:
        if python == "python" and "/" in inner[0]:
            python = os.path.join(os.path.dirname(inner[0]), "python")
        program = [python, *(["-m"] if {"-m", "--module"} & names else []), *rest]
    keys = _keys_of(options, form, nodes)
    line = quote_all([*words[:start], *program])
    told = f"`shardway submit ... {' '.join([*keys, '--', line])}`"
    left = [option[0] for option in options if _is_told(option, form)]
    more = [f"left out: {', '.join(left)}"] if left else []
    _refuse(what, remedy="; ".join([told, *more, *([form.hint] if form.hint else [])]))


def _keys_of(options: Sequence[tuple[str, ...]], form: CommandForm, nodes: int) -> list[str]:
    """Keys of [site] that say what the options of a launcher said."""
    said: dict[str, int] = {}
    for option in options:
        glued = _GLUED.fullmatch(option[0])
        name = glued[1] if glued else _plain_option(option[0])
        value = glued[2] if glued else option[0].partition("=")[2] or (option[1] if len(option) > 1 else "")
        if name in form.counts and value.isdecimal():
            said[form.counts[name]] = int(value)
    total = said.pop(TOTAL, 0)
    nodes = said.get(NODES, nodes)
    if total and RANKS not in said and nodes and total % nodes == 0:
        said[RANKS] = total // nodes
    keys = [f"{key}={said[key]}" for key in (NODES, RANKS) if key in said]
    return [*keys, *([f"site.launcher={form.launcher}"] if form.launcher else [])]


def _is_told(option: tuple[str, ...], form: CommandForm) -> bool:
    """Whether an option says what the new line does not."""
    glued = _GLUED.fullmatch(option[0])
    name = glued[1] if glued else _plain_option(option[0])
    return name not in form.silent and name not in form.counts and name != "--"


def _refuse(what: str, allowed: str = "", remedy: str = "") -> NoReturn:
    problem = Problem(_KEY, what, _ORIGIN, allowed, remedy)
    raise UserError(render_problems(_KEY, [problem]), [problem])


# --- what shells start


_STARTS_RANKS = re.compile(
    r"(?<![\w./-])(?:\S*/)?(torchrun|ft_launcher|deepspeed|mpirun|mpiexec|srun|horovodrun|accelerate\s+launch"
    r"|-m\s+(?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.runner))(?![\w.-])"
)


def find_launcher(text: str) -> str:
    """The launcher that a text of shell starts, "" for none; comments are no part of it."""
    for line in text.splitlines():
        try:
            kept = " ".join(shlex.split(line, comments=True))
        except ValueError:
            kept = line
        if found := _STARTS_RANKS.search(kept):
            return " ".join(found[1].split())
    return ""
