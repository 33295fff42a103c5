from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from shardway.models.transformer import (
    Attention,
    BlockShape,
    FullAttention,
    LatentAttention,
    LatentShape,
    rotate,
    rotation,
)

SHAPE = BlockShape(dim=16, layers=1, heads=4, kv_heads=2, ffn_dim=8)
LATENT = LatentShape(kv_rank=6, q_rank=5, rope_head_dim=2, value_head_dim=3)


def fill(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return module.double()


def sequence(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def turn(vector: torch.Tensor, position: int) -> torch.Tensor:
    """One vector turned as the paper has it, pair by pair."""
    half = len(vector) // 2
    out = vector.clone()
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / len(vector))
        a, b = vector[i], vector[i + half]
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)
    return out


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one head, [seq, width] each, token by token."""
    rows = []
    for t in range(len(q)):
        weights = torch.softmax(k[: t + 1] @ q[t] / math.sqrt(q.shape[1]), 0)
        rows.append(weights @ v[: t + 1])
    return torch.stack(rows)


def naive_latent(module: LatentAttention, x: torch.Tensor, heads: int) -> torch.Tensor:
    """Equations 37 to 47 of arXiv:2405.04434 for one sequence [seq, dim], head by head."""
    latent, width = module.latent, module.key_width
    queries = x if module.q_down is None else module.q_norm(x @ module.q_down.weight.T)
    down = x @ module.kv_down.weight.T
    compressed, shared = down[:, : latent.kv_rank], down[:, latent.kv_rank :]
    shared = torch.stack([turn(row, t) for t, row in enumerate(shared)])
    up = module.kv_norm(compressed) @ module.kv_up.weight.T
    outputs = []
    for head in range(heads):
        q = (queries @ module.wq.weight.T).unflatten(1, (heads, -1))[:, head]
        turned = torch.stack([turn(row, t) for t, row in enumerate(q[:, width:])])
        k, v = up.unflatten(1, (heads, -1))[:, head].split((width, latent.value_head_dim), dim=1)
        outputs.append(attend(torch.cat((q[:, :width], turned), 1), torch.cat((k, shared), 1), v))
    return torch.cat(outputs, 1) @ module.wo.weight.T


@pytest.mark.parametrize("q_rank", [0, 5])
@pytest.mark.parametrize("value_head_dim", [3, 6])
def test_latent_attention_is_that_of_the_paper(q_rank, value_head_dim):
    latent = dataclasses.replace(LATENT, q_rank=q_rank, value_head_dim=value_head_dim)
    shape = dataclasses.replace(SHAPE, kv_heads=4, latent=latent)
    module, x = fill(LatentAttention(shape, latent)), sequence(2, 7, 16)
    expected = torch.stack([naive_latent(module, row, 4) for row in x])
    assert torch.allclose(
        module(x, rotation(torch.arange(7), latent.rope_head_dim, shape.rope_theta)), expected, atol=1e-6
    )


def test_heads_of_latent_attention_add_up():
    """What a rank computes that holds two of the four heads is its part of the sum."""
    shape = dataclasses.replace(SHAPE, kv_heads=4, latent=LATENT)
    module, x = fill(LatentAttention(shape, LATENT)), sequence(1, 5, 16)
    total, turns = torch.zeros_like(x), rotation(torch.arange(5), LATENT.rope_head_dim, shape.rope_theta)
    for half in (0, 1):
        part = fill(LatentAttention(shape, LATENT))
        for split in (part.wq, part.kv_up):
            split.weight = torch.nn.Parameter(split.weight.chunk(2)[half])
        part.wo.weight = torch.nn.Parameter(part.wo.weight.chunk(2, dim=1)[half])
        total += part(x, turns)
    assert torch.allclose(total, module(x, turns), atol=1e-12)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_grouped_attention_is_that_of_each_head(qk_norm):
    shape = dataclasses.replace(SHAPE, qk_norm=qk_norm, qkv_bias=True, bias=True, head_dim=6)
    module, x = fill(Attention(shape)), sequence(5, 16)
    outputs = []
    for head in range(4):
        q, k, v = (w(x).unflatten(1, (-1, 6)) for w in (module.wq, module.wk, module.wv))
        q, k, v = q[:, head], k[:, head // 2], v[:, head // 2]
        if qk_norm:
            q = q / (q.square().mean(1, keepdim=True) + 1e-5).sqrt() * module.q_norm.weight
            k = k / (k.square().mean(1, keepdim=True) + 1e-5).sqrt() * module.k_norm.weight
        q, k = (torch.stack([turn(row, t) for t, row in enumerate(y)]) for y in (q, k))
        outputs.append(attend(q, k, v))
    assert torch.allclose(
        module(x[None], rotation(torch.arange(5), 6, shape.rope_theta))[0], module.wo(torch.cat(outputs, 1)), atol=1e-6
    )


def test_full_attention_sees_later_positions():
    q, k, v = (sequence(1, 4, 5, 6, seed=seed) for seed in range(3))
    k, v = k[:, :2], v[:, :2]
    expected = [torch.softmax(q[0, h] @ k[0, h // 2].T / math.sqrt(6), 1) @ v[0, h // 2] for h in range(4)]
    assert torch.allclose(FullAttention()(q, k, v)[0], torch.stack(expected), atol=1e-12)


def test_a_rotation_is_that_of_the_paper():
    x = torch.randn(1, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, *rotation(torch.arange(5), 8, 100.0))
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    angle = torch.arange(5).double()[:, None] * 100.0 ** (-torch.arange(4).double() / 4)
    expected = pairs * torch.exp(1j * angle)[:, None]
    assert torch.allclose(turned, torch.cat((expected.real, expected.imag), -1).float(), atol=1e-6)


def test_scores_depend_on_the_distance_of_positions_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator)

    def score(at: int, of: int) -> float:
        turned = [rotate(x, *rotation(torch.tensor([p]), 16, 10000.0)) for x, p in ((q, at), (k, of))]
        return (turned[0] * turned[1]).sum().item()

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) == pytest.approx(score(5, 0), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_a_rotation_of_narrow_numbers_is_computed_in_float32():
    x = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16)
    cos, sin = rotation(torch.tensor([1000]), 2, 10000.0)
    assert cos.dtype == sin.dtype == torch.float32
    turned = rotate(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    expected = [math.cos(1000) - math.sin(1000), math.cos(1000) + math.sin(1000)]
    assert torch.equal(turned.flatten(), torch.tensor(expected, dtype=torch.bfloat16))


def test_padded_values_run_in_the_fused_kernel_of_a_cpu():
    """Values as wide as keys are what that kernel takes; narrower ones alone would fall back to the slow form."""
    shape = dataclasses.replace(SHAPE, kv_heads=4, latent=LATENT)
    module = fill(LatentAttention(shape, LATENT)).float()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        turns = rotation(torch.arange(5), LATENT.rope_head_dim, shape.rope_theta)
        fused = module(sequence(1, 5, 16).float(), turns)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = module(sequence(1, 5, 16).float(), turns)
    assert F.mse_loss(fused, plain) < 1e-10
