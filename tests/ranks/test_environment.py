"""What a library finds that looks up launcher variables itself, and the group of a process alone."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from runs import place
from shardway.ranks.launcher import variables_for_libraries
from shardway.ranks.start import StartOptions, start_ranks


def test_the_variables_are_those_of_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before = dict(os.environ)
    with variables_for_libraries(place(1, 2, "srun", 4711), {"OTHER": "x"}):
        found = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "OTHER")]
        assert found == ["1", "2", "1", "4711", "x"]
    assert dict(os.environ) == before


def test_what_else_changes_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEANWHILE", "before")
    with pytest.raises(KeyError), variables_for_libraries(place(0, 1), {}):
        os.environ["MEANWHILE"] = "after"
        raise KeyError
    assert os.environ["MEANWHILE"] == "after"


def test_a_process_alone_gets_a_group_where_it_is_asked_for() -> None:
    threads = torch.get_num_threads()
    assert not start_ranks(place(0, 1, "none"), StartOptions(threads=threads)).grouped
    assert not dist.is_initialized()
    ranks = start_ranks(place(0, 1, "none"), StartOptions(threads=threads, group_alone=True))
    assert ranks.grouped
    assert ranks.gather("alone") == ["alone"]
    ranks.end()
    assert not dist.is_initialized()
