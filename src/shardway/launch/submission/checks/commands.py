"""The program of a job: it is there, and its Python has what it needs.

Invariant: what modules of the site, an image or variables of the job may bring is not known before the job runs, and
not held against anybody. This module must not run what it looks at: modules are looked for, never imported.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from shardway.errors import Problem
from shardway.launch.containers.base import all_mounts
from shardway.launch.hosts.base import Done, Host
from shardway.launch.job import AGENTS, SECRETS
from shardway.launch.snapshot import LinkedPath, SnapshotPlan
from shardway.launch.submission.checks.code import Code
from shardway.launch.submission.checks.copies import list_copies
from shardway.launch.submission.checks.look import HostCheck, always, test_exists
from shardway.launch.submission.command import CommandRead, find_launcher
from shardway.launch.submission.job_request import JobRequest, build_job, launcher_of, runtime_of, shape_of
from shardway.places import expand_home

_KEY, _ORIGIN = "the command", "command line"

_FIND = """import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))"""

_ON_PATH = 'PATH=${1:+$1/bin:}$PATH; type -P -- "$0"'


def list_local_problems(wish: JobRequest, code: Code) -> Iterator[Problem]:
    """What is wrong with a command in the folder that is submitted: its script or program, other files that its words
    name, and what a shell of it starts."""
    read = wish.read
    if read is None:
        return
    words = read.program.words
    yield from _list_missing_program(read, code)
    for word in dict.fromkeys(words[1:] if not read.program.python else words):
        if word != read.script and not any(word == text for _, text in read.texts):
            yield from list_lost_paths(word, code)
    for where, text in read.texts:
        if where.endswith(" -c") and not re.search(r"\b(cd|pushd)\b", text):  # it stays in the folder of the job
            for word in re.findall(r"(?<![^\s=\"'<>();|&])\.\./[^\s;&|<>\"']*", text):
                yield from list_lost_paths(word, code)
    yield from _list_launchers_of_shells(wish)


def _list_missing_program(read: CommandRead, code: Code) -> Iterator[Problem]:
    script, first = read.script, read.program.words[0]
    if script and not script.startswith(("/", "~")):
        if why := code.why_missing(script):
            yield Problem(_KEY, why, _ORIGIN, remedy="correct its path")
        elif script.endswith(".py") and (code.here / script).is_file():
            yield from _read_script(code, script)
    if read.program.python or first == script or first.startswith("/") or "/" not in first:
        return
    if why := code.why_missing(first):
        yield Problem(_KEY, why, _ORIGIN, remedy="correct its path")
    elif code.is_there and not os.access(code.here / first, os.X_OK):
        yield Problem(_KEY, f"{first} is not executable", _ORIGIN, remedy=f"`chmod +x {first}`, or name what runs it")


def list_lost_paths(word: str, code: Code) -> Iterator[Problem]:
    """A relative path among the words (as it stands, or behind `--option=`) that means nothing where the job runs.

    One that begins with `../` is a path in any case, any other word where there is a file of that name.
    """
    for path in dict.fromkeys((word, word.partition("=")[2])):
        if not path or path.startswith(("/", "-")) or "://" in path or "\n" in path:
            continue
        is_path = path == ".." or path.startswith("../") or (("/" in path or "." in path) and _is_there(code, path))
        if is_path and (why := code.why_lost(path)):
            whole = posixpath.normpath(posixpath.join(code.here, path))
            yield Problem(_KEY, why, _ORIGIN, remedy=f"name it by its whole path: {whole}")
            return


def _is_there(code: Code, path: str) -> bool:
    try:
        return (code.here / path).exists()
    except OSError:  # a word that is too long to be a path
        return False


def _list_launchers_of_shells(wish: JobRequest) -> Iterator[Problem]:
    """A shell that starts ranks of its own, in each of several ranks of a node: every one of them would be a world."""
    ranks = shape_of(wish).ranks_per_node
    for where, text in wish.read.texts if wish.read is not None and ranks > 1 else ():
        if launcher := find_launcher(text):
            what = f"{where} starts {launcher}, and the job script would do so in each of {ranks} ranks of a node"
            remedy = "set site.ranks_per_node=1, or name what it starts: `-- python train.py`"
            yield Problem(_KEY, what, _ORIGIN, remedy=remedy)


def list_warnings(wish: JobRequest, code: Code) -> Iterator[str]:
    """What of a command may be meant so, but is worth a sentence."""
    read = wish.read
    if read is None:
        return
    yield from list_copies(wish, code)
    if not code.is_there:
        return
    if read.program.python and (python := _find_activated(wish)):
        yield (
            f"`python` is {python} in this shell, and the job takes that of {_folder_of_venv(wish) or 'its PATH'} "
            f"(site.venv): name it by its path, or set site.venv={posixpath.dirname(posixpath.dirname(python))}"
        )
    if code.snapshot is not None:
        yield from _list_own_files(read, code.snapshot)


def _list_own_files(read: CommandRead, plan: SnapshotPlan) -> Iterator[str]:
    """What the job does not have as a copy of its own."""
    if read.script.startswith("/") and Path(read.script).is_relative_to(plan.root):
        yield (
            f"{read.script} is named by its whole path, so the job runs that file as it is by then, and not the copy "
            f"of this moment: to run the copy, name it as {Path(os.path.relpath(read.script, plan.root / plan.below))}"
        )
    secret = [entry.path for entry in plan.left_out if "secret" in entry.reason]
    if secret:
        yield (
            f"not in the copy that the job runs in, being secret by name: {_name_few(secret)}; the job has what stands "
            f"in {SECRETS}"
        )
    linked = [link.path for link in plan.links if not _is_no_output(link, plan.root)]
    if linked:
        yield f"linked, not copied: {_name_few(linked)}; what the command writes there, it writes into {plan.root}"


def _is_no_output(link: LinkedPath, root: Path) -> bool:
    hidden = posixpath.basename(link.path).startswith(".") or os.path.isfile(root / link.path / "pyvenv.cfg")
    return hidden or any(word in link.reason for word in _NO_OUTPUT)


_NO_OUTPUT = ("run directory", "environment", "installed packages", "leads out")
"""Reasons of links into which no program writes, or of which their person knows."""


def _name_few(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"{', '.join(paths[:3])}{more}"


def _find_activated(wish: JobRequest) -> str:
    """The `python` of an environment that the person has activated, where the job would take that of another one."""
    if runtime_of(wish) != "none" or wish.loaded.values.site.venv != "auto" or _is_surrounded(wish, "PATH"):
        return ""
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or ""
    python = shutil.which("python") or shutil.which("python3") or ""
    if not active or os.path.dirname(os.path.dirname(python)) != os.path.normpath(active):
        return ""
    venv = _folder_of_venv(wish)
    return python if venv is None or not venv or os.path.realpath(venv) != os.path.realpath(active) else ""


def _read_script(code: Code, script: str) -> Iterator[Problem]:
    try:
        ast.parse((code.here / script).read_bytes(), script)
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = f"{script}{where} is no Python: {error.msg if isinstance(error, SyntaxError) else error}"
        yield Problem(_KEY, what, _ORIGIN, remedy="mend it: the job would end as soon as it starts")


def list_looks(wish: JobRequest, host: Host, code: Code) -> Iterator[HostCheck]:
    """Looks at the host for the program and for the environment of its Python."""
    yield from _look_for_conda(wish, host)
    if runtime_of(wish) != "none":
        yield from _look_into_container(wish, host)
        return
    yield from _look_for_program(wish, host)
    yield from _look_for_modules(wish, code)


def _look_for_program(wish: JobRequest, host: Host) -> Iterator[HostCheck]:
    """A program by its path, or by its name on the PATH, where nothing of the job changes that."""
    word, where, venv = wish.program.words[0], host.name or "this machine", _folder_of_venv(wish)
    script = wish.read.script if wish.read is not None else ""
    for path in dict.fromkeys((word, script)):
        if path.startswith("/"):
            gone = Problem(_KEY, f"there is no {path} on {where}", _ORIGIN, remedy="correct its path")
            yield HostCheck(_KEY, _ORIGIN, partial(_test_path, path), always(gone))
    if not wish.program.python and "/" not in word and not _is_surrounded(wish, "PATH") and venv is not None:
        what = f"there is no program {word} on the PATH of {where}"
        gone = Problem(_KEY, what, _ORIGIN, remedy=f"correct its name; a file of the code is named by path: ./{word}")

        def judge(done: Done) -> Iterator[Problem]:
            if done.code == 1:  # and not 127, where there is no bash
                yield gone

        yield HostCheck(_KEY, _ORIGIN, lambda at: ("bash", "-c", _ON_PATH, word, at), judge, venv)


def _test_path(path: str, _: str) -> tuple[str, ...]:
    return test_exists(path)


def _look_into_container(wish: JobRequest, host: Host) -> Iterator[HostCheck]:
    """A program or script of the host that the image cannot have: it is outside of what is mounted, and of folders
    that images have themselves."""
    script = wish.read.script if wish.read is not None else ""
    for path in dict.fromkeys((wish.program.words[0], script)):
        if path.startswith("/") and may_be_hidden(wish, path):
            where = host.name or "this machine"
            what = f"{path} is a path of {where}, which the container does not see: it is in none of its mounts"
            remedy = f'mount its folder, site.mounts=["{posixpath.dirname(path)}"], or name what is in the image'
            hidden = Problem(_KEY, what, _ORIGIN, remedy=remedy)
            yield HostCheck(_KEY, _ORIGIN, partial(_test_path, path), partial(where_it_is_there, hidden))


def may_be_hidden(wish: JobRequest, path: str) -> bool:
    """Whether a whole path is outside of what the container shows of the host, and of folders that images have
    themselves. Not where that cannot be told: a variable says what is mounted."""
    job = build_job(wish, 1)
    seen = [mount.target for mount in all_mounts(job)]
    # Apptainer shows the home folder unless a site forbids it; of others it is asked for (--container-mount-home)
    home = runtime_of(wish) == "apptainer" or any("home" in option for option in job.container.rules.options)
    seen += ["~"] if home else []
    places = [str(expand_home(place)) for place in seen if not place.startswith("$")]
    inside = any(expand_home(path).is_relative_to(place) for place in (*_OF_IMAGES, *places))
    return not inside and len(places) == len(seen)


def where_it_is_there(problem: Problem, done: Done) -> Iterator[Problem]:
    """The problem where the command that looks for it succeeds."""
    if done.ok:
        yield problem


_OF_IMAGES = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt", "/etc", "/root")
"""Folders that an image has of its own; whether it has a path there is not seen from outside."""


def _look_for_modules(wish: JobRequest, code: Code) -> Iterator[HostCheck]:
    """What the program needs of its virtual environment; one Python finds all of it and imports nothing."""
    venv, names = _folder_of_venv(wish), _list_modules(wish, code)
    named = wish.program.interpreter
    if named.startswith("/"):
        yield from _look_into_interpreter(wish, code, named)
    if not venv or not names or _is_surrounded(wish, "PYTHONPATH"):
        return

    def judge(done: Done) -> Iterator[Problem]:
        for name in done.out.split() if done.ok else ():
            yield _describe_module(wish, venv, name)

    def words(python: str) -> tuple[str, ...]:
        find = ("timeout", "10", python, "-c", _FIND, *names)  # seconds: nobody waits for a slow file system
        # the Python of the environment starts another one's ranks only where that cannot
        return ("bash", "-c", _OTHER, named, *find) if named else find

    yield HostCheck("site.venv", wish.loaded.origins["site.venv"], words, judge, f"{venv}/bin/python3")


_OTHER = 'found=$(timeout 10 "$0" "${@:4}") && [ -z "$found" ] || exec "$@"'
"""Looks with the first Python, and with the second where that one lacks something."""


def _look_into_interpreter(wish: JobRequest, code: Code, python: str) -> Iterator[HostCheck]:
    """The module of `-m`, in an interpreter that was named."""
    module = wish.read.module.split(".")[0] if wish.read is not None else ""
    if not module.isidentifier() or code.holds_module(module) or _is_surrounded(wish, "PYTHONPATH"):
        return
    what = f"there is no module {module} in the code or for {python}"
    gone = Problem(_KEY, what, _ORIGIN, remedy="correct its name, or install it there")

    def judge(done: Done) -> Iterator[Problem]:
        if done.ok and done.out.split():
            yield gone

    yield HostCheck(_KEY, _ORIGIN, lambda _: ("timeout", "10", python, "-c", _FIND, module), judge)


def _list_modules(wish: JobRequest, code: Code) -> tuple[str, ...]:
    """torch for torchrun and what is like it, Shardway for its own runs, and the module of `python -m`."""
    own = wish.program.meets_by_itself
    named = wish.read.module.split(".")[0] if wish.read is not None and not wish.program.interpreter else ""
    named = "" if code.holds_module(named) else named
    return (
        *(("torch",) if own or launcher_of(wish) in AGENTS else ()),
        *(("nvidia_resiliency_ext",) if launcher_of(wish) == "ft_launcher" else ()),
        *(("shardway",) if own else ()),
        *((named,) if named.isidentifier() else ()),
    )


def _describe_module(wish: JobRequest, venv: str, name: str) -> Problem:
    if name in ("torch", "shardway", "nvidia_resiliency_ext"):
        remedy = f"`{venv}/bin/pip install {name.replace('_', '-')}`, or name another environment"
        return Problem("site.venv", f"{venv} has no {name}", wish.loaded.origins["site.venv"], remedy=remedy)
    what = f"there is no module {name} in the code or in {venv}"
    return Problem(_KEY, what, _ORIGIN, remedy="correct its name, or install it there")


def _look_for_conda(wish: JobRequest, host: Host) -> Iterator[HostCheck]:
    """A conda environment, where conda is a program of the host and not of a module."""
    venv = build_job(wish, 1).around.venv
    name = venv.removeprefix("conda:")
    if name == venv or _is_surrounded(wish, "PATH"):
        return
    key, origin, where = "site.venv", wish.loaded.origins["site.venv"], host.name or "this machine"
    remedy = "correct its name (`conda env list` has those there are), or make it"
    gone = Problem(key, f"there is no conda environment {name} on {where}", origin, remedy=remedy)
    if "/" in name:
        yield HostCheck(key, origin, test_exists, always(gone), name)
        return

    def judge(done: Done) -> Iterator[Problem]:
        if done.ok and name not in parse_conda_environments(done.out):
            yield gone

    yield HostCheck(key, origin, lambda _: ("timeout", "20", "conda", "env", "list"), judge)


def parse_conda_environments(text: str) -> set[str]:
    """Names of environments in what `conda env list` prints: the first word of a line, or the last part of its path."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {words[0] for words in lines} | {words[-1].rpartition("/")[2] for words in lines}


def _folder_of_venv(wish: JobRequest) -> str | None:
    """The virtual environment of the job, "" for none; None for one of conda, which is not looked into."""
    venv = build_job(wish, 1).around.venv
    return None if venv.startswith("conda:") else venv


def _is_surrounded(wish: JobRequest, name: str) -> bool:
    """Whether modules or a variable of the job may bring more than is seen from here."""
    around = build_job(wish, 1).around
    return bool(around.modules) or name in around.names
