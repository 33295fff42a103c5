"""Names, options, mounts and variables of a wish: whether they can be said, and whether they contradict a key.

Invariant: what passes here arrives unchanged. This module must not look at files or machines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shardway.errors import Problem, UserError
from shardway.inherited import find_family, name_key
from shardway.launch.containers.base import all_mounts
from shardway.launch.job import SECRETS
from shardway.launch.submission.checks.numbers import NAMED_BY_KEYS, Check, problem
from shardway.launch.submission.job_request import JobRequest, build_job, list_memory_options, parse_mount, runtime_of
from shardway.places import list_variables
from shardway.runfile.load import is_text

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./%*-]*")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL|PRIVATE_KEY", re.IGNORECASE)


def options_do_not_contradict_keys(wish: JobRequest) -> Iterator[Problem]:
    """An option beside the key of the same meaning would win on one scheduler and lose on another."""
    named = NAMED_BY_KEYS[wish.profile.scheduler]
    for name, value in wish.section.options.items():
        bare = name.lstrip("-")
        if bare in named and not (bare == "gres" and _has_no_gpu(value)):
            what = (
                f'"{name}" is what {named[bare]} says' if named[bare] else f'"{name}" is set by the job script itself'
            )
            yield problem(wish, "options", what, remedy=f"use {named[bare]}" if named[bare] else "leave it out")
        if bare == "l" and wish.profile.scheduler == "pbs":
            entries = value if isinstance(value, list) else [value]
            if any(str(entry).startswith(("select", "walltime", "nodes", "place")) for entry in entries):
                what = '"l" with select, nodes, place or walltime is what the other keys of [site] say'
                yield problem(wish, "options", what, 'other resources, such as {l = "filesystems=home"}')
        entries = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, str | int | bool) for entry in entries) or any(
            "\n" in str(e) for e in (name, *entries)
        ):
            yield problem(
                wish, "options", f'"{name}" is not one line of text', "texts, numbers, true, false, lists of them"
            )


def memory_is_said_once(wish: JobRequest) -> Iterator[Problem]:
    """sbatch would refuse both; where the site alone says the memory, the option stands in its place."""
    if wish.section.memory != "auto":
        for name in list_memory_options(wish):
            what = f'"{name}" and site.memory both say the memory of the job, and Slurm takes one'
            yield problem(wish, "options", what, remedy="leave out one of them")


def _has_no_gpu(gres: Any) -> bool:
    """Whether generic resources of Slurm are others than those that keys ask for: local disks, licences of a node."""
    entries = gres if isinstance(gres, list) else [gres]
    return not any(part.strip().startswith("gpu") for entry in entries for part in str(entry).split(","))


def variables_can_be_set_and_are_no_secrets(wish: JobRequest) -> Iterator[Problem]:
    """A job script is read by others; a variable of the launcher would place every rank at rank 0."""
    for name, value in wish.section.environment.items():
        if not _NAME.fullmatch(name):
            yield problem(wish, "environment", f'"{name}" is no name of a variable', "letters, digits and _")
        elif (family := find_family(name)) and name not in family.settings:
            key = name_key(name)
            what = f'"{name}" ({family.subject}) is not for a run to set'
            yield problem(wish, "environment", what, remedy=f"set {key} in its place" if key else "leave it out")
        elif _SECRET.search(name):
            what = f'"{name}" looks like a secret, and job scripts and run files are read by others'
            yield problem(wish, "environment", what, remedy=f"write {name}=... into {SECRETS} (chmod 600) on the site")
        if isinstance(value, dict | list) or "\0" in str(value):
            yield problem(wish, "environment", f'"{name}" is not a text', "a text or a number")


def names_are_plain(wish: JobRequest) -> Iterator[Problem]:
    """Schedulers cut such words at blanks, or take a part of them for something else."""
    for key in ("queue", "account", "accelerator_type"):
        value = getattr(wish.section, key)
        if not _PLAIN.fullmatch(value):
            yield problem(
                wish,
                key,
                f'"{value}" holds characters that schedulers do not take',
                "letters, digits, _ @ + = : , . / % * -",
            )


def the_run_directory_of_a_training_is_text(wish: JobRequest) -> Iterator[Problem]:
    """The training keeps its own path in `resolved.toml`; a command of one's own does not."""
    if wish.read is None and not is_text(str(wish.run)):
        what = f"the run directory {str(wish.run)!a} is not UTF-8 text"
        yield Problem("run.root", what, remedy="choose another folder with --dir or run.root")


def an_image_is_one_that_its_runtime_starts(wish: JobRequest) -> Iterator[Problem]:
    """Enroot and Charliecloud start files; a name in a registry has to be fetched first."""
    image, runtime = wish.section.image, runtime_of(wish)
    if not image or runtime == "none" or image.startswith(("/", "~", "$", ".")):
        return
    if runtime in ("enroot", "charliecloud"):
        remedy = f"`shardway image import {image}` makes the file" if runtime == "enroot" else "name the file or folder"
        yield problem(wish, "image", f'"{image}" is no path, and {runtime} starts files', remedy=remedy)
        return
    from shardway.launch.image.uri import parse_uri

    try:
        parse_uri(image)
    except UserError as error:
        yield problem(wish, "image", str(error).splitlines()[0], "a path on the site, or docker://REGISTRY/IMAGE:TAG")


def mounts_can_be_said(wish: JobRequest) -> Iterator[Problem]:
    """SOURCE:TARGET[:ro], as every runtime takes it; some take paths apart at more than the colon."""
    for text in wish.section.mounts:
        if parse_mount(text) is None:
            yield problem(wish, "mounts", f'"{text}" is no mount', "SOURCE:TARGET or SOURCE:TARGET:ro")
    runtime = runtime_of(wish)
    divider = _DIVIDERS.get(runtime, _COLON)
    for mount in all_mounts(build_job(wish, 1)) if runtime != "none" else ():
        for path in dict.fromkeys((mount.source, mount.target)):
            if found := divider.search(path):
                sign = {" ": "a blank", ",": "a comma", ":": "a colon"}.get(found[0], "a control character")
                what = f'{runtime} cannot mount "{path}": it takes {sign} for the end of a path'
                yield problem(wish, "container", what, remedy="choose a folder with a plain name (run.root, --dir)")


def own_folders_have_no_variables(wish: JobRequest) -> Iterator[Problem]:
    """The job's shell fills in `$NAME` where a person writes it; in the name of a folder that is there it would too."""
    job = build_job(wish, 1)
    work = None if job.around.workdir.is_relative_to(job.run) else job.around.workdir
    own = [str(path) for path in (job.run, work, wish.project) if path is not None]
    held = dict.fromkeys(own if runtime_of(wish) != "none" else (), "run.root")
    if wish.section.venv == "auto" and job.around.venv:
        held[job.around.venv] = "site.venv"
    for path, key in held.items():
        if names := list_variables(path):
            what = f'the folder "{path}" has ${names[0]} in its name, which the shell of a job takes for a variable'
            yield Problem(key, what, remedy="give it another name, or name another folder")


_COLON = re.compile(r"[:\x00-\x1f]")
_DIVIDERS = {"pyxis": re.compile(r"[:,\s]"), "enroot": re.compile(r"[:\s]"), "apptainer": re.compile(r"[:,]")}

CHECKS: tuple[Check, ...] = (
    options_do_not_contradict_keys,
    memory_is_said_once,
    variables_can_be_set_and_are_no_secrets,
    names_are_plain,
    the_run_directory_of_a_training_is_text,
    an_image_is_one_that_its_runtime_starts,
    mounts_can_be_said,
    own_folders_have_no_variables,
)
