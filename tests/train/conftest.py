from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def quiet_threads() -> Iterator[None]:
    """One torch thread while a whole run is trained in pytest's own process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
