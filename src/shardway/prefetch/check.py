"""Finds what is missing or damaged in the folder of a model before a job waits in a queue for it, each fault with the
name of its file.

Invariants:
- Only reads, without a network, torch, transformers and safetensors: of weights the headers alone.
- Every fault is listed, each file once. What cannot be judged from the files (whether weights are good) is no fault.
- A fault that libraries get along with is `doubtful`: callers warn of it and refuse nothing.

Sources: safetensors, "Format" (8 bytes of length, a JSON header, tensors without gaps); transformers 5.23
(configuration_utils, tokenization_utils_base: names and keys of files; dynamic_module_utils: auto_map); Git LFS
specification, "The Pointer".
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardway.errors import Problem, ShardwayError, UserError, check_no_problems
from shardway.hfconfig import CONFIG, locate_model
from shardway.places import expand_place
from shardway.prefetch.cache import CachedRepo, HubCache, HubName, find_cache, find_hub_name, name_of_snapshot
from shardway.prefetch.hub import find_digest

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
GENERATION, ADAPTER, ADAPTER_WEIGHTS = "generation_config.json", "adapter_config.json", "adapter_model.safetensors"
TOKENIZER, TOKENIZER_CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
SENTENCEPIECE, TEMPLATE = "tokenizer.model", "chat_template.jinja"

_POINTER = b"version https://git-lfs"
_HEADER_LIMIT = 100_000_000
"""Longer headers are refused by safetensors itself."""
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64, "BF16": 16}
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class ModelNeeds:
    """What a command needs of a model besides its config. `tokenizer`: "sound": those of its files that are there can
    be read; "needed": there is one; "unused": nothing. `chat`: a chat template of its own. `own_code`: the user lets
    code of the repository run."""

    weights: bool = True
    tokenizer: Literal["unused", "sound", "needed"] = "sound"
    chat: bool = False
    own_code: bool = False

    @property
    def option(self) -> str:
        """The option of `shardway prefetch` that brings all of it, and no weights where none are needed."""
        return "--tokenizer" if self.tokenizer == "needed" and not self.weights else "--model"


@dataclass(frozen=True)
class FileFault:
    """One file with what is wrong with it. `missing`: nothing is there, so that a job with a network could fetch it."""

    file: str
    what: str
    remedy: str = ""
    missing: bool = False
    doubtful: bool = False

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


class DamagedContent(ValueError):
    """A file whose content is not what its name says; the message is a predicate: "is empty"."""


# --- a model in the cache, or in a folder


@dataclass(frozen=True)
class CachedModel:
    """A repository as the cache has it: the folder of its snapshot (None: it has none), and what is wrong there."""

    name: HubName
    folder: Path | None
    faults: tuple[FileFault, ...]


def check_cached(name: HubName, cache: HubCache, needs: ModelNeeds, *, reads: bool = False) -> CachedModel:
    """The snapshot that a name leads to, and all that is missing or damaged in it. `reads`: compare digests too."""
    repo, option = cache.repo(name), needs.option if name.kind == "model" else "--dataset"
    fetch = f"`shardway prefetch {option} {name}`"
    commit = repo.find_commit(name.revision)
    if not commit or not repo.snapshot(commit).is_dir():
        what, wanted = f"is not in the cache {cache.folder}", name.revision or "main"
        if commit and not name.revision:
            what = f"is in the cache in name alone: refs/main leads to commit {commit[:12]}, of which nothing is there"
        elif repo.folder.is_dir():
            others = ", ".join(sorted(_list_revisions(repo))) or "none"
            what = f"is not in the cache {cache.folder} at the revision {wanted} (it has: {others})"
        return CachedModel(name, None, (FileFault(str(name), what, fetch, missing=True),))
    folder = repo.snapshot(commit)
    check = check_model if name.kind == "model" else check_snapshot
    faults = check(folder, needs, reads=reads)
    return CachedModel(name, folder, tuple(faults))


def _list_revisions(repo: CachedRepo) -> Iterator[str]:
    refs = repo.folder / "refs"
    for path in refs.rglob("*") if refs.is_dir() else ():
        if path.is_file():
            yield str(path.relative_to(refs))
    snapshots = repo.folder / "snapshots"
    if snapshots.is_dir():
        yield from (path.name[:12] for path in snapshots.iterdir())


def check_model(folder: Path, needs: ModelNeeds, *, reads: bool = False) -> list[FileFault]:
    """All that is missing or damaged in the folder of a model, as far as a command with these needs would meet it."""
    found = _Findings(folder, needs.option)
    found.add_links()
    found.add_recorded(reads=reads)
    if (folder / ADAPTER).exists() and not (folder / CONFIG).exists():
        _check_adapter(found)
    else:
        config = found.read_json(CONFIG, required=True)
        _check_code(found, CONFIG, config, needs)
        if needs.weights:
            _check_weights(found)
    found.read_json(GENERATION)
    if needs.tokenizer != "unused":
        _check_tokenizer(found, needs)
    return found.as_list()


def check_snapshot(folder: Path, needs: ModelNeeds = ModelNeeds(), *, reads: bool = False) -> list[FileFault]:
    """The same of any repository: links without a file, and files that differ from the record of their fetch."""
    found = _Findings(folder)
    found.add_links()
    found.add_recorded(reads=reads)
    if not any(path.is_file() for path in folder.rglob("*")):
        found.add(".", "has no files", missing=True)
    return found.as_list()


def locate_whole_model(hf: str, *, weights: bool) -> Path:
    """`locate_model`, with everything that is missing or damaged at once, before any weight is read. Raises
    UserError."""
    needs, name = ModelNeeds(weights=weights, tokenizer="unused"), find_hub_name(hf)
    try:
        folder = locate_model(hf, weights=weights)
    except UserError:
        cached = check_cached(name, find_cache(), needs) if name else None
        if cached is not None and cached.folder is not None:
            check_no_problems("the model", _list_problems(str(name), cached.faults))
        raise
    check_no_problems("the model", _list_problems(str(name or folder), check_model(folder, needs)))
    return folder


def _list_problems(name: str, faults: Sequence[FileFault]) -> list[Problem]:
    return [Problem("model.hf", f'"{name}": {fault}', remedy=fault.remedy) for fault in faults if not fault.doubtful]


# --- findings


@dataclass
class _Findings:
    """Faults by file, and the files that are read on the way."""

    folder: Path
    option: str = "--model"
    faults: dict[str, FileFault] = field(default_factory=dict)

    @property
    def name(self) -> HubName | None:
        return name_of_snapshot(self.folder)

    @property
    def repo(self) -> CachedRepo | None:
        return CachedRepo(self.folder.parent.parent) if self.name else None

    def add(self, file: str, what: str, remedy: str = "", *, missing: bool = False, doubtful: bool = False) -> None:
        before = self.faults.get(file)
        if before is None or (before.doubtful and not doubtful):
            self.faults[file] = FileFault(file, what, remedy, missing, doubtful)

    def as_list(self) -> list[FileFault]:
        """All of them, each with a remedy, those that certainly stop a job first."""
        ordered = sorted(self.faults.values(), key=lambda fault: fault.doubtful)
        return [replace(fault, remedy=fault.remedy or self._remedy(fault)) for fault in ordered]

    def _remedy(self, fault: FileFault) -> str:
        if self.name is None:
            return "copy it again from where the model came"
        name, repo = self.name, self.repo
        recorded = repo.read_record(name.revision).get(fault.file) if repo else None
        path = self.folder / fault.file
        # what has another size than the hub lists is found without reading all files
        reads = not fault.missing and (recorded is None or (path.is_file() and path.stat().st_size == recorded.size))
        option = self.option if name.kind == "model" else "--dataset"
        shown = replace(name, revision="") if repo and repo.find_commit("") == name.revision else name
        return f"`shardway prefetch{' --verify' if reads else ''} {option} {shown}` fetches it again"

    def add_missing(self, file: str, why: str = "") -> None:
        cut = self.describe_cut()
        self.add(file, f"is missing{why}{cut}", missing=True)

    def describe_cut(self) -> str:
        """A sentence about downloads that were cut, where the cache has some."""
        blobs = self.repo.folder / "blobs" if self.repo else None
        if blobs is None or not blobs.is_dir():
            return ""
        cut = sorted(path for path in blobs.iterdir() if path.name.endswith(".incomplete"))
        return f" (a download was cut: blobs/{cut[0].name} is a part of a file)" if cut else ""

    def add_links(self) -> None:
        """Links that lead to nothing."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_symlink() and not path.exists():
                target = os.readlink(path)
                file, blob = path.relative_to(self.folder).as_posix(), Path(path.parent, target)
                cut = any(blob.parent.glob(f"{blob.name}*.incomplete")) if blob.parent.is_dir() else False
                why = ": its download was cut" if cut else ""
                self.add(file, f"is a link to {target}, which is not there{why}", missing=cut)

    def add_recorded(self, *, reads: bool) -> None:
        """Files that prefetch fetched and that are no longer what they were."""
        repo = self.repo
        recorded = repo.read_record(self.folder.name) if repo else {}
        for file, facts in recorded.items():
            path = self.folder / file
            try:
                size = path.stat().st_size
                if size != facts.size:
                    if not _is_pointer(path):
                        self.add(file, f"has {size:,} bytes, and the hub lists {facts.size:,}")
                elif reads and (digest := find_digest(path, facts)) != facts.digest:
                    self.add(file, f"has other bytes than the hub's (digest {digest[:12]}, not {facts.digest[:12]})")
            except FileNotFoundError:
                self.add_missing(file, ", and the hub lists it")
            except OSError as error:
                self.add(file, f"cannot be read: {error.strerror}")

    def read_text(self, file: str) -> str | None:
        """The text of a file; None, and a fault where it is there, if it cannot be had."""
        path = self.folder / file
        try:
            content = path.read_bytes()
            if content.startswith(_POINTER):
                raise DamagedContent("is a pointer of Git LFS and not the file itself: `git lfs pull` fetches it")
            if not content.strip():
                raise DamagedContent("is empty")
            return content.decode("utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            self.add(file, f"is no text: {error.reason} at byte {error.start}")
        except OSError as error:
            self.add(file, f"cannot be read: {error.strerror}")
        except DamagedContent as error:
            self.add(file, str(error))
        return None

    def read_json(self, file: str, *, required: bool = False) -> dict[str, Any]:
        """The object in a JSON file; empty, and a fault, where it is damaged (or missing, if it is required)."""
        if required and not os.path.lexists(self.folder / file):
            self.add_missing(file)
            return {}
        text = self.read_text(file)
        if text is None:
            return {}
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            self.add(file, f"is no JSON: {error}")
            return {}
        if not isinstance(content, dict):
            self.add(file, f"is JSON, but {type(content).__name__} where an object belongs")
            return {}
        return content


def _is_pointer(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_POINTER)) == _POINTER


# --- weights


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file: name -> dtype, shape, data_offsets. Raises DamagedContent for a file that is
    damaged or cut, OSError for one that cannot be read."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(64)
        if not head:
            raise DamagedContent("is empty")
        if head.startswith(_POINTER):
            raise DamagedContent("is a pointer of Git LFS and not the file itself: `git lfs pull` fetches it")
        length = int.from_bytes(head[:8], "little")
        if len(head) < 8 or length > _HEADER_LIMIT:
            raise DamagedContent("is no safetensors file: its header is damaged")
        if 8 + length > size:
            raise DamagedContent(f"is cut: it ends after {size:,} bytes, inside its header")
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            ends = [_check_tensor(entry) for entry in tensors.values()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DamagedContent("is no safetensors file: its header is damaged") from None
    whole = 8 + length + max(ends, default=0)
    if size < whole:
        raise DamagedContent(f"is cut: it has {size:,} of {whole:,} bytes")
    if size > whole:
        raise DamagedContent(f"has {size - whole:,} bytes more than its header counts")
    return tensors


def _check_tensor(entry: Mapping[str, Any]) -> int:
    """Where the bytes of a tensor end. Raises ValueError and the like where its numbers do not agree."""
    first, end = entry["data_offsets"]
    bits = _BITS.get(entry["dtype"]) or int(re.sub(r"\D.*", "", entry["dtype"][1:]) or 8)
    if not 0 <= first <= end or math.ceil(math.prod(entry["shape"]) * bits / 8) != end - first:
        raise ValueError
    return int(end)


def _check_weights(found: _Findings) -> None:
    folder = found.folder
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    files = sorted(name for name in names if name.endswith(".safetensors") and not name.startswith("consolidated"))
    if INDEX in names:
        _check_index(found)
        return
    parts = [name for name in files if re.search(r"-\d+-of-\d+\.safetensors$", name)]
    if parts and SINGLE not in names:
        found.add_missing(INDEX, f", and the weights are in parts ({parts[0]} ...)")
    elif SINGLE in names:
        files = [SINGLE]
    elif not files:
        if any(name.endswith(".bin") for name in names):
            remedy = "convert them once with transformers: from_pretrained(...), then save_pretrained(folder)"
            found.add(SINGLE, "is missing: the model has weights as .bin files alone", remedy)
        elif found.repo is not None:  # a folder with a config alone is a model with random weights
            found.add_missing(SINGLE)
    for name in files:
        _read_header(found, name)


def _read_header(found: _Findings, name: str) -> dict[str, Any] | None:
    try:
        return read_safetensors_header(found.folder / name)
    except FileNotFoundError:
        found.add_missing(name, f", and {INDEX} names it")
    except OSError as error:
        found.add(name, f"cannot be read: {error.strerror}")
    except DamagedContent as error:
        found.add(name, str(error))
    return None


def _check_index(found: _Findings) -> None:
    index = found.read_json(INDEX)
    if INDEX in found.faults:
        return
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        found.add(INDEX, 'has no "weight_map" of tensors and files')
        return
    size, complete = 0, True
    for name in sorted(set(placed.values())):
        if "/" in name or "\0" in name or name.startswith("."):
            found.add(INDEX, f'names the file "{name}", which is not beside it')
            complete = False
            continue
        tensors = _read_header(found, name)
        if tensors is None:
            complete = False
            continue
        absent = [tensor for tensor, file in placed.items() if file == name and tensor not in tensors]
        if absent:
            found.add(name, f"has no tensor {absent[0]}, and {INDEX} places it there")
        size += sum(end - first for first, end in (entry["data_offsets"] for entry in tensors.values()))
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if complete and isinstance(total, int | float) and total != size:
        found.add(INDEX, f"counts {total:,.0f} bytes of tensors, and its files hold {size:,}", doubtful=True)


def _check_adapter(found: _Findings) -> None:
    """An adapter alone: its own weights, and the model that it changes."""
    config = found.read_json(ADAPTER)
    if (found.folder / ADAPTER_WEIGHTS).exists() or not (found.folder / "adapter_model.bin").exists():
        _read_header(found, ADAPTER_WEIGHTS)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        if ADAPTER not in found.faults:
            found.add(ADAPTER, 'names no base model ("base_model_name_or_path")')
        return
    name = find_hub_name(base)
    if name is None:
        if not os.path.isdir(expand_place(base)):
            found.add(ADAPTER, f"is an adapter of {base}, which is not there", "bring that folder here as well")
        return
    try:
        cache = HubCache(found.repo.folder.parent, "") if found.repo else find_cache()
    except ShardwayError:  # whether it is there cannot be judged
        return
    if not cache.repo(name).find_commit(name.revision):
        fetch = f"`shardway prefetch --model {base}` fetches its base"
        found.add(ADAPTER, f"is an adapter of {base}, which is not in the cache", fetch, missing=True)


# --- code of the repository


def _check_code(found: _Findings, file: str, config: Mapping[str, Any], needs: ModelNeeds) -> None:
    """Files of Python that `auto_map` names, with those that they import."""
    auto = config.get("auto_map")
    if not isinstance(auto, dict):
        return
    values = [each for value in auto.values() for each in (value if isinstance(value, list) else [value])]
    words = [word for word in values if isinstance(word, str)]
    modules = dict.fromkeys(word.rpartition("--")[2].split(".")[0] for word in words if "--" not in word)
    seen: set[str] = set()
    waiting = [(module, file) for module in modules]
    while waiting:
        module, by = waiting.pop(0)
        if module in seen:
            continue
        seen.add(module)
        if not module.isidentifier():
            found.add(file, f'names code by "{module}", which is no module')
            continue
        name = f"{module}.py"
        if not os.path.lexists(found.folder / name):
            found.add_missing(name, f", and {by} names it")
            continue
        text = found.read_text(name) or ""
        waiting += [(each, name) for each in re.findall(r"^\s*from\s+\.(\w+)\s+import", text, re.MULTILINE)]
    for word in words:
        if "--" in word:
            other = word.partition("--")[0]
            found.add(
                file, f"takes code from another repository ({other})", f"fetch that one too: {other}", doubtful=True
            )
    if file == CONFIG and words and not needs.own_code and not _is_known(config):
        code = ", ".join(f"{module}.py" for module in modules) or words[0]
        remedy = "choose a model without code of its own, or load it in a script of your own (trust_remote_code=True)"
        found.add(CONFIG, f'needs code of the repository ({code}) for "{config.get("model_type", "?")}"', remedy)


def _is_known(config: Mapping[str, Any]) -> bool:
    """Whether Shardway computes the family without the repository's code."""
    from shardway.plan.huggingface import FAMILIES

    family = config.get("model_type")
    return isinstance(family, str) and family in FAMILIES


# --- the tokenizer

_BY_CLASS = {
    SENTENCEPIECE: r"Llama|CodeLlama|Gemma|Mistral|T5|XLMRoberta|Camembert|Albert|MBart|Pegasus|Siglip",
    "vocab.json": r"GPT2|Qwen2|Roberta|Bart|Whisper|CLIP|CodeGen|Phi",
    "vocab.txt": r"Bert|Electra|MobileBert",
}
"""The vocabulary of the slow tokenizers, by what their class names begin with."""


def _check_tokenizer(found: _Findings, needs: ModelNeeds) -> None:
    names = {path.name for path in found.folder.iterdir()} if found.folder.is_dir() else set()
    settings, fast = found.read_json(TOKENIZER_CONFIG), found.read_json(TOKENIZER)
    named, added = found.read_json(SPECIAL), found.read_json("added_tokens.json")
    if TOKENIZER in names and TOKENIZER not in found.faults and not isinstance(fast.get("model"), dict):
        found.add(TOKENIZER, 'has no "model": it is no tokenizer of the library tokenizers')
    for file in (SENTENCEPIECE, "vocab.json", "vocab.txt", "merges.txt"):
        path = found.folder / file
        if file in names and path.exists() and (_is_pointer(path) or not path.stat().st_size):
            found.add(file, "is a pointer of Git LFS and not the file itself" if path.stat().st_size else "is empty")
    _check_code(found, TOKENIZER_CONFIG, settings, needs)
    has_own_code = isinstance(settings.get("auto_map"), dict) and "AutoTokenizer" in settings["auto_map"]
    if TOKENIZER not in names and not has_own_code:
        _check_slow_vocabulary(found, names, str(settings.get("tokenizer_class") or ""), needs)
    elif fast and TOKENIZER not in found.faults:
        _check_special(found, fast, settings, named, added)
    if needs.chat:
        _check_template(found, settings)


def _check_slow_vocabulary(found: _Findings, names: set[str], kind: str, needs: ModelNeeds) -> None:
    """Without a tokenizer.json: the file that the class of the tokenizer reads."""
    wanted = next((file for file, pattern in _BY_CLASS.items() if re.match(pattern, kind)), "")
    there = [file for file in (*_BY_CLASS, *(name for name in names if name.endswith(".tiktoken"))) if file in names]
    if "vocab.json" in names and "merges.txt" not in names and wanted in ("", "vocab.json"):
        found.add_missing("merges.txt", ", and vocab.json is of no use without it")
    elif not there and (needs.tokenizer == "needed" or kind):
        file = wanted if wanted and not kind.endswith("Fast") else TOKENIZER
        why = f", and {TOKENIZER_CONFIG} ({kind}) needs it" if kind else ""
        cut = found.describe_cut()
        found.add(file, f"is missing{why}{cut}", missing=True, doubtful=needs.tokenizer != "needed")


def _check_special(
    found: _Findings,
    fast: Mapping[str, Any],
    settings: Mapping[str, Any],
    named: Mapping[str, Any],
    added: Mapping[str, Any],
) -> None:
    """Special tokens that no vocabulary has would get numbers behind the model's last one."""
    vocabulary = fast["model"].get("vocab")
    if isinstance(vocabulary, list):  # of a unigram model, with scores
        vocabulary = {row[0] for row in vocabulary if isinstance(row, list) and row}
    if not isinstance(vocabulary, dict | set):
        return
    known = set(vocabulary) | set(added)
    entries = fast.get("added_tokens")
    decoder = settings.get("added_tokens_decoder")
    listed = [*(entries if isinstance(entries, list) else ()), *(decoder.values() if isinstance(decoder, dict) else ())]
    known |= {entry["content"] for entry in listed if isinstance(entry, dict) and isinstance(entry.get("content"), str)}
    for file, table in ((TOKENIZER_CONFIG, settings), (SPECIAL, named)):
        for key in _SPECIAL_NAMES:
            value = table.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text and text not in known:
                found.add(file, f'names {key} = "{text}", which {TOKENIZER} does not have', doubtful=True)


def _check_template(found: _Findings, settings: Mapping[str, Any]) -> None:
    folder = found.folder
    if os.path.lexists(folder / TEMPLATE):
        found.read_text(TEMPLATE)  # an empty or unreadable one is a fault
        return
    if settings.get("chat_template") or (folder / "chat_template.json").exists():
        return
    others = [path.name for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    what = f"is missing, and {TOKENIZER_CONFIG} has no chat_template"
    remedy = "choose a model that was trained on conversations, or name a template of your own (data.chat_template)"
    found.add(TEMPLATE, what + (f" (there are others: {', '.join(others)})" if others else ""), remedy, missing=True)


# --- files that a run names by themselves


def check_named_file(path: Path, *, template: bool = False) -> FileFault | None:
    """What is wrong with a tokenizer or, if `template`, a chat template that a run file names by its path; None for
    nothing."""
    found = _Findings(path.parent)
    if not os.path.lexists(path):
        found.add_missing(path.name)
    elif path.is_symlink() and not path.exists():
        found.add_links()
    elif path.suffix == ".json":
        content = found.read_json(path.name)
        if path.name == TOKENIZER and content and not isinstance(content.get("model"), dict):
            found.add(path.name, 'has no "model": it is no tokenizer of the library tokenizers')
        if template and content and not content.get("chat_template"):
            remedy = f"name {TEMPLATE} beside it, if it is there, or a template of your own"
            found.add(path.name, "has no chat_template", remedy)
    elif path.suffix == ".model":
        if _is_pointer(path) or not path.stat().st_size:
            found.add(
                path.name, "is a pointer of Git LFS and not the file itself" if path.stat().st_size else "is empty"
            )
    elif path.is_file():
        found.read_text(path.name)
    return next((fault for fault in found.as_list() if fault.file == path.name), None)
