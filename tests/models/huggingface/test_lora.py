"""Which layers an adapter stands beside, what it begins with, and how the weights beside it are told from others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardway.errors import UserError
from shardway.models.contract import find_base
from shardway.models.huggingface.lora import (
    LoraShape,
    base_name,
    fingerprint_weights,
    is_of_adapter,
    list_targets,
    name_in_files,
)
from shardway.models.huggingface.model import HuggingFaceModel, build_huggingface
from shardway.models.huggingface.weights import find_weights
from tiny_hf import TOKENS, logits_of, save_tiny

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny(root / family, family) for family in ("llama", "qwen2_moe")}


def build(folder: Path, *, weights: bool = False) -> HuggingFaceModel:
    return build_huggingface(folder, vocab=50, seq_len=16, weights=weights)


def leaves(model: HuggingFaceModel, *words: str) -> list[str]:
    """The ends of the chosen names, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in list_targets(model, model.plan(), words)))


def test_words_and_ends_of_names_choose_layers(folders: dict[str, Path]) -> None:
    model = build(folders["llama"])
    assert leaves(model, "all-linear") == [*ATTENTION, *FEED_FORWARD]
    assert leaves(model, "attention") == list(ATTENTION)
    assert leaves(model, "*_proj") == [*ATTENTION, *FEED_FORWARD]
    assert leaves(model, "mlp.*", "lm_head") == [*FEED_FORWARD, "lm_head"]
    assert list_targets(model, model.plan(), ("layers.1.self_attn.q_proj",)) == ("model.layers.1.self_attn.q_proj",)
    assert len(list_targets(model, model.plan(), ("q_proj", "attention"))) == 3 * 4


def test_experts_have_no_adapter(folders: dict[str, Path]) -> None:
    """Nor does what else is in their place: the library has other layers there."""
    model = build(folders["qwen2_moe"])
    assert leaves(model, "all-linear") == list(ATTENTION)
    with pytest.raises(UserError, match="up_proj"):
        list_targets(model, model.plan(), ("q_proj", "up_proj"))


def test_every_word_without_a_layer_is_named(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError) as caught:
        build(folders["llama"]).add_lora(LoraShape(4, 8.0, 0.0, ("qproj", "q_proj", "experts.*")), None)
    assert str(caught.value).startswith("2 problems in the adapter (model.adapter)\n")
    assert '"qproj"' in str(caught.value)
    assert '"experts.*"' in str(caught.value)
    assert "such as q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in str(caught.value)


def test_a_rank_above_the_smaller_side_of_a_layer_is_refused(folders: dict[str, Path]) -> None:
    """Keys and values of two heads have 16 outputs, queries of four have 32."""
    with pytest.raises(UserError) as caught:
        build(folders["llama"]).add_lora(LoraShape(17, 8.0, 0.0, ("all-linear",)), None)
    assert str(caught.value) == (
        "1 problem in the adapter (model.adapter)\n"
        "  model.lora_rank: 17 is more than 16, the smaller side of model.layers.0.self_attn.k_proj (16 x 32)\n"
        "      allowed: 1 to 16\n"
        "      to do: a smaller rank, or model.lora_targets without that layer"
    )
    build(folders["llama"]).add_lora(LoraShape(17, 8.0, 0.0, ("q_proj",)), None)


def test_names() -> None:
    base, adapter = "model.layers.0.mlp.up_proj.base_layer.weight", "model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert (base_name(base), base_name(adapter)) == ("model.layers.0.mlp.up_proj.weight", "")
    assert (is_of_adapter(base), is_of_adapter(adapter)) == (False, True)
    assert name_in_files(adapter) == "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"


@torch.no_grad()
def test_a_new_adapter_changes_nothing_and_trains_alone(folders: dict[str, Path]) -> None:
    model = build(folders["llama"], weights=True)
    assert find_base(model) == ""
    model.base_fingerprint = model.fingerprint_base(0)
    assert find_base(model) == model.base_fingerprint
    model.add_lora(LoraShape(4, 8.0, 0.0, ("all-linear",)), None)
    model.to_empty(device="cpu")
    model.init_weights(3)
    assert torch.allclose(model(TOKENS), logits_of(folders["llama"]), atol=1e-5)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert len(trained) == 3 * 7 * 2
    for name, parameter in trained.items():
        if ".lora_B." in name:
            assert not parameter.any()
        else:  # as peft draws it: uniform within 1 / sqrt(inputs)
            assert float(parameter.std()) == pytest.approx((3 * parameter.shape[1]) ** -0.5, rel=0.25)


def test_only_frozen_matrices_are_held_as_they_are_multiplied(folders: dict[str, Path]) -> None:
    model = build(folders["qwen2_moe"])
    model.add_lora(LoraShape(4, 8.0, 0.0, ("all-linear",)), torch.bfloat16)
    narrow = {name for name, each in model.named_parameters() if each.dtype == torch.bfloat16}
    assert "lm_head.weight" in narrow
    assert "model.layers.0.mlp.experts.gate" in narrow
    assert "model.layers.0.self_attn.q_proj.base_layer.weight" in narrow
    assert not any(is_of_adapter(name) or "norm" in name or "embed" in name or name.endswith("bias") for name in narrow)


def test_weights_that_were_trained_further_have_another_fingerprint(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "same", "llama")
    before = find_weights(folders["llama"])
    same = find_weights(folder)
    assert before is not None
    assert same is not None
    assert fingerprint_weights(before) == fingerprint_weights(same)
    parts = save_tiny(tmp_path / "parts", "llama", file_size="20KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    assert fingerprint_weights(find_weights(parts)) == fingerprint_weights(before)  # type: ignore[arg-type]
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["lm_head.weight"] * 1.001}, folder / "model.safetensors")
    assert fingerprint_weights(find_weights(folder)) != fingerprint_weights(before)  # type: ignore[arg-type]
