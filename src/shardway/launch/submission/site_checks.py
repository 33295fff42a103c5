"""Checks of a job request without its host: the site's limits, names and options, the run file, the earlier run.

Invariants:
- A check returns all of its problems and changes nothing. A limit that the profile does not state is not checked.
- What passes arrives at the scheduler and at the ranks unchanged.
- Run file: what a rank would refuse when it starts is refused before the queue.
- Resumed run: what its ranks would refuse when they resume from the newest checkpoint, or find complete, is refused
  before the queue, as far as this can be decided without the data. Without a checkpoint, or if the record of the run
  cannot be read, nothing is refused.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardway.errors import Problem, UserError
from shardway.hardware.catalogue import facts_of_part, load_accelerators
from shardway.inherited import find_family, name_key
from shardway.launch.containers import all_mounts
from shardway.launch.hosts.base import Host
from shardway.launch.job import SECRETS
from shardway.launch.launchers import list_launchers
from shardway.launch.runs.job_status import Ledger
from shardway.launch.schedulers.base import list_owners
from shardway.launch.submission.job_request import (
    JobRequest,
    build_job,
    is_elastic,
    launcher_of,
    list_memory_options,
    parse_mount,
    runtime_of,
    shape_of,
    walltime_of,
)
from shardway.places import list_variables
from shardway.plugins import list_names, make_plugin
from shardway.refusals import ANOTHER_FOLDER
from shardway.resolve.draft import Circumstances, Resolved
from shardway.resolve.request import (
    ResolveRequest,
    check_same_run,
    find_changes,
    machine_of_known,
    resolve,
    resolve_request,
)
from shardway.rundir.names import find_steps
from shardway.runfile.load import is_text, render_value
from shardway.sites.schema import CPU
from shardway.units import format_bytes, render_seconds

# --- the request against the profile of its site

Check = Callable[[JobRequest], Iterator[Problem]]


def problem(request: JobRequest, key: str, what: str, allowed: str = "", remedy: str = "") -> Problem:
    """A problem of a key of [site], with the origin of its value."""
    return Problem(f"site.{key}", what, request.loaded.origins[f"site.{key}"], allowed, remedy)


def a_wall_time_is_known_and_within_the_limit(request: JobRequest) -> Iterator[Problem]:
    """A job over the limit waits forever, or is refused by the scheduler without naming the limit."""
    walltime, queue = walltime_of(request), request.queue
    if walltime is None:
        unknown = request.section.queue and queue is None and request.profile.queues
        limit = f'does not know the queue "{request.section.queue}"' if unknown else "states no limit"
        what = f"nothing says how long a job may run: the profile of {request.profile.name} {limit}"
        yield problem(request, "walltime", what, 'a time such as "24h"', "set site.walltime, or give --walltime")
    elif queue is not None and queue.max_walltime is not None and walltime > queue.max_walltime:
        limit = render_seconds(queue.max_walltime)
        what = f'{render_seconds(walltime)} is longer than the queue "{queue.name}" of {request.profile.name} allows'
        remedy = f'set site.walltime = "{limit}"; --until-done goes on in as many jobs as the work needs'
        yield problem(request, "walltime", what, f"at most {limit}", remedy)


def nodes_are_within_the_limits(request: JobRequest) -> Iterator[Problem]:
    """A job with more nodes than a queue gives out waits forever."""
    nodes, queue = request.section.nodes, request.queue
    if request.scheduler.this_machine and nodes > 1:
        remedy = "leave it at 1, or name a site that has nodes: --on SITE"
        yield problem(request, "nodes", f"{nodes} nodes, and {request.profile.name} is one machine", "1", remedy)
    if queue is not None and queue.max_nodes is not None and nodes > queue.max_nodes:
        larger = [q.name for q in request.profile.queues if (q.max_nodes or nodes) >= nodes and q is not queue]
        remedy = f"choose another queue: {', '.join(larger)}" if larger else "ask for fewer nodes"
        yield problem(
            request, "nodes", f'{nodes} nodes in the queue "{queue.name}"', f"at most {queue.max_nodes}", remedy
        )
    if queue is not None and queue.min_nodes is not None and nodes < queue.min_nodes:
        yield problem(request, "nodes", f'{nodes} nodes in the queue "{queue.name}"', f"at least {queue.min_nodes}")


def an_account_is_named_where_one_is_needed(request: JobRequest) -> Iterator[Problem]:
    """A job without an account is refused, or charged to an arbitrary one."""
    terms = request.profile.request
    if terms.account == "required" and not request.section.account:
        listing = f"; `{terms.account_command}` lists yours" if terms.account_command else ""
        remedy = f"set site.account{listing}; for good: [defaults] account in a profile of your own (docs/sites.md)"
        yield problem(request, "account", f"{request.profile.name} requires a project account", remedy=remedy)


def ranks_of_a_node_have_an_accelerator_each(request: JobRequest) -> Iterator[Problem]:
    """A rank without an accelerator fails when the job starts, hours later."""
    node, asked = request.profile.node, request.section.ranks_per_node
    most = node.accelerators_per_node if request.loaded.values.run.device != "cpu" else 0
    if asked != "auto" and most and int(asked) > most:
        what = f"{asked} ranks on nodes with {most} accelerators"
        remedy = 'lower site.ranks_per_node, or leave it at "auto"; run.device = "cpu" trains on cores'
        yield problem(request, "ranks_per_node", what, f"at most {most}", remedy)
    if asked != "auto" and node.cores and int(asked) > node.cores:
        yield problem(
            request, "ranks_per_node", f"{asked} ranks on nodes of {node.cores} cores", f"at most {node.cores}"
        )


def memory_is_there_and_may_be_asked_for(request: JobRequest) -> Iterator[Problem]:
    """A job that requests more memory than any node has waits forever."""
    asked, node = request.section.memory, request.profile.node
    if asked == "auto":
        return
    if request.profile.request.memory is False:
        what = f"{request.profile.name} does not take a job that says how much memory it wants"
        yield problem(request, "memory", what, '"auto"', "leave it out")
    if node.memory is not None and int(asked) > node.memory:
        what = f"{format_bytes(int(asked))} of nodes with {format_bytes(node.memory)}"
        yield problem(request, "memory", what, f"at most {format_bytes(node.memory)}")


def a_launcher_goes_with_its_scheduler(request: JobRequest) -> Iterator[Problem]:
    """The launcher of a scheduler needs that scheduler."""
    launcher, scheduler, runtime = launcher_of(request), request.profile.scheduler, runtime_of(request)
    possible = list_launchers(request.scheduler)
    if launcher not in possible:
        allowed = ", ".join(possible)
        yield problem(request, "launcher", f'"{launcher}" does not go with the scheduler {scheduler}', allowed)
    if launcher == "agent" and not request.program.is_training:
        what = '"agent" starts the training of a run file alone, and this is a command of your own'
        yield problem(request, "launcher", what, ", ".join(name for name in possible if name != "agent"))
    if launcher != "agent" and is_elastic(request):
        what = f'"{launcher}" ends the job where a node is lost, and run.elastic wants it to go on'
        yield problem(request, "launcher", what, '"agent" or "auto"', "leave it out, or set run.elastic to off")
    owners = list_owners(f"container={runtime}")
    if owners and not make_plugin("launchers", launcher).works_with_container_of_scheduler:
        what = f'"{launcher}" does not go with {runtime}, whose containers are started by {owners[0].launcher}'
        yield problem(request, "launcher", what, f"torchrun, {owners[0].launcher}")


def a_container_has_a_runtime_and_an_image(request: JobRequest) -> Iterator[Problem]:
    """An image needs a runtime, and a runtime an image."""
    section, runtime = request.section, runtime_of(request)
    if section.image and runtime == "none":
        if section.container == "none":
            what = f'"{section.image}" is named, but site.container = "none"'
        else:
            what = f'"{section.image}" is named, and the profile of {request.profile.name} knows no container runtime'
        runtimes = ", ".join(sorted(set(list_names("containers")) - {"none"}))
        yield problem(request, "image", what, remedy=f"set site.container to one of {runtimes}")
    if runtime != "none" and not section.image:
        images = make_plugin("containers", runtime).images
        yield problem(request, "container", f'"{runtime}" needs an image', remedy=f"set site.image: {images}")
    owners = list_owners(f"container={runtime}")
    if owners and request.scheduler not in owners:
        free = [name for name in list_names("containers") if name != "none" and not list_owners(f"container={name}")]
        yield problem(request, "container", f'"{runtime}" is a part of {owners[0].title}', ", ".join(free))


def the_run_stops_before_its_time_is_over(request: JobRequest) -> Iterator[Problem]:
    """A stop margin as long as the wall-time leaves no time to train."""
    margin, walltime = request.loaded.values.run.stop_margin, walltime_of(request)
    if margin != "auto" and walltime is not None and float(margin) >= walltime:
        what = f"{render_seconds(float(margin))} before the end of a wall-time of {render_seconds(walltime)} is no time"
        yield Problem("run.stop_margin", what, request.loaded.origins["run.stop_margin"], "less than the wall-time")


NUMBER_CHECKS: tuple[Check, ...] = (
    a_wall_time_is_known_and_within_the_limit,
    nodes_are_within_the_limits,
    an_account_is_named_where_one_is_needed,
    ranks_of_a_node_have_an_accelerator_each,
    memory_is_there_and_may_be_asked_for,
    a_launcher_goes_with_its_scheduler,
    a_container_has_a_runtime_and_an_image,
    the_run_stops_before_its_time_is_over,
)


def list_warnings(request: JobRequest) -> list[str]:
    """Warnings about a request that is valid but may not be meant so."""
    warnings, shape, node = [], shape_of(request), request.profile.node
    idle = (node.accelerators_per_node or 0) - shape.ranks_per_node
    if idle > 0 and request.profile.request.whole_nodes and shape.accelerators_per_node:
        warnings.append(
            f"{shape.ranks_per_node} ranks a node leave {idle} of {node.accelerators_per_node} accelerators idle, and "
            f"{request.profile.name} charges whole nodes"
        )
    queue, known = request.section.queue, [entry.name for entry in request.profile.queues]
    if queue and known and queue not in known:
        warnings.append(
            f'the profile of {request.profile.name} does not know the queue "{queue}" (it knows {", ".join(known)}), '
            "so its limits are not checked"
        )
    return warnings


# --- names, options, mounts and variables

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./%*-]*")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL|PRIVATE_KEY", re.IGNORECASE)


def options_do_not_contradict_keys(request: JobRequest) -> Iterator[Problem]:
    """An option and the key of the same meaning: which one wins depends on the scheduler."""
    for name, value in request.section.options.items():
        if found := request.scheduler.check_option(name.lstrip("-"), value):
            yield problem(request, "options", f'"{name}" {found.what}', found.allowed, found.remedy)
        entries = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, str | int | bool) for entry in entries) or any(
            "\n" in str(e) for e in (name, *entries)
        ):
            yield problem(
                request, "options", f'"{name}" is not one line of text', "strings, numbers, true, false, lists of them"
            )


def memory_is_set_once(request: JobRequest) -> Iterator[Problem]:
    """A scheduler refuses two memory settings. If only the site sets the memory, the option replaces it."""
    if request.section.memory != "auto":
        for name in list_memory_options(request):
            what = f'"{name}" and site.memory both say the memory of the job, and {request.scheduler.title} takes one'
            yield problem(request, "options", what, remedy="leave out one of them")


def variables_can_be_set_and_are_no_secrets(request: JobRequest) -> Iterator[Problem]:
    """Other users can read a job script; a variable of the launcher would place every rank at rank 0."""
    for name, value in request.section.environment.items():
        if not _NAME.fullmatch(name):
            yield problem(request, "environment", f'"{name}" is no name of a variable', "letters, digits and _")
        elif (family := find_family(name)) and name not in family.settings:
            key = name_key(name)
            what = f'"{name}" ({family.subject}) is not for a run to set'
            yield problem(request, "environment", what, remedy=f"set {key} in its place" if key else "leave it out")
        elif _SECRET.search(name):
            what = f'"{name}" looks like a secret, and job scripts and run files are read by others'
            yield problem(
                request, "environment", what, remedy=f"write {name}=... into {SECRETS} (chmod 600) on the site"
            )
        if isinstance(value, dict | list) or "\0" in str(value):
            yield problem(
                request, "environment", f"{name} = {render_value(value)} is not a string", "a string or a number"
            )


def names_are_plain(request: JobRequest) -> Iterator[Problem]:
    """Schedulers cut such words at blanks, or interpret a part of them."""
    for key in ("queue", "account", "accelerator_type"):
        value = getattr(request.section, key)
        if not _PLAIN.fullmatch(value):
            yield problem(
                request,
                key,
                f'"{value}" holds characters that schedulers do not take',
                "letters, digits, _ @ + = : , . / % * -",
            )


def the_run_directory_of_a_training_is_text(request: JobRequest) -> Iterator[Problem]:
    """A training stores its own path in `resolved.toml`, which is UTF-8; a user's command does not."""
    if request.read is None and not is_text(str(request.run)):
        what = f"the run directory {str(request.run)!a} is not UTF-8 text"
        yield Problem("run.root", what, remedy=ANOTHER_FOLDER)


def an_image_is_one_that_its_runtime_starts(request: JobRequest) -> Iterator[Problem]:
    """Enroot and Charliecloud start files; an image in a registry must be fetched first."""
    image, runtime = request.section.image, runtime_of(request)
    if not image or runtime == "none" or image.startswith(("/", "~", "$", ".")):
        return
    if way := make_plugin("containers", runtime).starts_files:
        what = f'"{image}" is no path, and {runtime} starts files'
        yield problem(request, "image", what, remedy=way.replace("IMAGE", image))
        return
    from shardway.launch.image.request import parse_uri

    try:
        parse_uri(image)
    except UserError as error:
        yield problem(
            request, "image", str(error).splitlines()[0], "a path on the site, or docker://REGISTRY/IMAGE:TAG"
        )


def mounts_are_valid(request: JobRequest) -> Iterator[Problem]:
    """SOURCE:TARGET[:ro], as every runtime takes it; some runtimes split paths at more characters than the colon."""
    for text in request.section.mounts:
        if parse_mount(text) is None:
            yield problem(request, "mounts", f'"{text}" is no mount', "SOURCE:TARGET or SOURCE:TARGET:ro")
    runtime = runtime_of(request)
    divider = re.compile(make_plugin("containers", runtime).divider)
    for mount in all_mounts(build_job(request, 1)) if runtime != "none" else ():
        for path in dict.fromkeys((mount.source, mount.target)):
            if found := divider.search(path):
                sign = {" ": "a blank", ",": "a comma", ":": "a colon"}.get(found[0], "a control character")
                what = f'{runtime} cannot mount "{path}": it takes {sign} for the end of a path'
                yield problem(request, "container", what, remedy="choose a folder with a plain name (run.root, --dir)")


def own_folders_have_no_variables(request: JobRequest) -> Iterator[Problem]:
    """The job's shell expands `$NAME` in paths that the user writes, and would do so in the name of an existing
    folder."""
    job = build_job(request, 1)
    work = None if job.around.workdir.is_relative_to(job.run) else job.around.workdir
    own = [str(path) for path in (job.run, work, request.project) if path is not None]
    held = dict.fromkeys(own if runtime_of(request) != "none" else (), "run.root")
    if request.section.venv == "auto" and job.around.venv:
        held[job.around.venv] = "site.venv"
    for path, key in held.items():
        if names := list_variables(path):
            what = f'the folder "{path}" has ${names[0]} in its name, which the shell of a job takes for a variable'
            yield Problem(key, what, remedy="give it another name, or name another folder")


NAME_CHECKS: tuple[Check, ...] = (
    options_do_not_contradict_keys,
    memory_is_set_once,
    variables_can_be_set_and_are_no_secrets,
    names_are_plain,
    the_run_directory_of_a_training_is_text,
    an_image_is_one_that_its_runtime_starts,
    mounts_are_valid,
    own_folders_have_no_variables,
)


# --- the rules of the run file


def check_run(run_request: ResolveRequest, site: str, request: JobRequest) -> Resolved:
    """Check the run file for the ranks and the machine that the job will have, and return the run as they will have it.

    `site` is that of --on. Raises UserError with every problem."""
    values, profile, shape = request.loaded.values, request.profile, shape_of(request)
    if values.parallel.layout == "auto" or values.model.hf:
        return _check_planned(run_request, site, request)
    unknown = shape.ranks_per_node if values.run.device == "cuda" else 0
    accelerators = profile.node.accelerators_per_node
    part = load_accelerators().get(profile.node.accelerator or CPU)
    circumstances = Circumstances(
        ranks=shape.ranks,
        ranks_per_node=shape.ranks_per_node,
        usable_cores=profile.node.cores or os.cpu_count() or 1,
        accelerators=unknown if accelerators is None else accelerators,
        site=profile.name,
        own_model=run_request.own_model,
        devices=(facts_of_part(part),) if part is not None else (),
    )
    return resolve(request.loaded, circumstances)  # the planner, which is slow to import, would only pick a micro-batch


def _check_planned(run_request: ResolveRequest, site: str, request: JobRequest) -> Resolved:
    """The same if the planner chooses the layout, or if the config of a checkpoint must be read."""
    shape = shape_of(request)
    machine = machine_of_known(request.profile) if request.loaded.values.run.device != "cpu" else None
    named = [f"site.name={site}"] if site else []
    run_request = replace(run_request, overrides=(*run_request.overrides, *named))
    return resolve_request(run_request, shape.ranks, shape.ranks_per_node, planned=machine).resolved


# --- a resumed run: changed keys, or complete

_SAY_HOW_MANY = frozenset(("train.steps", "train.global_batch"))
"""Keys that decide how many steps a number of samples, tokens or epochs is."""

_WAYS_OUT = "or submit it as another run (`shardway submit` with another run.name or --dir)"


def check_goes_on(host: Host, ledger: Ledger, resolved: Resolved) -> None:
    """Raise UserError if a key has changed that must not change between attempts, or if the run is complete."""
    run = ledger.run
    listed, record = host.run_many([("ls", str(run.checkpoints)), ("cat", str(run.resolved_path))])
    steps = find_steps(listed.out.splitlines())
    if not steps or not record.ok:
        return
    try:
        saved = tomllib.loads(record.out)
    except (ValueError, RecursionError):
        return  # its ranks report what to do about it
    tables = {name: table for name, table in saved.items() if isinstance(table, dict)}
    check_same_run(tables, resolved, str(run.path), _WAYS_OUT)
    total = _find_total(tables, resolved, ledger.status)
    if total is not None and steps[-1] >= total:
        raise UserError(
            f"{run.path} has a checkpoint of step {steps[-1]}, and {total} steps are asked for, so a job would have "
            f"nothing to do.\n  To do: raise train.steps, {_WAYS_OUT}."
        )


def _find_total(saved: Mapping[str, Any], resolved: Resolved, status: Mapping[str, Any]) -> int | None:
    """The requested number of steps. If it depends on the data: the recorded number if nothing that decides it has
    changed; else None."""
    if resolved.values.train.steps.unit == "steps":
        return math.ceil(resolved.values.train.steps.amount)
    if any(key in _SAY_HOW_MANY or key.startswith("data.") for key in find_changes(saved, resolved)):
        return None
    total = status.get("total_steps")
    return total if isinstance(total, int) else None
