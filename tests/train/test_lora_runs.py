"""Runs that train an adapter beside a frozen model: the curve does not depend on the layout, a run goes on with the
same bits, its checkpoints hold the adapter alone, what is exported is what peft reads; and scripts that call peft."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

from pool import ranks
from runs import (
    COMMON,
    Died,
    die_at,
    layout,
    lone_rank,
    open_tiny,
    pool_ranks,
    read_column,
    tell_steps,
    train_alone,
    train_tiny,
    worst_difference,
)
from shardway.checkpoint.reader import TensorReader
from shardway.errors import UserError
from shardway.models.huggingface.model import HuggingFaceModel
from shardway.ranks.start import Ranks
from shardway.resolve.request import ResolveRequest, resolve_loaded
from shardway.rundir.directory import RunDir
from shardway.runfile.load import load_run
from shardway.train.run_weights import export_on, export_run, lay_evenly
from tiny_hf import TOKENS, load_reference, save_tiny

LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4


def adapted(folder: Path, *words: str) -> tuple[str, ...]:
    """Overrides of a tiny run that trains an adapter beside the model in a folder."""
    return (
        *(*COMMON, f"model.hf={folder}", "model.adapter=lora", "model.lora_rank=4"),
        *("data.seq_len=12", "train.steps=6", "optim.lr=2e-2", "optim.weight_decay=0.1", *words),
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose vocabulary holds the bytes of synthetic data."""
    return save_tiny(tmp_path_factory.mktemp("base") / "llama", "llama", vocab_size=256)


# --- layouts


def check_parity(rank: int, folder: Path, model: Path, *words: str) -> None:
    """`words` of a layout and more; the micro-batch decides the masks of dropout, so one rank has it too."""
    drops = any("dropout" in word for word in words)
    alone = [
        word for word in words if not word.startswith(("parallel.", "recompute.", *(() if drops else ("train.micro",))))
    ]
    train_alone(rank, folder / "alone", *alone, base=adapted(model))
    train_tiny(folder / "together", pool_ranks(), *words, base=adapted(model))
    if rank == 0:
        losses, expected = read_column(folder / "together"), read_column(folder / "alone")
        assert len(losses) == 6
        assert worst_difference(losses, expected) < LOSS_TOLERANCE
        norms, expected_norms = (read_column(folder / name, "grad_norm") for name in ("together", "alone"))
        assert worst_difference(norms, expected_norms) < NORM_TOLERANCE
        assert expected[-1] < expected[0], "the run learns nothing, so that equal curves would say little"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((*layout(2, 1), "train.micro_batch=2"), id="copies"),
        pytest.param(layout(1, 2), id="shards"),
        pytest.param((*layout(1, 2), "recompute.mode=full", "parallel.cpu_offload=true"), id="shards on the host"),
        pytest.param((*layout(2, 1), "model.lora_dropout=0.3", "train.micro_batch=4"), id="dropout"),
        pytest.param((*layout(1, 1), "parallel.cp=2"), id="parts of sequences"),
    ],
)
@ranks(2)
def test_two_ranks_give_the_curve_of_one(rank: int, tmp_path: Path, base: Path, words: tuple[str, ...]) -> None:
    check_parity(rank, tmp_path, base, *words)


@ranks(4)
def test_shards_and_copies_of_them_give_the_curve_of_one(rank: int, tmp_path: Path, base: Path) -> None:
    check_parity(rank, tmp_path, base, *layout(2, 2), "optim.clip=0.5")


@ranks(2)
def test_bf16_stays_close_to_one_rank(rank: int, tmp_path: Path, base: Path) -> None:
    """Frozen matrices are held in bf16, as they are multiplied; shards cast the rest of a block too."""
    words = ("precision.compute=bf16", "train.micro_batch=4", "train.steps=3", "optim.warmup=1 steps")
    train_alone(rank, tmp_path / "alone", *words, base=adapted(base))
    train_tiny(tmp_path / "together", pool_ranks(), *words, *layout(1, 2), base=adapted(base))
    if rank == 0:
        losses, expected = read_column(tmp_path / "together"), read_column(tmp_path / "alone")
        assert worst_difference(losses, expected) < 1e-2


def test_the_format_of_frozen_weights_changes_no_bit(base: Path, tmp_path: Path) -> None:
    words = ("precision.compute=bf16", "recompute.mode=full", "train.steps=2", "optim.warmup=1 steps")
    train_tiny(tmp_path / "held", lone_rank(), *words, base=adapted(base))
    with pytest.MonkeyPatch.context() as patch:
        add = HuggingFaceModel.add_lora
        patch.setattr(HuggingFaceModel, "add_lora", lambda model, lora, dtype: add(model, lora, None))
        train_tiny(tmp_path / "whole", lone_rank(), *words, base=adapted(base))
    assert read_column(tmp_path / "held") == read_column(tmp_path / "whole")


# --- saved and resumed


@ranks(2)
def test_a_run_goes_on_with_the_same_bits(rank: int, tmp_path: Path, base: Path) -> None:
    saves = ("checkpoint.every=3 steps",)
    for name, stop in (("whole", None), ("broken", 4)):
        words = (*saves, *layout(1, 2))
        with contextlib.suppress(Died):
            hook = die_at(stop) if stop is not None else None
            train_tiny(tmp_path / name, pool_ranks(), *words, base=adapted(base), before_step=hook)
    train_tiny(tmp_path / "broken", pool_ranks(), *saves, *layout(1, 2), base=adapted(base))
    if rank == 0:
        whole, broken = (TensorReader(RunDir(tmp_path / name).path / LAST) for name in ("whole", "broken"))
        assert whole.entries.keys() == broken.entries.keys()
        for name in whole.entries:
            assert torch.equal(whole.read(name), broken.read(name)), name
        assert read_column(tmp_path / "whole") == read_column(tmp_path / "broken")


LAST = "checkpoints/step-000000006"


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank that saved its last step."""
    folder = tmp_path_factory.mktemp("run") / "run"
    train_tiny(folder, lone_rank(), "checkpoint.every=3 steps", base=adapted(base))
    return folder


def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(run: Path) -> None:
    entries = TensorReader(run / LAST).entries
    weights = [name for name in entries if name.startswith("model.")]
    assert len(weights) == 3 * 7 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in weights)
    moments = {name for name in entries if name.startswith("optimizer.state.")}
    assert {name.removeprefix("optimizer.state.").rpartition(".")[0] for name in moments} == {
        name.removeprefix("model.") for name in weights
    }


def test_a_run_does_not_go_on_beside_other_weights(run: Path, base: Path, tmp_path: Path) -> None:
    """Same names and shapes, trained further: as a model that was fetched anew may be."""
    folder, other = tmp_path / "run", tmp_path / "llama"
    shutil.copytree(run, folder)
    shutil.copytree(base, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 1e-3 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    hidden = base.with_name("away")
    base.rename(hidden)
    other.rename(base)
    try:
        with pytest.raises(UserError, match="are not those that the adapter was trained beside"):
            train_tiny(folder, lone_rank(), "train.steps=8", "checkpoint.every=3 steps", base=adapted(base))
    finally:
        shutil.rmtree(base)
        hidden.rename(base)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == kept


@pytest.mark.parametrize(
    "words",
    [("model.adapter=none",), ("model.lora_rank=8",), ('model.lora_targets=["q_proj"]',), ("model.lora_alpha=1.0",)],
)
def test_another_adapter_is_another_run(run: Path, base: Path, words: tuple[str, ...]) -> None:
    base_words = adapted(base) if "none" not in words[0] else (*COMMON, f"model.hf={base}", "data.seq_len=12")
    with pytest.raises(UserError, match=words[0].partition("=")[0]):
        train_tiny(run, lone_rank(), *words, "train.steps=9", base=base_words)


# --- exported


def export_merged(on: Ranks, run: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the whole model that `--merge` writes."""
    asked = lay_evenly(load_run(run / "resolved.toml"))
    resolution = resolve_loaded(ResolveRequest(run / "resolved.toml", directory=run), asked, on.world, on.world)
    export_on(on, resolution, RunDir(run), folder, "fp32")
    parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for part in parts for name, tensor in part.items()}


@torch.no_grad()
def test_peft_reads_an_exported_adapter_and_merges_to_the_same_bits(run: Path, base: Path, tmp_path: Path) -> None:
    import peft

    adapter = tmp_path / "adapter"
    assert export_run(RunDir(run), adapter, None, {}) is not None
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8.0, "CAUSAL_LM")
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    with warnings.catch_warnings(record=True) as warned:  # of keys that it misses or does not know
        warnings.simplefilter("always")
        theirs = peft.PeftModel.from_pretrained(load_reference(base), adapter).eval()
    assert not [each for each in warned if "adapter" in str(each.message)]
    expected = theirs(TOKENS).logits
    assert (expected - load_reference(base)(TOKENS).logits).abs().max() > 0.01, "the adapter changes nothing"
    whole = theirs.merge_and_unload().state_dict()

    ours = export_merged(lone_rank(), run, tmp_path / "merged")
    assert ours.keys() == whole.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, whole[name]), name
    assert torch.allclose(load_reference(tmp_path / "merged")(TOKENS).logits, expected, atol=2e-6)


@ranks(2)
def test_shards_are_merged_to_the_bits_of_one_rank(rank: int, tmp_path: Path, base: Path) -> None:
    train_alone(rank, tmp_path / "run", "checkpoint.every=3 steps", base=adapted(base))
    together = export_merged(pool_ranks(), tmp_path / "run", tmp_path / "together")
    if rank == 0:
        alone = export_merged(lone_rank(), tmp_path / "run", tmp_path / "alone")
        assert alone.keys() == together.keys()
        assert all(torch.equal(alone[name], together[name]) for name in alone)


def test_only_an_adapter_is_merged(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--merge"):
        export_run(RunDir(run), tmp_path / "out", None, {}, own_names=True, merge=True)
    assert not (tmp_path / "out").exists()


# --- scripts that put peft onto their own model


def train_script(on: Ranks, folder: Path, model: Path, *words: str, last: int | None = None) -> list[float]:
    """The losses of a script that adapts a model of the library itself; all ranks die after step `last`."""
    import peft

    losses = []
    tokens = torch.arange(96 * 13).reshape(96, 13) * 7 % 50
    own = ("run.device=cpu", "run.threads=1", "checkpoint.background=false", "checkpoint.every=2 steps", *words)
    with open_tiny(folder, on, base=(*own, "train.micro_batch=4")) as run:
        if last is not None:
            tell_steps(run, die_at(last))
        torch.manual_seed(1)
        with warnings.catch_warnings():  # of words of transformers that peft uses
            warnings.simplefilter("ignore")
            config = peft.LoraConfig(r=4, target_modules="all-linear")
            net = run.shard(peft.get_peft_model(load_reference(model), config))
        run.optimizer(torch.optim.AdamW, net, lr=2e-2)
        for batch in run.steps(run.loader(TensorDataset(tokens), batch_size=8), 6):
            losses.append(run.step(net, batch, loss_of_library))
    return losses


def loss_of_library(net: Any, batch: Any) -> torch.Tensor:
    (tokens,) = batch
    logits = net(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@ranks(2)
def test_a_script_adapts_its_own_model_in_every_layout(rank: int, tmp_path: Path, base: Path) -> None:
    """And its checkpoint holds all that the model holds: nothing else is known of where it came from."""
    alone = train_script(lone_rank(), tmp_path / f"alone-{rank}", base)
    assert alone[-1] < alone[0]
    for shape in ((2, 1), (1, 2)):
        folder = tmp_path / f"{shape}"
        assert worst_difference(train_script(pool_ranks(), folder, base, *layout(*shape)), alone) < LOSS_TOLERANCE
    if rank == 0:
        entries = TensorReader(tmp_path / "(1, 2)" / LAST).entries
        assert [name for name in entries if name.startswith("model.") and "base_layer" in name]
        moments = [name for name in entries if name.startswith("optimizer.state.")]
        assert moments
        assert all("lora_" in name for name in moments)


@ranks(2)
def test_a_script_goes_on_with_the_same_bits(rank: int, tmp_path: Path, base: Path) -> None:
    words = layout(1, 2)
    whole = train_script(pool_ranks(), tmp_path / "whole", base, *words)
    with contextlib.suppress(Died):
        train_script(pool_ranks(), tmp_path / "broken", base, *words, last=4)
    assert train_script(pool_ranks(), tmp_path / "broken", base, *words) == whole[4:]
