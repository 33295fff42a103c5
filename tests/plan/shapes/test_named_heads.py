"""A config's `architectures` decides on the head: parameters are those of the class in the library."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from library_counts import count, make_config
from test_hf_against_library import CASES

from shardway.errors import UserError
from shardway.plan.case import Case, Degrees, machine_of_part
from shardway.plan.huggingface import shape_of_config
from shardway.plan.planner import estimate
from shardway.plan.shapes import Architecture

NAMED = (
    ("bert", "BertModel"),
    ("bert", "BertForSequenceClassification"),
    ("bert", "BertForTokenClassification"),
    ("bert", "BertForMultipleChoice"),
    ("bert", "BertLMHeadModel"),
    ("roberta", "RobertaModel"),
    ("roberta", "RobertaForSequenceClassification"),
    ("roberta", "RobertaForQuestionAnswering"),
    ("llama", "LlamaModel"),
    ("llama", "LlamaForSequenceClassification"),
    ("llama", "LlamaForTokenClassification"),
    ("gpt2", "GPT2Model"),
    ("gpt2", "GPT2ForTokenClassification"),
    ("opt", "OPTForSequenceClassification"),
    ("falcon", "FalconForSequenceClassification"),
    ("qwen3_moe", "Qwen3MoeForSequenceClassification"),
    ("vit", "ViTModel"),
    ("vit", "ViTForImageClassification"),
)


def config_of(family: str, name: str, **more: Any) -> dict[str, Any]:
    return {"model_type": family, **CASES[family][0], "architectures": [name], **more}


def shape(family: str, name: str, **more: Any) -> Architecture:
    found = shape_of_config(config_of(family, name, **more), name)
    assert isinstance(found, Architecture)
    return found


@pytest.mark.parametrize(("family", "name"), NAMED)
def test_parameters_are_those_of_the_class(family: str, name: str) -> None:
    import torch
    import transformers

    labels = {str(number): f"label {number}" for number in range(5)}
    config = make_config({"model_type": family, **CASES[family][0], "id2label": labels})
    with torch.device("meta"):
        expected = count(getattr(transformers, name)._from_config(config))
    written = {**json.loads(json.dumps(config.to_dict())), "architectures": [name]}
    assert shape_of_config(written, name).parameters == expected


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "BertForPreTraining"),
        ("gpt2", "GPT2DoubleHeadsModel"),
        ("gptj", "GPTJForQuestionAnswering"),
        ("t5", "T5EncoderModel"),
        ("resnet", "ResNetModel"),
        ("vit", "ViTForMaskedImageModeling"),
    ],
)
def test_a_head_of_unknown_sizes_is_no_other_one(family: str, name: str) -> None:
    with pytest.raises(UserError, match=f'architectures: "{name}" has a head whose sizes are not known'):
        shape(family, name)


def test_a_head_over_one_position_computes_once_a_sample() -> None:
    bare, scored = shape("llama", "LlamaModel"), shape("llama", "LlamaForSequenceClassification")
    labelled = shape("llama", "LlamaForTokenClassification")

    def flops(model: Architecture) -> float:
        return 16 * model.forward_flops_per_token(16, causal=False)

    assert flops(scored) - flops(bare) == pytest.approx(2 * 64 * 2)
    assert flops(labelled) - flops(bare) == pytest.approx(16 * 2 * 64 * 2)


def test_a_smaller_head_takes_less_memory_and_time() -> None:
    machine, priced = machine_of_part("a100"), []
    for name in ("LlamaModel", "LlamaForSequenceClassification", "LlamaForCausalLM"):
        model = shape("llama", name, vocab_size=50_000)
        case = Case(model=model, seq_len=256, global_batch=16, micro_batch=2, degrees=Degrees(dp_replicate=8))
        priced.append(estimate(case, machine))
    bare, scored, language = priced
    assert bare.peak.device <= scored.peak.device < language.peak.device
    assert bare.time.seconds < scored.time.seconds < language.time.seconds


def test_positions_that_no_token_uses() -> None:
    """OPT's and RoBERTa's tables of positions have two rows for padding."""
    opt, roberta = shape("opt", "OPTForCausalLM"), shape("roberta", "RobertaForMaskedLM")
    assert (opt.positions, opt.longest) == (52, 50)
    assert (roberta.positions, roberta.longest) == (50, 48)
    assert replace(roberta, unused_positions=0).longest == 50


# --- Gemma 3, whose config.json on the hub leaves out what the library has as default

TOWER = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
GEMMA = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": TOWER}
SMALL = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
LARGE = {
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "sliding_window": 1024,
}


@pytest.mark.parametrize(
    ("text", "published"),
    [(SMALL, 4_300_079_472), (LARGE, 27_432_406_640)],
    ids=["google/gemma-3-4b-it", "google/gemma-3-27b-it"],
)
def test_gemma_3_with_its_vision_tower(text: dict[str, Any], published: int) -> None:
    """The number of parameters on the model's page on huggingface.co."""
    found = shape_of_config({**GEMMA, "text_config": {**text, "model_type": "gemma3_text"}}, "gemma")
    assert isinstance(found, Architecture)
    assert found.parameters == published
    assert found.name == "gemma, for text alone"
    assert [layer.attention.window for layer in found.layers[:7]] == [1024] * 5 + [0, 1024]
