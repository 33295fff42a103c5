"""What tests of `shardway.infer` share: small random models of five families, a tokenizer, and what transformers makes
of prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardway.infer.generate import Sampling
from shardway.infer.inputs import Prompt
from tiny_hf import load_reference, save_tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mixtral": {},
    "gemma": {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64, "n_inner": 48},
}
SPREAD = {"initializer_range": 0.3, "num_key_value_heads": 4, "num_hidden_layers": 2, "bos_token_id": None}
"""Weights so far apart that greedy tokens differ from each other, and heads that four ranks can share."""

PROMPTS = ((5, 6, 7, 8), (9,))
GREEDY = Sampling(max_tokens=8)


def save_families(folder: Path, **changes: Any) -> dict[str, Path]:
    """A model of each family in a folder of its own; `changes` are keys of its config."""
    return {name: save_tiny(folder / name, name, **{**SPREAD, **more, **changes}) for name, more in FAMILIES.items()}


def list_prompts(ids: Sequence[Sequence[int]] = PROMPTS) -> list[Prompt]:
    return [Prompt(tuple(each)) for each in ids]


def continue_reference(model: Any, ids: Sequence[int], count: int = GREEDY.max_tokens) -> tuple[int, ...]:
    """The greedy tokens of the library for one prompt, without the one that ends it."""
    tokens = torch.tensor([list(ids)])
    made = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    found = made[0, len(ids) :].tolist()
    end = model.generation_config.eos_token_id
    return tuple(found[: found.index(end)] if end in found else found)


def continue_folder(folder: Path, count: int = GREEDY.max_tokens) -> list[tuple[int, ...]]:
    """The same for each of PROMPTS, by the library's own model of a folder."""
    model = load_reference(folder)
    return [continue_reference(model, ids, count) for ids in PROMPTS]


def save_tokenizer(folder: Path, template: str = "") -> None:
    """A tokenizer of the bytes of a text beside a model, as byte-level BPE has it without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: number for number, name in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, **({"chat_template": template} if template else {})})
    )
