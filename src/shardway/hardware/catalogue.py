"""Accelerators and links as the vendors state them, read from the TOML files beside this module.

Invariant: a value is in the catalogue only with its source; a value that no source states is `None`. All
peaks are dense. This module must not look at the machine it runs on, nor guess a part from a name it does not know.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal, get_args

Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

_VENDOR_WORDS = ("nvidia ", "amd ")


@dataclass(frozen=True)
class Link:
    """What joins two accelerators of a node, or two nodes; rates are one direction.

    `bandwidth_bytes_per_s` is that of one endpoint (all links of an accelerator, or one network adapter),
    `peer_bandwidth_bytes_per_s` that between two neighbours. `sources` maps a field to its citation.
    """

    key: str
    name: str
    bandwidth_bytes_per_s: float | None
    peer_bandwidth_bytes_per_s: float | None
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Accelerator:
    """One device as a process sees it: a GPU, or one die of a module that shows its dies as devices.

    `peak_flops` holds dense FLOP/s per dtype; `link` is a key of `load_links`; `device_names` are patterns of
    the names that drivers give. `sources` maps a field, or "peak_flops.<dtype>", to its citation.
    """

    key: str
    vendor: str
    name: str
    device_names: tuple[str, ...]
    peak_flops: Mapping[Dtype, float]
    memory_bytes: int | None
    memory_bandwidth_bytes_per_s: float | None
    link: str | None
    power_w: float | None
    sources: Mapping[str, str]

    def peak(self, dtype: Dtype) -> float | None:
        """Dense FLOP/s at `dtype`, or None where no source states it."""
        return self.peak_flops.get(dtype)


@cache
def load_accelerators() -> Mapping[str, Accelerator]:
    """Every accelerator of the catalogue by its key, such as "h100-sxm5-80gb"."""
    table = _read_table("accelerators.toml")
    return MappingProxyType(
        {key: _accelerator(key, row, table["sources"]) for key, row in table["accelerators"].items()}
    )


@cache
def load_links() -> Mapping[str, Link]:
    """Every link of the catalogue by its key, such as "nvlink4" or "ndr400"."""
    table = _read_table("links.toml")
    return MappingProxyType({key: _link(key, row, table["sources"]) for key, row in table["links"].items()})


def find_accelerator(device_name: str) -> Accelerator | None:
    """The part behind a driver's device name, such as "NVIDIA H100 80GB HBM3"; None where it is not known.

    The name is that of `torch.cuda.get_device_name` or `nvidia-smi`. A slice of a device (MIG, vGPU) is not
    known: its share of the peak is nowhere stated.
    """
    return match_accelerator(device_name, load_accelerators().values())


def match_accelerator(device_name: str, accelerators: Iterable[Accelerator]) -> Accelerator | None:
    """The accelerator whose most specific pattern matches the name; None where two are equally specific."""
    name = _bare(device_name)
    hits = [
        (_specificity(pattern), accelerator)
        for accelerator in accelerators
        for pattern in accelerator.device_names
        if fnmatchcase(name, _bare(pattern))
    ]
    most = max((specificity for specificity, _ in hits), default=0)
    best = {accelerator.key: accelerator for specificity, accelerator in hits if specificity == most}
    return best.popitem()[1] if len(best) == 1 else None


def _bare(device_name: str) -> str:
    """The name in lower case without the vendor's word, which drivers give or leave out by version."""
    name = " ".join(device_name.lower().split())
    return next((name.removeprefix(word) for word in _VENDOR_WORDS if name.startswith(word)), name)


def _specificity(pattern: str) -> int:
    """How many characters of a pattern are literal."""
    return sum(character not in "*?" for character in pattern)


def _read_table(file_name: str) -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath(file_name).read_text(encoding="utf-8"))


def _citations(row: Mapping[str, Any], sources: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType({field: sources[name] for field, name in row["source"].items()})


def _link(key: str, row: Mapping[str, Any], sources: Mapping[str, str]) -> Link:
    return Link(
        key=key,
        name=row["name"],
        bandwidth_bytes_per_s=row.get("bandwidth_bytes_per_s"),
        peer_bandwidth_bytes_per_s=row.get("peer_bandwidth_bytes_per_s"),
        sources=_citations(row, sources),
    )


def _accelerator(key: str, row: Mapping[str, Any], sources: Mapping[str, str]) -> Accelerator:
    return Accelerator(
        key=key,
        vendor=row["vendor"],
        name=row["name"],
        device_names=tuple(row.get("device_names", ())),
        peak_flops=MappingProxyType(dict(row.get("peak_flops", {}))),
        memory_bytes=row.get("memory_bytes"),
        memory_bandwidth_bytes_per_s=row.get("memory_bandwidth_bytes_per_s"),
        link=row.get("link"),
        power_w=row.get("power_w"),
        sources=_citations(row, sources),
    )
