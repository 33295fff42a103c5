"""What is loaded is what was saved; what is damaged is refused whole, on every rank, with nothing changed."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from pool import RankPool, ranks
from runs import lone_rank, pool_ranks
from saved_tensors import save_checkpoint
from shardway.checkpoint import reader
from shardway.checkpoint.catalog import PassedOver, verify_checkpoint
from shardway.checkpoint.file_format import TensorTable
from shardway.checkpoint.reader import load_latest, peek_latest
from shardway.checkpoint.state import Trained, random_state
from shardway.checkpoint.writer import collect_content, shared_place, write_checkpoint
from shardway.errors import JobError, UserError
from shardway.models.transformer import TransformerShape
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from speed import thinned
from trained import assert_same_bits, make_parallel, make_trained, train_on, whole_state

NUMBERS = {"step": 2, "samples": 16, "targets": 192, "data": "abc"}


def save_two(folder: Path, on: Ranks, shape: tuple[int, int] = (1, 1)) -> RunDir:
    """Checkpoints of steps 1 and 2; the same weights in both."""
    directory, trained = RunDir(folder), make_trained(on, shape)
    directory.create()
    for step in (1, 2):
        save_checkpoint(directory, on, trained, step, {**NUMBERS, "step": step})
    on.barrier()
    return directory


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.bin"))


def lose_shard(folder: Path) -> None:
    shards(folder)[-1].unlink()


def flip_bit(folder: Path) -> None:
    data = bytearray(shards(folder)[-1].read_bytes())
    data[len(data) // 2] ^= 1
    shards(folder)[-1].write_bytes(data)


def truncate(folder: Path) -> None:
    shards(folder)[-1].write_bytes(shards(folder)[-1].read_bytes()[:1000])


def lose_metadata(folder: Path) -> None:
    (folder / "tensors.json").unlink()


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def tear_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 2, "step"')


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def change_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def count_in_words(folder: Path) -> None:
    change_manifest(folder, step="two")


DAMAGES: dict[Callable[[Path], None], str] = {
    lose_shard: "{shard} is missing",
    flip_bit: "the content of {shard} has changed (its checksum is another)",
    truncate: "{shard} has 1000 bytes, the manifest says {size}",
    lose_metadata: "tensors.json is missing",
    lose_manifest: "its manifest.json is missing",
    tear_manifest: "its manifest.json cannot be read (Expecting ':' delimiter: line 1 column 21 (char 20))",
    empty_manifest: "its manifest.json cannot be read (list indices must be integers or slices, not str)",
    count_in_words: "its manifest.json has changed (its checksum is another)",
}


@pytest.mark.parametrize("damage", [flip_bit, lose_manifest], ids=lambda damage: damage.__name__)
@ranks(2)
def test_what_is_damaged_is_passed_over_on_every_rank_and_nothing_on_disk_changes(
    rank: int, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    on = pool_ranks()
    directory = save_two(tmp_path, on, (1, 2))
    folder = directory.checkpoint_path(2)
    last = shards(folder)[-1]
    what = DAMAGES[damage].format(shard=last.name, size=last.stat().st_size)
    on.barrier()
    if rank == 0:
        damage(folder)
    on.barrier()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    trained = make_trained(on, (1, 2), seed=1)
    loaded = load_latest(directory, on, trained)
    assert loaded is not None
    assert (loaded.step, loaded.passed_over) == (1, (PassedOver(2, what),))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@ranks(2)
def test_where_nothing_is_whole_every_rank_is_told(rank: int, tmp_path: Path) -> None:
    on = pool_ranks()
    directory = save_two(tmp_path, on, (1, 2))
    if rank == 0:
        lose_manifest(directory.checkpoint_path(2))
        flip_bit(directory.checkpoint_path(1))
    on.barrier()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    trained = make_trained(on, (1, 2), seed=1)
    with pytest.raises(JobError) as failure:
        load_latest(directory, on, trained)
    shard = shards(directory.checkpoint_path(1))[-1].name
    assert str(failure.value) == (
        f"no checkpoint in {directory.checkpoints} is whole:\n"
        "  step-000000002: its manifest.json is missing\n"
        f"  step-000000001: the content of {shard} has changed (its checksum is another)\n"
        "  None was loaded, and nothing was changed. To do: restore the files, or start over with --fresh, which sets "
        "the run directory aside."
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_manifest_of_another_step_is_damage(tmp_path: Path) -> None:
    directory = save_two(tmp_path, lone_rank())
    shutil.copy(directory.checkpoint_path(1) / "manifest.json", directory.checkpoint_path(2))
    loaded = load_latest(directory, lone_rank(), make_trained(lone_rank(), seed=1))
    assert loaded is not None
    assert (loaded.step, loaded.passed_over) == (1, (PassedOver(2, "its manifest is that of step 1"),))


@pytest.mark.parametrize(
    "damage",
    [lose_shard, truncate, lose_metadata, tear_manifest, empty_manifest, count_in_words],
    ids=lambda damage: damage.__name__,
)
def test_every_damage_is_told(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    directory, trained = save_two(tmp_path, lone_rank()), make_trained(lone_rank(), seed=1)
    folder = directory.checkpoint_path(2)
    (shard,) = shards(folder)
    what = DAMAGES[damage].format(shard=shard.name, size=shard.stat().st_size)
    damage(folder)
    loaded = load_latest(directory, lone_rank(), trained)
    assert loaded is not None
    assert (loaded.step, loaded.passed_over) == (1, (PassedOver(2, what),))


@ranks(2)
def test_a_newer_format_is_refused_on_every_rank(rank: int, tmp_path: Path) -> None:
    on = pool_ranks()
    directory = save_two(tmp_path, on, (2, 1))
    folder = directory.checkpoint_path(2)
    if rank == 0:
        change_manifest(folder, format=3)
    on.barrier()
    with pytest.raises(UserError) as failure:
        load_latest(directory, on, make_trained(on, (2, 1)))
    assert str(failure.value) == (
        f"the checkpoint {folder} has format 3; this Shardway reads format 2.\n"
        "  Nothing in it was changed. To do: update Shardway."
    )


def test_a_look_at_the_manifests_alone_says_the_same(tmp_path: Path) -> None:
    directory = save_two(tmp_path, lone_rank())
    lose_manifest(directory.checkpoint_path(2))
    manifest = peek_latest(directory)
    assert manifest is not None
    assert manifest.step == 1
    lose_manifest(directory.checkpoint_path(1))
    with pytest.raises(JobError, match="start over with --fresh") as failure:
        peek_latest(directory)
    with pytest.raises(JobError) as same:
        load_latest(directory, lone_rank(), make_trained(lone_rank()))
    assert str(same.value) == str(failure.value)


def test_nothing_saved_is_nothing_loaded(tmp_path: Path) -> None:
    directory = RunDir(tmp_path)
    directory.create()
    assert peek_latest(directory) is None
    assert load_latest(directory, lone_rank(), make_trained(lone_rank())) is None


def test_the_newest_is_read_by_number_not_by_time(tmp_path: Path) -> None:
    directory, trained = RunDir(tmp_path), make_trained(lone_rank())
    directory.create()
    for step in (10, 9):
        save_checkpoint(directory, lone_rank(), trained, step, {**NUMBERS, "step": step})
    manifest = peek_latest(directory)
    assert manifest is not None
    assert manifest.step == 10
    assert verify_checkpoint(directory, 9).step == 9


WIDER = TransformerShape(vocab=64, dim=48, layers=2, heads=2, kv_heads=1, ffn_dim=64)
DEEPER = TransformerShape(vocab=64, dim=32, layers=3, heads=2, kv_heads=1, ffn_dim=64)


@pytest.mark.parametrize(("shape", "sizes"), [((1, 2), WIDER), ((2, 1), DEEPER)], ids=["wider", "deeper"])
@ranks(2)
def test_another_model_is_a_misfit_on_every_rank(
    rank: int, tmp_path: Path, shape: tuple[int, int], sizes: TransformerShape
) -> None:
    on = pool_ranks()
    directory = save_two(tmp_path, on, shape)
    other = make_trained(on, shape, sizes=sizes)
    with pytest.raises(JobError) as failure:
        load_latest(directory, on, other)
    first, second = str(failure.value).splitlines()
    start = f"the checkpoint {directory.checkpoint_path(2)} does not fit this model or optimizer: "
    assert first.startswith(start)
    assert len(first) > len(start) + 10
    assert second == (
        "  To do: use the run file that it was saved with (in a script: its model and optimizer). `shardway checkpoint "
        "export RUN FOLDER --own-names` takes its weights out. Or start over with --fresh, which sets the run "
        "directory aside."
    )


def test_a_misfit_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    directory = save_two(tmp_path, lone_rank())
    other = make_trained(lone_rank(), sizes=DEEPER)
    state = whole_state(other.model, other.optimizer)
    with pytest.raises(JobError):
        load_latest(directory, lone_rank(), other)
    assert_same_bits(whole_state(other.model, other.optimizer), state)


def write_state(rank: int, folder: Path, shape: tuple[int, int]) -> None:
    directory, trained = RunDir(folder), make_trained(pool_ranks(), shape, steps=3)
    directory.create()
    save_checkpoint(directory, pool_ranks(), trained, 2, NUMBERS)
    if rank == 0:
        torch.save(whole_state(trained.model, trained.optimizer), folder / "expected.pt")
    else:
        whole_state(trained.model, trained.optimizer)


def read_state(rank: int, folder: Path, shape: tuple[int, int], same_world: bool) -> None:
    trained = make_trained(pool_ranks(), shape, steps=0, seed=1)
    loaded = load_latest(RunDir(folder), pool_ranks(), trained)
    assert loaded is not None
    assert (loaded.step, loaded.numbers, loaded.random_restored) == (2, NUMBERS, same_world)
    assert_same_bits(whole_state(trained.model, trained.optimizer), torch.load(folder / "expected.pt"))


@thinned("before", [(1, 1), (2, 1), (1, 4), (1, 2), (2, 2)], every=5)
def test_every_layout_reads_every_other(rank_pool: RankPool, tmp_path: Path, before: tuple[int, int]) -> None:
    """What is saved under `before` has the same bits in all others."""
    world = before[0] * before[1]
    rank_pool.run(write_state, world, {"folder": tmp_path, "shape": before})
    for after in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4)):
        size = after[0] * after[1]
        rank_pool.run(read_state, size, {"folder": tmp_path, "shape": after, "same_world": size == world})


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Tied(nn.Module):
    """A language model whose output layer is its embedding, tied in the usual way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_tied(on: Ranks, shape: tuple[int, int], steps: int) -> Trained:
    torch.manual_seed(steps)
    model = make_parallel(Tied(), on, shape)
    trained = Trained(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    train_on(trained, steps)
    return trained


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@ranks(2)
def test_tied_weights_are_saved_and_stay_tied(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    directory, trained = RunDir(tmp_path), make_tied(pool_ranks(), shape, 2)
    directory.create()
    save_checkpoint(directory, pool_ranks(), trained, 2, NUMBERS)
    again = make_tied(pool_ranks(), shape, 0)
    assert load_latest(directory, pool_ranks(), again) is not None
    assert_same_bits(whole_state(again.model, again.optimizer), whole_state(trained.model, trained.optimizer))
    for each in (trained, again):
        names = dict(each.model.named_parameters(remove_duplicate=False))
        embedding, head = (p for name, p in names.items() if name.endswith(("embedding.weight", "head.weight")))
        assert embedding is head
        train_on(each, 2)
    assert_same_bits(whole_state(again.model, again.optimizer), whole_state(trained.model, trained.optimizer))


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad"])
def test_another_optimizer_is_a_misfit_and_changes_nothing(tmp_path: Path, name: str) -> None:
    directory, model = save_two(tmp_path, lone_rank()), make_trained(lone_rank(), steps=0, seed=4).model
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.5, weight_decay=0.1)
    before, settings = whole_state(model, None), {**optimizer.param_groups[0]}
    with pytest.raises(JobError, match="does not fit this model or optimizer"):
        load_latest(directory, lone_rank(), Trained(model, optimizer))
    assert_same_bits(whole_state(model, None), before)
    assert {**optimizer.param_groups[0]} == settings


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adagrad", "Adamax"])
def test_asking_a_fresh_optimizer_for_its_state_changes_no_weight(name: str) -> None:
    """torch makes the state by a step without gradients: neither weights nor settings may notice."""
    model = make_trained(lone_rank(), steps=0).model
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.5, weight_decay=0.1)
    before, settings = whole_state(model, None), {**optimizer.param_groups[0]}
    Trained(model, optimizer).template(TensorTable({}, {}))
    assert_same_bits(whole_state(model, None), before)
    assert {**optimizer.param_groups[0]} == settings
    assert all(parameter.grad is None for parameter in model.parameters())


def test_steps_that_an_optimizer_has_taken_are_those_saved(tmp_path: Path) -> None:
    again = make_trained(lone_rank(), steps=0, seed=4)
    load_latest(save_two(tmp_path, lone_rank()), lone_rank(), again)
    assert again.optimizer is not None
    assert {float(state["step"]) for state in again.optimizer.state.values()} == {2.0}


class Sparse(nn.Module):
    """A model one of whose layers was frozen and one of whose layers no batch has used yet."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.unused = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.embedding(tokens)))


def test_parameters_without_state_are_resumed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Sparse()
    trained = Trained(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    train_on(trained, 2)
    directory = RunDir(tmp_path)
    directory.create()
    save_checkpoint(directory, lone_rank(), trained, 2, NUMBERS)
    fresh = Sparse()
    again = Trained(fresh, torch.optim.AdamW(fresh.parameters(), lr=0.01))
    assert load_latest(directory, lone_rank(), again) is not None
    assert_same_bits(whole_state(fresh, None), whole_state(model, None))
    for each in (trained, again):
        train_on(each, 2)
    assert_same_bits(whole_state(fresh, None), whole_state(model, None))


def test_a_model_without_optimizer_is_loaded(tmp_path: Path) -> None:
    directory = save_two(tmp_path, lone_rank())
    model = make_trained(lone_rank(), steps=0, seed=1).model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_latest(directory, lone_rank(), Trained(model, None)) is not None
    expected = make_trained(lone_rank())
    assert_same_bits(whole_state(model, None), whole_state(expected.model, None))


# --- what a checkpoint has not


def save_part(folder: Path, part: str) -> RunDir:
    """A checkpoint of step 1 without the tensors of one part."""
    directory, trained = RunDir(folder), make_trained(lone_rank())
    directory.create()
    content = collect_content(lone_rank(), trained, 1, NUMBERS)
    del content.tensors[part]
    write_checkpoint(shared_place(directory, lone_rank()), lone_rank(), content)
    return directory


def test_with_weights_alone_the_optimizer_begins_anew(tmp_path: Path) -> None:
    """Not with the states that asking it for a template has made up: they would count a step that never was."""
    directory = save_part(tmp_path, "optimizer")
    found, expected = make_trained(lone_rank(), steps=0, seed=5), make_trained(lone_rank())
    assert load_latest(directory, lone_rank(), found) is not None
    assert found.optimizer is not None
    assert not found.optimizer.state
    fresh = Trained(expected.model, torch.optim.AdamW(expected.model.parameters(), lr=0.01))
    for trained in (found, fresh):
        train_on(trained, 2)
    assert_same_bits(whole_state(found.model, found.optimizer), whole_state(fresh.model, fresh.optimizer))


@pytest.mark.parametrize(("part", "restored"), [("random", False), ("optimizer", True)])
def test_generators_that_were_not_saved_stay_as_they_are(part: str, restored: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    directory = save_part(tmp_path, part)
    torch.manual_seed(4711)
    before = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:  # as on a GPU, whose generator the checkpoint of a CPU has not
        patch.setattr(reader, "random_state", lambda: {**random_state(), "cuda": torch.zeros(4, dtype=torch.uint8)})
        loaded = load_latest(directory, lone_rank(), make_trained(lone_rank(), steps=0))
    assert loaded is not None
    assert loaded.random_restored is restored
    assert torch.equal(before, torch.get_rng_state()) is not restored
