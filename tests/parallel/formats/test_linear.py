"""Products with a weight that is handed in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from shardway.parallel.precision import FormattedLinear, linear_with


class Halved(FormattedLinear):
    """Multiplies by half of the weight, and notes the formats that it is given."""

    seen: tuple[torch.dtype, bool]

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.seen = (x.dtype, torch.is_autocast_enabled("cpu"))
        return F.linear(x, weight.to(x.dtype) / 2)


def test_an_ordinary_layer_multiplies_with_what_it_is_given() -> None:
    layer, x, weight, bias = nn.Linear(4, 3), torch.randn(2, 4), torch.randn(5, 4), torch.randn(5)
    assert torch.equal(linear_with(layer, x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(linear_with(layer, x, weight), F.linear(x, weight))
    assert torch.equal(linear_with(layer, x, layer.weight, layer.bias), layer(x))


def test_a_formatted_layer_decides_the_product_and_not_the_bias() -> None:
    layer, x, weight, bias = Halved(4, 3), torch.randn(2, 4), torch.randn(5, 4), torch.randn(5)
    torch.testing.assert_close(linear_with(layer, x, weight, bias), F.linear(x, weight / 2, bias))
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight / 2, layer.bias))


def test_autocast_chooses_the_format_around_the_product_and_not_in_it() -> None:
    layer, x = Halved(4, 3), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer.seen == (torch.bfloat16, False)
    layer(x)
    assert layer.seen == (torch.float32, False)
