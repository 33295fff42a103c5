"""Checks of a job request on the submitting host, in one exchange: program, Python packages, files, folders.

Invariant: what cannot be judged from here is not reported: a host that does not answer, a path with a variable that is
not set, what modules, images or variables of the job may bring.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath

from shardway.errors import Problem, UserError
from shardway.launch.containers import all_mounts
from shardway.launch.hosts.base import Done, Host
from shardway.launch.submission.command import Code, command_problem
from shardway.launch.submission.job_request import JobRequest, build_job, parse_mount
from shardway.places import expand_home, list_variables
from shardway.plugins import load_plugin, make_plugin

# --- checks on the submitting host: many commands, one exchange

AT = "\0path"
"""In the words of a command: the path that the check is about."""


@dataclass(frozen=True)
class HostCheck:
    """A command on the host, and the problem where its answer is wrong; by default where it fails in time.

    `path`: the path on the host (with `~` and `$NAMES`) that AT stands for, "" for none."""

    problem: Problem
    words: tuple[str, ...] = ("test", "-e", AT)
    path: str = ""
    is_wrong: Callable[[Done], bool] = lambda done: not done.ok and not done.timed_out


def list_host_problems(request: JobRequest, host: Host, code: Code) -> list[Problem]:
    """All problems on the submitting host, each once, in one exchange (and one more if paths have variables): program,
    environment, image, data, output folders. A path with a variable that the host does not set is one too. Raises
    HostUnreachable."""
    looks = [*_look_for_needed(request, host, code), *_look_for_shared(request), *_look_for_conda(request, host)]
    if request.runtime == "none":
        looks += [*_look_for_program(request, host), *_look_for_modules(request, code)]
    else:
        looks += _look_into_container(request, host)
    problems = []
    for key, path in _list_data(request):  # data at a relative path that is missing in the folder in which the job runs
        if not path.startswith(("/", "~/")) and not list_variables(path) and (why := code.why_missing(path)):
            remedy = "correct the path, or name the data by their whole path"
            problems.append(request.problem(key, why, remedy=remedy))
    named = {look.path: look for look in looks if look.path}
    paths: dict[str, PurePosixPath] = {}
    try:
        paths = dict(zip(named, host.expand_many(list(named)), strict=True))
    except UserError:  # one by one, since one of them fails
        for path, look in named.items():
            try:
                paths[path] = host.expand(path)
            except UserError as error:
                what, _, remedy = str(error).partition("\n  To do: ")
                what, remedy = what.removesuffix("."), remedy.removesuffix(".")
                problems.append(replace(look.problem, what=what, allowed="", remedy=remedy))
    commands = {
        look: tuple((str(paths[look.path]) if look.path else "") if word == AT else word for word in look.words)
        for look in looks
        if not look.path or look.path in paths
    }
    each = list(dict.fromkeys(commands.values()))
    answers = dict(zip(each, host.run_many(each), strict=True)) if each else {}
    problems += [look.problem for look, words in commands.items() if look.is_wrong(answers[words])]
    return list(dict.fromkeys(problems))


# --- the program and its Python packages on the host

_FIND = """import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))"""

_ON_PATH = 'PATH=${1:+$1/bin:}$PATH; type -P -- "$0"'

_OTHER = 'found=$(timeout 10 "$0" "${@:4}") && [ -z "$found" ] || exec "$@"'
"""Runs the first Python, and the second one if the first lacks a module."""


def _look_for_program(request: JobRequest, host: Host) -> Iterator[HostCheck]:
    """The program by its path, or by its name on the PATH if nothing in the job changes the PATH."""
    word, where, venv = request.program.words[0], host.name or "this machine", request.venv_folder
    if request.program.calls:  # it comes with the attempt
        return
    for path in dict.fromkeys((word, request.read.script if request.read is not None else "")):
        if path.startswith("/"):
            yield HostCheck(command_problem(f"there is no {path} on {where}", "correct its path"), ("test", "-e", path))
    if not request.program.python and "/" not in word and not request.may_add_to("PATH") and venv is not None:
        remedy = f"correct its name; a file of the code is named by path: ./{word}"
        gone = command_problem(f"there is no program {word} on the PATH of {where}", remedy)
        yield HostCheck(gone, ("bash", "-c", _ON_PATH, word, AT), venv, lambda done: done.code == 1)  # 127: no bash


def _look_for_modules(request: JobRequest, code: Code) -> Iterator[HostCheck]:
    """The modules that the program needs from its virtual environment, or from an interpreter that the user has named;
    one Python looks for all of them and imports none."""
    if request.may_add_to("PYTHONPATH"):
        return
    venv, python, own = request.venv_folder, request.program.interpreter, request.program.meets_by_itself
    module = request.read.module.split(".")[0] if request.read is not None else ""
    if not module.isidentifier() or (code.is_there and any((code.here / m).exists() for m in (module, f"{module}.py"))):
        module = ""  # none, or one of the code
    remedy = "correct its name, or install it there"
    if module and python.startswith("/"):
        gone = command_problem(f"there is no module {module} in the code or for {python}", remedy)
        yield HostCheck(gone, ("timeout", "10", python, "-c", _FIND, module), is_wrong=partial(_is_missing, module))
    names = list(dict.fromkeys((*(("torch",) if own else ()), *make_plugin("launchers", request.launcher).modules)))
    names += ["shardway"] if own else ["cloudpickle"] if request.program.calls else []
    names += [module] if module and not python else []
    # it is asked first, the environment's Python only if a module is missing there
    first = ("bash", "-c", _OTHER, python) if python else ()
    words = (*first, "timeout", "10", AT, "-c", _FIND, *names)  # seconds; a slow file system ends the check
    for name in dict.fromkeys(names) if venv else ():
        missing = command_problem(f"there is no module {name} in the code or in {venv}", remedy)
        if name in ("torch", "shardway", "nvidia_resiliency_ext", "cloudpickle"):
            package = '"shardway[torch]"' if own and name in ("torch", "shardway") else name.replace("_", "-")
            install = f"`{venv}/bin/pip install {package}`, or name another environment"
            missing = request.problem("venv", f"{venv} has no {name}", remedy=install)
        yield HostCheck(missing, words, f"{venv}/bin/python3", partial(_is_missing, name))


def _is_missing(name: str, done: Done) -> bool:
    return done.ok and name in done.out.split()


def _look_for_conda(request: JobRequest, host: Host) -> Iterator[HostCheck]:
    """A conda environment, if conda is a program of the host and not of an environment module."""
    name = request.around.venv.removeprefix("conda:")
    if name == request.around.venv or request.may_add_to("PATH"):
        return
    what = f"there is no conda environment {name} on {host.name or 'this machine'}"
    remedy = "correct its name (`conda env list` has those there are), or make it"
    gone = request.problem("venv", what, remedy=remedy)
    if "/" in name:
        yield HostCheck(gone, path=name)
    else:
        words = ("timeout", "20", "conda", "env", "list")
        yield HostCheck(gone, words, is_wrong=lambda done: done.ok and name not in parse_conda_environments(done.out))


def parse_conda_environments(text: str) -> set[str]:
    """Environment names in the output of `conda env list`: the first word of a line, or the last part of its path."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {words[0] for words in lines} | {words[-1].rpartition("/")[2] for words in lines}


# --- files and folders that the job needs

_OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that are local to each node, unless a machine states otherwise."""

_OF_EACH_NODE = ("/usr/", "/lib", "/etc/", "/var/", "/dev/", "/proc/", "/sys/", "/opt/", "/run/")
"""Folders of files of each node's own (drivers, daemons, devices), which a login node may lack."""

_OF_IMAGES = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt", "/etc", "/root")
"""Folders that every image brings itself; whether a path there exists is not visible from outside."""


def _look_for_needed(request: JobRequest, host: Host, code: Code) -> Iterator[HostCheck]:
    """What must exist before the job starts."""
    venv, image, bare = request.around.venv, request.section.image, request.runtime == "none"
    if venv and not venv.startswith("conda:") and bare:
        yield _needed(request, host, "site.venv", f"{venv}/bin/activate", "make the environment there, or name another")
    if image.startswith(("/", "~", "$")):
        yield _needed(request, host, "site.image", image, "correct the path; `shardway image` makes one")
    for key, path in _list_data(request):
        whole = path.startswith(("/", "~/"))
        if whole and bare:
            yield _needed(request, host, key, path, "correct the path, or copy the data there")
        elif not whole and not list_variables(path) and not code.is_there:
            remedy = "name it by its whole path: the job runs in the run directory"
            yield _needed(request, host, key, str(request.workdir / path), remedy)


def _needed(request: JobRequest, host: Host, key: str, path: str, remedy: str) -> HostCheck:
    what = f"there is no {path} on {host.name or 'this machine'}"
    return HostCheck(request.problem(key, what, remedy=remedy), path=path)


def _list_data(request: JobRequest) -> Iterator[tuple[str, str]]:
    """Keys and paths of the files that a run file reads."""
    data = request.loaded.values.data
    if request.follows is not None and request.loaded.values.pipeline.before:
        return  # a step of the pipeline may make them
    if request.program.meets_by_itself and (data.blend or load_plugin("data_sources", data.kind).reads_files()):
        blended = [("data.blend", part.path) for part in data.blend]
        for key, path in (*(blended or [("data.path", data.path)]), ("data.validation", data.validation)):
            if path and not path.startswith("python:"):
                yield key, path


def _look_for_shared(request: JobRequest) -> Iterator[HostCheck]:
    """Paths that all nodes must see: data, a model in a cache, and the run directory, through which nodes and jobs
    exchange state. They are wrong by the file system types of the folder and of its parents, as far as they exist."""
    if request.scheduler.this_machine:
        return
    storage = request.profile.storage
    named = ", ".join(place for place in (storage.scratch, storage.project, storage.home) if place)
    remedy = "choose a folder on a shared file system" + (f": {named}" if named else "")
    models = [("model.hf", str(folder)) for folder in request.hub_repos if folder.name.startswith("models--")]
    for key, path in (("run.root", str(request.run)), *models, *_list_data(request)):
        if key != "run.root" and not path.startswith("/"):
            continue
        above = _find_local_folder(request, path)
        what = f"{path} is on a node's own disk ({above or 'in memory'}), which other nodes do not see"
        ancestors = (str(folder) for folder in (PurePosixPath(path), *PurePosixPath(path).parents) if folder.name)
        yield HostCheck(
            request.problem(key, what, remedy=remedy),
            ("stat", "-f", "-c", "%T", *ancestors),  # the nearest first
            is_wrong=(lambda done: True) if above else _is_in_memory,
        )


def _is_in_memory(done: Done) -> bool:
    return done.out.startswith(("tmpfs", "ramfs", "devtmpfs"))


def _find_local_folder(request: JobRequest, path: str) -> str:
    """The node-local folder that contains a path; "" if none is known."""
    disk = request.profile.node.local_disk
    local = (*_OF_ONE_NODE, *([disk] if disk else []))
    return next((folder for folder in local if path == folder or path.startswith(f"{folder}/")), "")


# --- containers

_READABLE = '[ ! -e "$0" ] || [ -r "$0" ]'
_SQUASHFS = '[ ! -f "$0" ] || [ ! -r "$0" ] || [ "$(head -c 4 "$0" | tr -d "\\0")" = hsqs ]'
"""Tests the magic number of squashfs (Linux 4.0 and later); a missing file is already reported."""
_ROOTED = ("enroot", "podman")
"""Runtimes whose containers start as root."""


def _look_into_container(request: JobRequest, host: Host) -> Iterator[HostCheck]:
    """What the container needs to start, what it must mount, and paths of the host and of the run file that it does not
    see: they are outside the mounts and outside the folders that images bring themselves."""
    image, runtime, values = request.section.image, request.runtime, request.loaded.values
    for path in dict.fromkeys((request.program.words[0], request.read.script if request.read is not None else "")):
        if path.startswith("/") and _may_be_hidden(request, path):
            where = host.name or "this machine"
            what = f"{path} is a path of {where}, which the container does not see: it is in none of its mounts"
            remedy = f'mount its folder, site.mounts=["{posixpath.dirname(path)}"], or name what is in the image'
            yield HostCheck(command_problem(what, remedy), ("test", "-e", path), is_wrong=lambda done: done.ok)
    if image.startswith(("/", "~", "$")):
        unread = request.problem("image", f"{image} is there, and you may not read it")
        yield HostCheck(unread, ("bash", "-c", _READABLE, AT), image)
        if runtime in ("pyxis", "enroot"):
            what = f"{image} is no squashfs image, which {runtime} starts"
            other = request.problem("image", what, remedy="`shardway image import` makes one")
            yield HostCheck(other, ("bash", "-c", _SQUASHFS, AT), image)
    for mount in filter(None, map(parse_mount, request.section.mounts)):
        own = _find_local_folder(request, mount.source) or mount.source.startswith(_OF_EACH_NODE)
        if mount.source.startswith(("/", "~")) and not own:
            yield _needed(request, host, "site.mounts", mount.source, "correct the path; a mount has to be there")
    if runtime == "apptainer":  # it also mounts what its site configures, which is not visible from here
        return
    data = values.data
    kept = {"data.cache": data.cache, "data.stage": data.stage, "train.compile_cache": values.train.compile_cache}
    paths = [("site.venv", request.around.venv)]
    if request.program.meets_by_itself:
        read = {"data.tokenizer": values.data.tokenizer, "model.hf": values.model.hf}
        paths += [*_list_data(request), *read.items(), *kept.items()]
    for key, path in paths:
        if path.startswith("~/") and runtime in _ROOTED and key != "site.venv":  # the job script expands that one
            what = f"{path} is another folder in the container, where the home is that of root"
            rooted = request.problem(key, what, remedy="name it by its whole path, and mount it (site.mounts)")
            yield HostCheck(rooted, path=path, is_wrong=lambda done: True)
        elif path.startswith(("/", "~/")) and _may_be_hidden(request, path):
            what = f"{path} is not seen in the container: it is in none of its mounts"
            hidden = request.problem(key, what, remedy=f'add "{path}" to site.mounts')
            # a path that is not on the host may be in the image; a cache in the image ends with the container
            yield HostCheck(hidden, path=path, is_wrong=(lambda done: True) if key in kept else lambda done: done.ok)


def _may_be_hidden(request: JobRequest, path: str) -> bool:
    """Whether an absolute path is outside the container's mounts and outside the folders that images bring themselves.
    False if a mount contains a variable, since the path may be inside it."""
    job = build_job(request, 1)
    seen = [mount.target for mount in all_mounts(job)]
    # Apptainer mounts the home folder unless a site forbids it; other runtimes need an option (--container-mount-home).
    home = request.runtime == "apptainer" or any("home" in option for option in job.container.rules.options)
    seen += ["~"] if home else []
    places = [str(expand_home(place)) for place in seen if not place.startswith("$")]
    inside = any(expand_home(path).is_relative_to(place) for place in (*_OF_IMAGES, *places))
    return not inside and len(places) == len(seen)
