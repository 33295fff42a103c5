"""Number formats of a step, from the run file's words to the format of what is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardway.parallel.precision import Precision, apply_formats, read_precision
from shardway.runfile.schema import PrecisionSection
from small_stack import build_stack, float8, gradients, stack_loss, token_batch

CPU = torch.device("cpu")


def read(**keys: Any) -> Precision:
    return read_precision(PrecisionSection(**keys))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Precision(None, torch.float32)),
        ({"compute": "bf16", "reduce": "bf16"}, Precision(torch.bfloat16, torch.bfloat16)),
        (
            {"compute": "bf16", "weights": "bf16"},
            Precision(torch.bfloat16, torch.float32, weights_dtype=torch.bfloat16),
        ),
        ({"compute": "fp16"}, Precision(torch.float16, torch.float32)),
        (
            {"compute": "float8", "float8_recipe": "rowwise", "first_last": "bf16", "float8_all_gather": False},
            Precision(torch.bfloat16, torch.float32, float8=float8("rowwise", first_last="bf16")),
        ),
        (
            {"compute": "float8", "float8_all_gather": True, "float8_emulate": True},
            Precision(torch.bfloat16, torch.float32, float8=float8(all_gather=True, emulate=True)),
        ),
    ],
)
def test_the_words_of_a_run_file(keys: dict[str, Any], expected: Precision) -> None:
    assert read(**keys) == expected


def test_only_fp16_scales_its_loss() -> None:
    scaling = {name for name in ("fp32", "bf16", "fp16", "float8") if read(compute=name).scales_loss}
    assert scaling == {"fp16"}


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, torch.float32),
        ({"compute": "bf16"}, torch.bfloat16),
        ({"compute": "fp16"}, torch.float16),
        ({"compute": "float8"}, torch.bfloat16),
    ],
)
def test_autocast_multiplies_in_the_format(keys: dict[str, Any], dtype: torch.dtype) -> None:
    with read(**keys).autocast(CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_weights_in_the_format_of_products_need_no_autocast() -> None:
    with read(compute="bf16", weights="bf16").autocast(CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [({"compute": "bf16"}, 0.03), ({"compute": "fp16"}, 0.004), ({"compute": "bf16", "weights": "bf16"}, 0.04)],
    ids=str,
)
def test_gradients_are_those_of_fp32_within_the_format(keys: dict[str, Any], tolerance: float) -> None:
    """Relative to the norm of each gradient; an 8-bit significand is within 2^-9 = 0.002 a rounding, 11 bits 2^-12."""
    precision, model = read(**keys), build_stack()
    apply_formats(model, precision.weights_dtype)
    expected = gradients(build_stack(), token_batch())
    with precision.autocast(CPU):
        loss = stack_loss(model, token_batch())
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == precision.weights_dtype
        error = (parameter.grad.float() - expected[name]).norm() / expected[name].norm()
        assert 0 < error.item() < tolerance, name


def test_fp16_on_a_cpu_runs_all_that_a_transformer_needs() -> None:
    """Products, attention, convolution and norms stay in fp16 under autocast; a loss is computed in fp32."""
    q = torch.randn(1, 2, 8, 4)
    with read(compute="fp16").autocast(CPU):
        y = F.linear(torch.randn(3, 8), torch.randn(8, 8))
        found = {
            F.scaled_dot_product_attention(q, q, q, is_causal=True).dtype,
            F.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)).dtype,
            F.rms_norm(y, (8,)).dtype,
            y.dtype,
        }
        assert found == {torch.float16}
        assert F.cross_entropy(y, torch.zeros(3, dtype=torch.int64)).dtype == torch.float32
