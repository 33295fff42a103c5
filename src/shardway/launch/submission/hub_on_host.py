"""Looks into the cache of a hub on another host, before a job is queued there: by Shardway itself where the host has
it, else by names and sizes of files.

Invariants:
- Only reads, asks no hub, and sends no program: the host's own Shardway, or `bash` and `find`.
- Which cache is meant is known only where the run file or the profile names it. A cache that the host's shell chooses
  may be another one than the job's, so what is found there is doubtful, which is a warning.
- A host that gives no answer, or one that cannot be read, is no fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from shardway.hfconfig import CONFIG, HUB_CACHES, RECORDS
from shardway.launch.hosts.base import Done, Host
from shardway.prefetch.cache import HubName
from shardway.prefetch.check import INDEX, SINGLE, FileFault, ModelNeeds

_TIME_S = 60.0
"""How long a look may take; a slow file system ends it."""


@dataclass(frozen=True)
class HostModel:
    """What a cache on a host has of a model: `cache`, its folder, and the faults. `by`: what looked."""

    cache: str
    faults: tuple[FileFault, ...]
    by: str


def look_on_host(
    host: Host, name: HubName, needs: ModelNeeds, variables: Mapping[str, str], venv: str
) -> HostModel | None:
    """What the cache on a host has of a model; None where the host could not look. `variables`: those that the job
    gets; `venv`: its virtual environment, "" without one. Raises UserError for a path that the host cannot expand,
    HostUnreachable."""
    given = {key: value for key, value in variables.items() if key in HUB_CACHES}
    paths = [*given.values(), *([venv] if venv and not venv.startswith("conda:") else [])]
    expanded = [str(path) for path in host.expand_many(paths)] if paths else []
    around = ("env", *(f"{key}={path}" for key, path in zip(given, expanded, strict=False)), "timeout", f"{_TIME_S:g}")
    python = f"{expanded[-1]}/bin/python3" if len(paths) > len(given) else "python3"
    folder = f"models--{name.repo.replace('/', '--')}"
    program = (python, "-m", "shardway", "prefetch", "--check", "--json", "--model", str(name))
    plain = ("bash", "-c", _LOOK, "look", folder, name.revision or "main")
    checked, listed = host.run_many([(*around, *program), (*around, *plain)], timeout_s=2 * _TIME_S)
    found = _read_check(checked) or _read_listing(listed, name, needs)
    if found is None:
        return None
    doubtful = not given
    faults = [
        replace(fault, doubtful=fault.doubtful or doubtful, remedy=f"on {host.name}: {fault.remedy}")
        for fault in found.faults
        if needs.weights or not _is_of_weights(fault.file)
    ]
    return replace(found, faults=tuple(faults))


# --- by Shardway


def _read_check(done: Done) -> HostModel | None:
    """What `shardway prefetch --check --json` printed; None where that is not it."""
    try:
        facts = json.loads(done.out)
        faults = tuple([_read_fault(each) for each in facts["items"][0]["faults"]])
        cache = str(facts["cache"])
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return HostModel(cache, faults, "Shardway")


def _read_fault(facts: Mapping[str, Any]) -> FileFault:
    return FileFault(
        str(facts["file"]),
        str(facts["what"]),
        str(facts.get("remedy", "")),
        missing=facts.get("missing") is True,
        doubtful=facts.get("doubtful") is True,
    )


def _is_of_weights(file: str) -> bool:
    return file == INDEX or file.endswith((".safetensors", ".bin"))


# --- by names and sizes

_LOOK = rf"""
for each in {" ".join(f"{name}:{below}" for name, below in HUB_CACHES.items())}; do
  name=${{each%%:*}}
  if [ -n "${{!name}}" ]; then cache=${{!name}}/${{each#*:}}; break; fi
done
cache=${{cache:-$HOME/.cache/huggingface/hub}}; cache=${{cache%/}}
repo=$cache/$1
if [[ $2 =~ ^[0-9a-f]{{40}}$ ]]; then commit=$2; else commit=$(cat "$repo/refs/$2" 2> /dev/null); fi
snapshot=$repo/snapshots/$commit
printf '%s\036%s\036' "$cache" "$commit"
[ -n "$commit" ] && find -L "$snapshot" ! -type d -printf '%y %s %P\0' 2> /dev/null
printf '\036'
cat "$repo/{RECORDS}/$commit.json" 2> /dev/null || cat "$repo/trees/$commit.json" 2> /dev/null
printf '\036'
cat "$snapshot/{INDEX}" 2> /dev/null
printf '\036end'
"""
"""Prints the cache, the commit, the files of its snapshot (type, bytes, name), the record of their fetch, the index of
the weights; a byte 30 behind each."""


def _read_listing(done: Done, name: HubName, needs: ModelNeeds) -> HostModel | None:
    """What `_LOOK` printed, judged; None where it did not end."""
    parts = done.out.split("\036")
    if len(parts) != 6 or parts[5] != "end":
        return None
    cache, _, listing, record, index = parts[:5]
    remedy = f"`shardway prefetch --model {name}`, or copy its folder there"
    files: dict[str, tuple[str, int]] = {}
    for line in filter(None, listing.split("\0")):
        kind, size, file = line.split(" ", 2)
        files[file] = kind, int(size)
    if not files:
        at = f" at the revision {name.revision}" if name.revision else ""
        missing = FileFault(str(name), f"is not in the cache {cache}{at}", remedy, missing=True)
        return HostModel(cache, (missing,), "names and sizes")
    found: dict[str, FileFault] = {}
    for fault in (*_judge_files(files), *_judge_record(files, record), *_judge_model(files, index, needs)):
        found.setdefault(fault.file, replace(fault, remedy=remedy))
    return HostModel(cache, tuple(found.values()), "names and sizes")


def _judge_files(files: Mapping[str, tuple[str, int]]) -> Iterator[FileFault]:
    for file, (kind, size) in files.items():
        if kind == "l":
            yield FileFault(file, "is a link to a file that is not there")
        elif size == 0 and file.endswith((".json", ".safetensors", ".model")):
            yield FileFault(file, "is empty")


def _judge_record(files: Mapping[str, tuple[str, int]], record: str) -> Iterator[FileFault]:
    """Files that were fetched and are no longer what they were."""
    for file, facts in _read_table(record, "files").items():
        wanted = facts.get("lfs_size") or facts.get("size") if isinstance(facts, dict) else None
        if not isinstance(wanted, int):
            continue
        if file not in files:
            yield FileFault(file, "is missing, and the hub lists it", missing=True)
        elif files[file][0] == "f" and files[file][1] != wanted:
            yield FileFault(file, f"has {files[file][1]:,} bytes, and the hub lists {wanted:,}")


def _judge_model(files: Mapping[str, tuple[str, int]], index: str, needs: ModelNeeds) -> Iterator[FileFault]:
    """Files that a model does not go without."""
    if CONFIG not in files:
        yield FileFault(CONFIG, "is missing", missing=True)
    if not needs.weights:
        return
    parts = sorted({str(part) for part in _read_table(index, "weight_map").values()})
    for part in parts:
        if part not in files:
            yield FileFault(part, f"is missing, which {INDEX} names", missing=True)
    if not parts and not any(PurePosixPath(file).suffix in (".safetensors", ".bin") for file in files):
        yield FileFault(SINGLE, "is missing", missing=True)


def _read_table(text: str, key: str) -> dict[str, Any]:
    """A table of a JSON file; empty where it cannot be read."""
    try:
        found = json.loads(text)[key]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}
