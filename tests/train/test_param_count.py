"""Which functions of a user's file can make the model that is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.runfile.schema import RunFile
from shardway.train.param_count import count_model

OWN = """
import functools, math, sys
from pathlib import Path
from torch import nn
from torch.nn import Linear

WIDTH = 4
class Net(nn.Module):
    pass
def make():
    return Linear(WIDTH, WIDTH)
def leave():
    sys.exit(3)
small = functools.partial(Linear, 2, 2)
wide = lambda: Linear(8, 8)
"""


def test_a_function_that_is_not_there_is_answered_by_those_of_the_file(tmp_path: Path) -> None:
    """Without what the file imports, and without values that nothing can call."""
    own = tmp_path / "own.py"
    own.write_text(OWN)
    with pytest.raises(UserError) as refused:
        count_model(RunFile(), f"{own}:nope")
    assert str(refused.value).endswith('has no function "nope".\n  it has: Net, make, leave, small, wide')
    own.write_text("from torch.nn import Linear\n")
    with pytest.raises(UserError, match="it has: nothing"):
        count_model(RunFile(), f"{own}:nope")


def test_a_function_that_ends_the_process_has_failed(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    with pytest.raises(UserError, match="failed: SystemExit: 3"):
        count_model(RunFile(), f"{own}:leave")
