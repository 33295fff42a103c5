"""A tiny Llama as a folder of the hub has it, written by hand: config, two parts of weights with their index,
tokenizer, chat template and generation config. Nothing but NumPy is imported.

Invariant: a run trains it with `data.tokenizer = "bytes"`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

DIM, FFN, VOCAB = 16, 24, 256
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_LAYER = "model.layers.0"
PARTS: dict[str, dict[str, tuple[int, ...]]] = {
    FIRST: {
        "model.embed_tokens.weight": (VOCAB, DIM),
        f"{_LAYER}.self_attn.q_proj.weight": (DIM, DIM),
        f"{_LAYER}.self_attn.k_proj.weight": (DIM // 2, DIM),
        f"{_LAYER}.self_attn.v_proj.weight": (DIM // 2, DIM),
        f"{_LAYER}.self_attn.o_proj.weight": (DIM, DIM),
    },
    SECOND: {
        f"{_LAYER}.mlp.gate_proj.weight": (FFN, DIM),
        f"{_LAYER}.mlp.up_proj.weight": (FFN, DIM),
        f"{_LAYER}.mlp.down_proj.weight": (DIM, FFN),
        f"{_LAYER}.input_layernorm.weight": (DIM,),
        f"{_LAYER}.post_attention_layernorm.weight": (DIM,),
        "model.norm.weight": (DIM,),
        "lm_head.weight": (VOCAB, DIM),
    },
}


def write_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> int:
    """A safetensors file of random fp32 values; returns the bytes of its tensors."""
    drawn, at = np.random.default_rng(seed), 0
    header: dict[str, Any] = {}
    values = []
    for name, shape in shapes.items():
        values.append(drawn.normal(1.0 if len(shape) == 1 else 0.0, 0.1, shape).astype("<f4").tobytes())
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + len(values[-1])]}
        at += len(values[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(values))
    return at


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def write_model(folder: Path) -> Path:
    """The model."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [write_tensors(folder / name, shapes, seed) for seed, (name, shapes) in enumerate(PARTS.items())]
    placed = {tensor: name for name, shapes in PARTS.items() for tensor in shapes}
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": sum(sizes)}, "weight_map": placed})
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {"eos_token_id": 2})
    words = ["<unk>", "<s>", "</s>", *(chr(33 + number) for number in range(VOCAB - 3))]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = {"type": "BPE", "unk_token": "<unk>", "vocab": vocabulary, "merges": []}
    write_json(folder / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": model})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "</s>"})
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return folder
