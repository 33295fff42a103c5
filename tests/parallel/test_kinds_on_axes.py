"""Each kind of model along each axis that `AXES_OF_KIND` gives it: the loss is that of one rank.

The random layouts of `test_layout_parity.py` draw from one kind, a transformer with rotary positions. Here are the
other kinds, and the features of a transformer that have parameters or shapes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pool import ranks
from runs import COMMON, pool_ranks, read_column, read_named, train_alone, train_tiny, worst_difference
from speed import picked

TOLERANCE = 1e-5
STEPS = 3

SHORT = (
    f"train.steps={STEPS}",
    "optim.warmup=1 steps",
    "train.micro_batch=2",
    "data.validation_fraction=0.1",
    f"train.validate_every={STEPS}",
)

TOKENS = (
    "model.dim=16",
    "model.layers=2",
    "model.heads=4",
    "model.ffn_dim=32",
    "model.vocab=32",
    "model.tied=false",
    "data.seq_len=8",
)
LEARNED = ("model.positions=learned", "model.bias=true", "model.norm=layernorm", "model.activation=gelu")
LATENT = ("model.kv_rank=12", "model.q_rank=8", "model.value_head_dim=6")
VIT = ("model.kind=vit", "data.shape=[1, 8, 8]", *TOKENS[:4], "model.classes=4")
CONVNET = ("model.kind=convnet", "data.shape=[1, 8, 8]", "model.channels=[4, 6]", "model.classes=4")
MLP = ("model.kind=mlp", "data.shape=[1, 4, 4]", "model.hidden=[24, 12]", "model.classes=4")
ENCODER_DECODER = ("model.kind=encoder_decoder", *TOKENS[:5], "data.seq_len=8")

MODELS = {
    "rope": TOKENS,
    "learned": (*TOKENS, *LEARNED),
    "latent": (*TOKENS, *LATENT),
    "latent, whole queries": (*TOKENS, "model.kv_rank=12"),
    "normed heads": (*TOKENS, "model.qk_norm=true", "model.qkv_bias=true", "model.kv_heads=2"),
    "experts after a dense block": (*TOKENS, "model.experts=4", "model.expert_dim=16", "model.dense_layers=1"),
    "vit": VIT,
    "vit, mean": (*VIT, "model.pooling=mean", "model.bias=true", "model.qk_norm=true"),
    "vit of 4 blocks": (*VIT, "model.layers=4", "model.pooling=mean"),
    "convnet": CONVNET,
    "mlp": MLP,
    "encoder_decoder": ENCODER_DECODER,
}
SCHEDULES = ("gpipe", "interleaved", "zero_bubble", "zbv")
AXES = {
    "tp": ("parallel.tp=2",),
    "tp, whole sequence": ("parallel.tp=2", "parallel.tp_sequence=false"),
    "cp": ("parallel.cp=2",),
    "pp": ("parallel.pp=2",),
    **{f"pp, {schedule}": ("parallel.pp=2", f"parallel.pp_schedule={schedule}") for schedule in SCHEDULES},
    "dp_shard": ("parallel.dp_shard=2",),
}


@dataclass(frozen=True)
class Case:
    """A model on two ranks of an axis."""

    model: str
    axis: str

    def __str__(self) -> str:
        return f"{self.model} on {self.axis}"


TRANSFORMERS = ("rope", "learned", "latent", "latent, whole queries", "normed heads")
CASES = [
    *(Case(model, axis) for model in TRANSFORMERS for axis in ("tp", "tp, whole sequence", "cp", "pp")),
    *(Case(model, axis) for model in ("vit", "vit, mean") for axis in ("tp", "pp")),
    *(Case("vit of 4 blocks", f"pp, {schedule}") for schedule in SCHEDULES),
    Case("experts after a dense block", "pp"),
    Case("convnet", "pp"),
    Case("mlp", "pp"),
    Case("encoder_decoder", "dp_shard"),
]
KEPT = [
    *map(Case, TRANSFORMERS, ("tp", "tp, whole sequence", "cp", "pp", "cp")),
    *(Case("vit", "tp"), Case("vit, mean", "pp"), Case("vit of 4 blocks", "pp, zbv")),
    *CASES[-4:],
]
"""Every kind and every axis once, for `make test`."""


@pytest.mark.parametrize("case", picked(CASES, *KEPT), ids=str)
@ranks(2)
def test_the_loss_is_that_of_one_rank(rank: int, tmp_path: Path, case: Case) -> None:
    base = (*COMMON, *SHORT)
    model = MODELS[case.model]
    train_alone(rank, tmp_path / "alone", *model, base=base)
    train_tiny(tmp_path / "together", pool_ranks(), *model, *AXES[case.axis], base=base)
    if rank == 0:
        validated = [read_named(tmp_path / name, "validation")[-1]["loss"] for name in ("together", "alone")]
        assert validated[0] == pytest.approx(validated[1], rel=TOLERANCE)
        for column in ("loss", "grad_norm"):
            found, expected = (read_column(tmp_path / name, column) for name in ("together", "alone"))
            assert len(found) == STEPS
            assert worst_difference(found, expected) < TOLERANCE
            assert len(set(expected)) == STEPS, "the run changes nothing, so that equal curves would say little"
