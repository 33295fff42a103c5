"""What cannot be trained as the config says is refused before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardway.errors import UserError
from shardway.models.huggingface import build as build_module
from shardway.models.huggingface.build import build_huggingface
from tiny_hf import save_tiny


def write_config(folder: Path, **changes: Any) -> Path:
    from transformers import LlamaConfig

    from tiny_hf import SIZES

    LlamaConfig(**SIZES).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_type": "gemma2"}, 'model_type: "gemma2" is a family that Shardway has not been tested with'),
        ({"attention_dropout": 0.1}, "attention_dropout: 0.1 is set"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: "),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            'rope_parameters.rope_type: "dynamic" positions depend on the length of the input',
        ),
        ({"max_position_embeddings": 8}, "max_position_embeddings: 8 is less than data.seq_len = 16"),
        ({"sliding_window": 8}, "sliding_window: 8 is less than data.seq_len = 16"),
        ({"vocab_size": 40}, "vocab_size: 40 is smaller than the data's vocabulary of 50"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as told:
        build_huggingface(write_config(tmp_path, **changes), vocab=50, seq_len=16)
    assert str(told.value).startswith(f"1 problem in {tmp_path / 'config.json'}\n  {line}")


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_window"),
    ],
)
def test_options_of_other_families_are_refused(tmp_path: Path, family: str, changes: dict[str, Any], key: str) -> None:
    folder = save_tiny(tmp_path / "model", family, **changes)
    with pytest.raises(UserError, match=f"  {key}: "):
        build_huggingface(folder, vocab=50, seq_len=16)


def test_a_window_that_no_layer_uses_does_not_count(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen2", use_sliding_window=True, sliding_window=8)  # from layer 28 on
    assert build_huggingface(folder, vocab=50, seq_len=16).fit is not None


def test_what_the_library_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has a config\.json that transformers refuses: .*not a multiple"):
        build_huggingface(write_config(tmp_path, num_attention_heads=5, head_dim=None), vocab=50, seq_len=16)


def test_weights_of_another_shape_are_refused_before_they_are_read(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "llama")
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('_layers": 3', '_layers": 4'))
    with pytest.raises(UserError, match=r"9 tensors are not in the files: model\.layers\.3\.self_attn\.q_proj\.weight"):
        build_huggingface(folder, vocab=50, seq_len=16)


def test_a_config_alone_gives_random_weights_that_no_layout_changes(tmp_path: Path) -> None:
    models = [build_huggingface(write_config(tmp_path, initializer_range=0.5), vocab=50, seq_len=16) for _ in range(2)]
    assert models[0].fit is None
    assert all(parameter.is_meta for parameter in models[0].parameters())
    del models[1].model.layers["0"]
    for model in models:
        model.to_empty(device="cpu")
        model.init_weights(7)
    whole, part = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(part[name], whole[name]) for name in part)
    weight = whole["model.layers.2.mlp.up_proj.weight"]
    assert weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(whole["model.norm.weight"], torch.ones(32))
    frequencies = models[1].model.rotary_emb.inv_freq
    assert frequencies[:2].tolist() == pytest.approx([1.0, 10000 ** (-2 / 8)])


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(package: str) -> None:
        raise UserError(f"{package} cannot be imported")

    write_config(tmp_path)
    monkeypatch.setattr(build_module, "import_extra", refuse)
    with pytest.raises(UserError, match="transformers cannot be imported"):
        build_huggingface(tmp_path, vocab=50, seq_len=16)
