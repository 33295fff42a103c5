"""A model whose weights are formulas, and questions: what lm-evaluation-harness gave for them is recorded in tests.

Invariant: neither depends on a generator or a version, so a recorded number stays that of this model.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch

QUESTIONS: list[dict[str, Any]] = [
    {"question": "The sky is", "choices": ["blue", "a kind of fruit", "42"], "answer": 0},
    {"prompt": "Two and two make", "choices": ["four", "five", "twenty-two, at least"], "answer": 0},
    {"question": "Wie heißt die Straße?", "choices": ["Hauptstraße", "Bäckergäßchen", "Weg"], "answer": 1},
    {"question": "A cat says ", "choices": ["woof", "meow", "moo"], "answer": 2},
    {"question": "x = 1\ny = x + 1\nprint(y)\n", "choices": ["2", "1", "an error", "3"], "answer": 3},
    {"question": "True or false: 1 > 2?", "choices": ["true", "false"], "answer": 1},
    {"question": "Ω is a letter of", "choices": ["ελληνικά", "Latin"], "answer": 0},
    {"question": "zzz", "choices": ["aaaaaaaa", "zz", "q"], "answer": 1},
]


def write_questions(path: Path) -> Path:
    """The questions as JSON lines, each with "question", for a task of the harness."""
    rows = [{"question": each.get("question", each.get("prompt")), **each} for each in QUESTIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def save_formula_model(folder: Path) -> Path:
    """A small Llama over bytes, with positions for 64 tokens."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), 1):
            places = torch.arange(parameter.numel(), dtype=torch.float64)
            values = (places * places * (0.37 + 0.011 * number) + number).sin()
            parameter.copy_((0.25 * values + (parameter.dim() == 1)).view(parameter.shape))
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(folder)
    return folder
