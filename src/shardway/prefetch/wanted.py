"""What a run, or the words of a command line, need from a hub: repositories with the patterns of their files, and the
variables by which the job finds the cache.

Invariants:
- Nothing is resolved: no hub, no cache and no device is asked, so that a run file whose model is not here can be read.
- What prefetch brings of a model holds all that `hfconfig.locate_model` asks for.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardway.hfconfig import CONFIG, MODEL_FILES, NOT_FETCHED, TOKENIZER_FILES
from shardway.prefetch.cache import HubName, find_hub_name, parse_hub_name
from shardway.prefetch.check import ModelNeeds
from shardway.runfile.load import LoadedRunFile
from shardway.sites.schema import SiteProfile

_TOKENIZERS = (*TOKENIZER_FILES, "tokenizer.*", "*.model", "*.spm", "*.tiktoken", "additional_chat_templates/*", "*.py")
_MODELS = (*MODEL_FILES, *_TOKENIZERS, "adapter_config.json", "preprocessor_config.json", "processor_config.json")
_EVERYTHING = ("*",)
_NOT_DATA = (".gitattributes", ".gitignore")


@dataclass(frozen=True)
class WantedRepo:
    """A repository that is to be in the cache. `where`: the key or option that names it."""

    name: HubName
    where: str
    patterns: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    needs: ModelNeeds = field(default_factory=ModelNeeds)


@dataclass(frozen=True)
class WantedThings:
    """Everything that is needed. `variables`: those that the job gets from its site and its run file, for the place of
    the cache; `notes`: what is needed besides and fetched in another way; `folder`: model.hf where that is a folder."""

    repos: tuple[WantedRepo, ...] = ()
    folder: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def list_named(models: Iterable[str], tokenizers: Iterable[str], datasets: Iterable[str]) -> tuple[WantedRepo, ...]:
    """What options name. Raises UserError for a word that is no name."""
    return (
        *(want_model(parse_hub_name(text, "--model"), "--model") for text in models),
        *(
            WantedRepo(
                parse_hub_name(text, "--tokenizer"),
                "--tokenizer",
                (CONFIG, *_TOKENIZERS),
                needs=ModelNeeds(weights=False, tokenizer="needed"),
            )
            for text in tokenizers
        ),
        *(
            WantedRepo(parse_hub_name(text, "--dataset", "dataset"), "--dataset", _EVERYTHING, _NOT_DATA)
            for text in datasets
        ),
    )


def want_model(name: HubName, where: str, *, weights: bool = True) -> WantedRepo:
    """A model, with its weights or without them."""
    patterns = tuple(dict.fromkeys(_MODELS if weights else (CONFIG, *_TOKENIZERS, *MODEL_FILES[:2])))
    return WantedRepo(name, where, patterns, NOT_FETCHED, ModelNeeds(weights=weights))


def list_wanted(loaded: LoadedRunFile, profile: SiteProfile) -> WantedThings:
    """What a run needs on its site."""
    values, notes = loaded.values, list[str]()
    name = find_hub_name(values.model.hf)
    repos = (want_model(name, "model.hf", weights=values.model.hf_weights),) if name else ()
    paths = [part.path for part in values.data.blend] or [values.data.path]
    for path in (*paths, values.data.validation):
        if "://" in path:
            notes.append(f"{path} is an address: `shardway data prepare {shlex.quote(path)} FOLDER` brings it here")
    image = values.site.image
    if "://" in image:
        on = f" --on {profile.name}" if profile.name != "laptop" else ""
        notes.append(
            f"site.image is {image}: `shardway image import {image}{on}` makes a file of it, which site.image names"
        )
    if profile.internet.login == "none":
        notes.append(
            f"the login nodes of {profile.name} have no internet: where this machine is one, prefetch elsewhere and "
            "copy the cache there"
        )
    proxy = profile.internet.proxy if profile.internet.login == "proxy" else None
    if proxy and not any(os.environ.get(each) for each in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")):
        notes.append(
            f"the login nodes of {profile.name} reach the internet through a proxy: export https_proxy={proxy}"
        )
    folder = values.model.hf if name is None else ""
    return WantedThings(repos, folder, variables_of_job(loaded, profile), tuple(notes))


def variables_of_job(loaded: LoadedRunFile, profile: SiteProfile) -> dict[str, str]:
    """The variables that a job gets from the profile of its site and from its run file, the latter last."""
    own = {name: str(value) for name, value in loaded.values.site.environment.items()}
    return {**profile.environment, **own}
