"""The adapted model computes what the library computes, in every family that is offered, whole or in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardway.models.contract import find_plan, match_modules
from shardway.models.huggingface.model import FAMILIES, HuggingFaceModel, build_huggingface
from shardway.train.loss import token_cross_entropy
from tiny_hf import TOKENS, load_reference, logits_of, save_tiny


def build(folder: Path, seq_len: int = 16) -> HuggingFaceModel:
    model = build_huggingface(folder, vocab=50, seq_len=seq_len)
    model.to_empty(device="cpu")
    model.init_weights(0)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_library(tmp_path: Path, family: str) -> None:
    folder = save_tiny(tmp_path / "model", family)
    with torch.no_grad():
        logits = build(folder)(TOKENS)
    torch.testing.assert_close(logits, logits_of(folder), rtol=0, atol=2e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen2_moe"])
def test_gradients_are_those_of_the_library(tmp_path: Path, family: str) -> None:
    folder = save_tiny(tmp_path / "model", family, pad_token_id=None)
    reference, model = load_reference(folder), build(folder)
    for each in (reference, model):
        output = each(TOKENS[:, :-1])
        token_cross_entropy(getattr(output, "logits", output), TOKENS[:, 1:]).total.backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, gradient in list(expected.items()):
        if name.endswith("experts.gate_up_proj"):
            expected[name.replace("gate_up_proj", "gate")], expected[name.replace("gate_up_proj", "up")] = (
                gradient.chunk(2, dim=1)
            )
        if name.endswith("experts.down_proj"):
            expected[name.removesuffix("_proj")] = gradient
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


def test_positions_may_be_given(tmp_path: Path) -> None:
    """A part of a sequence knows where it stands: later positions turn queries and keys further."""
    folder = save_tiny(tmp_path / "model", "llama")
    model, later = build(folder), torch.arange(3, 19)
    with torch.no_grad():
        expected = load_reference(folder)(TOKENS, position_ids=later[None]).logits
        assert torch.equal(model(TOKENS, positions=later), model(TOKENS, positions=later.expand(2, -1)))
        torch.testing.assert_close(model(TOKENS, positions=later), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_model_can_be_cut_into_stages(tmp_path: Path, family: str) -> None:
    folder = save_tiny(tmp_path / "model", family, tie_word_embeddings=False)
    whole, first, last = (build(folder) for _ in range(3))
    first.model.norm = first.lm_head = last.model.embed_tokens = None
    del first.model.layers["2"], last.model.layers["0"], last.model.layers["1"]
    positions = torch.arange(16)
    with torch.no_grad():
        assert torch.equal(last(first(TOKENS, positions=positions), positions=positions), whole(TOKENS))
    assert set(dict(first.named_parameters())) | set(dict(last.named_parameters())) == set(
        dict(whole.named_parameters())
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_names_what_is_there(tmp_path: Path, family: str) -> None:
    model = build(save_tiny(tmp_path / "model", family))
    plan = find_plan(model)  # raises where a pattern matches nothing
    assert plan is not None
    assert len(match_modules(model, plan.blocks)) == len(match_modules(model, plan.attention)) == 3
    assert (plan.first, plan.last) == (("model.embed_tokens",), ("model.norm", "lm_head"))
    assert bool(plan.experts) == family.endswith(("moe", "mixtral"))
    # Fused projections, and norms over all heads, have no place among the splits of a region.
    assert bool(plan.tensor) == (family not in ("phi3", "olmo2"))


def test_the_plan_says_how_everything_in_a_region_splits(tmp_path: Path) -> None:
    """The outputs of a region are added up over ranks, so whatever is linear in one must split, or be counted twice."""
    model = build(save_tiny(tmp_path / "model", "qwen2_moe"))
    plan = model.plan()
    split = {name for name, _ in match_modules(model, plan.tensor)} | {
        name for name, _ in match_modules(model, plan.experts)
    }
    whole = {
        name
        for _, region in match_modules(model, plan.regions)
        for name, module in region.named_modules()
        if isinstance(module, nn.Linear)
    } - {name.split(".", 4)[-1] for name in split}
    assert whole == {"shared_expert_gate"}
    assert plan.active == 0.5


def halved(module: nn.Linear, dim: int, half: int) -> None:
    """Keep one half of a weight (and of the bias with the rows), as a rank of two on a tensor axis does."""
    module.weight = nn.Parameter(module.weight.chunk(2, dim)[half].clone())
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias.chunk(2)[half].clone() if dim == 0 else module.bias / 2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_runs_with_fewer_heads(tmp_path: Path, kv_heads: int) -> None:
    """Half of the query heads, and half of the key and value heads (or the only one), give half of the sum."""
    folder = save_tiny(tmp_path / "model", "qwen2", num_key_value_heads=kv_heads)
    x, models = torch.randn(2, 16, 32), [build(folder) for _ in range(3)]
    parts = []
    for half, model in enumerate((*models[:2], None)):
        attention = (model or models[2]).model.layers["0"].self_attn
        if model is not None:
            halved(attention.q_proj, 0, half)
            halved(attention.o_proj, 1, half)
            for module in (attention.k_proj, attention.v_proj) if kv_heads > 1 else ():
                halved(module, 0, half)
        angles = models[2].model.rotary_emb(x, torch.arange(16)[None])
        with torch.no_grad():
            parts.append(attention(x, position_embeddings=angles, attention_mask=None)[0])
    torch.testing.assert_close(parts[0] + parts[1], parts[2], rtol=0, atol=1e-6)


def test_another_core_can_take_the_place_of_attention(tmp_path: Path) -> None:
    class Nothing(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            assert (q.shape, k.shape, v.shape) == ((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8))
            return torch.zeros_like(q)

    model = build(save_tiny(tmp_path / "model", "llama"))
    for name, _ in match_modules(model, model.plan().attention):
        model.set_submodule(name, Nothing())
    with torch.no_grad():
        logits = model(TOKENS)
    # Without attention a token's logits depend on that token alone.
    assert torch.equal(logits[0, 3], model(TOKENS[:1, 3:4].expand(2, 16))[0, 0])


def test_hooks_of_a_region_see_one_tensor_in_and_one_out(tmp_path: Path) -> None:
    model = build(save_tiny(tmp_path / "model", "llama"))
    seen: list[tuple[torch.Size, torch.Size]] = []
    for _, region in match_modules(model, model.plan().regions):
        region.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].shape, output.shape)))
    model(TOKENS)
    assert seen == [(torch.Size([2, 16, 32]), torch.Size([2, 16, 32]))] * 6


def test_a_block_compiles_in_one_piece(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "llama")
    model = build(folder)
    for _, block in match_modules(model, model.plan().blocks):
        block.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), logits_of(folder), rtol=0, atol=2e-6)
