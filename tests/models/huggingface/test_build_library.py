"""What cannot be trained as the config says is refused before any weight is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import lone_rank, read_named, train_tiny
from shardway.errors import UserError
from shardway.models.huggingface import model as build_module
from shardway.models.huggingface.model import build_huggingface
from shardway.resolve.request import ResolveRequest
from shardway.rundir.directory import RunDir
from shardway.train.run_weights import ImportRequest, _resolve, export_on, import_on, resolve_import
from tiny_hf import TOKENS, load_reference, save_tiny


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


def test_the_library_warns_of_nothing_while_it_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    build, shown = AutoModelForCausalLM.from_config, list[bool]()

    def watch(*given: Any, **options: Any) -> Any:
        shown.append(logging.getLogger("torchao").isEnabledFor(logging.WARNING))
        return build(*given, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", watch)
    build_huggingface(write_config(tmp_path), vocab=50, seq_len=16)
    assert shown == [False]


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(package: str) -> None:
        raise UserError(f"{package} cannot be imported")

    write_config(tmp_path)
    monkeypatch.setattr(build_module, "import_extra", refuse)
    with pytest.raises(UserError, match="transformers cannot be imported"):
        build_huggingface(tmp_path, vocab=50, seq_len=16)


# --- what config.json says of ties, and what the files hold


def write_head(folder: Path, head: torch.Tensor | None, *, embedding: bool = True, tied: bool = True) -> Path:
    """Say in config.json whether the output layer is the embedding, and put a head into the files, or take it out."""
    from safetensors.torch import load_file, save_file

    path = next(path for path in folder.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(path))
    held = load_file(path)
    whole = held["model.embed_tokens.weight"]
    if not embedding:
        del held["model.embed_tokens.weight"]
    save_file(held, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    placed = json.loads(index.read_text()) if index.is_file() else None
    target = folder / "head.safetensors" if placed else path
    others = {} if placed else held
    others.pop("lm_head.weight", None)
    if head is not None:
        others["lm_head.weight"] = whole.clone() if head.numel() == 0 else head
    save_file(others, target, metadata={"format": "pt"})
    if placed:
        placed["weight_map"] |= {"lm_head.weight": target.name}
        index.write_text(json.dumps(placed))
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": tied}))
    return folder


EQUAL = torch.empty(0)
OTHER = 0.05 * torch.randn(50, 32, generator=torch.Generator().manual_seed(3))
NEAR = OTHER.clone().bfloat16()


def filled(folder: Path) -> Any:
    model = build_huggingface(folder, vocab=50, seq_len=16)
    model.to_empty(device="cpu")
    model.init_weights(0)
    return model.eval()


@pytest.mark.parametrize("file_size", ["4GB", "20KB"], ids=["one file", "several files"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2_moe"])
@pytest.mark.parametrize(
    ("head", "embedding", "ties"),
    [(None, True, True), (EQUAL, True, True), (OTHER, True, False), (NEAR, True, False), (OTHER, False, True)],
    ids=["no head", "equal", "other", "other format", "head alone"],
)
def test_the_output_layer_is_what_the_library_makes_of_it(
    tmp_path: Path, family: str, file_size: str, head: torch.Tensor | None, embedding: bool, ties: bool
) -> None:
    folder = save_tiny(tmp_path / "model", family, tie_word_embeddings=True, file_size=file_size)
    write_head(folder, head, embedding=embedding)
    model, reference = filled(folder), load_reference(folder)
    assert (reference.lm_head.weight is reference.model.embed_tokens.weight) == ties
    assert model.config.tie_word_embeddings == ties
    assert len(model.notes) == (not ties)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), reference(TOKENS).logits, rtol=0, atol=2e-6)


def test_a_head_that_is_missing_is_told_with_both_remedies(tmp_path: Path) -> None:
    folder = write_head(save_tiny(tmp_path / "model", "llama", tie_word_embeddings=True), None, tied=False)
    with pytest.raises(UserError) as told:
        build_huggingface(folder, vocab=50, seq_len=16)
    assert "1 tensors are not in the files: lm_head.weight" in str(told.value)
    assert "set tie_word_embeddings = true in its config.json" in str(told.value)


RUN = (
    "data.seq_len=12",
    "data.kind=synthetic",
    "data.samples=32",
    "train.global_batch=8",
    "train.validate_every=off",
    "checkpoint.every=1 steps",
    "checkpoint.background=false",
    "run.device=cpu",
    "run.threads=1",
)


def export(run: Path, target: Path) -> Path:
    export_on(lone_rank(), _resolve(RunDir(run), 1, 1), RunDir(run), target, "fp32")
    return target


def test_a_head_of_its_own_is_trained_resumed_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told once: a run that goes on knows by its checkpoint, even where the folder's weights are gone."""
    hub = write_head(save_tiny(tmp_path / "hub", "llama", tie_word_embeddings=True), OTHER)
    words = (*RUN, f"model.hf={hub}", "optim.lr=0.01")
    train_tiny(tmp_path / "run", lone_rank(), *words, "train.steps=1", base=())
    assert capsys.readouterr().err.count("tie_word_embeddings = false") == 1
    (hub / "model.safetensors").unlink()
    train_tiny(tmp_path / "run", lone_rank(), *words, "train.steps=3", base=())
    assert [event["checkpoint"] for event in read_named(tmp_path / "run", "started")] == [None, "step-000000001"]
    assert "tie_word_embeddings" not in capsys.readouterr().err
    out = export(tmp_path / "run", tmp_path / "out")
    reference = load_reference(out)
    assert reference.lm_head.weight is not reference.model.embed_tokens.weight
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert not torch.equal(reference.lm_head.weight, OTHER)


def test_what_was_imported_and_exported_is_what_the_library_would_have_loaded(tmp_path: Path) -> None:
    for number, head in enumerate((OTHER, EQUAL, None)):
        hub = write_head(save_tiny(tmp_path / f"hub-{number}", "llama", tie_word_embeddings=True), head)
        run = tmp_path / f"run-{number}"
        request = ResolveRequest(None, (*RUN, f"model.hf={hub}", "train.steps=1"), run)
        import_on(lone_rank(), resolve_import(request, 1, 1), ImportRequest(hub))
        out = export(run, tmp_path / f"out-{number}")
        expected, found = load_reference(hub).state_dict(), load_reference(out).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
