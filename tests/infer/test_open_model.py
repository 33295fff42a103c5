"""What a word opens gives the tokens of transformers: families on 1, 2 and 4 ranks, and runs of any layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import FAMILIES, GREEDY, continue_folder, list_prompts, save_families, save_tokenizer

from pool import ranks
from runs import COMMON, TINY_IMAGES, lone_rank, pool_ranks, train_tiny
from shardway.checkpoint.catalog import FoundCheckpoint
from shardway.checkpoint.reader import TensorReader
from shardway.errors import JobError, SiteError, UserError
from shardway.infer.generate import Generator
from shardway.infer.model import ModelRequest, _RunModel, open_model
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from shardway.train.run_weights import export_run
from tiny_hf import load_reference, save_tiny

Reference = dict[str, tuple[Path, list[tuple[int, ...]]]]


def list_greedy(word: Path, on: Ranks | None = None, **options: Any) -> list[tuple[int, ...]]:
    """The greedy tokens for each of PROMPTS."""
    opened = open_model(ModelRequest(str(word), device="cpu", **options), on)
    generator = Generator(opened, on)
    return [generator.generate([each], GREEDY)[0].tokens for each in list_prompts()]


# --- families


@pytest.fixture(name="families", scope="module")
def _families(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Of each family its folder, and the greedy tokens of the library."""
    found = save_families(tmp_path_factory.mktemp("families"))
    return {name: (folder, continue_folder(folder)) for name, folder in found.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_the_library(families: Reference, name: str) -> None:
    folder, expected = families[name]
    assert len({token for each in expected for token in each}) > 3, "a model that repeats itself shows little"
    assert list_greedy(folder) == expected


def check_split(families: Reference) -> None:
    for name, (folder, expected) in families.items():
        opened = open_model(ModelRequest(str(folder), device="cpu"), pool_ranks())
        weights = dict(opened.model.named_parameters())
        split = next(each for key, each in weights.items() if key.endswith(("q_proj.weight", "c_attn.weight")))
        assert split.to_local().numel() * pool_ranks().world == split.numel()
        generator = Generator(opened, pool_ranks())
        assert [generator.generate([each], GREEDY)[0].tokens for each in list_prompts()] == expected, name


@ranks(4)
def test_four_ranks_give_the_same(rank: int, families: Reference) -> None:
    check_split(families)


@ranks(2)
def test_two_ranks_give_the_same(rank: int, families: Reference) -> None:
    check_split(families)


@ranks(2)
def test_a_model_that_cannot_be_divided_is_refused(rank: int, tmp_path: Path) -> None:
    if rank == 0:
        save_tiny(tmp_path / "odd", "llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24, head_dim=8)
    pool_ranks().barrier()
    with pytest.raises(UserError, match="num_attention_heads = 3, num_key_value_heads = 3 cannot be divided"):
        open_model(ModelRequest(str(tmp_path / "odd")), pool_ranks())


# --- runs

LAYOUTS = {
    "shard": ("dp_shard=2", "dp_replicate=2"),
    "tensor": ("tp=2", "dp_shard=2"),
    "pipeline": ("pp=2", "tp=2", "pp_micro_batches=2"),
    "context": ("cp=2", "dp_shard=2"),
    "experts": ("ep=2", "dp_shard=4"),
}
OF_EXPERTS = ("model.experts=4", "model.expert_dim=16", "model.experts_per_token=2", "model.balance=loss")
SIZES = (
    "model.heads=4",
    "model.dim=32",
    "model.vocab=50",
    "model.tied=false",
    "data.seq_len=32",
    "train.steps=2",
    "optim.lr=0.01",
    "optim.warmup=1 steps",
)


@ranks(4)
def train_layout(rank: int, folder: Path) -> None:
    """A run of each layout, on four ranks."""
    for name, degrees in LAYOUTS.items():
        words = (*SIZES, *(f"parallel.{each}" for each in degrees), *(OF_EXPERTS if name == "experts" else ()))
        if "dp_shard" not in " ".join(degrees):
            words = (*words, "parallel.dp_shard=1")
        train_tiny(folder / name, pool_ranks(), *words, "checkpoint.every=1 steps", "train.micro_batch=auto")


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, rank_pool: Any) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train_layout(rank_pool=rank_pool, folder=folder)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_needs_no_export(runs: Path, tmp_path: Path, name: str) -> None:
    """Every weight has the bits that an export has, and the tokens are those of the exported model."""
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))
    opened = open_model(ModelRequest(str(runs / name)))
    assert opened.origin == f"run {runs / name}, step 2"
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before
    threads = torch.get_num_threads()
    export_run(RunDir(runs / name), tmp_path / "out", None, {})
    torch.set_num_threads(threads)
    exported = load_reference(tmp_path / "out").state_dict()
    found = opened.model.state_dict()
    assert found.keys() == exported.keys()
    assert all(torch.equal(found[key], exported[key]) for key in exported)
    assert list_greedy(runs / name) == continue_folder(tmp_path / "out")


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_a_run_of_the_librarys_model_needs_no_export(families: Reference, tmp_path: Path, name: str) -> None:
    """One that ties its embedding, and one whose experts are stacked in another way here."""
    source = tmp_path / "source"
    shutil.copytree(families[name][0], source)
    save_tokenizer(source)
    words = (f"model.hf={source}", "data.seq_len=12", "train.steps=1", "optim.warmup=1 steps", "optim.lr=0.01")
    train_tiny(tmp_path / "run", lone_rank(), *words, "checkpoint.every=1 steps", base=COMMON)
    opened = open_model(ModelRequest(str(tmp_path / "run")))
    assert opened.tokenizer is not None
    assert opened.tokenizer.decode(opened.tokenizer.encode("hé")) == "hé"
    threads = torch.get_num_threads()
    export_run(RunDir(tmp_path / "run"), tmp_path / "out", None, {})
    torch.set_num_threads(threads)
    exported, found = load_reference(tmp_path / "out").state_dict(), opened.model.state_dict()
    assert found.keys() == exported.keys()
    assert all(torch.equal(found[key], exported[key]) for key in exported)


def test_one_checkpoint_of_a_run_is_chosen(runs: Path) -> None:
    run = runs / "shard"
    first = open_model(ModelRequest(str(run), step=1))
    assert first.origin.endswith("step 1")
    (folder,) = [each for each in (run / "checkpoints").iterdir() if each.name.endswith("1")]
    same = open_model(ModelRequest(str(folder)))
    weights = first.model.state_dict(), same.model.state_dict(), open_model(ModelRequest(str(run))).model.state_dict()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not all(torch.equal(weights[0][key], weights[2][key]) for key in weights[0])
    for word, options, what in (
        (folder, {"step": 1}, "is one checkpoint, among which"),
        (run, {"step": 7}, "no checkpoint of step 7"),
        (run, {"best": True}, "none is the best"),
        (run, {"best": True, "step": 1}, "name two checkpoints"),
    ):
        with pytest.raises(UserError, match=what):
            open_model(ModelRequest(str(word), **options))  # type: ignore[arg-type]


@ranks(2)
def check_runs_on_two(rank: int, runs: Path, expected: dict[str, Any]) -> None:
    for name, tokens in expected.items():
        assert list_greedy(runs / name, pool_ranks()) == tokens


def test_a_run_is_split_over_other_ranks(runs: Path, rank_pool: Any) -> None:
    expected = {name: list_greedy(runs / name) for name in ("pipeline", "experts")}
    check_runs_on_two(rank_pool=rank_pool, runs=runs, expected=expected)


def find_model_file(folder: Path) -> Path:
    """The file that holds most of the model's weights."""
    reader = TensorReader(folder)
    name = next(name for name in reader.entries if name.startswith("model."))
    return folder / reader.place(name)[0]


def test_a_damaged_checkpoint_is_passed_over_and_named(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "tensor", run)
    newest, oldest = sorted((run / "checkpoints").iterdir(), reverse=True)
    path = find_model_file(newest)
    content = bytearray(path.read_bytes())
    content[TensorReader(newest).place("model.embedding.weight")[1] + 5] ^= 1
    path.write_bytes(content)
    opened = open_model(ModelRequest(str(run)))
    assert opened.origin.endswith("step 1")
    assert len(opened.notes) == 1
    assert f"passed over the damaged checkpoint {newest.name}" in opened.notes[0]
    with pytest.raises(JobError, match="choose another step"):
        open_model(ModelRequest(str(run), step=2))
    path.unlink()
    shutil.rmtree(oldest)
    with pytest.raises(JobError, match="is missing"):
        open_model(ModelRequest(str(run)))


def test_checkpoints_that_are_pruned_meanwhile_are_passed_over(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in training writes a newer one, and prunes all that were there when its model was about to be opened."""
    run, newest = tmp_path / "run", tmp_path / "newest"
    shutil.copytree(runs / "tensor", run)
    shutil.move(RunDir(run).checkpoint_path(2), newest)
    list_tensors = _RunModel.list_tensors

    def train_on(model: _RunModel, found: FoundCheckpoint) -> Any:
        if newest.exists():
            shutil.rmtree(RunDir(run).checkpoint_path(1))
            shutil.move(newest, RunDir(run).checkpoint_path(2))
        return list_tensors(model, found)

    monkeypatch.setattr(_RunModel, "list_tensors", train_on)
    opened = open_model(ModelRequest(str(run)))
    assert (opened.step, opened.notes) == (2, ())


# --- what cannot be opened

ONE_STEP = ("train.steps=1", "optim.warmup=1 steps", "checkpoint.every=1 steps")


def test_what_is_no_model_is_refused(tmp_path: Path, families: Reference) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    without = tmp_path / "without"
    without.mkdir()
    shutil.copy(families["llama"][0] / "config.json", without)
    other = tmp_path / "other"
    shutil.copytree(families["llama"][0], other)
    (other / "config.json").write_text('{"model_type": "vit"}')
    for word, what in (
        (empty, "is neither a model nor a run"),
        (without, "has a config.json and no weights"),
        (other, "has no language model that continues text"),
        (tmp_path / "nothing", "there is no .* holds empty, other, without"),
    ):
        with pytest.raises(UserError, match=what):
            open_model(ModelRequest(str(word)))
    with pytest.raises(UserError, match="which alone has steps"):
        open_model(ModelRequest(str(families["llama"][0]), step=3))
    with pytest.raises(SiteError, match="sees no CUDA device"):
        open_model(ModelRequest(str(families["llama"][0]), device="cuda"))


def test_a_damaged_folder_is_a_sentence(tmp_path: Path, families: Reference) -> None:
    folder = tmp_path / "model"
    shutil.copytree(families["qwen3"][0], folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(JobError, match="transformers cannot open"):
        open_model(ModelRequest(str(folder)))
    shutil.copy(families["qwen3"][0] / weights.name, weights)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 40'))
    with pytest.raises(JobError, match=r"6 tensors of other sizes than its config.json states: .* is \[32, 48\], and"):
        open_model(ModelRequest(str(folder)))
    shutil.copy(families["qwen3"][0] / config.name, config)
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(UserError, match="has 'x' as a token that ends or pads a text"):
        list_greedy(folder)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("model.kv_rank=8", "model.rope_head_dim=8", "model.value_head_dim=8"), "model.kv_rank"),
        (("model.positions=learned", "model.max_positions=32"), "model.positions"),
        (("model.kind=encoder_decoder",), "has no form among Hugging Face's"),
    ],
)
def test_a_run_that_the_library_cannot_compute_is_refused(tmp_path: Path, words: tuple[str, ...], what: str) -> None:
    train_tiny(tmp_path / "run", lone_rank(), *words, *ONE_STEP)
    with pytest.raises(UserError, match=what) as refused:
        open_model(ModelRequest(str(tmp_path / "run")))
    assert "export --own-names" in str(refused.value)


def test_a_run_without_a_checkpoint_or_of_images_is_refused(tmp_path: Path) -> None:
    train_tiny(tmp_path / "none", lone_rank(), *ONE_STEP, "checkpoint.every=off")
    with pytest.raises(UserError, match="is a run without a checkpoint"):
        open_model(ModelRequest(str(tmp_path / "none")))
    train_tiny(tmp_path / "images", lone_rank(), *ONE_STEP, base=TINY_IMAGES)
    with pytest.raises(UserError, match="a convnet that does not continue text"):
        open_model(ModelRequest(str(tmp_path / "images")))


# --- random weights and fewer bits


def test_random_weights_follow_from_the_seed(families: Reference) -> None:
    word = str(families["qwen3"][0])
    draws = [open_model(ModelRequest(word, random_weights=True, seed=seed)).model for seed in (1, 1, 2)]
    weights = [each.model.layers[0].mlp.up_proj.weight for each in draws]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@ranks(2)
def test_random_weights_are_the_same_over_ranks(rank: int, families: Reference) -> None:
    word = families["qwen3"][0]
    alone = list_greedy(word, None, random_weights=True, seed=3)
    assert list_greedy(word, pool_ranks(), random_weights=True, seed=3) == alone


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_weights_in_fewer_bits(families: Reference, name: str) -> None:
    word = str(families[name][0])
    plain, quantized = (open_model(ModelRequest(word, quantize=kind)) for kind in ("off", "int8"))
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        exact, found = (each.model(tokens).logits for each in (plain, quantized))
    weights = dict(quantized.model.named_parameters())
    attention = next(each for key, each in weights.items() if key.endswith(("q_proj.weight", "c_attn.weight")))
    assert type(attention.data).__name__ != "Tensor"
    assert 0 < (exact - found).norm() / exact.norm() < 0.03  # 8 bits a weight: 1 / 254 of the largest of a row
    if name == "mixtral":
        assert "of the weights are in no linear layers and not quantized to int8: model.layers.0" in quantized.notes[0]
    else:
        assert quantized.notes == ()
    for kind in ("fp8", "int4"):
        with pytest.raises(SiteError, match="needs a GPU"):
            open_model(ModelRequest(word, quantize=kind))


@ranks(2)
def test_quantized_weights_are_not_split(rank: int, families: Reference) -> None:
    with pytest.raises(UserError, match="works on one rank"):
        open_model(ModelRequest(str(families["llama"][0]), quantize="int8"), pool_ranks())


def test_a_run_with_an_adapter_is_opened_with_it(tmp_path: Path) -> None:
    """The weights of model.hf and what was trained beside them."""
    base, threads = save_tiny(tmp_path / "base", "llama", vocab_size=256), torch.get_num_threads()
    words = ("data.kind=synthetic", "data.samples=96", "train.steps=6", "train.global_batch=8", "data.seq_len=12")
    words = (*words, "train.validate_every=off", "optim.warmup=1 steps", "optim.lr=0.1", "run.device=cpu")
    run, adapter = tmp_path / "run", ("model.adapter=lora", "model.lora_rank=4", f"model.hf={base}")
    train_tiny(run, lone_rank(), *adapter, base=(*words, "checkpoint.background=false"))
    try:
        assert export_run(RunDir(run), tmp_path / "merged", None, {}, merge=True) is not None
    finally:
        torch.set_num_threads(threads)
    expected = continue_folder(tmp_path / "merged")
    assert list_greedy(run) == expected != continue_folder(base)
    shutil.move(base, tmp_path / "away")
    save_tiny(base, "llama", vocab_size=256, seed=1)
    with pytest.raises(UserError, match="not those that the adapter was trained beside"):
        list_greedy(run)
