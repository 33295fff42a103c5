"""What make_kept.py runs to make new kept data. What is in a folder that was made before is not read from here.

Invariant: a run is described by the words of a command line, so that any later version can be asked the same.
"""

from __future__ import annotations

from typing import Any

SMALL = (
    *("run.device=cpu", "run.threads=1", "run.display=off"),
    *("data.kind=synthetic", "data.samples=96", "data.seq_len=16", "train.steps=8", "train.global_batch=8"),
    *("train.validate_every=4 steps", "train.validation_samples=8", "optim.warmup=2 steps"),
    *("checkpoint.every=8 steps", "checkpoint.background=false"),
)
MODEL = ("model.dim=16", "model.heads=4", "model.ffn_dim=32", "model.vocab=32")

DEFAULT = (
    *("run.device=cpu", "run.threads=1", "data.path=text.txt", "data.validation_fraction=0.2"),
    *("model.dim=32", "model.layers=2", "data.seq_len=32", "train.steps=8", "train.global_batch=4"),
    *("train.validate_every=4 steps", "train.validation_samples=8"),
)
"""The default run, shrunk. Its own data are the library of the Python that runs it, which has versions."""

MIXTURE = ("model.experts=4", "model.expert_dim=16")
MODELS = {
    "dense": ("model.tied=false",),
    "tied": ("model.tied=true",),
    "grouped": ("model.tied=false", "model.kv_heads=2"),
    "one kv head": ("model.tied=false", "model.kv_heads=1", "model.norm=layernorm", "model.activation=gelu"),
    "experts": ("model.tied=false", *MIXTURE, "model.balance=none"),
    "experts, bias": ("model.tied=false", *MIXTURE, "model.balance_step=0.01", "model.dense_layers=1"),
    "experts, loss": (
        *("model.tied=false", *MIXTURE, "model.balance=loss", "model.balance_weight=0.1"),
        *("model.shared_experts=1", "model.kv_heads=2"),
    ),
}

LAYOUTS: dict[str, tuple[int, int, str, tuple[str, ...]]] = {
    "cp pp ep": (
        *(4, 4, "experts, bias"),
        (
            *("cp=2", "pp=2", "ep=2", "reshard_after_forward=auto", "prefetch=1", "cp_method=gather"),
            *("pp_schedule=zero_bubble", "pp_micro_batches=2", "micro_batch=auto", "mode=none"),
        ),
    ),
    "cp tp ep": (
        *(4, 2, "experts, loss"),
        (
            *("cp=2", "tp=2", "ep=2", "reshard_after_forward=true", "prefetch=0", "cp_method=ring"),
            *("tp_sequence=true", "tp_loss=false", "micro_batch=auto", "mode=selective"),
        ),
    ),
    "replicate shard ep": (
        *(4, 2, "experts"),
        (
            *("dp_replicate=2", "dp_shard=2", "ep=2", "reshard_after_forward=false", "prefetch=0"),
            *("micro_batch=1", "mode=none"),
        ),
    ),
    "tp pp": (
        *(4, 4, "grouped"),
        (
            *("tp=2", "pp=2", "tp_sequence=false", "tp_loss=true", "pp_schedule=gpipe", "pp_split=[3, 1]"),
            *("micro_batch=4", "mode=none"),
        ),
    ),
    "replicate tp": (
        *(4, 2, "dense"),
        ("dp_replicate=2", "tp=2", "tp_sequence=true", "tp_loss=true", "micro_batch=4", "mode=full"),
    ),
    "shard pp": (
        *(4, 4, "one kv head"),
        (
            *("dp_shard=2", "pp=2", "reshard_after_forward=false", "prefetch=1", "pp_schedule=interleaved"),
            *("pp_micro_batches=2", "micro_batch=2", "mode=full"),
        ),
    ),
    "three replicas": (3, 2, "dense", ("dp_replicate=3", "micro_batch=1", "mode=none")),
    "shard": (
        *(2, 2, "tied"),
        ("dp_shard=2", "reshard_after_forward=true", "prefetch=2", "micro_batch=auto", "mode=selective"),
    ),
    "pp zbv": (
        *(2, 4, "grouped"),
        ("pp=2", "pp_schedule=zbv", "pp_split=[1, 1, 1, 1]", "micro_batch=2", "mode=selective"),
    ),
    "pp": (2, 4, "experts, loss", ("pp=2", "pp_schedule=1f1b", "pp_split=[3, 1]", "micro_batch=2", "mode=full")),
}
"""Ranks, blocks, model and what differs: after those of 120 draws by seed 2026 of `tests/drawn_layouts.py` that
together show most. Each axis is split beside others, and each schedule, method and kind of recompute is there."""


def _word(word: str) -> str:
    room = {"micro_batch": "train", "mode": "recompute"}.get(word.partition("=")[0], "parallel")
    return f"{room}.{word}"


def _layout(ranks: int, layers: int, model: str, words: tuple[str, ...]) -> dict[str, Any]:
    steps = 4 if ranks == 4 or "pp_schedule=zbv" in words else 8  # what takes long on two cores
    said = (*SMALL, *MODEL, f"model.layers={layers}", f"train.steps={steps}", *MODELS[model], *map(_word, words))
    return {"parts": [{"ranks": ranks, "words": said}]}


def _resumed(*parts: tuple[int, tuple[str, ...]], model: tuple[str, ...]) -> dict[str, Any]:
    """Half of the way in one layout, the rest in another."""
    words = (*SMALL, *MODEL, *model, "optim.schedule=constant")
    halves = zip(parts, (5, 8), strict=True)
    return {
        "parts": [
            {"ranks": ranks, "words": (*words, *layout, f"train.steps={steps}")} for (ranks, layout), steps in halves
        ],
        "parameters": {},
    }


CASES: dict[str, dict[str, Any]] = {
    "the default run": {"parts": [{"ranks": 1, "words": DEFAULT}], "parameters": {}},
    **{f"layout: {name}": _layout(*layout) for name, layout in LAYOUTS.items()},
    "resumed: shards, then tensor parallel": _resumed(
        (2, ("parallel.dp_shard=2",)), (2, ("parallel.tp=2",)), model=("model.layers=2", "model.tied=false")
    ),
    "resumed: expert parallel, then one rank": _resumed(
        (2, ("parallel.cp=2", "parallel.ep=2", "parallel.dp_replicate=1")),
        (1, ("train.micro_batch=4",)),
        model=("model.layers=2", *MODELS["experts, bias"], "model.dense_layers=0"),
    ),
    "resumed: replicas with dropout, then a pipeline": _resumed(
        (2, ("parallel.dp_replicate=2", "train.micro_batch=2")),
        (2, ("parallel.pp=2", "train.micro_batch=2")),
        model=("model.layers=2", "model.tied=false", "model.dropout=0.1", "optim.name=muon"),
    ),
    "a loop of one's own, stopped by a signal": {
        "parts": [
            {"ranks": 2, "script": "loop.py", "words": ["--stop-after=5", "parallel.dp_shard=2"]},
            {"ranks": 2, "script": "loop.py", "words": ["parallel.dp_shard=2"]},
        ],
        "parameters": {},
    },
}
"""By name: the commands that are run one after the other in one folder."""


# --- run directories

TINY = (
    *("run.device=cpu", "run.threads=1", "run.display=off", "data.kind=synthetic", "data.samples=64"),
    *("model.dim=8", "model.layers=1", "model.heads=2", "model.ffn_dim=16", "model.vocab=16", "data.seq_len=8"),
    *("train.global_batch=4", "train.validation_samples=8", "optim.warmup=2 steps", "optim.schedule=constant"),
)
"""A model whose checkpoint is small."""

FINISHED = (
    *(*TINY, "train.steps=6", "train.validate_every=2 steps", "data.record_ids=true"),
    *("checkpoint.every=2 steps", "checkpoint.keep=1", "checkpoint.keep_best=1", "guard.compare_every=2 steps"),
)
SHARDED = (
    *(*TINY, "parallel.dp_shard=2", "train.validate_every=off", "checkpoint.every=2 steps", "checkpoint.keep=1"),
    *("model.layers=2", "model.tied=false"),
)
FAILED = (
    *(*TINY, "train.steps=8", "guard.non_finite=stop", "optim.lr=1e30", "optim.clip=off", "train.validate_every=off"),
    *("checkpoint.every=off", "optim.warmup=2 steps"),
)
KILLED = (*(*TINY, "run.restarts=0", "train.validate_every=off", "checkpoint.every=off"),)
SPIKED = (
    *(*(word for word in TINY if "synthetic" not in word and "samples" not in word and "vocab" not in word),),
    *("data.path=spiky.txt", "data.shuffle=false", "data.validation_fraction=0.0", "train.validate_every=off"),
    *("checkpoint.every=5 steps", "checkpoint.keep=1", "checkpoint.background=false", "optim.lr=0.02"),
    *("guard.spike=6.0", "guard.on_spike=roll_back", "guard.spike_steps=1", "train.steps=34"),
)
LOCAL = (
    *(*TINY, "train.validate_every=off", "checkpoint.every=4 steps", "checkpoint.keep=1"),
    *("train.micro_batch=1", "checkpoint.background=false"),
    *("checkpoint.local_every=1 steps", "checkpoint.local_dir=$PWD/disk"),
)
JOB = """format = 1

[model]
dim = 8
layers = 1
heads = 2
ffn_dim = 16
vocab = 16

[data]
kind = "synthetic"
samples = 64
seq_len = 8

[train]
steps = 100000
global_batch = 2048
micro_batch = 8
validate_every = "off"

[checkpoint]
every = "off"
keep = 1

[run]
device = "cpu"
threads = 1
"""
"""Its steps take a good part of a second, so that a deadline comes after few."""
