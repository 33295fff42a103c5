"""Doors: what another package adds to Shardway, found by its entry points.

A package adds a scheduler, an optimizer or a data source by an entry point of the group:

    [project.entry-points."shardway.schedulers"]
    flux = "shardway_flux:Flux"

From then on `scheduler = "flux"` is allowed in a site profile. Shardway's own entries are in `GROUPS`, in the same
form, and loaded in the same way. `docs/extending.md` walks through the contract of each group.

Invariants:
- A name of Shardway's own never needs a look at the installed packages, so that it costs no time and nothing can
  replace it. Other names are looked up when they are asked for.
- Looking up and listing import no plugin, and this module does not import torch.
- A plugin that cannot be loaded is an error that names its package, not a traceback.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from shardway.errors import UserError
from shardway.version import __version__

PREFIX = "shardway."
"""What the name of each group begins with, as entry points have it."""


@dataclass(frozen=True)
class PluginGroup:
    """One kind of thing that other packages may add.

    `noun` is what messages call it, `key` where its name is written, `contract` the class that each of them derives
    from ("module:class"), `own` what Shardway itself has: name -> "module:attribute".
    """

    noun: str
    key: str
    contract: str
    own: Mapping[str, str]


GROUPS: Mapping[str, PluginGroup] = MappingProxyType(
    {
        "schedulers": PluginGroup(
            "scheduler",
            "scheduler of a site profile",
            "shardway.launch.schedulers.base:Scheduler",
            {
                "local": "shardway.launch.schedulers.local:ThisMachine",
                "slurm": "shardway.launch.schedulers.slurm:Slurm",
                "pbs": "shardway.launch.schedulers.pbs:Pbs",
            },
        ),
        "launchers": PluginGroup(
            "launcher",
            "launcher of a site profile, site.launcher of a run file",
            "shardway.launch.launchers:Launcher",
            {
                "torchrun": "shardway.launch.launchers:Torchrun",
                "srun": "shardway.launch.launchers:Srun",
                "mpirun": "shardway.launch.launchers:Mpirun",
                "agent": "shardway.launch.launchers:Agent",
                "ft_launcher": "shardway.launch.launchers:FtLauncher",
            },
        ),
        "containers": PluginGroup(
            "container runtime",
            "container of a site profile, site.container of a run file",
            "shardway.launch.containers:Container",
            {
                "none": "shardway.launch.containers:NoContainer",
                "pyxis": "shardway.launch.containers:Pyxis",
                "enroot": "shardway.launch.containers:Enroot",
                "apptainer": "shardway.launch.containers:Apptainer",
                "podman": "shardway.launch.containers:Podman",
                "charliecloud": "shardway.launch.containers:Charliecloud",
            },
        ),
    }
)
"""The groups by their names without `PREFIX`."""


@dataclass(frozen=True)
class Plugin:
    """One registered entry: `target` is "module:attribute"; `package` and `version` are those of its distribution."""

    group: str
    name: str
    target: str
    package: str
    version: str

    def load(self) -> Any:
        """The class that the entry names. Raises UserError if it cannot be imported or does not keep the contract."""
        return _load(self)


def list_names(group: str) -> tuple[str, ...]:
    """Every registered name of a group: our own first, then those of other packages by name."""
    return (*GROUPS[group].own, *sorted({plugin.name for plugin in _installed(group)} - set(GROUPS[group].own)))


def is_registered(group: str, name: str) -> bool:
    """Whether a name is registered."""
    return name in GROUPS[group].own or any(plugin.name == name for plugin in _installed(group))


def list_plugins(group: str) -> tuple[Plugin, ...]:
    """Every registered entry of a group, our own first. Entries of other packages that no name reaches, because
    Shardway or another package has that name, are listed too."""
    return (*_own(group), *_installed(group))


def find_plugin(group: str, name: str) -> Plugin:
    """The entry of this name. Raises UserError if there is none, or two other packages have one."""
    target = GROUPS[group].own.get(name)
    if target is not None:
        return Plugin(group, name, target, "shardway", __version__)
    found = [plugin for plugin in _installed(group) if plugin.name == name]
    noun = GROUPS[group].noun
    if not found:
        raise UserError(f'"{name}" is no {noun} that is registered\n  allowed: {", ".join(list_names(group))}')
    if len(found) > 1:
        packages = " and ".join(f"{plugin.package} {plugin.version}" for plugin in found)
        raise UserError(f'the {noun} "{name}" is in two packages, {packages}\n  to do: uninstall one of them')
    return found[0]


def load_plugin(group: str, name: str) -> Any:
    """The class of this name: `find_plugin(group, name).load()`."""
    return find_plugin(group, name).load()


@cache
def make_plugin(group: str, name: str) -> Any:
    """The object of this name, of a group whose classes take no arguments (schedulers, launchers, containers)."""
    return load_plugin(group, name)()


@cache
def make_own(group: str) -> tuple[Any, ...]:
    """An object of each class of our own, in the order of `GROUPS`, without a look at the installed packages."""
    return tuple(make_plugin(group, name) for name in GROUPS[group].own)


@cache
def make_installed(group: str) -> tuple[Any, ...]:
    """An object of each class of other packages; those that cannot be loaded are left out, for they are refused where
    they are named."""
    made = []
    for name in list_names(group)[len(GROUPS[group].own) :]:
        with contextlib.suppress(UserError):
            made.append(make_plugin(group, name))
    return tuple(made)


def _own(group: str) -> Iterator[Plugin]:
    for name, target in GROUPS[group].own.items():
        yield Plugin(group, name, target, "shardway", __version__)


@cache
def _installed(group: str) -> tuple[Plugin, ...]:
    """The entries of other packages, by name."""
    found = entry_points(group=PREFIX + group)
    plugins = {Plugin(group, entry.name, entry.value, *_distribution(entry)) for entry in found}
    return tuple(sorted(plugins, key=lambda plugin: (plugin.name, plugin.package, plugin.target)))


def _distribution(entry: EntryPoint) -> tuple[str, str]:
    return (entry.dist.name, entry.dist.version) if entry.dist else ("an unknown package", "n/a")


@cache
def _load(plugin: Plugin) -> Any:
    group = GROUPS[plugin.group]
    here = f'the {group.noun} "{plugin.name}" of {plugin.package} {plugin.version}'
    try:
        found = EntryPoint(plugin.name, plugin.target, PREFIX + plugin.group).load()
    except Exception as error:  # whatever a foreign module raises while it is imported
        if plugin.package == "shardway":
            raise
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{here} cannot be loaded: {what}\n  to do: upgrade or uninstall {plugin.package}") from error
    contract = EntryPoint("contract", group.contract, PREFIX + plugin.group).load()
    if not (inspect.isclass(found) and issubclass(found, contract)):
        what = f"{plugin.target} is no class derived from {group.contract.replace(':', '.')}"
    elif missing := sorted(getattr(found, "__abstractmethods__", ())):
        what = f"{plugin.target} lacks {', '.join(missing)}, which {group.contract.replace(':', '.')} asks for"
    else:
        return found
    raise UserError(f"{here} cannot be used: {what}\n  to do: tell its authors, or uninstall {plugin.package}")
