"""Where a model is cut, and why one cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardway.errors import UserError
from shardway.models.contract import ModelPlan
from shardway.models.image_models import MLP, MLPShape
from shardway.models.transformer import Transformer, TransformerShape
from shardway.parallel.axes.pipeline import keep_stages, plan_cut

SHAPE = TransformerShape(vocab=16, dim=8, layers=4, heads=2, kv_heads=2, ffn_dim=16, tied=False)


class Net(nn.Module):
    """An embedding, three layers and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layers = nn.ModuleDict({str(index): nn.Linear(4, 4) for index in range(3)})
        self.out = nn.Linear(4, 8, bias=False)


PLAN = ModelPlan(blocks=("layers.*",), first=("table",), last=("out",))


def test_stages_follow_one_another_and_hold_each_module_once() -> None:
    cut = plan_cut(Net(), PLAN, 2, [1, 2])
    assert cut == (("table", "layers.0"), ("layers.1", "layers.2", "out"))


def test_a_rank_keeps_its_stages_by_their_names() -> None:
    model = Transformer(SHAPE)
    whole = dict(model.named_parameters())
    stages = keep_stages(model, plan_cut(model, model.plan(), 4, [1, 1, 1, 1]), (0, 2))
    kept = dict(model.named_parameters())
    assert {name.partition(".")[0] for name in kept} == {"embedding", "blocks"}
    assert all(kept[name] is whole[name] for name in kept)
    assert [sorted(name.split(".")[1] for name, _ in stage.module.named_parameters()) for stage in stages] == [
        sorted(name.split(".")[1] for name in kept if name.startswith(("embedding", "blocks.0"))),
        sorted(name.split(".")[1] for name in kept if name.startswith("blocks.2")),
    ]


def test_a_stage_without_an_output_layer_hands_on_what_it_was_given() -> None:
    first, last = (keep_stages(make(), plan_cut(make(), make().plan(), 2), (index,))[0] for index in (0, 1))
    x = torch.ones(2, 6)
    assert first.module(x).shape == (2, 5)
    assert last.module(first.module(x)).shape == (2, 3)
    assert make()(x).shape == (2, 3)


def make() -> MLP:
    return MLP(MLPShape(6, (5, 4), 3))


def tied() -> nn.Module:
    model = Net()
    model.out.weight = model.table.weight
    return model


def twins() -> nn.Module:
    model = Net()
    model.layers["2"].weight = model.layers["0"].weight
    return model


def with_a_stray() -> nn.Module:
    model = Net()
    model.scale = nn.Parameter(torch.ones(4))
    return model


@pytest.mark.parametrize(
    ("make", "plan", "split", "told"),
    [
        (
            Net,
            ModelPlan(blocks=("layers.*",)),
            (),
            "parallel.pp cuts a model between its blocks, and the plan of Net does not say what comes after them.\n"
            "  To do: name `blocks`, `first` and `last` in its plan, or set parallel.pp = 1.",
        ),
        (
            tied,
            ModelPlan(blocks=("layers.*",), first=("table",), last=("out",), shared=(("table", "out"),)),
            (),
            "table and out of Net share a weight and would be in different stages of a pipeline.\n"
            "  To do: do not tie them (model.tied = false), or set parallel.pp = 1.",
        ),
        (
            tied,
            PLAN,
            (),
            "table.weight and out.weight of Net are one weight, and would be in stages 0 and 1 of a pipeline.\n"
            "  To do: give each a weight of its own, or set parallel.pp = 1.",
        ),
        (
            twins,
            PLAN,
            (1, 2),
            "layers.0.weight and layers.2.weight of Net are one weight, and would be in stages 0 and 1 of a pipeline.\n"
            "  To do: give each a weight of its own, or set parallel.pp = 1.",
        ),
        (
            with_a_stray,
            PLAN,
            (),
            "the parameters scale of Net are in none of the modules that its plan names as `first`, `blocks` or "
            "`last`, so a pipeline has no stage for them.\n"
            "  To do: name their modules in the plan.",
        ),
        (
            Net,
            PLAN,
            (1, 1),
            "parallel.pp_split = [1, 1] gives 2 blocks to 2 stages; the model has 3 blocks, and there are 2 stages.",
        ),
    ],
)
def test_a_model_that_cannot_be_cut(
    make: Callable[[], nn.Module], plan: ModelPlan, split: tuple[int, ...], told: str
) -> None:
    with pytest.raises(UserError) as refused:
        plan_cut(make(), plan, 2, split)
    assert str(refused.value) == told


def test_more_stages_than_blocks() -> None:
    with pytest.raises(UserError) as refused:
        plan_cut(Net(), PLAN, 4)
    assert str(refused.value) == (
        "3 blocks cannot be cut into 4 stages.\n"
        "  To do: lower parallel.pp or parallel.pp_stages_per_rank to at most 3 stages together."
    )


def test_weights_that_are_shared_within_a_stage_may_be() -> None:
    assert len(plan_cut(twins(), PLAN, 2, [3, 0])) == 2


def test_a_rank_without_any_weight() -> None:
    model = Net()
    with pytest.raises(UserError) as refused:
        keep_stages(model, plan_cut(model, PLAN, 4, [2, 0, 0, 1]), (1, 2))
    assert str(refused.value) == (
        "a rank of the pipeline would hold no weight of Net (its stages, of 4: 1, 2).\n"
        "  To do: give it a block in parallel.pp_split, or lower parallel.pp."
    )
