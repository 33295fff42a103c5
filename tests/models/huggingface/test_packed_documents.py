"""Models of `transformers` keep the documents of a packed sequence apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardway.models.huggingface.model import FAMILIES, build_huggingface
from tiny_hf import TOKENS, load_reference, save_tiny

ROWS = [[5, 1, 10], [12, 4]]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_each_document_alone(tmp_path: Path, family: str) -> None:
    folder = save_tiny(tmp_path / "model", family)
    model = build_huggingface(folder, vocab=50, seq_len=16)
    model.to_empty(device="cpu")
    model.init_weights(0)
    model.eval()
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS])
    with torch.no_grad():
        packed, library = model(TOKENS, positions, packed=True), load_reference(folder)
        for row, lengths in enumerate(ROWS):
            for end, length in zip(torch.tensor(lengths).cumsum(0).tolist(), lengths, strict=True):
                document = TOKENS[row : row + 1, end - length : end]
                alone = library(document).logits[0]
                torch.testing.assert_close(packed[row, end - length : end], alone, rtol=0, atol=1e-5)
