"""Reads the command after `--`: the program that every rank runs, recognised by a table of first words.

Invariant: a word is passed on as it was typed, or the command is refused; none is dropped.

    wrapper     runs the command that follows it (env, uv run, conda run, nsys profile): runs as typed
    shell       runs text or a file: runs as typed; its text is kept for the checks
    launcher    starts ranks (torchrun, mpirun, accelerate launch): refused, with the line to type instead
    scheduler   submits a job itself: refused
    own         Shardway itself: refused, with the line to type instead

Any other first word is a program, and runs as typed. `python` and `python3` are those of the job's environment; with a
version or a path, it is that very interpreter.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from shardway.errors import Problem, UserError, render_problems
from shardway.launch.job import Program
from shardway.launch.script import quote_all
from shardway.plugins import make_installed, make_own

# --- the table of first words


class Role(StrEnum):
    """What the first word of a command is."""

    WRAPPER = "wrapper"
    SHELL = "shell"
    LAUNCHER = "launcher"
    SCHEDULER = "scheduler"
    OWN = "own"


@dataclass(frozen=True)
class CommandForm:
    """A row: the words that a command begins with ("uv run"), and how to find what follows its options.

    `flags`: options without a value. `values`: options with one. For any other option `takes_values` decides. `counts`:
    option that gives a number of ranks or nodes -> the key of [site] for it. `runs`: what follows the options:
    "command", or a launcher's Python "script", which `-m` makes a module."""

    names: tuple[str, ...]
    role: Role
    flags: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()
    takes_values: bool = False
    counts: Mapping[str, str] = field(default_factory=dict)
    runs: str = "command"
    launcher: str = ""
    """The value of site.launcher that replaces a launcher, if the program depends on it."""
    silent: frozenset[str] = frozenset()
    """Options of a launcher that the job script sets itself; other dropped options are reported to the user."""
    hint: str = ""


def word_set(text: str) -> frozenset[str]:
    """The words of a string, as a set."""
    return frozenset(text.split())


RANKS, NODES, TOTAL = "site.ranks_per_node", "site.nodes", "ranks in all"
"""What options of launchers count: a key of [site], or all ranks of the job."""

_OF_TORCHRUN = CommandForm(
    names=("torchrun",),
    role=Role.LAUNCHER,
    flags=word_set("--standalone --no-python --run-path -m --module --use-env"),
    takes_values=True,
    counts=MappingProxyType({"--nproc-per-node": RANKS, "--nnodes": NODES}),
    runs="script",
    silent=word_set(
        "--standalone --no-python -m --module --use-env --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf "
        "--node-rank --master-addr --master-port --local-addr --monitor-interval --start-method --max-restarts"
    ),
)
_OF_ACCELERATE = CommandForm(
    names=("accelerate launch", "accelerate-launch"),
    role=Role.LAUNCHER,
    flags=word_set(
        "--cpu --multi-gpu --tpu --ipex --use-deepspeed --use-fsdp --use-megatron-lm --use-xpu --quiet -q --debug -m "
        "--module --no-python --same-network --downcast-bf16 --enable-cpu-affinity --use-parallelism-config"
    ),
    takes_values=True,
    counts=MappingProxyType({"--num-machines": NODES, "--num-processes": TOTAL}),
    runs="script",
    silent=word_set(
        "-m --module --no-python --multi-gpu --machine-rank --main-process-ip --main-process-port --quiet -q"
    ),
    hint="`Accelerator()` finds its rank by itself; what else the launcher or its config file said stands in its "
    "arguments, such as Accelerator(mixed_precision=...)",
)
_OF_DEEPSPEED = CommandForm(
    names=("deepspeed", "deepspeed.pt"),
    role=Role.LAUNCHER,
    flags=word_set("--module --no-python --no-local-rank --no-ssh --save-pid --force-multi --bind-cores-to-rank"),
    takes_values=True,
    counts=MappingProxyType({"--num-gpus": RANKS, "--num-accelerators": RANKS, "--num-nodes": NODES}),
    runs="script",
    silent=word_set(
        "--module --no-python --no-local-rank --no-ssh --master-addr --master-port --hostfile -H --force-multi"
    ),
    hint="a script that asks for --local_rank finds it in the variable LOCAL_RANK",
)
_OF_MPI = CommandForm(
    names=("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "horovodrun"),
    role=Role.LAUNCHER,
    flags=word_set(
        "--oversubscribe -oversubscribe --allow-run-as-root --tag-output -tag-output --report-bindings -l -v --verbose "
        "-q"
    ),
    takes_values=True,
    counts=MappingProxyType(
        {
            **dict.fromkeys(("-n", "-np", "--np", "-c", "--n"), TOTAL),
            **dict.fromkeys(("-ppn", "--ppn", "-npernode", "--npernode", "-N"), RANKS),
        }
    ),
    launcher="mpirun",
    silent=word_set("-H -host --host -f -hostfile --hostfile -machinefile --machinefile"),
)
_OF_SRUN = CommandForm(
    names=("srun",),
    role=Role.LAUNCHER,
    flags=word_set("-l --label -u --unbuffered --exclusive --overlap --exact --pty -v --verbose -Q --quiet -s"),
    takes_values=True,
    counts=MappingProxyType(
        {
            **dict.fromkeys(("-n", "--ntasks"), TOTAL),
            **dict.fromkeys(("-N", "--nodes"), NODES),
            "--ntasks-per-node": RANKS,
        }
    ),
    launcher="srun",
    silent=word_set("-l --label -u --unbuffered"),
)

FORMS: tuple[CommandForm, ...] = (
    CommandForm(("env",), Role.WRAPPER, values=word_set("-u --unset -C --chdir")),
    CommandForm(
        ("uv run",),
        Role.WRAPPER,
        values=word_set(
            "--with --with-editable --with-requirements --extra --group --only-group --no-group -p --python --project "
            "--directory --env-file --package --index --default-index --index-url --cache-dir --config-file -w"
        ),
    ),
    CommandForm(
        ("conda run", "mamba run", "micromamba run"),
        Role.WRAPPER,
        values=word_set("-n --name -p --prefix --cwd -e --env -r --root-prefix"),
    ),
    CommandForm(("poetry run", "pipenv run", "pdm run", "rye run", "hatch run", "pipx run"), Role.WRAPPER),
    CommandForm(("pixi run",), Role.WRAPPER, values=word_set("-e --environment --manifest-path")),
    CommandForm(
        ("nsys profile", "ncu", "nice", "ionice", "time", "nohup", "numactl", "taskset", "stdbuf", "setsid", "timeout"),
        Role.WRAPPER,
        values=word_set("-o --output -t --trace -n -s --sample -c -e -f --force-overwrite -w --wait -k -N -m -i"),
    ),
    CommandForm(("bash", "sh", "zsh", "dash", "ksh"), Role.SHELL, values=word_set("-o +o -O")),
    _OF_TORCHRUN,
    replace(_OF_TORCHRUN, names=("ft_launcher",)),
    _OF_ACCELERATE,
    _OF_DEEPSPEED,
    _OF_MPI,
    _OF_SRUN,
    replace(_OF_MPI, names=("aprun", "jsrun"), launcher=""),
    CommandForm(tuple(name for each in make_own("schedulers") for name in each.submit_programs), Role.SCHEDULER),
    CommandForm(("shardway",), Role.OWN),
)
"""The table: the first words of a command, and what they are."""

MODULES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("torch.distributed.run", "torch.distributed.launch"), "torchrun"),
        "accelerate.commands.launch": "accelerate launch",
        "deepspeed.launcher.runner": "deepspeed",
        "nvidia_resiliency_ext.fault_tolerance.launcher": "ft_launcher",
        "mpi4py.run": "",
        "shardway": "shardway",
    }
)
"""Modules of `python -m` -> their row of the table; "" for none."""

BY_NAME = {name: form for form in FORMS for name in form.names}


def find_form(words: Sequence[str]) -> tuple[CommandForm | None, int]:
    """The row of the table that a command begins with, and its number of words."""
    first = os.path.basename(words[0]) if words else ""
    for name, used in ((" ".join((first, *words[1:2])), 2), (first, 1)):
        if name in BY_NAME:
            return BY_NAME[name], used
        if any(name in each.submit_programs for each in make_installed("schedulers")):
            return CommandForm((name,), Role.SCHEDULER), used
    return None, 0


# --- read a command

_KEY, _ORIGIN = "the command", "command line"


_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?[dt]?(\.exe)?")
_PLAIN_PYTHON = ("python", "python3")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_GLUED = re.compile(r"(-[a-zA-Z])(\d+)")
_OF_THE_SHELL = frozenset((".", "source", "cd", "exec", "export", "eval", "module", "set", "ulimit"))
_MOVE = word_set("-C --chdir --directory --cwd --project")
"""Options of wrappers that run a command in another folder."""
_FEW = 4
"""Most nested wrappers that are followed."""


@dataclass(frozen=True)
class CommandRead:
    """What a command is: the program of the job, and what the checks can read of it.

    `script`: the Python script that finally runs, `module` that of `-m`; "" if there is none or it is unknown. `texts`:
    what a shell runs, with its place: ("bash -c", "torchrun x.py"), ("run.sh", ...)."""

    program: Program
    script: str = ""
    module: str = ""
    texts: tuple[tuple[str, str], ...] = ()


def read_command(command: Sequence[str], here: Path, nodes: int = 1) -> CommandRead:
    """Read the command that was typed in the folder `here`, for a job of `nodes` nodes.

    Raises UserError for a command that cannot run as a rank, with the line to type instead if there is one."""
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
    """Index of the command that the wrappers run; the length if there is none."""
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
            # an unknown option may have had a value
            inner = next((at for at in range(inner, len(words)) if _is_known(words[at:])), inner)
        if inner >= len(words):
            return start
        start = inner
    return start


def _is_known(words: Sequence[str]) -> bool:
    return find_form(words)[0] is not None or bool(_PYTHON.fullmatch(os.path.basename(words[0])))


def _count_options(words: Sequence[str], form: CommandForm) -> int:
    """How many words the leading options of a row take."""
    return sum(map(len, _split_options(words, form)))


def _split_options(words: Sequence[str], form: CommandForm) -> list[tuple[str, ...]]:
    """The leading options, each with its value. A Python script as a value ends them: the unknown option before it was
    wrongly taken for one with a value."""
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
    """The option's name with "-" for "_": --nproc_per_node and --nproc-per-node are one option."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _count_numbers(words: Sequence[str]) -> int:
    return next((at for at, word in enumerate(words) if not re.fullmatch(r"[\d,.:x-]+[smhd]?", word)), len(words))


def _read_inner(words: Sequence[str], start: int, here: Path, nodes: int) -> CommandRead:
    """Read a command behind its wrappers, which are the words before `start`."""
    inner = words[start:]
    form, used = find_form(inner)
    if form is not None and form.role is Role.LAUNCHER:
        _refuse_launcher(words, start, form, used, nodes)
    if form is not None and form.role is Role.SCHEDULER:
        _refuse(
            f"{inner[0]} submits a job of its own, which shardway would not see",
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
    """A Python script without its interpreter: an executable one names its own in its first line."""
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
    """A shell script by its name, with its text; none if it cannot be read or is no script."""
    try:
        with open(here / name, "rb") as file:
            data = file.read(1 << 18)
    except OSError:
        return ()
    is_shell = name.endswith((".sh", ".bash")) or re.match(rb"#!.*\b(ba|z|da|k)?sh\b", data)
    return ((name, data.decode("utf-8", "replace")),) if is_shell and b"\0" not in data else ()


# --- Python


def _read_python(words: Sequence[str], start: int, here: Path, nodes: int) -> CommandRead:
    """An interpreter with its own options, and what it runs. A launcher's module is refused like the launcher."""
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
    """The absolute path of an interpreter as typed, since a folder beside the code is not copied."""
    path = os.path.normpath(here / word)
    return path if "/" in word and os.path.exists(path) else word


def _split_python(words: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Python's own options with their values, and what follows: "file", "module", "code", "" for nothing.

    Source: `python --help` of 3.10 to 3.14; letters may stand together ("-um")."""
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
    """Whether the module of -m is a separate word."""
    return len(options) > 1 and options[-2].startswith("-") and options[-2].endswith("m")


# --- refusals, with the line to type instead


def _refuse_own(words: Sequence[str]) -> NoReturn:
    what = "it begins with shardway, which a job starts by itself"
    if words[:1] == ["train"]:
        _refuse(what, remedy=f"`shardway submit {quote_all(words[1:])}`".replace(" `", "`"))
    _refuse(what, remedy="name a run file in place of the command: `shardway submit my.toml`")


def _refuse_launcher(
    words: Sequence[str], start: int, form: CommandForm, used: int, nodes: int, python: str = "python"
) -> NoReturn:
    """Raise UserError with the equivalent line without the launcher."""
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
    instead = f"`shardway submit ... {' '.join([*keys, '--', line])}`"
    left = [option[0] for option in options if _is_lost(option, form)]
    more = [f"left out: {', '.join(left)}"] if left else []
    _refuse(what, remedy="; ".join([instead, *more, *([form.hint] if form.hint else [])]))


def _keys_of(options: Sequence[tuple[str, ...]], form: CommandForm, nodes: int) -> list[str]:
    """Keys of [site] for what the options of the launcher set."""
    counts: dict[str, int] = {}
    for option in options:
        glued = _GLUED.fullmatch(option[0])
        name = glued[1] if glued else _plain_option(option[0])
        value = glued[2] if glued else option[0].partition("=")[2] or (option[1] if len(option) > 1 else "")
        if name in form.counts and value.isdecimal():
            counts[form.counts[name]] = int(value)
    total = counts.pop(TOTAL, 0)
    nodes = counts.get(NODES, nodes)
    if total and RANKS not in counts and nodes and total % nodes == 0:
        counts[RANKS] = total // nodes
    keys = [f"{key}={counts[key]}" for key in (NODES, RANKS) if key in counts]
    return [*keys, *([f"site.launcher={form.launcher}"] if form.launcher else [])]


def _is_lost(option: tuple[str, ...], form: CommandForm) -> bool:
    """Whether an option sets something that the new line lacks."""
    glued = _GLUED.fullmatch(option[0])
    name = glued[1] if glued else _plain_option(option[0])
    return name not in form.silent and name not in form.counts and name != "--"


def _refuse(what: str, allowed: str = "", remedy: str = "") -> NoReturn:
    problem = Problem(_KEY, what, _ORIGIN, allowed, remedy)
    raise UserError(render_problems(_KEY, [problem]), [problem])


# --- launchers in shell text


_STARTS_RANKS = re.compile(
    r"(?<![\w./-])(?:\S*/)?(torchrun|ft_launcher|deepspeed|mpirun|mpiexec|srun|horovodrun|accelerate\s+launch"
    r"|-m\s+(?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.runner))(?![\w.-])"
)


def find_launcher(text: str) -> str:
    """The launcher that a shell text starts, "" for none; comments are ignored."""
    for line in text.splitlines():
        try:
            kept = " ".join(shlex.split(line, comments=True))
        except ValueError:
            kept = line
        if found := _STARTS_RANKS.search(kept):
            return " ".join(found[1].split())
    return ""
