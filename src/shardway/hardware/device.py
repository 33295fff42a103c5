"""What a device can do, as far as the defaults of a run depend on it.

Invariant: a fact is None if no source states it, and never guessed. This module must not import torch, nor choose a
default (that is `resolve.rules.formats`).
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from shardway.hardware.catalogue import Accelerator, find_accelerator
from shardway.hardware.probe import Device

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

_BF16_FROM = (8, 0)
"""Ampere: the first compute capability with bf16 and TF32 in its matrix units."""


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
    modern = capability >= _BF16_FROM if capability is not None else None
    return DeviceFacts(
        "cuda" if capability is not None or part is not None else "unknown",
        name,
        capability,
        native_bf16 if native_bf16 is not None else modern if modern is not None else known.native_bf16,
        known.bf16_gain,
        modern if modern is not None else known.has_tf32,
        find_missing_compiler(),
    )


def facts_of_found(device: Device) -> DeviceFacts:
    """A device as its driver lists it."""
    return facts_of_cuda(device.name, device.capability)


def find_missing_compiler(environ: Mapping[str, str] = os.environ) -> str:
    """Why torch cannot compile kernels for a GPU here; "" where it can.

    Triton turns kernels into code, and has a C compiler build what starts them, against the headers of Python.
    """
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not any(shutil.which(each) for each in (environ.get("CC") or "cc", "gcc", "clang")):
        return "no C compiler is found"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python's headers are not installed"
    return ""
