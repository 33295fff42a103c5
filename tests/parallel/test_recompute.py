"""Recompute: gradients bit for bit, which operators run again, names, and what the compiler makes of it."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardway.errors import UserError
from shardway.parallel.blocks import OPERATORS, apply_recompute, find_operators
from shardway.runfile.schema import RecomputeSection
from small_stack import VOCAB, build_stack, gradients, stack_loss, token_batch

LAYERS = 3
MATMULS = ("aten.mm.default", "aten.addmm.default")


def section(**keys: Any) -> RecomputeSection:
    return RecomputeSection(**keys)


class _Counter(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Counter[str]]:
    counter = _Counter()
    with counter:
        yield counter.seen


def backward_counts(keys: dict[str, Any]) -> Counter[str]:
    """How often each operator runs in the backward pass of a stack that recomputes so."""
    model = build_stack(LAYERS)
    apply_recompute(list(model.blocks), section(**keys))
    loss = stack_loss(model, token_batch())
    with counting() as seen:
        loss.backward()
    return seen


MODES = [
    {"mode": "full"},
    {"mode": "full", "every": 2},
    {"mode": "selective"},
    {"mode": "selective", "every": 3, "save_ops": ["attention"]},
    {"mode": "selective", "save_ops": ["aten.gelu", "aten.native_layer_norm"]},
]


@pytest.mark.parametrize("keys", MODES, ids=str)
def test_gradients_are_the_same_bits_with_dropout(keys: dict[str, Any]) -> None:
    plain, recomputed = build_stack(LAYERS, dropout=0.3), build_stack(LAYERS, dropout=0.3)
    apply_recompute(list(recomputed.blocks), section(**keys))
    torch.manual_seed(7)
    expected = gradients(plain, token_batch())
    after_plain = torch.get_rng_state()
    torch.manual_seed(7)
    found = gradients(recomputed, token_batch())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(torch.get_rng_state(), after_plain)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_full_recompute_runs_a_whole_block_again(every: int) -> None:
    plain, full = backward_counts({}), backward_counts({"mode": "full", "every": every})
    blocks = len(range(0, LAYERS, every))
    assert full["aten.gelu.default"] - plain["aten.gelu.default"] == blocks
    assert sum(full[each] - plain[each] for each in MATMULS) == 3 * blocks  # up, router, down
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert full[attention] - plain[attention] == blocks


def test_selective_recompute_leaves_matmuls_and_attention_alone() -> None:
    plain, some = backward_counts({}), backward_counts({"mode": "selective"})
    again = some - plain
    kept = {str(operator) for operator in find_operators(["matmul", "attention"])}
    assert not kept & again.keys()
    assert again["aten.gelu.default"] == LAYERS
    assert again["aten.native_layer_norm.default"] == LAYERS


def test_an_operator_may_be_named_by_itself() -> None:
    again = backward_counts({"mode": "selective", "save_ops": ["aten.gelu"]}) - backward_counts({})
    assert again["aten.gelu.default"] == 0
    assert again["aten.native_layer_norm.default"] == LAYERS


@pytest.mark.parametrize("mode", ["none", "budget"])
def test_modes_of_others_change_no_block(mode: str) -> None:
    model = build_stack(1)
    apply_recompute(list(model.blocks), section(mode=mode))
    assert "forward" not in vars(model.blocks[0])


def test_names_and_classes_stay_and_a_copy_is_a_copy() -> None:
    model = build_stack(1)
    names = list(model.state_dict())
    apply_recompute(list(model.blocks), section(mode="full"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert list(model.state_dict()) == names
    assert type(model.blocks[0]) is type(build_stack(1).blocks[0])
    assert stack_loss(twin, token_batch()).item() == pytest.approx(math.log(VOCAB))


def test_validation_needs_no_gradients() -> None:
    model = build_stack(1)
    expected = stack_loss(model, token_batch())
    apply_recompute(list(model.blocks), section(mode="selective"))
    with torch.no_grad():
        assert torch.equal(stack_loss(model, token_batch()), expected)


def test_groups_are_of_operators_that_exist() -> None:
    assert {"aten.mm.default", "aten.convolution.default"} <= {str(each) for each in find_operators(["matmul"])}
    assert all(find_operators([group]) for group in OPERATORS)


@pytest.mark.parametrize("name", ["aten.mmm", "matmuls", "", "aten", "aten.__name__"])
def test_an_unknown_operator_is_told(name: str) -> None:
    with pytest.raises(UserError, match=rf'recompute.save_ops names "{name}", which is no operator of this torch'):
        find_operators([name])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("keys", [{"mode": "full"}, {"mode": "selective"}], ids=str)
def test_compiled_blocks_recompute_in_one_graph(keys: dict[str, Any]) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    layers = 10  # more than torch would compile of one function if each block were a graph of its own
    plain, model = build_stack(layers), build_stack(layers)
    apply_recompute(list(model.blocks), section(**keys))
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter)
    expected, found = gradients(plain, token_batch()), gradients(model, token_batch())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert counter.frame_count == 1
    targets = [node.target for node in counter.graphs[0].graph.nodes]
    assert torch.ops.higher_order.tag_activation_checkpoint in targets
