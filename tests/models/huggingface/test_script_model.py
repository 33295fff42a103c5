"""A model of the library in a script of one's own: trained in any layout, `save_pretrained` writes it whole."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

from pool import ranks
from runs import layout, open_tiny, pool_ranks
from saved_tensors import read_whole
from tiny_hf import SIZES, load_reference

pytestmark = pytest.mark.slow  # transformers takes seconds to import

SCRIPT = ("run.device=cpu", "run.threads=1", "train.steps=2", "checkpoint.background=false")


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    return model(input_ids=batch[0], labels=batch[0]).loss


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["replicated", "sharded"])
@ranks(2)
def test_save_pretrained_writes_what_the_checkpoint_holds(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    import transformers

    torch.manual_seed(0)
    raw = transformers.AutoModelForCausalLM.from_config(transformers.GraniteConfig(**SIZES, tie_word_embeddings=True))
    with open_tiny(tmp_path / "run", pool_ranks(), *layout(*shape), base=SCRIPT) as run:
        net = run.shard(raw)
        run.optimizer(torch.optim.AdamW, net, lr=0.01)
        ids = torch.arange(128).reshape(16, 8) % 50
        for batch in run.steps(run.loader(TensorDataset(ids), batch_size=8)):
            run.step(net, batch, own_loss)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        if shape == (1, 2) or rank == 0:  # shards are gathered on all ranks
            net.save_pretrained(tmp_path / "out")
    dist.barrier()
    if rank == 0:
        found = load_reference(tmp_path / "out").state_dict()
        saved = read_whole(tmp_path / "run" / "checkpoints" / "step-000000002")
        weights = {name.removeprefix("model."): value for name, value in saved.items() if name.startswith("model.")}
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")  # it is the embedding
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["architectures"] == ["GraniteForCausalLM"]
