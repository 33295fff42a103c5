"""Names, prefixes, shapes, formats and settings of a source against a model; all that does not fit is told at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shardway.checkpoint.import_weights import Described, ForeignSource, Match, match_source, open_source
from shardway.errors import UserError
from shardway.models.huggingface.own import to_huggingface_config, translate
from shardway.models.transformer import Transformer, TransformerShape

SHAPE = TransformerShape(vocab=20, dim=8, layers=1, heads=2, kv_heads=1, ffn_dim=16, tied=False)


def make(shape: TransformerShape = SHAPE, seed: int = 1) -> Transformer:
    model = Transformer(shape)
    model.init_weights(seed)
    return model


def library_names(model: nn.Module) -> dict[str, torch.Tensor]:
    return {translate(name): each.detach() for name, each in model.named_parameters()}


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def matched(path: Path, shape: TransformerShape = SHAPE, prefix: str | None = None) -> Match:
    with torch.device("meta"):
        model = Transformer(shape)
    return match_source(open_source(path), model, prefix)


def assert_fills(match: Match, model: Transformer) -> None:
    """What the source gives is this model, bit for bit."""
    found = make(model.shape, seed=2)
    match.fill(found)
    assert all(torch.equal(each, found.get_parameter(name)) for name, each in model.named_parameters())


@pytest.mark.parametrize("prefix", ["", "module.", "state_dict._orig_mod.", "model."])
@pytest.mark.parametrize("names", ["own", "library"])
def test_names_are_found_under_any_prefix(names: str, prefix: str, tmp_path: Path) -> None:
    model = make()
    tensors = library_names(model) if names == "library" else dict(model.state_dict())
    more = {"optimizer.state.0.exp_avg": torch.zeros(3)} if prefix else {}
    match = matched(saved(tmp_path / "x", {**{prefix + name: each for name, each in tensors.items()}, **more}))
    assert match.prefix == prefix.replace("_orig_mod.", "")
    assert dict(match.unused) == ({"optimizer": 1} if prefix else {})
    assert_fills(match, model)


def test_weights_that_are_there_twice_are_chosen_by_the_person(tmp_path: Path) -> None:
    model, mean = make(), make(seed=3)
    path = saved(tmp_path / "x", {"ema": mean.state_dict(), "model": model.state_dict()})
    with pytest.raises(UserError, match=r"holds the weights 2 times, under ema\., model\."):
        matched(path)
    assert_fills(matched(path, prefix="ema."), mean)


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    tensors = dict(make().state_dict())
    del tensors["norm.weight"], tensors["blocks.0.ffn.up.weight"]
    tensors["more.weight"] = torch.zeros(2)
    tensors["head.weight"] = torch.zeros(21, 8)
    tensors["embedding.weight"] = torch.zeros(20, 8, dtype=torch.int8)
    with pytest.raises(UserError) as told:
        matched(saved(tmp_path / "x", tensors))
    message = str(told.value)
    assert message.startswith(f"4 problems in {tmp_path / 'x'} (a file of torch.save) as the weights of this run")
    assert "missing: 2 tensors are not there: blocks.0.ffn.up.weight, norm.weight" in message
    assert "left over: 1 tensor is there, and the model has no such tensor: more.weight" in message
    assert "shape: 1 tensor is of another shape: head.weight [21, 8] where the model has [20, 8]" in message
    assert "format: 1 tensor is in no format of weights" in message
    assert "embedding.weight (int8)" in message


def write_hub(folder: Path, model: Transformer, **changes: Any) -> Path:
    folder.mkdir()
    save_file(library_names(model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**to_huggingface_config(model.shape, 16), **changes}))
    return folder


def test_settings_that_no_shape_says_are_compared(tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "x", make())
    assert_fills(matched(folder), make())
    with pytest.raises(UserError) as told:
        matched(folder, replace(SHAPE, rope_theta=500.0, norm_eps=1e-6))
    assert "model.rope_theta: 500.0 in this run, 10000.0 where the weights come from" in str(told.value)
    assert "to do: set model.norm_eps = 1e-05" in str(told.value)


def test_an_output_layer_of_its_own_is_not_lost(tmp_path: Path) -> None:
    """A tied model takes no `lm_head` but one that is the embedding."""
    model, tied = make(), replace(SHAPE, tied=True)
    tensors = library_names(model)
    path = saved(tmp_path / "x", tensors)
    with pytest.raises(UserError, match=r"has an output layer \(lm_head.weight\) of its own"):
        matched(path, tied)
    matched(saved(path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}), tied)
    del tensors["lm_head.weight"]
    with pytest.raises(UserError, match=r"not there: lm_head\.weight\n.*or set model\.tied = true"):
        matched(saved(path, tensors))


def test_buffers_come_along_and_are_missed_where_names_are_the_models_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(0.5)
    state = dict(model.state_dict())
    found = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    match = match_source(open_source(saved(tmp_path / "x", state)), found)
    match.fill(found)
    assert all(torch.equal(each, found.state_dict()[name]) for name, each in state.items())
    del state["1.running_var"]
    with pytest.raises(UserError, match=r"1 tensor is not there: 1\.running_var"):
        match_source(open_source(saved(tmp_path / "y", state)), found)


def test_conversions_are_counted(tmp_path: Path) -> None:
    tensors = {name: each.bfloat16() for name, each in make().state_dict().items()}
    tensors["norm.weight"] = tensors["norm.weight"].float()
    match = matched(saved(tmp_path / "x", tensors))
    assert match.count_conversions(make()) == {"bfloat16 to float32": len(tensors) - 1}


def test_thousands_of_tensors_are_matched_in_a_moment(tmp_path: Path) -> None:
    """What a source holds is listed once, not once for each weight."""
    model = nn.ModuleList([nn.Linear(1, 1) for _ in range(2000)])
    source = open_source(saved(tmp_path / "x", {}))
    counted = Counted(
        source, {name: Described(tuple(each.shape), "float32") for name, each in model.state_dict().items()}
    )
    assert len(match_source(counted, model).fit.arrangements) == 4000
    assert counted.asked < 10


class Counted:
    """A source that counts how often it is asked what it holds."""

    def __init__(self, source: ForeignSource, tensors: dict[str, Described]) -> None:
        self.kind, self.path, self.config, self.open = source.kind, source.path, None, source.open
        self._tensors, self.asked = tensors, 0

    @property
    def tensors(self) -> dict[str, Described]:
        self.asked += 1
        return self._tensors
