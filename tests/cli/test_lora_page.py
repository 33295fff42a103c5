"""The commands of docs/lora.md do what the page says, on a tiny model; its table is what the planner says now."""

from __future__ import annotations

import json
import random
import re
import shlex
from pathlib import Path

import pytest
from command_line import Shardway

from page_tables import check_table
from shardway.plan.case import Case, machine_of_part
from shardway.plan.huggingface import find_named
from shardway.plan.planner import estimate
from shardway.plan.shapes import Architecture, find_adapter
from shardway.runfile.schema import ModelSection
from tiny_hf import save_tiny

PAGE = Path(__file__).parents[2] / "docs" / "lora.md"
MARK = "<!-- run by tests/cli/test_lora_page.py -->"
QUICK = ("train.steps=2", "train.global_batch=2", "data.seq_len=32", "train.validate_every=off", "optim.warmup=1 steps")


def write_conversations(path: Path) -> None:
    path.parent.mkdir()
    dice = random.Random(0)
    with path.open("w") as stream:
        for _ in range(20):
            turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": str(dice.random())}]
            stream.write(json.dumps({"messages": turns}) + "\n")


def test_the_commands_of_the_page(shardway: Shardway, tmp_path: Path) -> None:
    write_conversations(tmp_path / "data" / "chat.jsonl")
    save_tiny(tmp_path / "models" / "base", "llama", vocab_size=260, max_position_embeddings=512)
    said: dict[str, str] = {}
    (block,) = re.findall(rf"{re.escape(MARK)}\n```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    for line in block.splitlines():
        dollar, program, *words = shlex.split(line)
        assert (dollar, program) == ("$", "shardway")
        further = QUICK if words[0] == "train" else ()
        ended = shardway(*words, *further)
        assert ended.code == 0, (line, ended.err)
        said[" ".join(words[:2] if words[0] == "checkpoint" else words[:1]) + " --merge" * ("--merge" in words)] = (
            ended.out
        )
    assert re.search(r"\d\S* parameters, 3 layers; \S+ of them are trained \(LoRA of rank 16\)", said["plan"])
    assert "model: 42 tensors" in said["checkpoint inspect"]
    assert said["checkpoint export"].startswith("step 2 written to adapter: adapter_model.safetensors")
    assert said["checkpoint export --merge"].startswith("step 2 written to model")
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_merge_without_an_adapter_is_refused(shardway: Shardway, tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "llama", vocab_size=260)
    assert shardway("train", "model.hf=base", "data.kind=synthetic", *QUICK, "--dir", "whole").code == 0
    ended = shardway("checkpoint", "export", "whole", "out", "--merge")
    assert (ended.code, "--merge: the run has no adapter" in ended.err) == (2, True)
    assert not (tmp_path / "out").exists()


def test_the_plan_of_8b(request: pytest.FixtureRequest) -> None:
    model, machine = find_named("llama3-8b"), machine_of_part("h100-sxm5-80gb")
    assert isinstance(model, Architecture)
    rows: list[list[str]] = [
        ["what is trained", "parameters", "states, GiB", "memory, GiB", "s a step", "tokens/s", "MFU"]
    ]
    for name, rank, targets in (
        ("all weights", 0, ["all-linear"]),
        ("LoRA of rank 16", 16, ["all-linear"]),
        ("LoRA of rank 16, attention", 16, ["attention"]),
    ):
        section = ModelSection(hf="x", adapter="lora", lora_rank=max(1, rank), lora_targets=targets)
        shape = model.beside(find_adapter(section, experts=False)) if rank else model
        settings = {"seq_len": 4096, "global_batch": 32, "attention": "flash3"}
        case = Case(model=shape, foreign=True, compiled=True, fused_loss=True, **settings)  # type: ignore[arg-type]
        found = estimate(case, machine)
        sizes = (found.peak.states, found.peak.device)
        rows.append(
            [
                name,
                f"{shape.trained_parameters:,}",
                *(f"{size / 2**30:.1f}" for size in sizes),
                f"{found.time.seconds:.1f}",
                f"{found.tokens_per_second:,.0f}",
                f"{found.mfu(causal=True):.0%}",
            ]
        )
    check_table(request, "lora.md", "a plan with an adapter", rows)
