"""From a request to the resolved run: reads the run file, the site profile and this machine.

Invariant: the same request on the same machine gives the same `Resolved` on every rank, so each rank resolves for
itself. This is the only module of its package that reads files, and it writes none.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardway.errors import Problem, ShardwayError, UserError, check_no_problems
from shardway.hardware import probe
from shardway.hardware.catalogue import load_accelerators
from shardway.hardware.device import DeviceFacts, facts_of_found, facts_of_part
from shardway.hfconfig import ModelFacts, locate_model, read_facts
from shardway.places import expand_place, list_unset
from shardway.resolve.build import name_of_run, resolve
from shardway.resolve.device_defaults import KEYS as DEVICE_KEYS
from shardway.resolve.draft import Circumstances, Resolved
from shardway.rundir.directory import RunDir
from shardway.runfile.load import LoadedRunFile, is_text, load_run
from shardway.runfile.schema import RunFile
from shardway.sites.find import UnknownSite
from shardway.sites.load import load_site
from shardway.sites.schema import CPU, SiteProfile

if TYPE_CHECKING:  # the planner is loaded only to plan
    from shardway.plan.machine import Machine
    from shardway.plan.shapes.measured import Shape

LAPTOP = "laptop"
"""The profile whose node facts are all detected."""

_OVERRIDE = re.compile(r"[A-Za-z_]+\.[A-Za-z0-9_.]+\s*=")


@dataclass(frozen=True)
class ResolveRequest:
    """A run file (None: the default run), `key.path=value` overrides, the run directory (None: root/name).

    A script with its `own_model` does not have to match [model] and [data], and its directory is a default.
    """

    run_file: Path | None = None
    overrides: tuple[str, ...] = ()
    directory: Path | None = None
    fresh: bool = False
    own_model: bool = False


def parse_words(words: Sequence[str]) -> ResolveRequest:
    """The request from words such as `run.toml train.steps=500`. Raises UserError if they name two run files."""
    overrides = tuple(word for word in words if _is_override(word))
    files = [word for word in words if not _is_override(word)]
    if len(files) > 1:
        raise UserError(
            f"a run has one run file, and {len(files)} words could be one: {', '.join(files)}.\n"
            "  allowed: at most one path, and section.key=value for each key to set, such as train.steps=500"
        )
    return ResolveRequest(Path(files[0]) if files else None, overrides)


def _is_override(word: str) -> bool:
    """Whether a word is an override; also `steps=500`, whose missing section is reported, unless a file has that
    name."""
    return bool(_OVERRIDE.match(word)) or ("=" in word and not os.path.exists(word))


def find_folder(path: str | Path) -> Path:
    """A folder that a run writes to, with `~` and `$VARIABLES` filled in (`check_variables` reports unset ones). Raises
    UserError if the system has no such home.

    A folder literally called `~` is dangerous: removing it in a shell would remove the home.
    """
    folder = expand_place(path)
    if str(folder).startswith("~"):
        raise UserError(
            f"the run directory {folder} begins with ~, and this machine knows no such home folder.\n"
            "  To do: write that folder out, with --dir or run.root."
        )
    return folder


@dataclass(frozen=True)
class Resolution:
    """A request, what was read for it, and the result."""

    request: ResolveRequest
    loaded: LoadedRunFile
    resolved: Resolved

    @property
    def directory(self) -> RunDir:
        """The run directory."""
        values = self.resolved.values.run
        return RunDir(find_folder(values.root) / values.name)

    def with_default(self, dotted: str, value: Any, origin: str) -> Resolution:
        """The same resolution with `value` for a key that is not set."""
        loaded = self.loaded.with_default(dotted, value, origin)
        return replace(self, loaded=loaded, resolved=resolve(loaded, self.resolved.circumstances))

    def under(self, **circumstances: Any) -> Resolution:
        """The same resolution under other circumstances; not for a run that the data has completed."""
        known = replace(self.resolved.circumstances, **circumstances)
        return replace(self, resolved=resolve(self.loaded, known))


def check_variables(loaded: LoadedRunFile) -> None:
    """Raise UserError for paths of a new run whose `$VARIABLES` are not set here."""
    problems = []
    for dotted in _PATHS:
        section, name = dotted.split(".")
        value = str(getattr(getattr(loaded.values, section), name))
        if unset := list_unset(value):
            what = f'"{value}": ${unset[0]} is not set here'
            remedy = "set that variable, or write the path out"
            problems.append(Problem(dotted, what, loaded.origins[dotted], remedy=remedy))
    check_no_problems(str(loaded.path or "the command line"), problems)


_PATHS = (
    *("run.root", "data.path", "data.validation", "data.tokenizer", "data.cache", "model.hf", "train.compile_cache"),
)
"""Keys whose value is a path on the machine that trains."""


def resolve_request(
    request: ResolveRequest, ranks: int = 1, ranks_per_node: int = 1, planned: Machine | None = None
) -> Resolution:
    """Read and resolve, for this machine or for one that is `planned`. Raises UserError with every problem."""
    return resolve_loaded(request, load_run(request.run_file, request.overrides), ranks, ranks_per_node, planned)


def resolve_loaded(
    request: ResolveRequest,
    loaded: LoadedRunFile,
    ranks: int = 1,
    ranks_per_node: int = 1,
    planned: Machine | None = None,
) -> Resolution:
    """The same for a run file that is already loaded."""
    if request.directory is not None:
        loaded = _place(loaded, request.directory, by_default=request.own_model)
    values, machine = loaded.values, probe.probe_machine()
    site = site_of(loaded, machine)
    known = planned or (_planned_machine(site, machine) if values.run.device != "cpu" else None)
    circumstances = Circumstances(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        usable_cores=machine.usable_cores,
        accelerators=planned.per_node if planned else len(machine.accelerators),
        site=site.name,
        hf=_facts_of(values.model.hf),
        machine=known,
        shape=_shape_of(values.model.hf) if known or values.parallel.layout == "auto" else None,
        own_model=request.own_model,
        local_disk=site.node.local_disk or "",
        devices=(facts_of_part(planned.accelerator),) if planned else _list_devices(values.run.device, machine),
    )
    if not request.fresh:
        with contextlib.suppress(ShardwayError, OSError):  # reported when the run begins
            place = RunDir(find_folder(values.run.root) / name_of_run(loaded))
            circumstances = replace(circumstances, before=read_before(place, values))
    return Resolution(request, loaded, resolve(loaded, circumstances))


def read_before(run: RunDir, values: RunFile) -> dict[str, Any]:
    """The values that earlier attempts of a run used for the keys that follow the device.

    Empty if there is no checkpoint to resume from. Raises JobError, OSError if its record cannot be read.
    """
    if not run.checkpoint_steps() and values.checkpoint.local_every == "off":
        return {}
    saved, found = run.read_resolved(), dict[str, Any]()
    for section, name in (key.split(".") for key in DEVICE_KEYS):
        value = saved.get(section, {}).get(name, "auto")
        found |= {f"{section}.{name}": value} if value != "auto" else {}
    return found


def _list_devices(kind: str, machine: probe.LocalMachine) -> tuple[DeviceFacts, ...]:
    """The abilities of this machine's accelerators, each kind once."""
    return tuple(dict.fromkeys(facts_of_found(each) for each in machine.accelerators)) if kind != "cpu" else ()


def site_of(loaded: LoadedRunFile, machine: probe.LocalMachine | None = None) -> SiteProfile:
    """The profile that a run names, seen from this machine. Raises UserError, with the origin of an unknown name."""
    try:
        return load_site(loaded.values.site.name, lambda: machine or probe.probe_machine())
    except UnknownSite as error:
        raise UserError(f"site.name ({loaded.origins['site.name']}): {error}") from None


def _facts_of(hf: str) -> ModelFacts | None:
    """The facts of `model.hf`'s config, if it is set."""
    return read_facts(locate_model(hf, weights=False)) if hf else None


def _shape_of(hf: str) -> Shape | None:
    """The layers of `model.hf`; None if it is not set, or of a family that the planner does not support."""
    if not hf:
        return None
    from shardway.plan.shapes.huggingface import read_shape

    try:
        return read_shape(hf)
    except UserError:
        return None


def _planned_machine(site: SiteProfile, found: probe.LocalMachine) -> Machine | None:
    """The machine of the site or, if its profile names no accelerator, nodes like this one."""
    if site.node.accelerator is None:
        own = load_site(LAPTOP, lambda: found).node
        facts = {"accelerator": own.accelerator, "accelerators_per_node": own.accelerators_per_node}
        site = site.model_copy(update={"node": site.node.model_copy(update=facts)})
    return machine_of_known(site)


def machine_of_known(site: SiteProfile) -> Machine | None:
    """The machine of a site; None for nodes without accelerators, and if the catalogue lacks their memory and rates."""
    part = load_accelerators().get(site.node.accelerator or CPU)
    if part is None or not (part.memory_bytes and part.peak_flops and site.node.accelerators_per_node):
        return None
    from shardway.plan.site import machine_of_site

    return machine_of_site(site)


def _place(loaded: LoadedRunFile, directory: Path, *, by_default: bool) -> LoadedRunFile:
    """The run with a directory as its root and name, so that `resolved.toml` leads back to it.

    The directory of `--dir` overrides the keys; that of a script applies only if no key sets it.
    """
    path = find_folder(directory)
    path = path if path.name not in ("", "..") else path.resolve()
    if not path.name:
        raise UserError(f"the run directory {directory} is the root of the file system; name a folder in it.")
    if not is_text(str(path)):
        raise UserError(
            f"the run directory {str(path)!a} is not UTF-8 text, and its name stands in text files.\n"
            "  To do: choose another name with --dir, or run.name in the run file."
        )
    origin = "shardway.start(directory=...)" if by_default else "--dir"
    for dotted, value in (("run.root", str(path.parent)), ("run.name", path.name)):
        put: Callable[[str, str, str], LoadedRunFile] = loaded.with_default if by_default else loaded.with_value
        loaded = put(dotted, value, origin)
    return loaded
