"""Tests below this folder need a CUDA device and skip with the reason where there is none."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def needs_cuda() -> None:
    """Skip the test where torch sees no CUDA device."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
