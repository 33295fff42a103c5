from __future__ import annotations

import pytest
from torch import nn

from shardway.errors import UserError
from shardway.models.contract import ModelPlan, canonical_name, find_init_weights, find_plan, match_modules, matches


class Planned(nn.Module):
    def __init__(self, *patterns: str) -> None:
        super().__init__()
        self.patterns = patterns
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))])
        self.head = nn.Linear(2, 2)

    def plan(self) -> ModelPlan:
        return ModelPlan(blocks=self.patterns)

    def init_weights(self, seed: int) -> None:
        self.seed = seed


def names(model: nn.Module, *patterns: str) -> list[str]:
    return [name for name, _ in match_modules(model, patterns)]


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("blocks.0", "blocks.*", True),
        ("blocks.0.attention", "blocks.*", False),
        ("blocks", "blocks.*", False),
        ("blocks.3.attention.wq", "blocks.*.attention.w[qkv]", True),
        ("blocks.3.attention.wo", "blocks.*.attention.w[qkv]", False),
        ("Head", "head", False),
    ],
)
def test_a_star_stands_for_one_part_of_a_name(name, pattern, fits):
    assert matches(name, pattern) is fits


def test_modules_come_once_and_in_the_model_s_order():
    assert names(Planned(), "head", "layers.*", "layers.1") == ["layers.0", "layers.1", "head"]


def test_the_modules_themselves_are_given():
    model = Planned()
    assert [module for _, module in match_modules(model, ["layers.*"])] == list(model.layers)


def test_every_pattern_that_matches_nothing_is_named_with_the_nearest_names():
    with pytest.raises(UserError) as caught:
        find_plan(Planned("layer.*", "head", "haed"))
    assert str(caught.value) == (
        "2 problems in the plan of Planned\n"
        "  layer.*: no module has such a name\n"
        "      allowed: the name of a module, * for any one part; such as layers.1, layers.0, layers\n"
        "      to do: correct the pattern\n"
        "  haed: no module has such a name\n"
        "      allowed: the name of a module, * for any one part; such as head, layers\n"
        "      to do: correct the pattern"
    )


class Carrying(Planned):
    """Hands over the plan that it was given."""

    def __init__(self, plan: ModelPlan) -> None:
        super().__init__()
        self.carried = plan

    def plan(self) -> ModelPlan:
        return self.carried


@pytest.mark.parametrize(
    "plan",
    [
        ModelPlan(tensor={"wq": "column"}),
        ModelPlan(regions=("attention",)),
        ModelPlan(attention=("core",)),
        ModelPlan(experts=("experts",)),
        ModelPlan(first=("embedding",)),
        ModelPlan(last=("norm",)),
        ModelPlan(shared=(("embedding", "head"),)),
        ModelPlan(held={"experts.gate": 1}),
    ],
)
def test_every_field_of_a_plan_is_looked_at(plan):
    with pytest.raises(UserError, match=r"no (module|parameter) has such a name"):
        find_plan(Carrying(plan))


def test_a_model_without_submodules_says_so():
    class Bare(nn.Module):
        def plan(self) -> ModelPlan:
            return ModelPlan(blocks=("blocks.*",))

    with pytest.raises(UserError, match="it has no submodules"):
        find_plan(Bare())


def test_a_wrapper_of_recompute_changes_neither_names_nor_matches():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Planned()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    assert match_modules(model, ["layers.*"]) == [("layers.0", model.layers[0]), ("layers.1", model.layers[1])]
    assert {canonical_name(name) for name, _ in model.named_parameters()} == dict(Planned().named_parameters()).keys()


def test_the_plan_of_a_class_is_found():
    assert find_plan(Planned("layers.*")) == ModelPlan(blocks=("layers.*",))


def test_a_module_without_methods_hands_over_nothing():
    model = nn.Linear(2, 2)
    assert find_plan(model) is None
    assert find_init_weights(model) is None


def test_a_submodule_that_is_called_plan_is_no_plan():
    model = nn.Module()
    model.plan = nn.Linear(2, 2)
    assert find_plan(model) is None


def test_a_method_that_returns_something_else_is_refused():
    class Other(nn.Module):
        def plan(self) -> dict[str, str]:
            return {"layers": "sharded"}

    with pytest.raises(UserError, match=r"plan\(\): returned a dict"):
        find_plan(Other())


def test_init_weights_of_a_class_is_found():
    model = Planned()
    fill = find_init_weights(model)
    assert fill is not None
    fill(7)
    assert model.seed == 7
