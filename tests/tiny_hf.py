"""Tiny random models of `transformers` in folders as its own save_pretrained writes them.

Invariant: weights are those of the library's initialisation with noise on all of them, so that no norm is 1 and no
bias 0. This module must not import transformers when it is imported: that takes seconds.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MORE: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "mistral": {"head_dim": 16, "sliding_window": 32},
    "qwen2": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "olmo": {"clip_qkv": 0.5},
    "phi3": {"resid_pdrop": 0.0},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
        "head_dim": 16,
    },
}
TOKENS = torch.arange(32).reshape(2, 16) * 7 % 50


def save_tiny(folder: Path, family: str, *, seed: int = 0, file_size: str = "4GB", **changes: Any) -> Path:
    """A random model of a family in `folder`; `changes` are keys of its config."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.CONFIG_MAPPING[family](**{**SIZES, **MORE.get(family, {}), **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(folder, max_shard_size=file_size)
    return folder


def load_reference(folder: Path) -> Any:
    """The library's own model of a folder, in float32, for comparison."""
    import transformers

    with contextlib.redirect_stderr(io.StringIO()):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(folder: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """What the library computes."""
    return load_reference(folder)(tokens).logits
