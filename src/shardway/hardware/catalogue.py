"""Accelerators and links as their vendors state them, from TOML files, and what a device does well.

Invariants:
- A value is in the catalogue only with its source; a value that no source states is `None`. All peaks are dense.
- A fact about a device is None if no source states it, and never guessed.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from shardway.errors import Problem, UserError, check_no_problems
from shardway.plugins import find_plugin, list_installed, load_plugin

Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

NO_ACCELERATOR = "cpu"
"""What stands for a key where a machine has none."""


@dataclass(frozen=True)
class Link:
    """What joins two accelerators of a node, or two nodes; rates are one direction.

    `bandwidth_bytes_per_s` is that of one endpoint (all links of an accelerator, or one network adapter),
    `peer_bandwidth_bytes_per_s` that between two neighbours, `links` the number of links of an accelerator. `sources`
    maps a field to its citation.
    """

    key: str
    name: str
    bandwidth_bytes_per_s: float | None
    peer_bandwidth_bytes_per_s: float | None
    sources: Mapping[str, str]
    links: int | None = None


@dataclass(frozen=True)
class Accelerator:
    """One device as a process sees it: a GPU, or one die of a module that shows its dies as devices.

    `multiprocessors`: SMs of NVIDIA, compute units of AMD. `peak_flops` holds dense FLOP/s per dtype; `link` is a key
    of `load_links`; `device_names` are patterns of the names that drivers give. `sources` maps a field, or
    "peak_flops.<dtype>", to its citation.
    """

    key: str
    vendor: str
    name: str
    device_names: tuple[str, ...]
    peak_flops: Mapping[Dtype, float]
    sources: Mapping[str, str]
    memory_bytes: int | None = None
    memory_bandwidth_bytes_per_s: float | None = None
    link: str | None = None
    power_w: float | None = None
    multiprocessors: int | None = None

    def peak(self, dtype: Dtype) -> float | None:
        """Dense FLOP/s at `dtype`, or None where no source states it."""
        return self.peak_flops.get(dtype)


class AcceleratorCatalogue(Mapping[str, Accelerator]):
    """Accelerators by key, ours first; those of other packages are read when a key is not ours, or for a list. Raises
    UserError where a package's file is not in the form of ours, or has a key that another one has."""

    def __getitem__(self, key: str) -> Accelerator:
        own = load_own_accelerators()
        return own[key] if key in own or key == NO_ACCELERATOR else load_installed_accelerators()[key]

    def __iter__(self) -> Iterator[str]:
        return iter((*load_own_accelerators(), *load_installed_accelerators()))

    def __len__(self) -> int:
        return len(load_own_accelerators()) + len(load_installed_accelerators())


def load_accelerators() -> Mapping[str, Accelerator]:
    """Every accelerator of the catalogue by its key, such as "h100-sxm5-80gb"."""
    return AcceleratorCatalogue()


@cache
def load_own_accelerators() -> Mapping[str, Accelerator]:
    """Those of Shardway."""
    return MappingProxyType(_read_accelerators(tomllib.loads(load_plugin("accelerators", "accelerators"))))


def _read_accelerators(table: Mapping[str, Any]) -> dict[str, Accelerator]:
    found = {}
    for key, row in table.get("accelerators", {}).items():
        facts = {name: value for name, value in row.items() if name != "source"}
        facts |= {"device_names": tuple(row.get("device_names", ())), "sources": _cite(row, table)}
        found[key] = Accelerator(key, **{**facts, "peak_flops": MappingProxyType(dict(row.get("peak_flops", {})))})
    return found


def _cite(row: Mapping[str, Any], table: Mapping[str, Any]) -> Mapping[str, str]:
    return MappingProxyType({field: table["sources"][name] for field, name in row["source"].items()})


@cache
def load_installed_accelerators() -> Mapping[str, Accelerator]:
    """Those of other packages. Raises UserError as `AcceleratorCatalogue`."""
    found: dict[str, Accelerator] = {}
    packages = dict.fromkeys((*load_own_accelerators(), NO_ACCELERATOR), "Shardway")
    for name in list_installed("accelerators"):
        plugin = find_plugin("accelerators", name)
        problems: list[Problem] = []
        try:
            table = tomllib.loads(plugin.load())
        except ValueError as error:
            raise UserError(f"{plugin.title} is not valid TOML: {error}\n  to do: upgrade {plugin.package}") from None
        rows = table.get("accelerators", {})
        for key, row in rows.items():
            problems += (Problem(f"accelerators.{key}", what) for what in _find_wrong(row, table.get("sources", {})))
            if key in packages:
                problems.append(Problem(f"accelerators.{key}", f"{packages[key]} has this key", remedy="uninstall one"))
        check_no_problems(plugin.title, problems)
        found |= _read_accelerators(table)
        packages |= dict.fromkeys(rows, plugin.package)
    return MappingProxyType(found)


_TEXT_FIELDS = ("vendor", "name", "link")
_NUMBER_FIELDS = ("memory_bytes", "memory_bandwidth_bytes_per_s", "power_w", "multiprocessors")


def _find_wrong(row: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    known = (*_TEXT_FIELDS, *_NUMBER_FIELDS, "device_names", "peak_flops", "source")
    yield from (f"has no field {name}" for name in row if name not in known)
    yield from (f"lacks {name}" for name in ("vendor", "name", "source") if name not in row)
    yield from (f"{name} is no string" for name in _TEXT_FIELDS if not isinstance(row.get(name, ""), str))
    yield from (f"{name} is no number above 0" for name in _NUMBER_FIELDS if not _is_amount(row.get(name, 1)))
    names, peaks, cited = row.get("device_names", []), row.get("peak_flops", {}), row.get("source", {})
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        yield "device_names is no list of strings"
    if not isinstance(peaks, dict) or not all(name in DTYPES and _is_amount(peak) for name, peak in peaks.items()):
        yield f"peak_flops is no table of {', '.join(DTYPES)} with numbers above 0"
    if "link" in row and row["link"] not in load_links():
        yield f'there is no link "{row["link"]}" (one of {", ".join(load_links())})'
    stated = {name for name in (*_NUMBER_FIELDS, "link") if name in row} | (
        {f"peak_flops.{name}" for name in peaks} if isinstance(peaks, dict) else set()
    )
    cited = cited if isinstance(cited, dict) else {}
    yield from (f"{name} has no source" for name in sorted(stated - set(cited)))
    yield from (f'source "{name}" is not in [sources]' for name in cited.values() if name not in sources)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


@cache
def load_links() -> Mapping[str, Link]:
    """Every link of the catalogue by its key, such as "nvlink4" or "ndr400"."""
    table = tomllib.loads(files(__package__).joinpath("links.toml").read_text(encoding="utf-8"))
    links = {}
    for key, row in table["links"].items():
        total, peer = row.get("bandwidth_bytes_per_s"), row.get("peer_bandwidth_bytes_per_s")
        links[key] = Link(key, row["name"], total, peer, _cite(row, table), row.get("links"))
    return MappingProxyType(links)


def find_accelerator(device_name: str) -> Accelerator | None:
    """The part behind a driver's device name, such as "NVIDIA H100 80GB HBM3"; None where it is not known.

    The name is that of `torch.cuda.get_device_name` or `nvidia-smi`. A slice of a device (MIG, vGPU) is not
    known: its share of the peak is nowhere stated.
    """
    own = match_accelerator(device_name, load_own_accelerators().values())
    return own or match_accelerator(device_name, load_installed_accelerators().values())


def match_accelerator(device_name: str, accelerators: Iterable[Accelerator]) -> Accelerator | None:
    """The accelerator whose most specific pattern matches the name; None where two are equally specific."""
    name = _bare(device_name)
    hits: dict[int, dict[str, Accelerator]] = {}  # literal characters of a pattern -> parts by key
    for accelerator in accelerators:
        for pattern in accelerator.device_names:
            if fnmatchcase(name, _bare(pattern)):
                literal = sum(character not in "*?" for character in pattern)
                hits.setdefault(literal, {})[accelerator.key] = accelerator
    best = hits[max(hits)] if hits else {}
    return best.popitem()[1] if len(best) == 1 else None


def _bare(device_name: str) -> str:
    """The name in lower case without the vendor's word, which drivers give or leave out by version."""
    name = " ".join(device_name.lower().split())
    vendor = next((word for word in ("nvidia ", "amd ") if name.startswith(word)), "")
    return name.removeprefix(vendor)


# --- What a device can do, as far as the defaults of a run depend on it

Kind = Literal["cpu", "cuda", "rocm", "mps", "unknown"]


@dataclass(frozen=True)
class DeviceFacts:
    """One device. `capability` is CUDA's compute capability, None where it is not known.

    `native_bf16`: whether bf16 products are in the hardware, not emulated. `bf16_gain`: how many times as fast as in
    fp32 they are on paper. `has_tf32`: whether fp32 products can run in TF32. `no_compiler` says why nothing can be
    compiled for it on this machine; "" where it can.
    """

    kind: Kind
    name: str
    capability: tuple[int, int] | None = None
    native_bf16: bool | None = None
    bf16_gain: float | None = None
    has_tf32: bool | None = None
    no_compiler: str = ""


A_CPU = DeviceFacts("cpu", "a CPU", native_bf16=False, has_tf32=False, no_compiler="a CPU")


def facts_of_part(part: Accelerator) -> DeviceFacts:
    """A part of the catalogue, on a machine that this one is not: taken to have a compiler."""
    bf16, fp32, is_nvidia = part.peak("bf16"), part.peak("fp32"), part.vendor == "nvidia"
    return DeviceFacts(
        "cuda" if is_nvidia else "rocm" if part.vendor == "amd" else "unknown",
        part.name,
        native_bf16=bf16 is not None if part.peak_flops else None,
        bf16_gain=bf16 / fp32 if bf16 and fp32 else None,
        has_tf32=is_nvidia and part.peak("tf32") is not None,
    )


def facts_of_cuda(name: str, capability: tuple[int, int] | None, native_bf16: bool | None = None) -> DeviceFacts:
    """A CUDA device of this machine by its driver's name and compute capability."""
    part = find_accelerator(name)
    known = facts_of_part(part) if part is not None else DeviceFacts("cuda", name)
    # From Ampere on matrix units have bf16 and TF32.
    modern = capability >= (8, 0) if capability is not None else None
    return DeviceFacts(
        "cuda" if capability is not None or part is not None else "unknown",
        name,
        capability,
        native_bf16 if native_bf16 is not None else modern if modern is not None else known.native_bf16,
        known.bf16_gain,
        modern if modern is not None else known.has_tf32,
        find_missing_compiler(),
    )


def find_missing_compiler(environ: Mapping[str, str] = os.environ) -> str:
    """Why torch cannot compile kernels for a GPU here; "" where it can. Triton turns kernels into code, and has a C
    compiler build what starts them, against the headers of Python."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not any(shutil.which(each) for each in (environ.get("CC") or "cc", "gcc", "clang")):
        return "no C compiler is found"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python's headers are not installed"
    return ""
