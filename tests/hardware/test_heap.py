"""What a process frees stays in its heap for what it takes next, unless a person has set that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import warm
from shardway.hardware import heap

STEPS = """
import ctypes, resource, sys
import torch
from shardway.ranks.launcher import find_placement
from shardway.ranks.start import StartOptions, start_ranks

for name in (-1, -3):
    ctypes.CDLL(None).mallopt(name, 2**17)  # nothing is kept, as where bad luck has it
if sys.argv[1] == "rank":
    start_ranks(find_placement({}), StartOptions())

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [torch.ones(2**16) for _ in range(64)]  # 16 MiB, in pieces of 256 KiB
    del made
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults = [step() for _ in range(8)]
print(min(faults[2:]), max(faults[2:]))
"""
PAGES = 64 * 2**18 // os.sysconf("SC_PAGE_SIZE")


def count_faults(argument: str) -> tuple[int, int]:
    """The fewest and the most page faults of a step that takes and frees `PAGES` pages."""
    words = [sys.executable, "-c", STEPS, argument]
    with warm.starts():
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    low, high = done.stdout.split()
    return int(low), int(high)


def test_a_rank_takes_its_memory_once() -> None:
    fewest, _ = count_faults("no rank")
    assert fewest > PAGES / 2
    _, most = count_faults("rank")
    assert most < PAGES * 0.05


@pytest.mark.parametrize(
    ("variables", "calls"),
    [
        ({}, [(-3, heap.LARGEST_BLOCK), (-1, heap.KEPT_BYTES)]),
        ({"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2"}, [(-3, heap.LARGEST_BLOCK), (-1, heap.KEPT_BYTES)]),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, []),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, []),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, []),
    ],
)
def test_a_setting_of_a_person_stays(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], calls: list[tuple[int, int]]
) -> None:
    made: list[tuple[int, int]] = []

    class Recording:
        def mallopt(self, *numbers: int) -> int:
            made.append(numbers)  # type: ignore[arg-type]
            return 1

    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: Recording())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    heap.keep_freed_memory()
    assert made == calls


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: object())
    heap.keep_freed_memory()
