"""`shardway plugins list`: what it shows of other packages, and what --check finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Shardway

from installed_packages import Install, installing
from shardway.plugins import GROUPS

GOOD = """
from shardway.train.optim.kinds import OptimizerKind

class Good(OptimizerKind):
    state_bytes = 4.0

    def build(self, section, model, peak_lr):
        raise RuntimeError
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from installing(tmp_path, monkeypatch)


def test_nothing_is_installed(shardway: Shardway) -> None:
    assert shardway("plugins", "list", "--others").out == "no other package adds anything\n"
    listed = [line.split()[:2] for line in shardway("plugins", "list").out.splitlines()[1:]]
    assert listed == [[group, name] for group in GROUPS for name in GROUPS[group].own]
    own = json.loads(shardway("plugins", "list", "--json", "optimizers", "--check").out)
    assert [row["name"] for row in own] == list(GROUPS["optimizers"].own)
    assert {(row["group"], row["package"], row["state"]) for row in own} == {("optimizers", "shardway", "ok")}


def test_the_table_and_what_check_finds(shardway: Shardway, install: Install) -> None:
    names = {"good": "good_module:Good", "sgd": "good_module:Good", "torn": "torn_module:Torn"}
    install("shardway-good", {"shardway.optimizers": names}, good_module=GOOD, torn_module="1 / 0")
    rows = [
        "GROUP       NAME  PACKAGE        VERSION  STATE",
        "optimizers  good  shardway-good  1.2.3    ok",
        "optimizers  sgd   shardway-good  1.2.3    shadowed by Shardway's own",
        "optimizers  torn  shardway-good  1.2.3    ok",
    ]
    listed = shardway("plugins", "list", "--others")
    assert (listed.code, listed.out.splitlines()) == (0, rows)
    checked = shardway("plugins", "list", "--others", "--check")
    rows[-1] = rows[-1].removesuffix("ok") + "cannot be loaded: ZeroDivisionError: division by zero"
    assert (checked.code, checked.out.splitlines()) == (1, rows)


def test_a_group_that_is_not_there(shardway: Shardway) -> None:
    done = shardway("plugins", "list", "optimiser")
    assert (done.code, done.err) == (
        2,
        f'shardway: there is no group "optimiser"\n  allowed: {", ".join(GROUPS)}\n',
    )
