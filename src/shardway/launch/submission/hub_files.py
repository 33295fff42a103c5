"""Looks before the queue for what a job needs of a hub: its model becomes the folder of a snapshot, and what is missing
or damaged there is a problem.

Invariants:
- Only reads, and asks no hub. A job gets the folder of a snapshot that is whole, and no name that it would have to
  look up; without such a snapshot its run file is unchanged.
- What is damaged is a problem on every site: libraries take what is in the cache as it is. What is missing is one where
  the nodes have no network, a warning where the profile does not state that, and nothing where they have one.
- Where the files are on another host, that host looks at its cache, and the run file is unchanged; where it cannot
  look, that is a warning.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardway.errors import Problem, ShardwayError, UserError, list_some
from shardway.hfconfig import CONFIG
from shardway.launch.hosts.base import Host
from shardway.launch.schedulers.base import find_scheduler
from shardway.launch.submission.hub_on_host import look_on_host
from shardway.places import expand_place, list_unset
from shardway.prefetch.cache import HubName, find_cache, find_hub_name, is_offline, name_of_snapshot
from shardway.prefetch.check import FileFault, ModelNeeds, check_cached, check_model, check_named_file, check_snapshot
from shardway.prefetch.wanted import variables_of_job
from shardway.runfile.load import LoadedRunFile, render_value
from shardway.sites.schema import SiteProfile


@dataclass
class HubFiles:
    """What was found. `loaded`: the run, with the folder of its model in place of a hub's name, if that is whole.
    `repos`: the parts of the cache that what is whole there needs. `folder`: that of the model, whole or not, by which
    the run is judged. `hides_rest`: the config of the model cannot be read, so the rest of the run cannot be judged."""

    loaded: LoadedRunFile
    repos: tuple[Path, ...] = ()
    folder: Path | None = None
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    hides_rest: bool = False

    @property
    def override(self) -> str:
        """The folder as model.hf on a command line; "" where no snapshot is here."""
        return f"model.hf={render_value(str(self.folder))}" if self.folder else ""


def find_hub_files(loaded: LoadedRunFile, profile: SiteProfile, host: Host, *, in_image: bool) -> HubFiles:
    """Look for what a run needs of a hub. `in_image`: its ranks run in a container, whose image may have files that are
    not here."""
    found, values = HubFiles(loaded), loaded.values
    name = find_hub_name(values.model.hf)
    needs = ModelNeeds(weights=values.model.hf_weights)
    if host.name:
        if name and profile.internet.nodes != "direct":
            _look_on_host(found, name, profile, host, needs)
        return found
    if name:
        _look_into_cache(found, name, profile, needs)
    elif values.model.hf and not list_unset(values.model.hf):
        folder = expand_place(values.model.hf)
        if os.path.isdir(folder):
            _add(found, "model.hf", folder, check_model(folder, needs))
    for key, snapshot in _list_snapshots(loaded):
        found.repos = tuple(dict.fromkeys((*found.repos, snapshot.parent.parent)))
        if key in ("data.path", "data.validation"):
            _add(found, key, snapshot, check_snapshot(snapshot))
    for key, path in _list_named_files(loaded):
        fault = check_named_file(path, template=key == "data.chat_template")
        if fault is not None and not (fault.missing and in_image):
            _add(found, key, path.parent, [fault])
    return found


def _look_into_cache(found: HubFiles, name: HubName, profile: SiteProfile, needs: ModelNeeds) -> None:
    variables = variables_of_job(found.loaded, profile)
    try:
        cache = find_cache(variables)
    except ShardwayError as error:
        found.warnings.append(f"whether {name} is in the cache was not looked at: {str(error).partition(chr(10))[0]}")
        return
    model = check_cached(name, cache, needs)
    here = find_scheduler(profile.scheduler).this_machine
    nodes = profile.internet.nodes
    offline = nodes == "none" or is_offline(variables) or (here and is_offline())
    certain = [fault for fault in model.faults if not fault.doubtful]
    kept = [fault for fault in certain if offline or not fault.missing]
    where = found.folder = model.folder
    if model.folder is not None and not certain:
        found.loaded = found.loaded.with_value("model.hf", str(model.folder), f'"{name}" in the cache')
        found.repos = (cache.repo(name).folder,)
    elif nodes is None and not here and (absent := [fault for fault in certain if fault not in kept]):
        found.warnings.append(
            f"{name} is not wholly in the cache ({list_some([str(fault) for fault in absent], 3)}), and the profile of "
            f"{profile.name} does not state whether its nodes have a network; without one the job would end: "
            f"{absent[0].remedy}"
        )
    found.hides_rest = bool(kept) and (model.folder is None or any(fault.file == CONFIG for fault in kept))
    _add(
        found,
        "model.hf",
        where or cache.folder,
        [*kept, *(fault for fault in model.faults if fault.doubtful)],
        str(name),
    )


def describe_uncached(loaded: LoadedRunFile, profile: SiteProfile) -> str:
    """What the cache of this machine lacks of the model that a run names; "" where nothing is missing, it cannot be
    looked at, or the site is another machine (its scheduler is not here), of which nothing is known. Only reads."""
    name, scheduler = find_hub_name(loaded.values.model.hf), find_scheduler(profile.scheduler)
    if name is None or not (scheduler.this_machine or shutil.which(scheduler.submit("job", "log", "")[0])):
        return ""
    try:
        cache = find_cache(variables_of_job(loaded, profile))
    except ShardwayError:
        return ""
    faults = [
        fault
        for fault in check_cached(name, cache, ModelNeeds(weights=loaded.values.model.hf_weights)).faults
        if not fault.doubtful
    ]
    if not faults:
        return ""
    what = list_some([str(fault) for fault in faults], 3)
    return f"model.hf: {name} is not whole in the cache {cache.folder} of this machine ({what})"


def _look_on_host(found: HubFiles, name: HubName, profile: SiteProfile, host: Host, needs: ModelNeeds) -> None:
    """Note what the cache of another host lacks. Raises HostUnreachable."""
    variables = variables_of_job(found.loaded, profile)
    venv = found.loaded.values.site.venv
    try:
        model = look_on_host(host, name, needs, variables, venv)
    except UserError:
        model = None  # a path that the host does not know is a problem of its own
    if model is None:
        found.warnings.append(
            f"whether {name} is whole in the cache on {host.name} could not be looked at; there, "
            f"`shardway prefetch --check --model {name}` shows it"
        )
        return
    nodes, origin = profile.internet.nodes, found.loaded.origins["model.hf"]
    offline = nodes == "none" or is_offline(variables)
    for fault in model.faults:
        what = str(fault) if fault.file == str(name) else f'"{name}": {fault} in {model.cache}'
        if fault.doubtful or (fault.missing and not offline):
            found.warnings.append(f"model.hf: {what} on {host.name}, for this shell; {fault.remedy}")
        else:
            found.problems.append(Problem("model.hf", f"{what} on {host.name}", origin, remedy=fault.remedy))


def _add(found: HubFiles, key: str, folder: Path, faults: list[FileFault], name: str = "") -> None:
    origin = found.loaded.origins[key]
    for fault in faults:
        subject = f'"{name}": ' if name and fault.file != name else ""
        what = f"{subject}{fault}" if name else f"{folder / fault.file} {fault.what}"
        if fault.doubtful:
            found.warnings.append(f"{key}: {what}")
        else:
            found.problems.append(Problem(key, what, origin, remedy=fault.remedy))


def _list_snapshots(loaded: LoadedRunFile) -> Iterator[tuple[str, Path]]:
    """Snapshots of the cache in which paths of a run lie, by their keys."""
    model, data = loaded.values.model, loaded.values.data
    named = [("model.hf", model.hf), ("data.tokenizer", data.tokenizer), ("data.chat_template", data.chat_template)]
    named += [("data.path", part.path) for part in data.blend] or [("data.path", data.path)]
    for key, text in (*named, ("data.validation", data.validation)):
        path = expand_place(text) if text.startswith(("/", "~", "$")) else Path()
        for folder in (path, *path.parents):
            if name_of_snapshot(folder) and folder.is_dir():
                yield key, folder


def _list_named_files(loaded: LoadedRunFile) -> Iterator[tuple[str, Path]]:
    """Files of models that a run names by whole paths: its tokenizer and its chat template."""
    data = loaded.values.data
    named: Mapping[str, str] = {"data.tokenizer": data.tokenizer, "data.chat_template": data.chat_template}
    for key, text in named.items():
        if text not in ("bytes", "chatml", "") and text.startswith(("/", "~/")):
            yield key, expand_place(text)
