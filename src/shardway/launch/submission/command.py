"""The command after `--`: the program that every rank runs, recognised by a table of first words; and what is wrong
with it in the folder in which it was typed.

Invariants:
- A word is passed on as it was typed, or the command is refused; none is dropped.
- A path is reported missing only if the job will not find it in the folder in which it runs.
- Several ranks of a program that ignores ranks: only a warning, with what was searched for and where. The script, the
  modules beside it that it imports and the scripts that a shell starts are read; without source here there is none.

    wrapper     runs the command that follows it (env, uv run, conda run, nsys profile): runs as typed
    shell       runs text or a file: runs as typed; its text is kept for the checks
    launcher    starts ranks (torchrun, mpirun, accelerate launch): refused, with the line to type instead
    scheduler   submits a job itself: refused
    own         Shardway itself: refused, with the line to type instead

Any other first word is a program, and runs as typed. `python` and `python3` are those of the job's environment; with a
version or a path, it is that very interpreter.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from shardway.errors import Problem, UserError, list_some, render_problems
from shardway.launch.job import SECRETS, Program
from shardway.launch.script import quote_all
from shardway.launch.snapshot import SnapshotPlan
from shardway.plugins import make_installed, make_own

# --- the table of first words

Role = StrEnum("Role", ("WRAPPER", "SHELL", "LAUNCHER", "SCHEDULER", "OWN"))

RANKS, NODES, TOTAL = "site.ranks_per_node", "site.nodes", "ranks in all"
"""What options of launchers count: a key of [site], or all ranks of the job."""


@dataclass(frozen=True)
class CommandForm:
    """A row: the words that a command begins with ("uv run"), and how to find what follows its options.

    `flags`: a launcher's options without a value, any other has one. `values`: options of anything else that have one,
    any other has none. `counts`: option that gives a number of ranks or nodes -> the key of [site] for it. `silent`:
    options of a launcher that the job script sets itself; other dropped options are reported to the user.
    `runs_script`: a Python script follows the options, which `-m` makes a module; else a command. `launcher`: the value
    of site.launcher that replaces a launcher, if the program depends on it."""

    names: tuple[str, ...]
    role: Role
    flags: str = ""
    values: str = ""
    counts: Mapping[str, str] = field(default_factory=dict)
    silent: str = ""
    runs_script: bool = False
    launcher: str = ""
    hint: str = ""

    def takes_value(self, option: str) -> bool:
        """Whether the next word is the option's value."""
        if self.role is Role.LAUNCHER:
            return option not in self.flags.split()
        return option in self.values.split()


_OF_MPI = CommandForm(
    ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "horovodrun"),
    Role.LAUNCHER,
    flags="--oversubscribe -oversubscribe --allow-run-as-root --tag-output -tag-output --report-bindings -l -v "
    "--verbose -q",
    counts={
        **dict.fromkeys(("-n", "-np", "--np", "-c", "--n"), TOTAL),
        **dict.fromkeys(("-ppn", "--ppn", "-npernode", "--npernode", "-N"), RANKS),
    },
    silent="-H -host --host -f -hostfile --hostfile -machinefile --machinefile",
    launcher="mpirun",
)

FORMS: tuple[CommandForm, ...] = (
    CommandForm(("env",), Role.WRAPPER, values="-u --unset -C --chdir"),
    CommandForm(
        ("uv run",),
        Role.WRAPPER,
        values="--with --with-editable --with-requirements --extra --group --only-group --no-group -p --python "
        "--project --directory --env-file --package --index --default-index --index-url --cache-dir --config-file -w",
    ),
    CommandForm(
        ("conda run", "mamba run", "micromamba run"),
        Role.WRAPPER,
        values="-n --name -p --prefix --cwd -e --env -r --root-prefix",
    ),
    CommandForm(("poetry run", "pipenv run", "pdm run", "rye run", "hatch run", "pipx run"), Role.WRAPPER),
    CommandForm(("pixi run",), Role.WRAPPER, values="-e --environment --manifest-path"),
    CommandForm(
        ("nsys profile", "ncu", "nice", "ionice", "time", "nohup", "numactl", "taskset", "stdbuf", "setsid", "timeout"),
        Role.WRAPPER,
        values="-o --output -t --trace -n -s --sample -c -e -f --force-overwrite -w --wait -k -N -m -i",
    ),
    CommandForm(("bash", "sh", "zsh", "dash", "ksh"), Role.SHELL, values="-o +o -O"),
    CommandForm(
        ("torchrun", "ft_launcher"),
        Role.LAUNCHER,
        flags="--standalone --no-python --run-path -m --module --use-env",
        counts={"--nproc-per-node": RANKS, "--nnodes": NODES},
        silent="--standalone --no-python -m --module --use-env --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf "
        "--node-rank --master-addr --master-port --local-addr --monitor-interval --start-method --max-restarts",
        runs_script=True,
    ),
    CommandForm(
        ("accelerate launch", "accelerate-launch"),
        Role.LAUNCHER,
        flags="--cpu --multi-gpu --tpu --ipex --use-deepspeed --use-fsdp --use-megatron-lm --use-xpu --quiet -q "
        "--debug -m --module --no-python --same-network --downcast-bf16 --enable-cpu-affinity --use-parallelism-config",
        counts={"--num-machines": NODES, "--num-processes": TOTAL},
        silent="-m --module --no-python --multi-gpu --machine-rank --main-process-ip --main-process-port --quiet -q",
        runs_script=True,
        hint="`Accelerator()` finds its rank by itself; what else the launcher or its config file said stands in its "
        "arguments, such as Accelerator(mixed_precision=...)",
    ),
    CommandForm(
        ("deepspeed", "deepspeed.pt"),
        Role.LAUNCHER,
        flags="--module --no-python --no-local-rank --no-ssh --save-pid --force-multi --bind-cores-to-rank",
        counts={"--num-gpus": RANKS, "--num-accelerators": RANKS, "--num-nodes": NODES},
        silent="--module --no-python --no-local-rank --no-ssh --master-addr --master-port --hostfile -H --force-multi",
        runs_script=True,
        hint="a script that asks for --local_rank finds it in the variable LOCAL_RANK",
    ),
    _OF_MPI,
    CommandForm(
        ("srun",),
        Role.LAUNCHER,
        flags="-l --label -u --unbuffered --exclusive --overlap --exact --pty -v --verbose -Q --quiet -s",
        counts={"-n": TOTAL, "--ntasks": TOTAL, "-N": NODES, "--nodes": NODES, "--ntasks-per-node": RANKS},
        silent="-l --label -u --unbuffered",
        launcher="srun",
    ),
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
        "shardway": "shardway",
    }
)
"""Modules of `python -m` -> their row of the table."""

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

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?[dt]?(\.exe)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_GLUED = re.compile(r"(-[a-zA-Z])(\d+)")
_OF_THE_SHELL = frozenset((".", "source", "cd", "exec", "export", "eval", "module", "set", "ulimit"))
_MOVE = ("-C", "--chdir", "--directory", "--cwd", "--project")
"""Options of wrappers that run a command in another folder."""


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
    """Index of the command that the wrappers run; that of the last wrapper if there is none."""
    start = 0
    while True:
        form, used = find_form(words[start:])
        if form is None or form.role is not Role.WRAPPER:
            return start
        inner = start + used
        inner += sum(map(len, _split_options(words[inner:], form)))
        if form.names == ("env",):
            while inner < len(words) and _ASSIGNMENT.fullmatch(words[inner]):
                inner += 1
            if {"-i", "-", "--ignore-environment"} & set(words[start:inner]):
                _refuse("`env -i` takes from each rank what says which rank it is", remedy="leave -i out")
        if os.path.basename(words[start]) in ("numactl", "taskset", "timeout"):
            while inner < len(words) and re.fullmatch(r"[\d,.:x-]+[smhd]?", words[inner]):
                inner += 1
        if inner > start + used:  # an unknown option may have had a value
            inner = next((at for at in range(inner, len(words)) if _is_known(words[at:])), inner)
        if inner >= len(words):
            return start
        start = inner


def _is_known(words: Sequence[str]) -> bool:
    return find_form(words)[0] is not None or bool(_PYTHON.fullmatch(os.path.basename(words[0])))


def _split_options(words: Sequence[str], form: CommandForm) -> list[tuple[str, ...]]:
    """The leading options, each with its value. A Python script as a value ends them: the unknown option before it was
    wrongly taken for one with a value."""
    options: list[tuple[str, ...]] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word, name = words[at], _plain_option(words[at])
        if word == "--":
            return [*options, ("--",)]
        has_value = form.takes_value(name)
        if "=" in word or _GLUED.fullmatch(word):
            has_value = False
        if word in ("-mca", "--mca", "-gmca", "--gmca"):
            taken = 3
        else:
            taken = 2 if has_value and at + 1 < len(words) and not words[at + 1].endswith(".py") else 1
        options.append(tuple(words[at : at + taken]))
        at += taken
    return options


def _plain_option(word: str) -> str:
    """The option's name with "-" for "_": --nproc_per_node and --nproc-per-node are one option."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _read_inner(words: Sequence[str], start: int, here: Path, nodes: int) -> CommandRead:
    """Read a command behind its wrappers, which are the words before `start`."""
    inner = words[start:]
    form, used = find_form(inner)
    role = form.role if form is not None else None
    if form is not None and role is Role.LAUNCHER:
        _refuse_launcher(words, start, form, used, nodes)
    if role is Role.SCHEDULER:
        _refuse(
            f"{inner[0]} submits a job of its own, which shardway would not see",
            remedy="name what its script starts: `-- python train.py`, `-- bash run.sh`",
        )
    if role is Role.OWN:
        _check_own(inner[used:])
        return CommandRead(Program(("-m", "shardway", *inner[used:])), module="shardway")
    if _PYTHON.fullmatch(os.path.basename(inner[0])):
        return _read_python(words, start, here, nodes)
    program = Program(tuple(inner), python=False)
    if form is not None and role is Role.SHELL:
        at = 1
        while at < len(inner) and inner[at].startswith(("-", "+")) and inner[at] not in ("-", "--"):
            if re.match(r"-(?!-).*c", inner[at]):
                named = ((f"{os.path.basename(inner[0])} -c", inner[at + 1]),) if at + 1 < len(inner) else ()
                return CommandRead(program, texts=named)
            at += 2 if form.takes_value(inner[at]) or re.fullmatch(r"-[a-z]+o", inner[at]) else 1
        return CommandRead(program, texts=_read_text(here, inner[at]) if at < len(inner) else ())
    if inner[0].endswith(".py"):  # an executable script names its own interpreter in its first line
        path, itself = here / inner[0], False
        if "/" in inner[0] and os.access(path, os.X_OK) and path.is_file():
            with open(path, "rb") as file:
                itself = file.read(2) == b"#!"
        return CommandRead(replace(program, python=not itself), script=inner[0])
    return CommandRead(program, texts=_read_text(here, inner[0]) if "/" in inner[0] else ())


def _read_text(here: Path, name: str) -> tuple[tuple[str, str], ...]:
    """A shell script by its name, with its text; none if it cannot be read or is no script."""
    try:
        with open(here / name, "rb") as file:
            data = file.read(1 << 18)
    except OSError:
        return ()
    is_shell = name.endswith((".sh", ".bash")) or re.match(rb"#!.*\b(ba|z|da|k)?sh\b", data)
    return ((name, data.decode("utf-8", "replace")),) if is_shell and b"\0" not in data else ()


def _read_python(words: Sequence[str], start: int, here: Path, nodes: int) -> CommandRead:
    """An interpreter with its own options, and what it runs. A launcher's module is refused like the launcher."""
    inner = words[start:]
    used, kind, module = _split_python(inner)
    rest = inner[used:]
    if kind == "" or (kind == "file" and not (rest and rest[0].strip())) or not inner[:used][-1].strip():
        allowed = "python SCRIPT ARGUMENTS..., python -m MODULE ARGUMENTS..., python -c CODE, or a program of its own"
        _refuse(f"{quote_all(words)} names no script", allowed=allowed)
    if launcher := MODULES.get(module):
        if launcher == "shardway":
            _check_own(rest)
        else:
            _refuse_launcher(words, start, BY_NAME[launcher], used, nodes, python=inner[0])
    script = rest[0] if kind == "file" else ""
    if inner[0] in ("python", "python3"):  # that of the job's environment
        if used == 1 or inner[1:used] == ["-m", module]:
            return CommandRead(Program(tuple(inner[1:])), script=script, module=module)
        return CommandRead(Program(("python3", *inner[1:]), python=False), script=script, module=module)
    interpreter, path = inner[0], os.path.normpath(here / inner[0])
    if "/" in interpreter and os.path.exists(path):
        interpreter = path  # whole, since a folder beside the code is not copied
    program = Program((interpreter, *inner[1:]), python=False, interpreter=interpreter)
    return CommandRead(program, script=script, module=module)


def _split_python(words: Sequence[str]) -> tuple[int, str, str]:
    """The number of words of an interpreter with its own options and their values; what follows: "file", "module",
    "code", "" for nothing; and the module of -m.

    Source: `python --help` of 3.10 to 3.14; letters may stand together ("-um")."""
    at = 1
    while at < len(words) and words[at].startswith("-"):
        word, letters = words[at], words[at][1:]
        if word == "-":
            return at, "", ""
        if word.startswith("--"):
            at += 2 if word == "--check-hash-based-pycs" else 1
            continue
        cut = next((number for number, letter in enumerate(letters) if letter in "cmWX"), None)
        if cut is None:
            if set(letters) & set("hV?"):
                return at, "", ""
            at += 1
            continue
        value = letters[cut + 1 :]
        at += 1 if value else 2
        if letters[cut] in "cm":
            if at > len(words):
                return len(words), "", ""
            return (at, "code", "") if letters[cut] == "c" else (at, "module", value or words[at - 1])
    return at, "file", ""


# --- refusals, with the line to type instead


PROGRAMS_OF_RANKS = ("bench", "generate", "evaluate")
"""Verbs of which each rank of a job is one process."""

PROGRAMS_OF_ONE = ("checkpoint", "report", "track", "data", "prefetch")
"""Verbs that are one process: they do something with a run that another job has trained, or bring what one needs."""


def list_rank_problems(program: Program, ranks: int) -> Iterator[Problem]:
    """A verb of one process in a job of several ranks would do its work several times at once."""
    is_one = program.words[:2] == ("-m", "shardway") and "".join(program.words[2:3]) in PROGRAMS_OF_ONE
    if is_one and ranks > 1:
        what = f"shardway {program.words[2]} is one process, and the job would have {ranks}"
        yield Problem("the command", what, remedy="site.nodes=1 site.ranks_per_node=1")


def _check_own(words: Sequence[str]) -> None:
    """Raise UserError for a verb that is no program of ranks: a job starts a training by itself."""
    if words[:1] and words[0] in (*PROGRAMS_OF_RANKS, *PROGRAMS_OF_ONE):
        return
    remedy = "name a run file in place of the command: `shardway submit my.toml`"
    if words[:1] == ["train"]:
        remedy = f"`shardway submit {quote_all(words[1:])}`".replace(" `", "`")
    _refuse("it begins with shardway, which a job starts by itself", remedy=remedy)


def _refuse_launcher(
    words: Sequence[str], start: int, form: CommandForm, used: int, nodes: int, python: str = "python"
) -> NoReturn:
    """Raise UserError with the equivalent line without the launcher."""
    inner = words[start:]
    name = " ".join((os.path.basename(inner[0]), *inner[1:used]))
    what = f"it {'begins with' if start == 0 else 'holds'} {name}, and the job script starts the ranks itself"
    options = _split_options(inner[used:], form)
    program = list(inner[used + sum(map(len, options)) :])
    if not program or ":" in program:
        _refuse(what, remedy=f"leave {name} and its options out; {RANKS}, {NODES} and site.launcher say them")
    names = {_plain_option(option[0]) for option in options}
    if form.runs_script and "--no-python" not in names:
        if python == "python" and "/" in inner[0]:
            python = os.path.join(os.path.dirname(inner[0]), "python")
        program = [python, *(["-m"] if {"-m", "--module"} & names else []), *program]
    counts: dict[str, int] = {}
    left = []  # what the new line lacks
    for option in options:
        name, value = _plain_option(option[0]), option[0].partition("=")[2] or " ".join(option[1:])
        if glued := _GLUED.fullmatch(option[0]):
            name, value = glued.groups()
        if name in form.counts and value.isdecimal():
            counts[form.counts[name]] = int(value)
        elif name not in (*form.silent.split(), *form.counts, "--"):
            left.append(option[0])
    total, nodes = counts.pop(TOTAL, 0), counts.get(NODES, nodes)
    if total and RANKS not in counts and nodes and total % nodes == 0:
        counts[RANKS] = total // nodes
    keys = [f"{key}={counts[key]}" for key in (NODES, RANKS) if key in counts]
    keys += [f"site.launcher={form.launcher}"] if form.launcher else []
    parts = [f"`shardway submit ... {' '.join([*keys, '--', quote_all([*words[:start], *program])])}`"]
    parts += [f"left out: {', '.join(left)}"] if left else []
    _refuse(what, remedy="; ".join([*parts, *([form.hint] if form.hint else [])]))


def _refuse(what: str, allowed: str = "", remedy: str = "") -> NoReturn:
    problem = replace(command_problem(what, remedy), allowed=allowed)
    raise UserError(render_problems("the command", [problem]), [problem])


def command_problem(what: str, remedy: str) -> Problem:
    """A problem of the command."""
    return Problem("the command", what, "command line", remedy=remedy)


# --- the submitted folder as the job will see it


@dataclass(frozen=True)
class Code:
    """The folder that is submitted. `here`: the folder as it is now. `snapshot`: its copy; None if the job runs in
    `here` itself or, unless `is_there`, on a host that has nothing of it."""

    here: Path
    snapshot: SnapshotPlan | None = None
    is_there: bool = True

    def why_missing(self, path: str) -> str:
        """Why the job will not find a relative path in its folder; "" if it will, or if that is unknown."""
        if self.is_there and not (self.here / path).exists():
            return f"there is no file {path} in {self.here}"
        return self.why_lost(path)

    def find_remedy(self, path: str) -> str:
        """What to do about a program that the job will not find."""
        if self.is_there and (self.here / path).exists():
            return "submit it from the folder that holds it, or name it by its whole path if the nodes see it there"
        return "correct its path"

    def why_lost(self, path: str) -> str:
        """Why a relative path that exists here does not exist for the job; "" if it does, or if that is unknown."""
        if not self.is_there or self.snapshot is None:
            return ""
        name = posixpath.normpath(posixpath.join(self.snapshot.below, path))
        if name == ".." or name.startswith("../"):
            return f"{path} leads out of {self.snapshot.root}, and the job runs in a copy of that folder"
        left_out = self.snapshot.left_out.items()
        gone = next((reason for entry, reason in left_out if name == entry or name.startswith(f"{entry}/")), "")
        return f"{path} is not in the snapshot that the job runs in ({gone})" if gone else ""


def list_local_problems(read: CommandRead, ranks: int, code: Code) -> Iterator[Problem]:
    """Problems of a command in the submitted folder: its script or program, other files among its words, and what its
    shell starts. `ranks`: those of a node."""
    words, script = read.program.words, read.script
    first = words[0]
    if script and not script.startswith(("/", "~")):
        if why := code.why_missing(script):
            yield command_problem(why, code.find_remedy(script))
        elif script.endswith(".py") and (code.here / script).is_file():
            try:
                ast.parse((code.here / script).read_bytes(), script)
            except (SyntaxError, ValueError) as error:
                where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
                reason = error.msg if isinstance(error, SyntaxError) else error
                remedy = "mend it: the job would end as soon as it starts"
                yield command_problem(f"{script}{where} is no Python: {reason}", remedy)
    if not read.program.python and first != script and "/" in first and not first.startswith("/"):
        if why := code.why_missing(first):
            yield command_problem(why, code.find_remedy(first))
        elif code.is_there and not os.access(code.here / first, os.X_OK):
            yield command_problem(f"{first} is not executable", f"`chmod +x {first}`, or name what runs it")
    for word in dict.fromkeys(words if read.program.python else words[1:]):
        if word != script and not any(word == text for _, text in read.texts):
            yield from list_lost_paths(word, code)
    for where, text in read.texts:
        if where.endswith(" -c") and not re.search(r"\b(cd|pushd)\b", text):  # it stays in the folder of the job
            for word in re.findall(r"(?<![^\s=\"'<>();|&])\.\./[^\s;&|<>\"']*", text):
                yield from list_lost_paths(word, code)
    for where, text in read.texts if ranks > 1 else ():  # each rank would be a separate world
        if launcher := find_launcher(text):
            what = f"{where} starts {launcher}, and the job script would do so in each of {ranks} ranks of a node"
            yield command_problem(what, "set site.ranks_per_node=1, or name what it starts: `-- python train.py`")


def list_lost_paths(word: str, code: Code) -> Iterator[Problem]:
    """Relative paths among the words (whole words, or after `--option=`) that do not exist where the job runs.

    A word that begins with `../` always counts as a path; any other word only if a file of that name exists."""
    for path in dict.fromkeys((word, word.partition("=")[2])):
        if not path or path.startswith(("/", "-")) or "://" in path or "\n" in path:
            continue
        is_path = path == ".." or path.startswith("../")
        if not is_path and ("/" in path or "." in path):
            try:
                is_path = (code.here / path).exists()
            except OSError:  # the word is too long to be a path
                continue
        if is_path and (why := code.why_lost(path)):
            whole = posixpath.normpath(posixpath.join(code.here, path))
            yield command_problem(why, f"name it by its whole path: {whole}")
            return


def warn_of_own_files(read: CommandRead, code: Code) -> Iterator[str]:
    """A warning for each kind of files that the job uses in place, or not at all, instead of a copy of its own."""
    plan = code.snapshot
    if not code.is_there or plan is None:
        return
    if read.script.startswith("/") and Path(read.script).is_relative_to(plan.root):
        yield (
            f"{read.script} is named by its whole path, so the job runs that file as it is by then, and not the copy "
            f"of this moment: to run the copy, name it as {Path(os.path.relpath(read.script, plan.root / plan.below))}"
        )
    secret = [path for path, reason in plan.left_out.items() if "secret" in reason]
    if secret:
        yield (
            f"not in the copy that the job runs in, being secret by name: {list_some(secret, 3)}; "
            f"the job has what stands in {SECRETS}"
        )
    linked = [
        link.path
        for link in plan.links
        if not posixpath.basename(link.path).startswith(".")
        and not os.path.isfile(plan.root / link.path / "pyvenv.cfg")
        and not any(word in link.reason for word in _NO_OUTPUT)
    ]
    if linked:
        yield f"linked, not copied: {list_some(linked, 3)}; what the command writes there, it writes into {plan.root}"


_NO_OUTPUT = ("run directory", "environment", "installed packages", "leads out")
"""Reasons of links into which no program writes, or which the user has made on purpose."""


# Compiled when a command is read: most submissions have none.
_STARTS_RANKS = (
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
        if found := re.search(_STARTS_RANKS, kept):
            return " ".join(found[1].split())
    return ""


# --- several ranks of a program that ignores ranks

_LIBRARIES = frozenset(
    (
        *("accelerate", "bagua", "colossalai", "composer", "deepspeed", "fairscale", "fairseq", "fairseq2", "fastai"),
        *("horovod", "ignite", "lightning", "lightning_fabric", "megatron", "mpi4py", "nemo", "pytorch_lightning"),
        *("ray", "shardway", "torchtitan", "torchtune"),
    )
)
"""Libraries that find their ranks themselves."""
_TRAINERS = ("transformers.", "trl.")
"""Packages whose trainers find their ranks themselves; the rest of each package does not."""
_SIGN = (
    r"torch\.distributed|torch\s+import\s+distributed|init_process_group|DistributedDataParallel|fully_shard"
    r"|\b(?:LOCAL_)?RANK\b|\bWORLD_SIZE\b|OMPI_COMM_WORLD|\bPMI_RANK\b"
    r"|transformers\.\w*Trainer\b|jax\.distributed|tf\.distribute|tensorflow\.distribute"
)
_LOOKED_FOR = (
    "torch.distributed, accelerate, lightning, deepspeed, horovod, mpi4py and their like, transformers.Trainer, RANK, "
    "WORLD_SIZE"
)
_MOST_FILES = 200
_MOST_BYTES = 1 << 20


def warn_of_copies(read: CommandRead, ranks: int, code: Code) -> Iterator[str]:
    """A warning if several ranks will each run the same program and its source shows no sign of ranks."""
    if ranks < 2 or not code.is_there:
        return
    module = read.module.replace(".", "/")
    named = [read.script] if read.script else []
    named += [f"{module}.py", f"{module}/__main__.py"] if module else []
    named += [word for _, text in read.texts for word in re.findall(r"[\w./-]+\.py\b", text)]
    scripts = [Path(name) for name in named if (code.here / name).is_file()]
    if not scripts or any(_mentions_ranks(text) for _, text in read.texts):
        return
    waiting, files = [code.here / script for script in scripts], set[Path]()
    while waiting and len(files) < _MOST_FILES:
        path = waiting.pop()
        if path in files:
            continue
        try:
            text = path.read_bytes()[:_MOST_BYTES].decode("utf-8", "replace")
        except OSError:
            continue
        imported = _list_imports(text)
        for name in imported:
            is_trainer = name.startswith(_TRAINERS) and name.endswith("Trainer")
            if is_trainer or name.split(".")[0] in _LIBRARIES or name.startswith("torch.distributed"):
                return
        if _mentions_ranks(text):
            return
        files.add(path)
        places = dict.fromkeys((path.parent, *(code.here / script.parent for script in scripts), code.here))
        for name in imported:  # a module, and the packages around it
            parts = name.split(".")
            for place in places:
                stems = [place.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
                found = [path for stem in stems for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py")]
                if found := [path for path in found if path.is_file()]:
                    waiting += found
                    break
    if files:
        more = f" and the {len(files) - 1} files that it imports" if len(files) > 1 else ""
        yield (
            f"{ranks} ranks will each run all of {scripts[0]}: nothing in it{more} looks for other ranks "
            f"({_LOOKED_FOR}), so they would train {ranks} copies and write the same files; "
            'where that is not meant: "site.nodes=1 site.ranks_per_node=1"'
        )


def _mentions_ranks(text: str) -> bool:
    names = (name for scheduler in make_own("schedulers") for name in scheduler.place_variables)
    return bool(re.search(_SIGN, text)) or any(name in text for name in names)


def _list_imports(text: str) -> list[str]:
    """Dotted names that a source imports. A name imported from a module may be a module too."""
    names: list[str] = []
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
    return list(dict.fromkeys(filter(None, names)))
