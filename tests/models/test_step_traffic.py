"""What a forward and backward pass of a transformer moves beside products and attention, counted on fake tensors: the
kernels of a device without a device. The bounds are the figures of `docs/numbers.md`."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from outside import ROOT, modules_of

with modules_of("bench"):
    import step_traffic
    from step_traffic import Counts, count_all, fuse, shape_of

LAYERS = 8
WEIGHTS = LAYERS * 7 + 1
"""Matrices that products read."""
OTHER_COMPILER = 1.02
"""The compiler's decompositions and its choice of what to compute again differ between versions of torch."""

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(name="counts", scope="module")
def _counts() -> Counts:
    torch._dynamo.reset()
    found = count_all(LAYERS)
    torch._dynamo.reset()
    return found


def documented() -> dict[str, tuple[int, int, float]]:
    """What it is -> products and attention, other kernels, GB that those move."""
    page = (ROOT / "docs/numbers.md").read_text()
    rows = re.findall(r"^\| (.*8 blocks.*|one block.*) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|", page, re.MULTILINE)
    return {name: (int(products), int(kernels), float(moved)) for name, products, kernels, moved in rows}


def test_what_is_moved_does_not_grow(counts: Counts) -> None:
    """Whoever lowers it lowers the figures of the page."""
    page, rows = documented(), dict(counts.rows())
    assert page.keys() == rows.keys()
    for name, found in rows.items():
        products, kernels, moved = page[name]
        slack = OTHER_COMPILER if "compiled" in name else 1.0
        assert found.products <= products, name
        assert found.kernels <= kernels * slack, name
        assert found.outside / 1e9 <= (moved + 0.005) * slack, name
        assert found.outside / 1e9 >= 0.97 * moved, f"{name}: less than the page says"


def test_what_is_moved_is_within_its_goals(counts: Counts) -> None:
    assert counts.eager.traffic.outside <= 45e9
    assert counts.compiled.outside <= 25e9


def test_each_weight_is_cast_once(counts: Counts) -> None:
    assert counts.weight_casts() == WEIGHTS
    assert counts.weight_casts(torch.float32) == WEIGHTS, "gradients"


def test_the_stream_is_cast_where_it_begins_and_nowhere_else(counts: Counts) -> None:
    """To bf16 behind the embedding, and its gradient back."""
    stream = (step_traffic.BATCH, step_traffic.SEQ, shape_of(1).dim)
    assert {key: count for key, count in counts.eager.casts.items() if key[0] == stream} == {
        (stream, torch.bfloat16): 1,
        (stream, torch.float32): 1,
    }


def test_rotations_are_made_once_for_all_blocks(counts: Counts) -> None:
    width = shape_of(1).head_width
    assert counts.eager.casts[(step_traffic.SEQ, 1, width), torch.bfloat16] == 2
    assert counts.eager.traffic.by_name["cos"] == 2 * 4 * step_traffic.SEQ * width // 2


# --- how graphs are fused


def traced(function: Callable[..., object], *shapes: tuple[int, ...]) -> fx.GraphModule:
    with FakeTensorMode():
        inputs = [torch.empty(shape) for shape in shapes]
        return make_fx(function, tracing_mode="real")(*inputs)


N = 1024
SQUARE = 4 * N * N


def test_a_chain_between_products_reads_and_writes_once() -> None:
    found = fuse(traced(lambda x, w: torch.mm((x * 2).relu().t() + 1, w), (N, N), (N, N)))
    assert (found.products, found.kernels, found.outside) == (1, 1, 2 * SQUARE)


def test_what_a_product_lies_between_is_two_kernels() -> None:
    found = fuse(traced(lambda x, w: torch.mm(x.relu(), w).relu(), (N, N), (N, N)))
    assert (found.products, found.kernels, found.outside) == (1, 2, 4 * SQUARE)


def test_a_shared_input_is_read_once() -> None:
    found = fuse(traced(lambda x, w: (torch.mm(x.relu(), w), x.sigmoid()), (N, N), (N, N)))
    assert (found.products, found.kernels, found.outside) == (1, 1, 3 * SQUARE)


def test_kernels_that_share_nothing_are_two() -> None:
    found = fuse(traced(lambda x, y: (x.relu(), y.relu()), (N, N), (N, N)))
    assert (found.kernels, found.outside) == (2, 4 * SQUARE)


def test_what_is_computed_again_is_fused_with_its_use_and_not_with_its_source() -> None:
    """relu(x) could be made before the product, and is read behind it alone."""
    found = fuse(traced(lambda x, w: torch.mm(x, w) * x.relu(), (N, N), (N, N)))
    assert (found.kernels, found.outside) == (1, 3 * SQUARE)


def test_a_cast_is_written_for_products_alone() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        narrow = torch.ops.prims.convert_element_type.default(x, torch.bfloat16)
        return torch.mm(narrow, narrow), narrow + 1

    found = fuse(traced(function, (N, N), (N, N)))
    assert found.outside == (SQUARE + SQUARE // 2) + (SQUARE + SQUARE // 2)
    assert found.kernels == 2
