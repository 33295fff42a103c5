"""What a device can do: by the catalogue, by its driver, and by what compiles here."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from shardway.hardware import catalogue
from shardway.hardware.catalogue import facts_of_cuda, facts_of_part, find_missing_compiler, load_accelerators


@pytest.mark.parametrize(
    ("key", "kind", "bf16", "gain", "tf32"),
    [
        ("h100-sxm5-80gb", "cuda", True, 14.8, True),
        ("v100-sxm2-32gb", "cuda", False, None, False),
        ("mi300x", "rocm", True, 8.0, False),
    ],
)
def test_a_part_of_the_catalogue(key: str, kind: str, bf16: bool, gain: float | None, tf32: bool) -> None:
    facts = facts_of_part(load_accelerators()[key])
    assert (facts.kind, facts.native_bf16, facts.has_tf32, facts.no_compiler) == (kind, bf16, tf32, "")
    assert facts.bf16_gain == (pytest.approx(gain, rel=0.01) if gain else None)


def test_a_device_that_the_catalogue_does_not_know_has_what_its_capability_says() -> None:
    facts = facts_of_cuda("NVIDIA GeForce RTX 4070", (8, 9))
    assert (facts.kind, facts.native_bf16, facts.bf16_gain, facts.has_tf32) == ("cuda", True, None, True)
    old = facts_of_cuda("Tesla T4", (7, 5))
    assert (old.kind, old.native_bf16, old.has_tf32) == ("cuda", False, False)


def test_what_is_missing_to_compile_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have = {"triton"}
    monkeypatch.setattr(catalogue, "find_spec", lambda name: object() if name in have else None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in have else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert find_missing_compiler({}) == "no C compiler is found"
    have.add("my-cc")
    assert find_missing_compiler({"CC": "my-cc"}) == "Python's headers are not installed"
    tmp_path.joinpath("Python.h").touch()
    assert find_missing_compiler({"CC": "my-cc"}) == ""
    have.remove("triton")
    assert find_missing_compiler({"CC": "my-cc"}) == "Triton is not installed"
