from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardway.errors import UserError
from shardway.models.contract import match_modules
from shardway.models.transformer import Transformer, TransformerShape, rotate, rotation

SHAPE = TransformerShape(vocab=17, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=40)
VARIANTS = [
    SHAPE,
    dataclasses.replace(SHAPE, tied=False),
    dataclasses.replace(SHAPE, kv_heads=4),
    dataclasses.replace(SHAPE, kv_heads=1, norm="layernorm"),
    dataclasses.replace(SHAPE, activation="gelu", tied=False, norm="layernorm"),
]
every_variant = pytest.mark.parametrize(
    "shape", VARIANTS, ids=lambda s: f"{s.norm}-{s.activation}-{s.kv_heads}kv-{'tied' if s.tied else 'untied'}"
)


def build(shape: TransformerShape, seed: int = 0) -> Transformer:
    model = Transformer(shape)
    model.init_weights(seed)
    return model


def tokens(batch: int, length: int, vocab: int = 17) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(1))


@every_variant
def test_a_token_changes_no_logit_before_it(shape):
    model, inputs = build(shape), tokens(1, 12)
    changed = inputs.clone()
    changed[0, 7] = (changed[0, 7] + 1) % shape.vocab
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert ((before - after)[:, 7:].abs().amax(-1) > 1e-4).all()


@every_variant
def test_logits_have_a_row_for_each_token(shape):
    assert build(shape)(tokens(3, 5)).shape == (3, 5, shape.vocab)


@every_variant
def test_the_parameter_formula_counts_the_module(shape):
    assert shape.parameters == sum(parameter.numel() for parameter in Transformer(shape).parameters())


@every_variant
def test_a_model_from_meta_has_the_bits_of_one_from_the_cpu(shape):
    with torch.device("meta"):
        model = Transformer(shape)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.detach().fill_(torch.nan)
    model.init_weights(5)
    expected = build(shape, seed=5)
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(tokens(2, 6)), expected(tokens(2, 6)))


@every_variant
def test_every_parameter_has_a_gradient(shape):
    model = build(shape)
    F.cross_entropy(model(tokens(4, 9)).flatten(0, 1), tokens(4, 9).roll(1).flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.norm() > 1e-6, name


@every_variant
def test_every_pattern_of_the_plan_matches(shape):
    model = Transformer(shape)
    plan = model.plan()
    assert [name for name, _ in match_modules(model, plan.blocks)] == ["blocks.0", "blocks.1"]
    split = {name for name, _ in match_modules(model, plan.tensor)}
    matrices = {name.removesuffix(".weight") for name, value in model.named_parameters() if value.dim() == 2}
    assert split | {"head"} == matrices | {"head"}


@every_variant
def test_flops_are_those_that_torch_counts(shape):
    model, (batch, length) = build(shape), (2, 8)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens(batch, length)).sum().backward()
    assert shape.flops_per_token(length) * batch * length == counter.get_total_flops()


def test_names_in_a_checkpoint_are_stable():
    block = ["attention_norm", "attention.wq", "attention.wk", "attention.wv", "attention.wo", "ffn_norm"]
    block += ["ffn.gate", "ffn.up", "ffn.down"]
    blocks = [f"blocks.{index}.{part}.weight" for index in range(2) for part in block]
    untied = dataclasses.replace(SHAPE, tied=False)
    assert list(Transformer(SHAPE).state_dict()) == ["embedding.weight", *blocks, "norm.weight"]
    assert list(Transformer(untied).state_dict()) == ["embedding.weight", *blocks, "norm.weight", "head.weight"]


def test_a_tied_output_uses_the_embedding_after_to_empty():
    with torch.device("meta"):
        model = Transformer(SHAPE)
    model.to_empty(device="cpu").init_weights(0)
    before = model(tokens(1, 4))
    unused = next(token for token in range(SHAPE.vocab) if token not in tokens(1, 4))
    with torch.no_grad():
        model.embedding.weight[unused] *= 2
    after = model(tokens(1, 4))
    assert torch.allclose(after[..., unused], 2 * before[..., unused])
    others = [token for token in range(SHAPE.vocab) if token != unused]
    assert torch.equal(after[..., others], before[..., others])


def test_grouped_queries_equal_full_attention_with_repeated_keys_and_values():
    grouped, full = build(SHAPE), build(dataclasses.replace(SHAPE, kv_heads=4))
    weights = grouped.state_dict()
    for name in [name for name in weights if name.endswith(("wk.weight", "wv.weight"))]:
        weights[name] = weights[name].unflatten(0, (2, SHAPE.head_dim)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(weights)
    assert torch.allclose(grouped(tokens(2, 9)), full(tokens(2, 9)), atol=1e-5)


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
        turn = [rotate(x, *rotation(torch.tensor([p]), 16, 10000.0)) for x, p in ((q, at), (k, of))]
        return (turn[0] * turn[1]).sum().item()

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) == pytest.approx(score(5, 0), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_positions_default_to_the_order_of_the_tokens():
    model, inputs = build(SHAPE), tokens(2, 6)
    assert torch.equal(model(inputs), model(inputs, torch.arange(6)))
    assert torch.equal(model(inputs), model(inputs, torch.arange(6).expand(2, 6)))
    assert torch.allclose(model(inputs), model(inputs, torch.arange(40, 46)), atol=1e-4)
    assert not torch.allclose(model(inputs), model(inputs, torch.arange(0, 12, 2)), atol=1e-3)


def test_a_rotation_of_narrow_numbers_is_computed_in_float32():
    x = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16)
    cos, sin = rotation(torch.tensor([1000]), 2, 10000.0)
    assert cos.dtype == sin.dtype == torch.float32
    turned = rotate(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    expected = [math.cos(1000) - math.sin(1000), math.cos(1000) + math.sin(1000)]
    assert torch.equal(turned.flatten(), torch.tensor(expected, dtype=torch.bfloat16))


def test_initial_values_have_the_documented_spread():
    shape = TransformerShape(vocab=400, dim=160, layers=2, heads=4, kv_heads=4, ffn_dim=400)
    weights = build(shape).state_dict()
    base = math.sqrt(2 / (5 * 160))
    residual = {name for name in weights if name.endswith(("wo.weight", "down.weight"))}
    for name, value in weights.items():
        if value.dim() == 1:
            assert (value == 1).all(), name
        else:
            expected = base / 2 if name in residual else base
            assert value.std().item() == pytest.approx(expected, rel=0.03), name


def test_another_seed_gives_other_weights():
    first, second = build(SHAPE, 0).state_dict(), build(SHAPE, 1).state_dict()
    assert all(not torch.equal(value, second[name]) for name, value in first.items() if value.dim() == 2)


def test_a_new_model_has_no_opinion_on_the_next_token():
    loss = F.cross_entropy(build(SHAPE)(tokens(8, 16)).flatten(0, 1), tokens(8, 16).roll(3).flatten())
    assert loss.item() == pytest.approx(math.log(17), abs=0.5)


@every_variant
def test_a_tiny_batch_is_learnt_by_heart(shape):
    model, inputs = build(shape), tokens(4, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss = F.cross_entropy(model(inputs[:, :-1]).flatten(0, 1), inputs[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3


def test_dropout_acts_in_training_only():
    model, inputs = build(dataclasses.replace(SHAPE, dropout=0.5)), tokens(1, 6)
    plain = build(SHAPE)
    assert not torch.equal(model(inputs), model(inputs))
    assert torch.equal(model.eval()(inputs), plain(inputs))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"heads": 3}, "3 heads do not split model.dim = 32 into heads of even width"),
        ({"heads": 32, "kv_heads": 32}, "32 heads do not split model.dim = 32 into heads of even width"),
        ({"kv_heads": 3}, "3 does not divide model.heads = 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, sentence):
    with pytest.raises(UserError) as caught:
        dataclasses.replace(SHAPE, **change)
    assert sentence in str(caught.value)


def test_all_misfits_are_named_at_once():
    with pytest.raises(UserError, match="2 problems in the transformer"):
        dataclasses.replace(SHAPE, heads=5, kv_heads=2)
