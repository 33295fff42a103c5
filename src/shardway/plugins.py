"""Doors: what another package adds to Shardway, found by its entry points.

A package adds a scheduler, an optimizer or a data source by an entry point of the group:

    [project.entry-points."shardway.schedulers"]
    flux = "shardway_flux:Flux"

From then on `scheduler = "flux"` is allowed in a site profile. Shardway's own entries are in `GROUPS`, in the same
form, and loaded in the same way. An entry of accelerators or sites names a package that holds a TOML file of the
entry's name. `docs/extending.md` walks through the contract of each group.

Invariants:
- A name of Shardway's own never needs a look at the installed packages, so that it costs no time and nothing can
  replace it. Other names are looked up when they are asked for.
- Looking up and listing import no plugin, and this module does not import torch.
- A plugin that cannot be loaded is an error that names its package, not a traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from importlib import import_module
from importlib.resources import files
from types import MappingProxyType
from typing import Any, ClassVar

from shardway.errors import UserError
from shardway.version import __version__

PREFIX = "shardway."
"""What the name of each group begins with, as entry points have it."""


@dataclass(frozen=True)
class PluginGroup:
    """One kind of thing that other packages may add.

    `noun` is what messages call it, `key` where its name is written, `contract` the class that each of them derives
    from ("module:class"), `own` what Shardway itself has: name -> "module:attribute". A group of files has no contract,
    and its entries name packages: that of `name` is the file name.toml in it.
    """

    noun: str
    key: str
    contract: str
    own: Mapping[str, str]


def _all_in(module: str, **classes: str) -> dict[str, str]:
    return {name: f"{module}:{each}" for name, each in classes.items()}


_SITES = (
    *("aspire2a-plus", "dgx-slurm", "generic-pbs", "generic-slurm", "jupiter", "jureca-dc", "juwels-booster"),
    *("laptop", "leonardo-booster", "lumi-g", "marenostrum5-acc", "param-rudra", "perlmutter"),
)

GROUPS: Mapping[str, PluginGroup] = {
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
        "launcher of a site profile, site.launcher",
        "shardway.launch.launchers:Launcher",
        _all_in(
            "shardway.launch.launchers",
            torchrun="Torchrun",
            srun="Srun",
            mpirun="Mpirun",
            agent="Agent",
            ft_launcher="FtLauncher",
            one_process="OneProcess",
        ),
    ),
    "containers": PluginGroup(
        "container runtime",
        "container of a site profile, site.container",
        "shardway.launch.containers:Container",
        _all_in(
            "shardway.launch.containers",
            none="NoContainer",
            pyxis="Pyxis",
            enroot="Enroot",
            apptainer="Apptainer",
            podman="Podman",
            charliecloud="Charliecloud",
        ),
    ),
    "data_sources": PluginGroup(
        "data source",
        "data.kind",
        "shardway.data.kinds:DataKind",
        _all_in(
            "shardway.data.kinds",
            text="TextKind",
            jsonl="JsonlKind",
            tokens="TokensKind",
            megatron="MegatronKind",
            parquet="ParquetKind",
            arrow="ArrowKind",
            webdataset="WebDatasetKind",
            mds="MdsKind",
            energon="EnergonKind",
            hdf5="Hdf5Kind",
            lmdb="LmdbKind",
            arrays="ArraysKind",
            images="ImagesKind",
            idx="IdxKind",
            shards="ShardsKind",
            dataset="DatasetKind",
            synthetic="SyntheticKind",
        ),
    ),
    "optimizers": PluginGroup(
        "optimizer",
        "optim.name",
        "shardway.train.optim.kinds:OptimizerKind",
        _all_in(
            "shardway.train.optim.kinds",
            adamw="AdamWKind",
            sgd="SGDKind",
            adafactor="AdafactorKind",
            adamw8bit="AdamW8bitKind",
            muon="MuonKind",
        ),
    ),
    "models": PluginGroup(
        "model",
        "model.kind",
        "shardway.models.build:ModelKind",
        _all_in(
            "shardway.models.build",
            transformer="TransformerKind",
            encoder_decoder="EncoderDecoderKind",
            vit="ViTKind",
            convnet="ConvNetKind",
            mlp="MLPKind",
        ),
    ),
    "trackers": PluginGroup(
        "tracker",
        "track.to",
        "shardway.watch.trackers.base:Tracker",
        {
            "tensorboard": "shardway.watch.trackers.tensorboard:TensorBoard",
            "openmetrics": "shardway.watch.trackers.openmetrics:OpenMetricsFile",
            **_all_in("shardway.watch.trackers.services", wandb="WeightsAndBiases", mlflow="MLflow", trackio="Trackio"),
        },
    ),
    "inference_backends": PluginGroup(
        "inference backend",
        "bench infer --backend",
        "shardway.bench.inference.backends:InferenceBackend",
        {
            **_all_in(
                "shardway.bench.inference.engines",
                transformers="TransformersBackend",
                vllm="VllmBackend",
                sglang="SglangBackend",
            ),
            "scripted": "shardway.bench.inference.backends:ScriptedBackend",
        },
    ),
    "inference_servers": PluginGroup(
        "inference server",
        "submit --serve",
        "shardway.launch.serving.servers:InferenceServer",
        _all_in(
            "shardway.launch.serving.servers",
            vllm="VllmServer",
            sglang="SglangServer",
            transformers="TransformersServer",
        ),
    ),
    "accelerators": PluginGroup(
        "catalogue of accelerators",
        "node.accelerator of a site profile",
        "",
        {"accelerators": "shardway.hardware"},
    ),
    "sites": PluginGroup(
        "site profile",
        "site.name",
        "",
        dict.fromkeys(_SITES, "shardway.sites"),
    ),
}
"""The groups by their names without `PREFIX`."""


# --- looking up


@dataclass(frozen=True)
class Plugin:
    """One registered entry: `target` is "module:attribute" (of a file: "package"); `package` and `version` are those of
    its distribution."""

    group: str
    name: str
    target: str
    package: str
    version: str

    @property
    def title(self) -> str:
        return f'the {GROUPS[self.group].noun} "{self.name}" of {self.package} {self.version}'

    def load(self) -> Any:
        """The class that the entry names, or the text of its file. Raises UserError if it cannot be imported or read,
        or does not keep the contract."""
        return _load(self)


def list_names(group: str) -> tuple[str, ...]:
    """Every registered name of a group: our own first, then those of other packages by name."""
    return (*GROUPS[group].own, *list_installed(group))


def list_installed(group: str) -> tuple[str, ...]:
    """The names that other packages add to a group, sorted."""
    return tuple(sorted({plugin.name for plugin in _installed(group)} - set(GROUPS[group].own)))


def is_registered(group: str, name: str) -> bool:
    """Whether a name is registered."""
    return name in GROUPS[group].own or any(plugin.name == name for plugin in _installed(group))


def list_plugins(group: str) -> tuple[Plugin, ...]:
    """Every registered entry of a group, our own first. Entries of other packages that no name reaches, because
    Shardway or another package has that name, are listed too."""
    return (*_own(group), *_installed(group))


def find_plugin(group: str, name: str) -> Plugin:
    """The entry of this name. Raises UserError if there is none, or two other packages have one."""
    entries = _own(group) if name in GROUPS[group].own else _installed(group)
    found = [plugin for plugin in entries if plugin.name == name]
    noun = GROUPS[group].noun
    if not found:
        raise UserError(f'"{name}" is no {noun} that is registered\n  allowed: {", ".join(list_names(group))}')
    if len(found) > 1:
        packages = " and ".join(f"{plugin.package} {plugin.version}" for plugin in found)
        raise UserError(f'the {noun} "{name}" is in two packages, {packages}\n  to do: uninstall one of them')
    return found[0]


def load_plugin(group: str, name: str) -> Any:
    """The class (or the text of the file) of this name: `find_plugin(group, name).load()`."""
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
    for name in list_installed(group):
        with contextlib.suppress(UserError):
            made.append(make_plugin(group, name))
    return tuple(made)


def describe_state(plugin: Plugin, *, check: bool = False) -> str:
    """Whether a name leads to this entry: "ok", or why not. `check` loads it too."""
    if plugin.package != "shardway":
        if plugin.name in GROUPS[plugin.group].own:
            return "shadowed by Shardway's own"
        twice = [other for other in _installed(plugin.group) if other.name == plugin.name and other != plugin]
        if twice:
            return f"twice: also in {', '.join(other.package for other in twice)}"
    if check:
        try:
            plugin.load()
        except Exception as error:  # of Shardway's own, whatever it raises
            return str(error).partition("\n")[0].removeprefix(f"{plugin.title} ")
    return "ok"


@cache
def _own(group: str) -> tuple[Plugin, ...]:
    return tuple(Plugin(group, name, target, "shardway", __version__) for name, target in GROUPS[group].own.items())


@cache
def _list_entries() -> Any:
    """The entry points of all packages, read once: this takes 10 ms, which a verb without such names does not pay."""
    from importlib.metadata import entry_points

    return entry_points()


@cache
def _installed(group: str) -> tuple[Plugin, ...]:
    plugins = set()
    for entry in _list_entries().select(group=PREFIX + group):
        package, version = (entry.dist.name, entry.dist.version) if entry.dist else ("an unknown package", "n/a")
        plugins.add(Plugin(group, entry.name, entry.value, package, version))
    return tuple(sorted(plugins, key=lambda plugin: (plugin.name, plugin.package, plugin.target)))


@cache
def _load(plugin: Plugin) -> Any:
    group = GROUPS[plugin.group]
    try:
        if not group.contract:
            return files(plugin.target).joinpath(f"{plugin.name}.toml").read_text(encoding="utf-8")
        found = _import(plugin.target)
    except Exception as error:  # whatever a foreign module raises while it is imported
        if plugin.package == "shardway":
            raise
        what = f"{type(error).__name__}: {error}"
        remedy = f"upgrade or uninstall {plugin.package}"
        raise UserError(f"{plugin.title} cannot be loaded: {what}\n  to do: {remedy}") from error
    contract, kept = _import(group.contract), group.contract.replace(":", ".")
    if not (inspect.isclass(found) and issubclass(found, contract)):
        what = f"{plugin.target} is no class derived from {kept}"
    else:
        facts = [name for name in vars(contract).get("__annotations__", {}) if not hasattr(found, name)]
        missing = [*facts, *sorted(getattr(found, "__abstractmethods__", ()))]
        if not missing:
            return found
        what = f"{plugin.target} lacks {', '.join(missing)}, which {kept} asks for"
    raise UserError(f"{plugin.title} cannot be used: {what}\n  to do: tell its authors, or uninstall {plugin.package}")


def _import(target: str) -> Any:
    """What "module:attribute" names."""
    module, _, attribute = target.partition(":")
    return reduce(getattr, filter(None, attribute.strip().split(".")), import_module(module.strip()))


# --- settings of a plugin's own


class HasSettings(ABC):  # noqa: B024 - contracts add what is abstract
    """A base of contracts: a plugin may have settings of its own, which a table of the run file gives."""

    settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Each setting with its default, whose type a given value must have (an integer also stands for a float)."""

    @classmethod
    def takes_settings(cls) -> bool:
        """Whether it has settings."""
        return bool(cls.settings)

    @classmethod
    def read_settings(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with those given in place of their defaults. Raises ValueError with all that is wrong, in the
        form "what; allowed: ..."."""
        wrong, read = [], dict(cls.settings)
        for name, value in given.items():
            default = cls.settings.get(name)
            if name not in cls.settings:
                near = difflib.get_close_matches(name, cls.settings, n=1, cutoff=0.6)
                wrong.append(f'there is no setting "{name}"{f" (did you mean {near[0]}?)" if near else ""}')
            elif isinstance(default, float) and type(value) in (int, float):
                read[name] = float(value)
            elif type(value) is type(default):
                read[name] = value
            else:
                wrong.append(f"{name} = {value!r} is no {type(default).__name__}")
        if wrong:
            allowed = ", ".join(f"{name} = {default!r}" for name, default in cls.settings.items())
            raise ValueError(f"{'; '.join(wrong)}; allowed: {allowed or 'no setting at all'}")
        return read


# --- names in files


@dataclass(frozen=True)
class PluginName:
    """Marks a string of a pydantic model as a name that is registered in a group, or one of `others`. The JSON Schema
    and messages list the names that are registered on this machine, our own first."""

    group: str
    others: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string", "enum": [*self.others, *list_names(self.group)]}

    def _check(self, value: Any) -> str:
        """As the choices of a Literal are checked, whose message is the same."""
        from pydantic_core import PydanticKnownError

        if isinstance(value, str) and (value in self.others or is_registered(self.group, value)):
            return value
        *names, last = (f"'{name}'" for name in (*self.others, *list_names(self.group)))
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(names)} or {last}" if names else last})
