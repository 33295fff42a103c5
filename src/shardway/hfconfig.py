"""Finds a Hugging Face model and reads its config.json, without torch and transformers.

Invariant: works on a login node: huggingface_hub is imported only for a download, nothing else beyond the standard
library. A hub name is what `shardway prefetch` brought of it, which no hub is asked for, or what the hub's library has
in its cache or fetches; HF_HUB_OFFLINE is obeyed. No weights are read.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from shardway.errors import Problem, UserError, check_no_problems, render_problems
from shardway.places import expand_home, expand_place, list_unset

CONFIG = "config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.*",
)
"""Patterns of the files that make a tokenizer; they go with a model that is saved."""

_NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
MODEL_FILES = (CONFIG, "generation_config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES)
"""Patterns of the files of a repository that make a model which is trained."""
NOT_FETCHED = ("original/*", "consolidated*.safetensors", "*/consolidated*.safetensors", "onnx/*", "openvino/*")
"""Patterns of the same weights once more, in the form of another library."""


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a decoder-only model that planning and resolving need."""

    family: str
    """`model_type` of the config: llama, qwen3 ..."""
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    max_positions: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0
    tokenizer: str = ""
    """Path of its tokenizer.json, if it has one."""


def locate_model(hf: str, *, weights: bool = True) -> Path:
    """The folder of a model: a local one as it is; a hub name ("org/name", "org/name@revision") from the cache or
    downloaded: config, safetensors and tokenizer files only; without `weights` only what `read_facts` reads.

    Ranks that share a cache call it on one of them first. Raises UserError if the model cannot be had.
    """
    folder = expand_place(hf)
    if folder.is_dir():
        return folder
    if unset := list_unset(hf):
        raise hf_error(hf, f"${unset[0]} is not set here", "a folder with a config.json, or a hub name")
    if hf.startswith(("/", ".", "~")) or hf.count("/") > 1 or folder.exists():
        raise hf_error(hf, "is no folder", "a folder with a config.json, or a hub name such as Qwen/Qwen3-0.6B")
    name, _, revision = hf.partition("@")
    if prefetched := _find_prefetched(name, revision, weights=weights):
        return prefetched
    hub = import_extra("huggingface_hub")
    patterns = MODEL_FILES if weights else (CONFIG, TOKENIZER_FILES[0])
    wanted = {"allow_patterns": list(patterns), "ignore_patterns": list(NOT_FETCHED)}
    try:
        found = Path(hub.snapshot_download(name, revision=revision or None, **wanted))
    except Exception as error:  # the client's errors share no base: OSError, ValueError and those of HTTP clients
        raise _explain(hf, error) from error
    if weights and next(found.glob("*.safetensors"), None) is None:
        what = "has no safetensors files (older ones have .bin files alone)"
        remedy = "convert it once with transformers: from_pretrained(...), then save_pretrained(folder)"
        raise hf_error(hf, what, "weights as safetensors", remedy)
    return found


OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""What keeps the libraries of a job from asking the hub; a library that has one of them may not look at the others."""
HUB_CACHES = {"HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
"""Variables that decide where the hub's cache is, the first that is set, and the folder below their value."""
COMMIT = re.compile(r"[0-9a-f]{40}")
RECORDS = "shardway"
"""Folder of a repository in the cache with what prefetch fetched of each commit."""


def _find_prefetched(name: str, revision: str, *, weights: bool) -> Path | None:
    """The snapshot that prefetch brought, if all of it is still there; without `weights` only what `read_facts` reads:
    a machine without a network may wait minutes for an answer of the hub."""
    variable = next((each for each in HUB_CACHES if os.environ.get(each)), "")
    base = os.path.expandvars(str(expand_home(os.environ.get(variable) or "~/.cache/huggingface/hub")))
    repo = Path(base) / HUB_CACHES.get(variable, "") / f"models--{name.replace('/', '--')}"
    try:
        commit = revision if COMMIT.fullmatch(revision) else (repo / "refs" / (revision or "main")).read_text().strip()
        recorded = json.loads((repo / RECORDS / f"{commit}.json").read_text(encoding="utf-8"))["files"]
        snapshot = repo / "snapshots" / commit
        if weights and not any(path.endswith(".safetensors") for path in recorded):
            return None
        read = [path for path in recorded if weights or path in (CONFIG, TOKENIZER_FILES[0])]
        return snapshot if read and all((snapshot / path).is_file() for path in read) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def parse_snapshot(path: str) -> tuple[str, str, str] | None:
    """Kind, repository and commit of a snapshot's folder in a cache of the hub, by the names of its folders: ("model",
    "org/name", COMMIT); None for another folder."""
    found = re.search(r"(?:^|/)(model|dataset)s--([^/]+)/snapshots/([0-9a-f]{40})/?$", path)
    return (found[1], found[2].replace("--", "/", 1), found[3]) if found else None


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises UserError if it is missing or no JSON object."""
    path = folder / CONFIG
    try:
        content = path.read_bytes()
        if (encoding := json.detect_encoding(content)) != "utf-8":
            what = "that begins with a byte-order mark" if encoding == "utf-8-sig" else f"in {encoding.upper()}"
            allowed, remedy = "UTF-8 without a byte-order mark, as transformers reads it", "save it again as that"
            raise hf_error(str(folder), f"has a {CONFIG} {what}", allowed, remedy)
        config = json.loads(content.decode("utf-8"))
    except json.JSONDecodeError as error:
        allowed = "JSON, which has no comments and no comma after the last entry"
        raise hf_error(str(folder), f"has a {CONFIG} that cannot be read: {error}", allowed) from None
    except FileNotFoundError:
        raise hf_error(str(folder), f"has no {CONFIG}", "a folder that save_pretrained wrote, or a hub name") from None
    except (OSError, ValueError, RecursionError) as error:
        raise hf_error(str(folder), f"has a {CONFIG} that cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise hf_error(str(folder), f"has a {CONFIG} that is no JSON object")
    return config


def read_facts(folder: Path) -> ModelFacts:
    """The facts of the model in a folder. Raises UserError that names every key that is missing or not a number."""
    config = read_config(folder)
    allowed, remedy = "an integer above 0", "name a decoder-only language model"
    problems = [
        Problem(key, f"{config[key]!r} is no size" if key in config else "is missing", allowed=allowed, remedy=remedy)
        for key in _NEEDED
        if type(config.get(key)) is not int or config[key] <= 0
    ]
    check_no_problems(str(folder / CONFIG), problems)
    vocab, dim, layers, heads, ffn_dim, positions = (config[key] for key in _NEEDED)
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    tokenizer = folder / TOKENIZER_FILES[0]
    return ModelFacts(
        family=str(config.get("model_type", "")),
        vocab=vocab,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or dim // heads,
        ffn_dim=ffn_dim,
        max_positions=positions,
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=config.get("num_experts_per_tok", 0) if experts else 0,
        expert_dim=(config.get("moe_intermediate_size") or ffn_dim) if experts else 0,
        tokenizer=str(tokenizer) if tokenizer.is_file() else "",
    )


def import_extra(package: str, extra: str = "hf") -> ModuleType:
    """A package of an extra. Raises UserError with the install command if it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f'{package} cannot be imported ({error}), and it is needed here.\n  To do: pip install "shardway[{extra}]"'
        ) from error


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """While entered, libraries warn of nothing: peft and transformers import torchao where that is installed, whose
    kernels that it lacks are no matter of a model that does not use them."""
    import logging  # what runs on a login node does without it

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def hf_error(hf: str, what: str, allowed: str = "", remedy: str = "") -> UserError:
    """An error about what `model.hf` names."""
    problem = Problem("model.hf", f'"{hf}" {what}', allowed=allowed, remedy=remedy)
    return UserError(render_problems("the model", [problem]), [problem])


def _explain(hf: str, error: Exception) -> UserError:
    """The error by its class names, so that no version of the hub's client has to be imported."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    fetch = f"`shardway prefetch --model {hf}` where there is a connection, with the same HF_HOME"
    for kind, (what, remedy) in HUB_REFUSALS.items():
        if kind in kinds:
            return hf_error(hf, what, remedy=remedy or fetch)
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return hf_error(hf, f"could not be fetched from the hub: {first}", remedy=f"try again later, or {fetch}")


HUB_REFUSALS: Mapping[str, tuple[str, str]] = {
    "GatedRepoError": (
        "is gated: its owners have to grant access",
        "accept its conditions on its page, then `hf auth login` or set HF_TOKEN",
    ),
    "RepositoryNotFoundError": (
        "is neither a folder nor a name of the hub (or it is private)",
        "correct the name, or `hf auth login` for a private one",
    ),
    "RevisionNotFoundError": ("names a revision that the hub does not have", "correct what stands behind the @"),
    "HFValidationError": (
        "is neither a folder nor a name of the hub",
        "name a folder, or a hub name such as Qwen/Qwen3-0.6B",
    ),
    "IncompleteSnapshotError": ("is in the local cache in part alone, and the hub cannot be reached", ""),
    "LocalEntryNotFoundError": ("is not in the local cache, and the hub cannot be reached", ""),
}
"""Class names of the hub's errors, the narrower first -> what is wrong with the name, and what to do; "" is to fetch it
where there is a connection."""
