from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from shardway.models.contract import find_plan, match_modules
from shardway.models.experts import MixtureShape
from shardway.models.transformer import LatentShape, Transformer, TransformerShape

SHAPE = TransformerShape(vocab=17, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=40)
MIXTURE = MixtureShape(experts=4, per_token=2, expert_dim=24)
LATENT = LatentShape(kv_rank=16, q_rank=12, rope_head_dim=4, value_head_dim=12)
VARIANTS = {
    "llama": SHAPE,
    "untied": dataclasses.replace(SHAPE, tied=False),
    "as many key heads": dataclasses.replace(SHAPE, kv_heads=4),
    "one key head": dataclasses.replace(SHAPE, kv_heads=1, norm="layernorm"),
    "gelu": dataclasses.replace(SHAPE, activation="gelu", tied=False, norm="layernorm"),
    "gpt2": dataclasses.replace(
        SHAPE, kv_heads=4, activation="gelu_tanh", norm="layernorm", bias=True, positions="learned", max_positions=20
    ),
    "qwen2": dataclasses.replace(SHAPE, qkv_bias=True),
    "qwen3": dataclasses.replace(SHAPE, qk_norm=True, head_dim=12, tied=False),
    "mixtral": dataclasses.replace(SHAPE, mixture=MIXTURE),
    "deepseek": dataclasses.replace(
        SHAPE,
        kv_heads=4,
        latent=LATENT,
        mixture=dataclasses.replace(MIXTURE, shared=2, score="sigmoid", scale=2.5, balance="loss"),
        dense_layers=1,
    ),
    "deepseek lite": dataclasses.replace(SHAPE, kv_heads=4, latent=dataclasses.replace(LATENT, q_rank=0), bias=True),
}
every_variant = pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)


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
    # Products of another number of tokens, as an expert then has, may round in another way.
    assert torch.allclose(before[:, :7], after[:, :7], rtol=0, atol=0 if shape.mixture is None else 1e-6)
    assert ((before - after)[:, 7:].abs().amax(-1) > 1e-4).all()


@every_variant
def test_logits_have_a_row_for_each_token(shape):
    assert build(shape)(tokens(3, 5)).shape == (3, 5, shape.vocab)


@every_variant
def test_a_model_from_meta_has_the_bits_of_one_from_the_cpu(shape):
    with torch.device("meta"):
        model = Transformer(shape)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.detach().fill_(torch.nan if tensor.is_floating_point() else -1)
    model.init_weights(5)
    expected = build(shape, seed=5)
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, expected.get_buffer(name)) for name, value in model.named_buffers())
    assert torch.equal(model(tokens(2, 6)), expected(tokens(2, 6)))


@every_variant
def test_every_parameter_has_a_gradient(shape):
    model = build(shape)
    F.cross_entropy(model(tokens(4, 9)).flatten(0, 1), tokens(4, 9).roll(1).flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        # One bias for all keys changes no softmax, unless positions turn it.
        assert parameter.grad.norm() > 1e-6 or (shape.positions == "learned" and name.endswith("wk.bias")), name


@every_variant
def test_the_plan_names_every_matrix_but_those_that_are_whole(shape):
    model = Transformer(shape)
    plan = find_plan(model)
    assert [name for name, _ in match_modules(model, plan.blocks)] == ["blocks.0", "blocks.1"]
    named = {name for name, _ in match_modules(model, [*plan.tensor, *plan.experts])} | {"head"}
    owners = {name.rpartition(".")[0] for name, value in model.named_parameters() if value.dim() > 1}
    whole = {name for name in owners if name.endswith((".q_down", ".kv_down", ".router", ".shared"))}
    norms = {name for name, _ in model.named_modules() if name.endswith(("attention_norm", "ffn_norm", "norm"))}
    inside = {name for name in norms if ".attention." in name}
    assert named == (owners - whole) | (norms - inside) | {"head"}


@pytest.mark.parametrize("name", VARIANTS)
def test_stages_of_a_pipeline_hand_on_what_they_are_given(name):
    shape = VARIANTS[name]
    model, first, last = build(shape), build(shape), build(shape)
    first.norm = first.head = None
    del first.blocks["1"]
    last.embedding = last.position_embedding = last.dropout = None
    del last.blocks["0"]
    if shape.tied:
        last.embedding = model.embedding  # tied weights keep both ends on one stage
        hidden = model.norm(last.blocks["1"](first(tokens(2, 6)), model.make_rotation(torch.arange(6))))
        assert torch.equal(model.head(hidden, model.embedding.weight), model(tokens(2, 6)))
    else:
        assert torch.equal(last(first(tokens(2, 6)), torch.arange(6)), model(tokens(2, 6)))


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
        weights[name] = weights[name].unflatten(0, (2, SHAPE.head_width)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(weights)
    assert torch.allclose(grouped(tokens(2, 9)), full(tokens(2, 9)), atol=1e-5)


def test_positions_default_to_the_order_of_the_tokens():
    model, inputs = build(SHAPE), tokens(2, 6)
    assert torch.equal(model(inputs), model(inputs, torch.arange(6)))
    assert torch.equal(model(inputs), model(inputs, torch.arange(6).expand(2, 6)))
    assert torch.allclose(model(inputs), model(inputs, torch.arange(40, 46)), atol=1e-4)
    assert not torch.allclose(model(inputs), model(inputs, torch.arange(0, 12, 2)), atol=1e-3)


def test_learned_positions_are_rows_of_a_table():
    model, inputs = build(VARIANTS["gpt2"]), tokens(2, 6)
    assert torch.equal(model(inputs), model(inputs, torch.arange(6)))
    assert not torch.allclose(model(inputs), model(inputs, torch.arange(7, 13)), atol=1e-3)
    with torch.no_grad():
        model.position_embedding.weight[7:13] = model.position_embedding.weight[:6]
    assert torch.allclose(model(inputs), model(inputs, torch.arange(7, 13)), atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "deepseek"])
def test_gradients_are_those_of_finite_differences(name):
    shape = dataclasses.replace(VARIANTS[name], dim=16, heads=2, kv_heads=2, ffn_dim=6, vocab=5)
    model, inputs = build(shape).double(), tokens(2, 4, 5)
    weights = {key: value for key, value in model.named_parameters() if value.dim() == 1 or "0." in key}

    def loss(*values):
        return torch.func.functional_call(model, dict(zip(weights, values, strict=True)), (inputs,)).sin().sum()

    model.eval()  # in training, an auxiliary loss adds to gradients and not to what is returned
    assert torch.autograd.gradcheck(loss, tuple(weights.values()), fast_mode=True, rtol=1e-3)


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


@pytest.mark.parametrize("name", VARIANTS)
def test_a_tiny_batch_is_learnt_by_heart(name):
    model, inputs = build(VARIANTS[name]), tokens(4, 17)
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
