from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardway.models.contract import find_plan, match_modules
from shardway.models.transformer import EncoderDecoder, EncoderDecoderShape, sinusoids

SHAPE = EncoderDecoderShape(vocab=17, dim=32, layers=2, heads=4, ffn_dim=48)


def build(shape: EncoderDecoderShape = SHAPE, seed: int = 0) -> EncoderDecoder:
    model = EncoderDecoder(shape)
    model.init_weights(seed)
    return model


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 17, (batch, length), generator=torch.Generator().manual_seed(1))


def test_it_is_torch_s_own_transformer_under_causal_masks():
    model = build()
    torchs = nn.Transformer(32, 4, 2, 2, 48, dropout=0.0, batch_first=True)
    for ours, theirs in ((model.encoder, torchs.encoder), (model.decoder, torchs.decoder)):
        for index, layer in enumerate(theirs.layers):
            layer.load_state_dict(ours[str(index)].state_dict())
    torchs.encoder.norm.load_state_dict(model.encoder_norm.state_dict())
    torchs.decoder.norm.load_state_dict(model.decoder_norm.state_dict())
    x = model.embedding(tokens(3, 9)) * math.sqrt(32) + sinusoids(9, 32, torch.device("cpu"))
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    expected = model.head(torchs(x, x, mask, mask, mask))
    assert torch.allclose(model(tokens(3, 9)), expected, atol=1e-5)


def test_a_token_changes_no_logit_before_it():
    model, inputs = build(), tokens(1, 12)
    changed = inputs.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 17
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert ((before - after)[:, 7:].abs().amax(-1) > 1e-4).all()


def test_validation_computes_what_training_does():
    model = build()
    trained = model(tokens(2, 6))
    with torch.no_grad():
        assert torch.allclose(model.eval()(tokens(2, 6)), trained, atol=1e-5)


def test_positions_are_those_of_the_paper():
    table = sinusoids(5, 7, torch.device("cpu"))
    assert table.shape == (5, 7)
    for position in range(5):
        for feature in range(7):
            angle = position / 10000 ** ((feature - feature % 2) / 7)
            expected = math.cos(angle) if feature % 2 else math.sin(angle)
            assert table[position, feature].item() == pytest.approx(expected, abs=1e-6)


def test_a_model_from_meta_has_the_bits_of_one_from_the_cpu():
    with torch.device("meta"):
        model = EncoderDecoder(SHAPE)
    model.to_empty(device="cpu").init_weights(3)
    expected = build(seed=3).state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_matrices_have_the_spread_that_torch_gives_them():
    shape = dataclasses.replace(SHAPE, dim=128, ffn_dim=256, layers=1)
    weights = build(shape).state_dict()
    for name, theirs in nn.Transformer(128, 4, 1, 1, 256, batch_first=True).state_dict().items():
        stack, _, rest = name.partition(".layers.")
        if rest and theirs.dim() > 1:
            assert weights[f"{stack}.{rest}"].std().item() == pytest.approx(theirs.std().item(), rel=0.03), name


def test_the_plan_fits_and_offers_no_cut():
    model = build()
    plan = find_plan(model)
    units = [name for name, _ in match_modules(model, plan.blocks)]
    assert units == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    assert plan.last == ()


def test_a_tiny_batch_is_learnt_by_heart():
    model, inputs = build(), tokens(4, 13)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss = F.cross_entropy(model(inputs[:, :-1]).flatten(0, 1), inputs[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3


def test_dropout_acts_in_training_only():
    model = build(dataclasses.replace(SHAPE, dropout=0.5))
    assert not torch.equal(model(tokens(1, 6)), model(tokens(1, 6)))
    assert torch.allclose(model.eval()(tokens(1, 6)), build()(tokens(1, 6)), atol=1e-6)
