"""The list of weights against the model that is built, and what the axes leave of each."""

from __future__ import annotations

import pytest
import torch

from exact_weights import WeightShape, held_elements, transformer_weights, weights_of_rank
from shardway.errors import Bug
from shardway.layout import AXES, Layout
from shardway.models.build import build_model
from shardway.runfile.schema import ModelSection, ParallelSection

SIZES = {"dim": 16, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn_dim": 32, "vocab": 40}
MODELS = {
    "llama": {"tied": False},
    "gpt": {
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "bias": True,
        "positions": "learned",
        "max_positions": 24,
        "kv_heads": 4,
    },
    "qwen": {"qkv_bias": True, "qk_norm": True},
    "mixture": {"experts": 6, "expert_dim": 8, "shared_experts": 2, "dense_layers": 1},
    "latent": {"kv_heads": 4, "kv_rank": 8, "q_rank": 6, "rope_head_dim": 2, "value_head_dim": 4},
    "latent_without_query_rank": {"kv_heads": 4, "kv_rank": 8, "rope_head_dim": 2, "value_head_dim": 4},
}


def section(name: str) -> ModelSection:
    return ModelSection(**{**SIZES, **MODELS[name]})


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_of_the_model(name: str) -> None:
    model = build_model(section(name), vocab=40, sample_shape=(24,))
    built = {each: tuple(parameter.shape) for each, parameter in model.named_parameters()}
    listed = {weight.name: weight.shape for weight in transformer_weights(section(name))}
    assert listed == built
    assert sum(w.elements for w in transformer_weights(section(name))) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("model", [ModelSection(), ModelSection(kind="mlp")])
def test_what_is_not_resolved_is_refused(model: ModelSection) -> None:
    with pytest.raises(Bug):
        transformer_weights(model)


@pytest.mark.parametrize("stages", [[1, 2], [2, 1]])
def test_stages_share_the_weights_out(stages: list[int]) -> None:
    weights = transformer_weights(section("llama"))
    parallel = ParallelSection(dp_replicate=1, pp=2, pp_stages_per_rank=1)
    first, last = (weights_of_rank(weights, parallel, stages, rank) for rank in (0, 1))
    assert set(first) | set(last) == set(weights)
    assert not set(first) & set(last)
    assert {weight.name for weight in first if weight.block is None} == {"embedding.weight"}
    assert {weight.block for weight in first} - {None} == set(range(stages[0]))


def test_a_v_gives_a_rank_both_ends() -> None:
    parallel = ParallelSection(dp_replicate=1, pp=2, pp_stages_per_rank=2, pp_schedule="zbv")
    outer = weights_of_rank(transformer_weights(section("llama")), parallel, [1, 1, 1, 0], rank=0)
    assert {w.name.split(".")[0] for w in outer if w.block is None} == {"embedding", "norm", "head"}


@pytest.mark.parametrize("rows", [1, 5, 8, 13])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_are_the_chunks_of_torch(rows: int, ranks: int) -> None:
    layout = Layout({**dict.fromkeys(AXES, 1), "dp_shard": ranks})
    weight, tensor = WeightShape("w", (rows, 3)), torch.empty(rows, 3)
    chunks = [chunk.numel() for chunk in tensor.chunk(ranks)]
    chunks += [0] * (ranks - len(chunks))
    assert [held_elements(weight, layout, rank) for rank in range(ranks)] == chunks
    assert weight.shard_elements(layout) == chunks[0]
