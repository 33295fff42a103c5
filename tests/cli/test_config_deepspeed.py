"""`shardway config show --deepspeed`: the settings that DeepSpeed would be started with, as JSON."""

from __future__ import annotations

import json

from command_line import Shardway

WORDS = ("config", "show", "--deepspeed")


def test_the_settings(shardway: Shardway) -> None:
    ended = shardway(*WORDS, "train.engine=deepspeed", "deepspeed.stage=3", "--nproc", "4", "train.micro_batch=2")
    shown = json.loads(ended.out)
    assert (ended.code, ended.err) == (0, "")
    assert shown["zero_optimization"]["stage"] == 3
    assert shown["gradient_accumulation_steps"] == 2


def test_another_engine_has_none(shardway: Shardway) -> None:
    ended = shardway(*WORDS)
    assert (ended.code, ended.out) == (2, "")
    assert 'train.engine is "torch", so nothing is handed to DeepSpeed' in ended.err


def test_one_thing_at_a_time(shardway: Shardway) -> None:
    ended = shardway(*WORDS, "--mesh", "train.engine=deepspeed")
    assert ended.code == 2
    assert "allowed: one of them" in ended.err
