from __future__ import annotations
import time
from pathlib import Path
import pytest
from pool import ranks
from runs import *


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@ranks(2)
def test_x(rank: int, tmp_path: Path, shape) -> None:
    t = time.time()
    train_alone(rank, tmp_path / "one")
    a = time.time() - t
    t = time.time()
    train_tiny(tmp_path / "two", pool_ranks(), *layout(*shape))
    b = time.time() - t
    d = worst_difference(read_column(tmp_path / "two"), read_column(tmp_path / "one"))
    print(a, b, d, read_column(tmp_path / "one")[-1])
    assert 0
