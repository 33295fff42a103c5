"""Tests below this folder need a CUDA device and skip with the reason where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def needs_cuda() -> None:
    """Skip the test where torch sees no CUDA device."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    """A run sets threads, determinism and precision of its process; put them back."""
    import torch

    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1])
    torch.set_float32_matmul_precision(precision)
