"""Fused Conv1D layers give on several ranks what they give on one, in every form that GPT-2 and its kin have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import FAMILIES, GREEDY, SPREAD, list_prompts

from pool import ranks
from runs import pool_ranks
from shardway.errors import UserError
from shardway.infer.generate import Generator
from shardway.infer.model import ModelRequest, open_model
from shardway.infer.split import CONV_COLUMNS, CONV_QKV, CONV_ROWS, FUSED_HEADS, find_fused_plan
from tiny_hf import load_reference, save_tiny

FORMS: dict[str, dict[str, Any]] = {
    "odd vocabulary, untied": {"vocab_size": 51, "tie_word_embeddings": False},
    "scores by layer": {"scale_attn_by_inverse_layer_idx": True, "n_inner": None},
    "unused cross-attention": {"add_cross_attention": True},
}
BATCH = ((5, 6, 7, 8), (9,), (40, 3, 3, 17, 21, 30, 11))


@pytest.fixture(name="forms", scope="module")
def _forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """Of each form its folder, and the logits of the library for the longest prompt."""
    root, found = tmp_path_factory.mktemp("forms"), {}
    for number, (name, changes) in enumerate({**FORMS, "openai-gpt": {}}.items()):
        family = "gpt2" if name in FORMS else name
        folder = save_tiny(root / str(number), family, **{**SPREAD, **FAMILIES["gpt2"], **changes})
        with torch.no_grad():
            found[name] = folder, load_reference(folder)(torch.tensor([BATCH[-1]])).logits
    return found


@ranks(2)
def test_every_form_gives_the_logits_of_the_library(rank: int, forms: dict[str, tuple[Path, torch.Tensor]]) -> None:
    for name, (folder, expected) in forms.items():
        opened = open_model(ModelRequest(str(folder), device="cpu"), pool_ranks())
        with torch.inference_mode():
            found = opened.model(torch.tensor([BATCH[-1]])).logits
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


@ranks(2)
def test_batches_and_caches_of_half_the_heads(rank: int, forms: dict[str, tuple[Path, torch.Tensor]]) -> None:
    folder, _ = forms["scores by layer"]
    alone = Generator(open_model(ModelRequest(str(folder)))).generate(list_prompts(BATCH), GREEDY)
    opened = open_model(ModelRequest(str(folder), device="cpu"), pool_ranks())
    for cache in ("dynamic", "static"):
        made = Generator(opened, pool_ranks(), cache).generate(list_prompts(BATCH), GREEDY)
        assert [each.tokens for each in made] == [each.tokens for each in alone], cache


def test_the_plan_is_found_from_the_modules() -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with torch.device("meta"):
        gpt2, opt = (
            AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes))
            for family, sizes in (
                ("gpt2", {**FAMILIES["gpt2"], "add_cross_attention": True}),
                ("opt", {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 48, "num_hidden_layers": 1}),
            )
        )
    found = find_fused_plan(gpt2)
    assert found is not None
    assert found.widths == {"heads": 4, "inner width": 48}
    layer = "transformer.h.*"
    assert found.plan == {
        f"{layer}.attn": FUSED_HEADS,
        f"{layer}.attn.c_attn": CONV_QKV,
        f"{layer}.attn.c_proj": CONV_ROWS,
        f"{layer}.mlp.c_fc": CONV_COLUMNS,
        f"{layer}.mlp.c_proj": CONV_ROWS,
        "transformer.wte": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
    }
    assert find_fused_plan(opt) is None


@ranks(2)
def test_what_cannot_be_split_is_refused(rank: int, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 3, "n_head": 3, "hidden_size": 24, "n_embd": 24}
    sizes = {"heads": heads, "inner": {"n_inner": 49}}
    if rank == 0:
        for name, changes in sizes.items():
            save_tiny(tmp_path / name, "gpt2", **{**FAMILIES["gpt2"], **changes})
        save_tiny(tmp_path / "opt", "opt", ffn_dim=48)
    pool_ranks().barrier()
    for name, what in (
        ("heads", "by which heads = 3 cannot be divided"),
        ("inner", "by which inner width = 49 cannot be divided"),
        ("opt", "no tensor-parallel plan for OPTForCausalLM, and its layers are not the fused Conv1D"),
    ):
        with pytest.raises(UserError, match=what):
            open_model(ModelRequest(str(tmp_path / name)), pool_ranks())
