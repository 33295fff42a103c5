"""What the library builds from a config is counted exactly, at any length, and layers alike need to run once."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from shardway.errors import UserError
from shardway.models.huggingface import count as counting
from shardway.models.huggingface.count import count_config, list_inputs, main
from shardway.models.trace import count_units
from shardway.plan.counted import CountedModel, counted_from_json
from shardway.plan.shapes import merge_units

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 16,
}
MIXTURE = {**SIZES, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {**MIXTURE, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"image_size": 56, "patch_size": 14}
SPEECH = {"vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48}
SPEECH |= {"decoder_ffn_dim": 48, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SPEECH |= {"max_source_positions": 40, "max_target_positions": 32, "pad_token_id": 0, "num_mel_bins": 8}
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
RESNET = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 3]}

TOKENS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", SIZES),
    "windows": ("gemma3_text", {**SIZES, "sliding_window": 32}),
    "linear attention": ("qwen3_next", {**MIXTURE, **LINEAR, "shared_expert_intermediate_size": 16}),
    # the experts of a whole pass are all computed
    "chunks": (
        "llama4_text",
        {**MIXTURE, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 32},
    ),
    "latent attention": ("deepseek_v3", LATENT),
    "an encoder": ("bert", {**SIZES, "max_position_embeddings": 40}),
    "an encoder and a decoder": ("t5", T5),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "speech": ("whisper", SPEECH),
    "images": ("vit", {**TOWER, "patch_size": 8}),
    "stages": ("resnet", RESNET),
}


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass of a layer that works in chunks of 64 takes as many operators as there are chunks."""
    monkeypatch.setattr(counting, "LENGTHS", (128, 192, 256))


def keys_of(family: str, sizes: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"model_type": family, **sizes, **more}


def build(count: CountedModel, keys: Mapping[str, Any]) -> tuple[torch.nn.Module, Any]:
    import transformers

    config = transformers.CONFIG_MAPPING[keys["model_type"]].from_dict(dict(keys))
    config.use_cache = False
    with torch.device("meta"):
        return getattr(transformers, count.model)._from_config(config, dtype=torch.bfloat16), config


@pytest.mark.parametrize("longest", [1, 2, 3, 4, 9])
def test_a_model_of_few_positions_is_counted_as_one_of_its_length_is(longest: int) -> None:
    """Three lengths that differ, or as many as it takes."""
    sizes = {"vocab_size": 1, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": longest}
    count = count_config({"model_type": "gpt_bigcode", **sizes, "architectures": ["GPTBigCodeForCausalLM"]})
    assert not count.failure
    assert len({*count.lengths}) == len(count.lengths) == min(3, longest)
    assert counted_from_json(count.to_json()) == count
    model = counting.build_on_meta(*_built(sizes), torch.bfloat16)
    tokens = torch.zeros((1, longest), dtype=torch.int64, device="meta")
    exact = sum(unit.count * unit.forward_flops for unit in count_units(model, {"input_ids": tokens}))
    assert count.at_length("small", longest).forward_flops_per_sample == exact


def _built(sizes: Mapping[str, int]) -> tuple[Any, Any]:
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    return GPTBigCodeForCausalLM, GPTBigCodeConfig(**sizes)


@pytest.mark.parametrize(("family", "sizes"), TOKENS.values(), ids=TOKENS)
def test_counts_at_any_length_are_those_of_a_whole_pass(family: str, sizes: dict[str, Any]) -> None:
    """As if all layers had run, at a length that was not counted."""
    keys = keys_of(family, sizes)
    count = count_config(keys)
    model, config = build(count, keys)
    assert count.failure == ""
    assert count.parameters == sum(each.numel() for each in model.parameters())
    length = 320 if count.longest != 40 else 32
    whole = count_units(model, next(list_inputs(model, config, length)))
    found = count.at_length("tiny", length)
    assert found.units == merge_units(whole)
    assert found.source == f"counted by {count.library} as {count.model}, for samples of {length:,} tokens"
    assert counted_from_json(count.to_json()) == count


@pytest.mark.parametrize(("family", "sizes"), OTHERS.values(), ids=OTHERS)
def test_a_model_that_takes_no_text_is_counted_for_one_sample(family: str, sizes: dict[str, Any]) -> None:
    keys = keys_of(family, sizes)
    count = count_config(keys)
    model, config = build(count, keys)
    assert (count.failure, count.lengths) == ("", ())
    found = count.at_length("tiny", 0)
    assert found.parameters == sum(each.numel() for each in model.parameters())
    assert found.units == merge_units(count_units(model, next(list_inputs(model, config, 64))))
    assert found.forward_flops_per_sample > 0


@pytest.mark.parametrize(
    ("family", "sizes", "more", "built"),
    [
        ("llama", SIZES, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ("llama", SIZES, {"architectures": ["LlamaOfAnOwnPackage"]}, "LlamaForCausalLM"),
        ("bert", SIZES, {}, "BertForMaskedLM"),
        ("bert", SIZES, {"is_decoder": True}, "BertLMHeadModel"),
        ("vit", TOWER, {"architectures": ["ViTModel"]}, "ViTModel"),
    ],
)
def test_the_class_is_the_one_that_is_named(
    family: str, sizes: dict[str, Any], more: dict[str, Any], built: str
) -> None:
    assert count_config(keys_of(family, sizes, **more)).model == built


def test_a_part_of_a_config_may_be_named() -> None:
    """The language model of one that sees; and the whole, whose tower has parameters alone for a text."""
    keys: dict[str, Any] = {
        "model_type": "gemma3",
        "text_config": SIZES,
        "vision_config": {**TOWER, "vision_use_head": False},
    }
    keys["mm_tokens_per_image"] = 4
    whole, language = count_config(keys), count_config({**keys, "architectures": ["Gemma3ForCausalLM"]})
    assert whole.model == "Gemma3ForConditionalGeneration"
    assert language.parameters < whole.parameters
    assert whole.at_length("", 256).flops_per_sample == language.at_length("", 256).flops_per_sample


LLAMA4 = {**SIZES, "num_hidden_layers": 1, "intermediate_size_mlp": 192, "interleave_moe_layer_step": 1}


@pytest.mark.parametrize("family", ["llama4_text", "llama4"])
def test_experts_that_a_token_does_not_meet_are_stored_and_not_computed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 of the library gives every token to every expert, and adds zeros for those that were not chosen."""
    monkeypatch.setattr(counting, "LENGTHS", (16,))

    def count(experts: int, met: int) -> CountedModel:
        text = {**LLAMA4, "num_local_experts": experts, "num_experts_per_tok": met}
        keys = {"architectures": ["Llama4ForCausalLM"], "text_config": {**text, "model_type": "llama4_text"}}
        return count_config(keys_of(family, text if family == "llama4_text" else keys))

    one, many, twice = count(1, 1), count(16, 1), count(16, 2)
    assert many.failure == ""
    assert many.parameters - one.parameters == 15 * (3 * 64 * 96 + 64)  # with the router's rows
    assert twice.parameters == many.parameters
    at_one, at_many, at_twice = (each.at_length("tiny", 16) for each in (one, many, twice))
    assert at_many.flops_per_sample == at_one.flops_per_sample
    second = 3 * 2 * (3 * 64 * 96 + 64) * 16  # forward and backward
    assert at_twice.flops_per_sample - at_many.flops_per_sample == second
    saved = [sum(unit.count * unit.saved_bytes for unit in each.units) for each in (at_one, at_many)]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_experts_that_get_their_own_tokens_are_counted_as_they_run(family: str) -> None:
    import transformers

    config = counting.make_config(transformers, keys_of(family, {**MIXTURE, "num_hidden_layers": 1}))
    model = counting.build_on_meta(counting.find_class(transformers, config), config, torch.bfloat16)
    with counting._ProductWatch(model, 4) as watch:
        count_units(model, next(list_inputs(model, config, 16)))
    assert not watch.found


def test_positions_behind_padding_are_no_length() -> None:
    keys = keys_of("xlm-roberta", {**SIZES, "max_position_embeddings": 66})
    assert count_config(keys).longest == 64


DECODER = {"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 2}
TOWERS = {"text_config": {**SIZES, "max_position_embeddings": 16}, "vision_config": {**TOWER, "vision_use_head": False}}


@pytest.mark.parametrize(
    ("family", "sizes", "learned"),
    [
        ("bert", {**SIZES, "max_position_embeddings": 40}, True),
        ("xlm-roberta", {**SIZES, "max_position_embeddings": 66}, True),  # behind the number of padding
        ("biogpt", {**SIZES, "max_position_embeddings": 40}, True),  # behind an offset
        ("gpt_bigcode", {**DECODER, "n_positions": 40}, True),
        ("gptj", {**DECODER, "n_positions": 40, "rotary_dim": 8}, False),  # rotary
        ("llama", {**SIZES, "max_position_embeddings": 40}, False),  # rotary
        ("roformer", {**SIZES, "max_position_embeddings": 40}, False),  # a table that is not learned
        ("bloom", {"vocab_size": 100, "hidden_size": 32, "n_layer": 1, "n_head": 2}, False),  # biases of the scores
        ("gemma3", {**TOWERS, "mm_tokens_per_image": 4}, False),  # as many patches as the text has positions
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_learned_positions_are_found(family: str, sizes: dict[str, Any], learned: bool) -> None:
    import transformers

    config = counting.make_config(transformers, keys_of(family, sizes))
    model = counting.build_on_meta(counting.find_class(transformers, config), config, torch.bfloat16)
    longest = counting.find_longest(model, config)
    assert counting.has_learned_positions(model, longest) is learned


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model_type": "an_own_family"}, 'model_type = "an_own_family" is not in transformers'),
        (keys_of("llama", {**SIZES, "hidden_size": "wide"}), "does not build its config.json"),
        (keys_of("llama", {**SIZES, "hidden_size": -64}), "does not build LlamaForCausalLM"),
    ],
)
def test_what_the_library_refuses(
    keys: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=says):
        count_config(keys)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(keys)))
    stdout = sys.stdout
    main()
    sys.stdout = stdout
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["error"]
    assert says in answer["error"]
