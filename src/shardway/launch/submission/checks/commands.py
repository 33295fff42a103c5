"""The program of a job: it is there, and its Python has what it needs.

Invariant: what modules of the site, an image or variables of the job may bring is not known before the job runs, and
not held against anybody. This module must not run what it looks at: modules are looked for, never imported.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

from shardway.errors import Problem
from shardway.launch.hosts.base import Done, Host
from shardway.launch.job import AGENTS
from shardway.launch.submission.checks.code import Code
from shardway.launch.submission.checks.look import Look, always, test_exists
from shardway.launch.submission.wish import Wish, build_job, runtime_of, starter_of

_KEY, _ORIGIN = "the command", "command line"

_FIND = """import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))"""

_ON_PATH = 'PATH=${1:+$1/bin:}$PATH; type -P -- "$0"'


def list_local_problems(wish: Wish, code: Code) -> Iterator[Problem]:
    """What is wrong with the script or program of a command in the folder that is submitted."""
    word, python = wish.program.words[0], wish.program.python
    if wish.program.meets_by_itself or word == "-m" or word.startswith("/") or not (python or "/" in word):
        return
    if why := code.why_missing(word):
        yield Problem(_KEY, why, _ORIGIN, remedy="correct its path")
    elif python and word.endswith(".py") and (code.here / word).is_file():
        yield from _read_script(code, word)
    elif not python and code.is_there and not os.access(code.here / word, os.X_OK):
        yield Problem(_KEY, f"{word} is not executable", _ORIGIN, remedy=f"`chmod +x {word}`, or name what runs it")


def _read_script(code: Code, script: str) -> Iterator[Problem]:
    try:
        ast.parse((code.here / script).read_bytes(), script)
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = f"{script}{where} is no Python: {error.msg if isinstance(error, SyntaxError) else error}"
        yield Problem(_KEY, what, _ORIGIN, remedy="mend it: the job would end as soon as it starts")


def list_looks(wish: Wish, host: Host, code: Code) -> Iterator[Look]:
    """Looks at the host for the program and for the environment of its Python."""
    yield from _look_for_conda(wish, host)
    if runtime_of(wish) != "none":
        return
    yield from _look_for_program(wish, host)
    yield from _look_for_modules(wish, code)


def _look_for_program(wish: Wish, host: Host) -> Iterator[Look]:
    """A program by its path, or by its name on the PATH, where nothing of the job changes that."""
    word, where, venv = wish.program.words[0], host.name or "this machine", _folder_of_venv(wish)
    if word.startswith("/"):
        gone = Problem(_KEY, f"there is no {word} on {where}", _ORIGIN, remedy="correct its path")
        yield Look(_KEY, _ORIGIN, lambda _: test_exists(word), always(gone))
    elif not wish.program.python and "/" not in word and not _is_surrounded(wish, "PATH") and venv is not None:
        what = f"there is no program {word} on the PATH of {where}"
        gone = Problem(_KEY, what, _ORIGIN, remedy=f"correct its name; a file of the code is named by path: ./{word}")

        def judge(done: Done) -> Iterator[Problem]:
            if done.code == 1:  # and not 127, where there is no bash
                yield gone

        yield Look(_KEY, _ORIGIN, lambda at: ("bash", "-c", _ON_PATH, word, at), judge, venv)


def _look_for_modules(wish: Wish, code: Code) -> Iterator[Look]:
    """What the program needs of its virtual environment; one Python finds all of it and imports nothing."""
    venv, names = _folder_of_venv(wish), _list_modules(wish, code)
    if not venv or not names or _is_surrounded(wish, "PYTHONPATH"):
        return

    def judge(done: Done) -> Iterator[Problem]:
        for name in done.out.split() if done.ok else ():
            yield _tell_module(wish, venv, name)

    def words(python: str) -> tuple[str, ...]:
        return ("timeout", "10", python, "-c", _FIND, *names)  # seconds: nobody waits for a slow file system

    yield Look("site.venv", wish.loaded.origins["site.venv"], words, judge, f"{venv}/bin/python3")


def _list_modules(wish: Wish, code: Code) -> tuple[str, ...]:
    """torch for torchrun and what is like it, Shardway for its own runs, and the module of `python -m`."""
    own, words = wish.program.meets_by_itself, wish.program.words
    named = words[1].split(".")[0] if wish.program.python and words[0] == "-m" and len(words) > 1 else ""
    named = "" if own or code.holds_module(named) else named
    return (
        *(("torch",) if own or starter_of(wish) in AGENTS else ()),
        *(("nvidia_resiliency_ext",) if starter_of(wish) == "ft_launcher" else ()),
        *(("shardway",) if own else ()),
        *((named,) if named.isidentifier() else ()),
    )


def _tell_module(wish: Wish, venv: str, name: str) -> Problem:
    if name in ("torch", "shardway", "nvidia_resiliency_ext"):
        remedy = f"`{venv}/bin/pip install {name.replace('_', '-')}`, or name another environment"
        return Problem("site.venv", f"{venv} has no {name}", wish.loaded.origins["site.venv"], remedy=remedy)
    what = f"there is no module {name} in the code or in {venv}"
    return Problem(_KEY, what, _ORIGIN, remedy="correct its name, or install it there")


def _look_for_conda(wish: Wish, host: Host) -> Iterator[Look]:
    """A conda environment, where conda is a program of the host and not of a module."""
    venv = build_job(wish, 1).around.venv
    name = venv.removeprefix("conda:")
    if name == venv or _is_surrounded(wish, "PATH"):
        return
    key, origin, where = "site.venv", wish.loaded.origins["site.venv"], host.name or "this machine"
    remedy = "correct its name (`conda env list` has those there are), or make it"
    gone = Problem(key, f"there is no conda environment {name} on {where}", origin, remedy=remedy)
    if "/" in name:
        yield Look(key, origin, test_exists, always(gone), name)
        return

    def judge(done: Done) -> Iterator[Problem]:
        if done.ok and name not in parse_conda_environments(done.out):
            yield gone

    yield Look(key, origin, lambda _: ("timeout", "20", "conda", "env", "list"), judge)


def parse_conda_environments(text: str) -> set[str]:
    """Names of environments in what `conda env list` prints: the first word of a line, or the last part of its path."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {words[0] for words in lines} | {words[-1].rpartition("/")[2] for words in lines}


def _folder_of_venv(wish: Wish) -> str | None:
    """The virtual environment of the job, "" for none; None for one of conda, which is not looked into."""
    venv = build_job(wish, 1).around.venv
    return None if venv.startswith("conda:") else venv


def _is_surrounded(wish: Wish, name: str) -> bool:
    """Whether modules or a variable of the job may bring more than is seen from here."""
    around = build_job(wish, 1).around
    return bool(around.modules) or name in around.names
