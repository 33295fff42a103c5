"""Checks of a job request on the submitting host, in one exchange: code, program, Python packages, files, folders.

Invariants:
- What cannot be judged from here is not reported: a host that does not answer, a path with a variable that is not set,
  what modules, images or variables of the job may bring.
- A path is reported missing only if the job will not find it in the folder in which it runs.
- Copies: only a warning, with what was searched for and where. The program's script, the modules beside it that it
  imports and the scripts that a shell starts are read; a program without source here is not warned about.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from shardway.errors import Problem, UserError
from shardway.launch.containers import all_mounts
from shardway.launch.hosts.base import Done, Host
from shardway.launch.job import SECRETS
from shardway.launch.snapshot_files import LinkedPath, SnapshotPlan
from shardway.launch.submission.command import CommandRead, find_launcher
from shardway.launch.submission.job_request import JobRequest, build_job, launcher_of, parse_mount, runtime_of, shape_of
from shardway.places import expand_home, list_variables
from shardway.plugins import load_plugin, make_own, make_plugin

# --- checks on the submitting host: many commands, one exchange


AT = "\0path"
"""In the words of a command: the path that the check is about."""


def _has_failed(done: Done) -> bool:
    return not done.ok and not done.timed_out


def _has_succeeded(done: Done) -> bool:
    return done.ok


@dataclass(frozen=True)
class HostCheck:
    """A command on the host, and the problem where its answer is wrong; by default where it fails in time.

    `path`: the path on the host (with `~` and `$NAMES`) that AT stands for, "" for none."""

    problem: Problem
    words: tuple[str, ...] = ("test", "-e", AT)
    path: str = ""
    is_wrong: Callable[[Done], bool] = _has_failed


def take_looks(host: Host, looks: Sequence[HostCheck]) -> list[Problem]:
    """All problems, in the order of the checks, each once. A path with a variable that the host does not set is one
    too. Raises HostUnreachable."""
    paths, problems = _expand(host, looks)
    commands = {
        look: tuple((str(paths[look.path]) if look.path else "") if word == AT else word for word in look.words)
        for look in looks
        if not look.path or look.path in paths
    }
    each = list(dict.fromkeys(commands.values()))
    answers = dict(zip(each, host.run_many(each), strict=True)) if each else {}
    problems += [look.problem for look, words in commands.items() if look.is_wrong(answers[words])]
    return list(dict.fromkeys(problems))


def _expand(host: Host, looks: Sequence[HostCheck]) -> tuple[dict[str, PurePosixPath], list[Problem]]:
    """The paths as expanded by the host, in one exchange; one by one if any of them fails."""
    named = {look.path: look for look in looks if look.path}
    try:
        return dict(zip(named, host.expand_many(list(named)), strict=True)), []
    except UserError:
        found = {path: _expand_one(host, look) for path, look in named.items()}
    paths = {path: one for path, one in found.items() if isinstance(one, PurePosixPath)}
    return paths, [one for one in found.values() if isinstance(one, Problem)]


def _expand_one(host: Host, look: HostCheck) -> PurePosixPath | Problem:
    try:
        return host.expand(look.path)
    except UserError as error:
        what, _, remedy = str(error).partition("\n  To do: ")
        where, origin = look.problem.where, look.problem.origin
        return Problem(where, what.removesuffix("."), origin, remedy=remedy.removesuffix("."))


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
        if not self.is_there:
            return ""
        if not (self.here / path).exists():
            return f"there is no file {path} in {self.here}"
        return self.why_lost(path)

    def why_lost(self, path: str) -> str:
        """Why a relative path that exists here does not exist for the job; "" if it does, or if that is unknown."""
        if not self.is_there or self.snapshot is None:
            return ""
        name = posixpath.normpath(posixpath.join(self.snapshot.below, path))
        if name == ".." or name.startswith("../"):
            return f"{path} leads out of {self.snapshot.root}, and the job runs in a copy of that folder"
        gone = next((e for e in self.snapshot.left_out if name == e.path or name.startswith(f"{e.path}/")), None)
        return f"{path} is not in the snapshot that the job runs in ({gone.reason})" if gone else ""

    def holds_module(self, name: str) -> bool:
        """Whether `import name` finds the module in the folder itself."""
        return self.is_there and any((self.here / found).exists() for found in (name, f"{name}.py"))


# --- several ranks of a program that ignores ranks

_LIBRARIES = frozenset(
    (
        *("accelerate", "bagua", "colossalai", "composer", "deepspeed", "fairscale", "fairseq", "fairseq2", "fastai"),
        *("horovod", "ignite", "lightning", "lightning_fabric", "megatron", "mpi4py", "nemo", "pytorch_lightning"),
        *("ray", "shardway", "torchtitan", "torchtune"),
    )
)
"""Libraries that find their ranks themselves."""
_SIGN = re.compile(
    r"torch\.distributed|torch\s+import\s+distributed|init_process_group|DistributedDataParallel|fully_shard"
    r"|\b(?:LOCAL_)?RANK\b|\bWORLD_SIZE\b|OMPI_COMM_WORLD|\bPMI_RANK\b"
    r"|transformers\.\w*Trainer\b|jax\.distributed|tf\.distribute|tensorflow\.distribute"
)


def _mentions_ranks(text: str) -> bool:
    """Whether a program's text looks as if it knew of ranks."""
    names = (name for scheduler in make_own("schedulers") for name in scheduler.place_variables)
    return bool(_SIGN.search(text)) or any(name in text for name in names)


_TRAINERS = ("transformers.", "trl.")
"""Packages whose trainers find their ranks themselves; the rest of each package does not."""
_LOOKED_FOR = (
    "torch.distributed, accelerate, lightning, deepspeed, horovod, mpi4py and their like, transformers.Trainer, RANK, "
    "WORLD_SIZE"
)
_MOST_FILES = 200
_MOST_BYTES = 1 << 20


def list_copies(request: JobRequest, code: Code) -> Iterator[str]:
    """A warning if several ranks will each run the same program and its source shows no sign of ranks."""
    shape, read = shape_of(request), request.read
    if read is None or shape.ranks < 2 or not code.is_there:
        return
    scripts = _list_scripts(read, code.here)
    if not scripts or any(map(_mentions_ranks, (text for _, text in read.texts))):
        return
    files = _read_with_imports(scripts, code)
    if not files or any(map(_shows_ranks, files.values())):
        return
    name = scripts[0]
    more = f" and the {len(files) - 1} files that it imports" if len(files) > 1 else ""
    yield (
        f"{shape.ranks} ranks will each run all of {name}: nothing in it{more} looks for other ranks "
        f"({_LOOKED_FOR}), so they would train {shape.ranks} copies and write the same files; "
        'where that is not meant: "site.nodes=1 site.ranks_per_node=1"'
    )


def _list_scripts(read: CommandRead, here: Path) -> list[Path]:
    """The script of a command, or the scripts that its shell starts, if they are here."""
    module = read.module.replace(".", "/")
    named = [read.script] if read.script else []
    named += [f"{module}.py", f"{module}/__main__.py"] if module else []
    named += [word for _, text in read.texts for word in re.findall(r"[\w./-]+\.py\b", text)]
    return [Path(name) for name in named if (here / name).is_file()]


def _read_with_imports(scripts: list[Path], code: Code) -> dict[Path, str]:
    """The text of the scripts and of the modules that they import from the folders around them."""
    files: dict[Path, str] = {}
    waiting = [code.here / script for script in scripts]
    while waiting and len(files) < _MOST_FILES:
        path = waiting.pop()
        if path in files:
            continue
        try:
            text = path.read_bytes()[:_MOST_BYTES].decode("utf-8", "replace")
        except OSError:
            continue
        files[path] = text
        places = (path.parent, *(code.here / script.parent for script in scripts), code.here)
        for name in _list_imports(text):
            waiting += _find_module(name, places)
    return files


def _list_imports(text: str) -> list[str]:
    """Dotted names that a source imports. A name imported from a module may be a module too."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
    return list(dict.fromkeys(filter(None, names)))


def _find_module(name: str, places: tuple[Path, ...]) -> list[Path]:
    parts = name.split(".")
    for place in dict.fromkeys(places):
        found = [
            path
            for count in range(1, len(parts) + 1)
            for stem in (place.joinpath(*parts[:count]),)
            for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py")
            if path.is_file()
        ]
        if found:
            return found
    return []


def _shows_ranks(text: str) -> bool:
    names = _list_imports(text)
    return (
        _mentions_ranks(text)
        or any(name.split(".")[0] in _LIBRARIES or name.startswith("torch.distributed") for name in names)
        or any(name.startswith(_TRAINERS) and name.endswith("Trainer") for name in names)
    )


# --- the program and its Python packages

_KEY, _ORIGIN = "the command", "command line"

_FIND = """import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))"""

_ON_PATH = 'PATH=${1:+$1/bin:}$PATH; type -P -- "$0"'


def list_local_problems(request: JobRequest, code: Code) -> Iterator[Problem]:
    """Problems of a command in the submitted folder: its script or program, other files among its words, and what its
    shell starts."""
    read = request.read
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
    yield from _list_launchers_of_shells(request)


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
    """Relative paths among the words (whole words, or after `--option=`) that do not exist where the job runs.

    A word that begins with `../` always counts as a path; any other word only if a file of that name exists."""
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
    except OSError:  # the word is too long to be a path
        return False


def _list_launchers_of_shells(request: JobRequest) -> Iterator[Problem]:
    """A shell that starts ranks itself while a node runs several ranks: each of them would be a separate world."""
    ranks = shape_of(request).ranks_per_node
    for where, text in request.read.texts if request.read is not None and ranks > 1 else ():
        if launcher := find_launcher(text):
            what = f"{where} starts {launcher}, and the job script would do so in each of {ranks} ranks of a node"
            remedy = "set site.ranks_per_node=1, or name what it starts: `-- python train.py`"
            yield Problem(_KEY, what, _ORIGIN, remedy=remedy)


def list_warnings(request: JobRequest, code: Code) -> Iterator[str]:
    """Warnings about a command that is valid but may not be meant so."""
    read = request.read
    if read is None:
        return
    yield from list_copies(request, code)
    if not code.is_there:
        return
    if read.program.python and (python := _find_activated(request)):
        yield (
            f"`python` is {python} in this shell, and the job takes that of {_folder_of_venv(request) or 'its PATH'} "
            f"(site.venv): name it by its path, or set site.venv={posixpath.dirname(posixpath.dirname(python))}"
        )
    if code.snapshot is not None:
        yield from _list_own_files(read, code.snapshot)


def _list_own_files(read: CommandRead, plan: SnapshotPlan) -> Iterator[str]:
    """Files that the job uses in place, not as a copy of its own."""
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
"""Reasons of links into which no program writes, or which the user has made on purpose."""


def _name_few(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"{', '.join(paths[:3])}{more}"


def _find_activated(request: JobRequest) -> str:
    """The `python` of an environment that the user has activated, if the job would use another one."""
    if runtime_of(request) != "none" or request.loaded.values.site.venv != "auto" or _is_surrounded(request, "PATH"):
        return ""
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or ""
    python = shutil.which("python") or shutil.which("python3") or ""
    if not active or os.path.dirname(os.path.dirname(python)) != os.path.normpath(active):
        return ""
    venv = _folder_of_venv(request)
    return python if venv is None or not venv or os.path.realpath(venv) != os.path.realpath(active) else ""


def _read_script(code: Code, script: str) -> Iterator[Problem]:
    try:
        ast.parse((code.here / script).read_bytes(), script)
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = f"{script}{where} is no Python: {error.msg if isinstance(error, SyntaxError) else error}"
        yield Problem(_KEY, what, _ORIGIN, remedy="mend it: the job would end as soon as it starts")


def list_looks(request: JobRequest, host: Host, code: Code) -> Iterator[HostCheck]:
    """Checks on the host for the program and its Python environment."""
    yield from _look_for_conda(request, host)
    if runtime_of(request) != "none":
        yield from _look_into_container(request, host)
        return
    yield from _look_for_program(request, host)
    yield from _look_for_modules(request, code)


def _look_for_program(request: JobRequest, host: Host) -> Iterator[HostCheck]:
    """The program by its path, or by its name on the PATH if nothing in the job changes the PATH."""
    word, where, venv = request.program.words[0], host.name or "this machine", _folder_of_venv(request)
    script = request.read.script if request.read is not None else ""
    for path in dict.fromkeys((word, script)):
        if path.startswith("/"):
            gone = Problem(_KEY, f"there is no {path} on {where}", _ORIGIN, remedy="correct its path")
            yield HostCheck(gone, ("test", "-e", path))
    if not request.program.python and "/" not in word and not _is_surrounded(request, "PATH") and venv is not None:
        what = f"there is no program {word} on the PATH of {where}"
        gone = Problem(_KEY, what, _ORIGIN, remedy=f"correct its name; a file of the code is named by path: ./{word}")
        yield HostCheck(gone, ("bash", "-c", _ON_PATH, word, AT), venv, lambda done: done.code == 1)  # 127: no bash


def _look_into_container(request: JobRequest, host: Host) -> Iterator[HostCheck]:
    """A program or script of the host that the image cannot have: it is outside the mounts and outside the folders that
    images bring themselves."""
    script = request.read.script if request.read is not None else ""
    for path in dict.fromkeys((request.program.words[0], script)):
        if path.startswith("/") and may_be_hidden(request, path):
            where = host.name or "this machine"
            what = f"{path} is a path of {where}, which the container does not see: it is in none of its mounts"
            remedy = f'mount its folder, site.mounts=["{posixpath.dirname(path)}"], or name what is in the image'
            hidden = Problem(_KEY, what, _ORIGIN, remedy=remedy)
            yield HostCheck(hidden, ("test", "-e", path), is_wrong=_has_succeeded)


def may_be_hidden(request: JobRequest, path: str) -> bool:
    """Whether an absolute path is outside the container's mounts and outside the folders that images bring themselves.
    False if a mount contains a variable, since the path may be inside it."""
    job = build_job(request, 1)
    seen = [mount.target for mount in all_mounts(job)]
    # Apptainer mounts the home folder unless a site forbids it; other runtimes need an option (--container-mount-home).
    home = runtime_of(request) == "apptainer" or any("home" in option for option in job.container.rules.options)
    seen += ["~"] if home else []
    places = [str(expand_home(place)) for place in seen if not place.startswith("$")]
    inside = any(expand_home(path).is_relative_to(place) for place in (*_OF_IMAGES, *places))
    return not inside and len(places) == len(seen)


_OF_IMAGES = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt", "/etc", "/root")
"""Folders that every image brings itself; whether a path there exists is not visible from outside."""


def _look_for_modules(request: JobRequest, code: Code) -> Iterator[HostCheck]:
    """The modules that the program needs from its virtual environment; one Python looks for all of them and imports
    none."""
    venv, names = _folder_of_venv(request), _list_modules(request, code)
    named = request.program.interpreter
    if named.startswith("/"):
        yield from _look_into_interpreter(request, code, named)
    if not venv or not names or _is_surrounded(request, "PYTHONPATH"):
        return
    words = ("timeout", "10", AT, "-c", _FIND, *names)  # seconds; a slow file system ends the check
    if named:  # it is asked first, the environment's Python only if a module is missing there
        words = ("bash", "-c", _OTHER, named, *words)
    for name in names:
        missing = _describe_module(request, venv, name)
        yield HostCheck(missing, words, f"{venv}/bin/python3", partial(_is_missing, name))


def _is_missing(name: str, done: Done) -> bool:
    return done.ok and name in done.out.split()


_OTHER = 'found=$(timeout 10 "$0" "${@:4}") && [ -z "$found" ] || exec "$@"'
"""Runs the first Python, and the second one if the first lacks a module."""


def _look_into_interpreter(request: JobRequest, code: Code, python: str) -> Iterator[HostCheck]:
    """The module of `-m`, in an interpreter that the user has named."""
    module = request.read.module.split(".")[0] if request.read is not None else ""
    if not module.isidentifier() or code.holds_module(module) or _is_surrounded(request, "PYTHONPATH"):
        return
    what = f"there is no module {module} in the code or for {python}"
    gone = Problem(_KEY, what, _ORIGIN, remedy="correct its name, or install it there")
    yield HostCheck(gone, ("timeout", "10", python, "-c", _FIND, module), is_wrong=partial(_is_missing, module))


def _list_modules(request: JobRequest, code: Code) -> tuple[str, ...]:
    """torch for torchrun and similar launchers, Shardway for its own runs, and the module of `python -m`."""
    own = request.program.meets_by_itself
    named = request.read.module.split(".")[0] if request.read is not None and not request.program.interpreter else ""
    named = "" if code.holds_module(named) else named
    return (
        *(("torch",) if own or make_plugin("launchers", launcher_of(request)).one_agent_a_node else ()),
        *(("nvidia_resiliency_ext",) if launcher_of(request) == "ft_launcher" else ()),
        *(("shardway",) if own else ()),
        *((named,) if named.isidentifier() else ()),
    )


def _describe_module(request: JobRequest, venv: str, name: str) -> Problem:
    if name in ("torch", "shardway", "nvidia_resiliency_ext"):
        remedy = f"`{venv}/bin/pip install {name.replace('_', '-')}`, or name another environment"
        return Problem("site.venv", f"{venv} has no {name}", request.loaded.origins["site.venv"], remedy=remedy)
    what = f"there is no module {name} in the code or in {venv}"
    return Problem(_KEY, what, _ORIGIN, remedy="correct its name, or install it there")


def _look_for_conda(request: JobRequest, host: Host) -> Iterator[HostCheck]:
    """A conda environment, if conda is a program of the host and not of an environment module."""
    venv = build_job(request, 1).around.venv
    name = venv.removeprefix("conda:")
    if name == venv or _is_surrounded(request, "PATH"):
        return
    what = f"there is no conda environment {name} on {host.name or 'this machine'}"
    remedy = "correct its name (`conda env list` has those there are), or make it"
    gone = Problem("site.venv", what, request.loaded.origins["site.venv"], remedy=remedy)
    if "/" in name:
        yield HostCheck(gone, path=name)
        return
    words = ("timeout", "20", "conda", "env", "list")
    yield HostCheck(gone, words, is_wrong=lambda done: done.ok and name not in parse_conda_environments(done.out))


def parse_conda_environments(text: str) -> set[str]:
    """Environment names in the output of `conda env list`: the first word of a line, or the last part of its path."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {words[0] for words in lines} | {words[-1].rpartition("/")[2] for words in lines}


def _folder_of_venv(request: JobRequest) -> str | None:
    """The virtual environment of the job, "" for none; None for a conda environment, which is not searched."""
    venv = build_job(request, 1).around.venv
    return None if venv.startswith("conda:") else venv


def _is_surrounded(request: JobRequest, name: str) -> bool:
    """Whether modules or a variable of the job may add what is not visible from here."""
    around = build_job(request, 1).around
    return bool(around.modules) or name in around.names


# --- files and folders that the job needs

_OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that are local to each node, unless a machine states otherwise."""

_MEMORY = ("tmpfs", "ramfs", "devtmpfs")

_DATA = ("data.path", "data.validation")


def list_host_problems(request: JobRequest, host: Host, code: Code) -> list[Problem]:
    """All problems on the submitting host, in one exchange (and one more if paths have variables): program,
    environment, image, data, output folders. Raises HostUnreachable."""
    looks = [*_list_needed(request, host, code), *_list_shared(request), *list_looks(request, host, code)]
    looks += [*_list_in_container(request, host)] if runtime_of(request) != "none" else []
    return [*_list_missing_data(request, code), *take_looks(host, looks)]


def _list_needed(request: JobRequest, host: Host, code: Code) -> Iterator[HostCheck]:
    """Checks for what must exist before the job starts."""
    venv, image = build_job(request, 1).around.venv, request.section.image
    if venv and not venv.startswith("conda:") and runtime_of(request) == "none":
        yield _needed(request, host, "site.venv", f"{venv}/bin/activate", "make the environment there, or name another")
    if image.startswith(("/", "~", "$")):
        yield _needed(request, host, "site.image", image, "correct the path; `shardway image` makes one")
    for key, path in _list_data(request):
        if path.startswith(("/", "~/")) and runtime_of(request) == "none":
            yield _needed(request, host, key, path, "correct the path, or copy the data there")
        elif not path.startswith(("/", "~/")) and not list_variables(path) and not code.is_there:
            remedy = "name it by its whole path: the job runs in the run directory"
            yield _needed(request, host, key, str(request.workdir / path), remedy)


def _list_in_container(request: JobRequest, host: Host) -> Iterator[HostCheck]:
    """Checks for what the container needs to start, and for what it must mount."""
    image, runtime, origins = request.section.image, runtime_of(request), request.loaded.origins
    if image.startswith(("/", "~", "$")):
        unread = Problem("site.image", f"{image} is there, and you may not read it", origins["site.image"])
        yield HostCheck(unread, ("bash", "-c", _READABLE, AT), image)
        if runtime in ("pyxis", "enroot"):
            what = f"{image} is no squashfs image, which {runtime} starts"
            remedy = "`shardway image import` makes one"
            other = Problem("site.image", what, origins["site.image"], remedy=remedy)
            yield HostCheck(other, ("bash", "-c", _SQUASHFS, AT), image)
    for mount in filter(None, map(parse_mount, request.section.mounts)):
        own = _local_folder(request, mount.source) or mount.source.startswith(_OF_EACH_NODE)
        if mount.source.startswith(("/", "~")) and not own:
            yield _needed(request, host, "site.mounts", mount.source, "correct the path; a mount has to be there")
    # Apptainer also mounts what its site configures, which is not visible from here.
    yield from _list_hidden(request) if runtime != "apptainer" else ()


_OF_EACH_NODE = ("/usr/", "/lib", "/etc/", "/var/", "/dev/", "/proc/", "/sys/", "/opt/", "/run/")
"""Folders of files of each node's own (drivers, daemons, devices), which a login node may lack."""

_READABLE = '[ ! -e "$0" ] || [ -r "$0" ]'
_SQUASHFS = '[ ! -f "$0" ] || [ ! -r "$0" ] || [ "$(head -c 4 "$0" | tr -d "\\0")" = hsqs ]'
"""Tests the magic number of squashfs (Linux 4.0 and later); a missing file is already reported."""


def _list_hidden(request: JobRequest) -> Iterator[HostCheck]:
    """Paths of the run file that the container does not see. A path that is not on the host may be in the image; a
    cache in the image ends with the container."""
    values, paths = request.loaded.values, {"site.venv": build_job(request, 1).around.venv}
    kept = {"data.cache": values.data.cache, "train.compile_cache": values.train.compile_cache}
    if request.program.meets_by_itself:
        read = {"data.tokenizer": values.data.tokenizer, "model.hf": values.model.hf}
        paths |= {**dict(_list_data(request)), **read, **kept}
    for key, path in paths.items():
        origin = request.loaded.origins[key]
        if path.startswith("~/") and runtime_of(request) in _ROOTED and key != "site.venv":  # the job script expands it
            what = f"{path} is another folder in the container, where the home is that of root"
            rooted = Problem(key, what, origin, remedy="name it by its whole path, and mount it (site.mounts)")
            yield HostCheck(rooted, path=path, is_wrong=lambda done: True)
        elif path.startswith(("/", "~/")) and may_be_hidden(request, path):
            what = f"{path} is not seen in the container: it is in none of its mounts"
            hidden = Problem(key, what, origin, remedy=f'add "{path}" to site.mounts')
            yield HostCheck(hidden, path=path, is_wrong=(lambda done: True) if key in kept else _has_succeeded)


_ROOTED = ("enroot", "podman")
"""Runtimes whose containers start as root."""


def _needed(request: JobRequest, host: Host, key: str, path: str, remedy: str) -> HostCheck:
    what = f"there is no {path} on {host.name or 'this machine'}"
    return HostCheck(Problem(key, what, request.loaded.origins[key], remedy=remedy), path=path)


def _list_missing_data(request: JobRequest, code: Code) -> Iterator[Problem]:
    """Data at a relative path that is missing in the folder in which the job runs."""
    for key, path in _list_data(request):
        if not path.startswith(("/", "~/")) and not list_variables(path) and (why := code.why_missing(path)):
            remedy = "correct the path, or name the data by their whole path"
            yield Problem(key, why, request.loaded.origins[key], remedy=remedy)


def _list_data(request: JobRequest) -> Iterator[tuple[str, str]]:
    """Keys and paths of the files that a run file reads."""
    data = request.loaded.values.data
    if request.program.meets_by_itself and load_plugin("data_sources", data.kind).reads_files():
        for key, path in zip(_DATA, (data.path, data.validation), strict=True):
            if path and not path.startswith("python:"):
                yield key, path


def _list_shared(request: JobRequest) -> Iterator[HostCheck]:
    """Paths that all nodes must see: data, and the run directory, through which nodes and jobs exchange state."""
    if request.scheduler.this_machine:
        return
    remedy = f"choose a folder on a shared file system{_storage(request)}"
    yield _shared(request, "run.root", str(request.run), remedy)
    for key, path in _list_data(request):
        if path.startswith("/"):
            yield _shared(request, key, path, remedy)


def _shared(request: JobRequest, key: str, path: str, remedy: str) -> HostCheck:
    """Wrong by the file system types of the folder and of its parents, as far as they exist."""
    above = _local_folder(request, path)
    what = f"{path} is on a node's own disk ({above or 'in memory'}), which other nodes do not see"
    ancestors = (str(folder) for folder in (PurePosixPath(path), *PurePosixPath(path).parents) if folder.name)
    return HostCheck(
        Problem(key, what, request.loaded.origins[key], remedy=remedy),
        ("stat", "-f", "-c", "%T", *ancestors),  # the nearest first
        is_wrong=lambda done: bool(above) or next(iter(done.out.split()), "") in _MEMORY,
    )


def _local_folder(request: JobRequest, path: str) -> str:
    """The node-local folder that contains a path; "" if none is known."""
    disk = request.profile.node.local_disk
    local = (*_OF_ONE_NODE, *([disk] if disk else []))
    return next((folder for folder in local if path == folder or path.startswith(f"{folder}/")), "")


def _storage(request: JobRequest) -> str:
    storage = request.profile.storage
    named = [place for place in (storage.scratch, storage.project, storage.home) if place]
    return f": {', '.join(named)}" if named else ""
