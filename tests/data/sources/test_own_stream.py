"""Iterable datasets of the user's own as sources: read in sequence, shared over ranks, gone on with by their state."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardway.data.loader import (
    Batch,
    HeldOutStream,
    LoaderOptions,
    Share,
    StreamLoader,
    count_samples,
    validation_stream,
)
from shardway.data.open import Data, open_data
from shardway.data.samplers import SnapshotPace
from shardway.data.sources.base import DataSource
from shardway.data.sources.own_dataset import OwnDataset
from shardway.data.sources.own_stream import OwnStream
from shardway.errors import JobError, UserError
from shardway.runfile.schema import DataSection

MODULE = '''
import random
import torch
from torch.utils.data import Dataset, IterableDataset

class Given(Dataset):
    """Samples as an expression gives them for number i."""

    def __init__(self, sample, count=12):
        self.sample, self.count = sample, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return eval(self.sample)

class Stream(IterableDataset):
    """Samples as an expression gives them for number i, from 0 on in each epoch."""

    def __init__(self, sample="(torch.full((2,), float(i)) + torch.rand(2), i % 10)", count=12):
        self.sample, self.count = sample, count

    def __iter__(self):
        for i in range(self.count):
            yield eval(self.sample)

class Sized(Stream):
    def __len__(self):
        return 12

class SizedWrongly(Stream):
    def __len__(self):
        raise RuntimeError("not counted yet")

class Goes(Stream):
    """It knows its place, and has a state."""

    at = 0

    def __iter__(self):
        while self.at < self.count:
            self.at, i = self.at + 1, self.at
            yield torch.full((2,), float(i)), i % 10
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

class Buffered(Goes):
    """Rows behind a buffer, which its state does not hold."""

    def __iter__(self):
        rows = super().__iter__()
        waiting = [next(rows) for _ in range(4)]
        for row in rows:
            yield waiting.pop(0)
            waiting.append(row)
        yield from waiting

class CountsLate(Goes):
    """The state that it has after a sample is that of before."""

    def __iter__(self):
        while self.at < self.count:
            yield torch.full((2,), float(self.at)), self.at % 10
            self.at += 1
        self.at = 0

class CannotGoOn(Goes):
    def load_state_dict(self, state):
        raise RuntimeError("not loaded")

class Stays(Goes):
    """It knows its place, and has no state."""

    state_dict = load_state_dict = None

class Places:
    def __init__(self, count):
        self.at, self.count = 0, count

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        return torch.full((2,), float(self.at)), self.at % 10

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

class OfIterator(Stream):
    """Its iterators have the state."""

    def __iter__(self):
        return Places(self.count)

class Itself(Stream):
    """Its own iterator, which begins anew."""

    def __iter__(self):
        self.rest = super().__iter__()
        return self

    def __next__(self):
        return next(self.rest)

class OneFile(Itself):
    """Its own iterator, of something that is opened once."""

    def __init__(self):
        self.rest = iter([(torch.zeros(2), i) for i in range(9)])

    def __iter__(self):
        return self

class Draws(Stream):
    """It draws from a generator of its own."""

    def __init__(self):
        self.drawn = random.Random(3)

    def __iter__(self):
        while True:
            yield torch.full((2,), self.drawn.random()), 0

class ChangesStream(Stream):
    made = 0

    def __init__(self):
        ChangesStream.made += 1
        super().__init__(f"(torch.full((2,), {ChangesStream.made}.0), 0)")

def stream_splits(split):
    return Stream(count=12 if split == "train" else 3)

def mixed_splits(split):
    return Stream("(torch.zeros(2), 0)") if split == "train" else Given("(torch.zeros(2), 1)")

def made(what):
    return eval(what)

def generator():
    yield torch.zeros(2), 0
'''
NAME = "stream_of_a_test"


@pytest.fixture(scope="module", autouse=True)
def own_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module of the user's that can be imported, also by loader processes."""
    folder = tmp_path_factory.mktemp("user")
    (folder / f"{NAME}.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
        sys.modules.pop(NAME, None)


def opened(
    name: str, wants: Any = "images", seed: int = 7, given: dict[str, Any] | None = None, **settings: Any
) -> Data:
    """The data of a section: `given` are further keys of it."""
    keys = {
        "dataset": f"{NAME}:{name}",
        "settings": settings,
        "seq_len": 4,
        "validation_fraction": 0.5,
        **(given or {}),
    }
    return open_data(
        DataSection(kind="dataset", **keys), seed, wants, **{"vocab" if wants == "tokens" else "classes": 10}
    )


def stream(name: str = "Stream", **how: Any) -> OwnStream:
    source = opened(name, **how).train
    assert isinstance(source, OwnStream)
    return source


def refused(name: str, **how: Any) -> str:
    with pytest.raises(UserError) as caught:
        opened(name, **how)
    return str(caught.value)


def read_in_sequence(
    name: str, steps: int = 6, position: int = 0, ranks: int = 1, options: LoaderOptions | None = None, **how: Any
) -> list[list[Any]]:
    """Input, target and number of the samples of some steps of 5, over all ranks."""
    shares = [Share(5, rank, ranks) for rank in range(ranks)]
    loaders = [
        StreamLoader(stream(name, **how), 7, share, options or LoaderOptions()).batches(position) for share in shares
    ]
    found = []
    for _ in range(steps):
        batches: list[Batch] = [next(loader) for loader in loaders]
        joined = [torch.cat([batch.data[field] for batch in batches]).tolist() for field in ("inputs", "targets")]
        found.append([*joined, [number for batch in batches for number in batch.ids.tolist()]])
    return found


def test_a_stream_has_the_facts_of_sample_0() -> None:
    source, sized = stream(), stream("Sized")
    assert not isinstance(source, DataSource)
    assert (source.size, source.tokens_per_sample, source.facts.sample_shape) == (0, 1, (2,))
    name = f'data.dataset "{NAME}:Stream"'
    assert source.facts.description == f"an unknown number of samples in sequence of {name}, shape [2], 10 classes"
    assert source.name == name
    assert sized.size == 12
    assert sized.facts.description.startswith("12 samples in sequence of data.dataset ")
    assert sized.locate(14) == f'sample 14 (number 2 of epoch 2) in the sequence of data.dataset "{NAME}:Sized"'
    assert len({each.facts.fingerprint for each in (source, stream(), sized, stream(count=9), stream(seed=8))}) == 4


@pytest.mark.parametrize(
    ("sample", "wants"),
    [
        ("(torch.full((2, 3), i * 20, dtype=torch.uint8), i)", "images"),
        ('{"label": i, "image": torch.ones(2) / (i + 1)}', "images"),
        ("torch.arange(5) + i", "tokens"),
        ("([1, 2, 3, i], [-100, 3, i, 5])", "tokens"),
        ('{"input_ids": [1, 2, 3, 4, i], "labels": [-100, -100, 3, 4, i]}', "tokens"),
    ],
)
def test_samples_of_a_stream_become_what_those_with_numbers_do(sample: str, wants: Any) -> None:
    given = {"mean": 0.5, "std": 0.25} if wants == "images" else {}
    numbered = opened("Given", wants=wants, sample=sample, given={**given, "validation_fraction": 0.0}).train
    assert isinstance(numbered, DataSource)
    expected = numbered.batch(np.arange(3))
    source = stream(wants=wants, sample=sample, given=given)
    batch = next(StreamLoader(source, 7, Share(3)).batches(0)).data
    assert {name: (value.dtype, value.tolist()) for name, value in batch.items()} == {
        name: (torch.from_numpy(value).dtype, value.tolist()) for name, value in expected.items()
    }


@pytest.mark.parametrize("name", ["Stream", "Sized", "Goes", "Itself"])
def test_no_sample_of_a_stream_is_lost_or_depends_on_ranks(name: str) -> None:
    """Sample 0 was read before."""
    whole = read_in_sequence(name)
    assert [number for _, _, numbers in whole for number in numbers] == list(range(30))
    assert [target for _, targets, _ in whole for target in targets] == [(i % 12) % 10 for i in range(30)]
    assert read_in_sequence(name, ranks=2) == whole
    assert read_in_sequence(name, position=15, steps=3, ranks=3) == whole[3:]


def test_draws_of_a_stream_follow_seed_and_epoch() -> None:
    first, second = read_in_sequence("Stream", 12)[:5], read_in_sequence("Stream", 12)[:5]
    assert first == second
    rows = torch.tensor([row for inputs, _, _ in read_in_sequence("Stream", 12) for row in inputs])
    drawn = rows - (torch.arange(60) % 12)[:, None]
    assert len(drawn.flatten().unique()) > 100
    assert ((drawn > -1e-5) & (drawn < 1)).all()


@pytest.mark.usefixtures("warm_starts")
def test_a_loader_process_makes_a_stream_anew() -> None:
    """It begins with sample 0 there too, and an error there keeps its text."""
    for name in ("Stream", "Goes"):
        assert read_in_sequence(name, 4, options=LoaderOptions(1)) == read_in_sequence(name, 4)
    sample = "(torch.zeros(2), 1 // (8 - i))"
    with pytest.raises(JobError, match='Stream" failed at sample 8: ZeroDivisionError'):
        read_in_sequence("Stream", 3, options=LoaderOptions(1), sample=sample)


def test_a_stream_is_pickled_without_its_dataset() -> None:
    source = stream("Goes")
    again = pickle.loads(pickle.dumps(source))
    assert again._dataset is None
    assert again.open().at == 0
    with pytest.raises(UserError, match="has made another sample 0 when it was called again"):
        pickle.loads(pickle.dumps(stream("ChangesStream"))).open()
    again = pickle.loads(pickle.dumps(stream("Sized")))
    again.size = 13
    with pytest.raises(UserError, match="has made 13 samples and, called again, 12"):
        again.open()


def test_the_state_of_a_stream_is_that_of_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot goes on without what came before."""
    monkeypatch.setattr(SnapshotPace, "take", lambda pace, reader: reader.snapshot())  # however long it takes
    source = stream("Goes")
    reader = StreamLoader(source, 7, Share(5)).batches(0)
    snapshots = [batch.snapshot for batch, _ in zip(reader, range(3), strict=False)]
    assert snapshots[1] is not None
    assert pickle.loads(snapshots[1].state) == {"at": 10}
    other = stream("Goes")
    found = next(StreamLoader(other, 7, Share(5)).batches(10, snapshot=snapshots[1]))
    assert found.ids.tolist() == [10, 11, 12, 13, 14]
    assert found.data["inputs"][:, 0].tolist() == [10, 11, 0, 1, 2]
    assert other.open().at == 3


def test_a_state_that_does_not_bring_back_the_next_sample_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is run through, and gives the same samples."""
    monkeypatch.setattr(SnapshotPace, "take", lambda pace, reader: reader.snapshot())
    exact = {"Stream": True, "Goes": True, "OfIterator": True, "Buffered": False, "CountsLate": False}
    assert {name: stream(name).state_is_exact for name in exact} == exact
    assert next(StreamLoader(stream("OfIterator"), 7, Share(5)).batches(0)).snapshot is not None
    for name in ("Buffered", "CountsLate"):
        assert next(StreamLoader(stream(name), 7, Share(5)).batches(0)).snapshot is None
        assert read_in_sequence(name, 3, position=15) == read_in_sequence(name)[3:]
    assert 'CannotGoOn" failed at sample 0: RuntimeError: not loaded' in refused("CannotGoOn")


def test_a_stream_for_validation_is_that_of_the_split() -> None:
    data = opened("stream_splits")
    assert isinstance(data.validation, OwnStream)
    held_out = HeldOutStream(data.validation)
    assert [count_samples(held_out, most) for most in (None, 2)] == [3, 2]
    for _ in range(2):
        batches = list(validation_stream(held_out, 3, Share(2)))
        assert [batch.data["targets"].tolist() for batch in batches] == [[0, 1], [2]]
    assert opened("Stream").validation is None
    assert isinstance(opened("mixed_splits").validation, OwnDataset)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (
            "iter([(torch.zeros(2), 0)] * 9)",
            "has returned list_iterator, which can be run through only once, and a run",
        ),
        ("OneFile()", "has returned OneFile, which can be run through only once"),
        ("generator()", "to do: make it a class with __iter__, and yield the samples there"),
        ("map(int, [])", "has made a dataset without samples"),
        ("Stream(count=0)", "has made a dataset without samples"),
    ],
)
def test_what_cannot_begin_again_is_refused(made: str, text: str) -> None:
    assert text in refused("made", what=made)


def test_a_stream_that_does_not_begin_again_alike_is_refused() -> None:
    for name in ("Stays", "Draws"):
        found = refused(name)
        assert f'sample 0 of "{NAME}:{name}" is not the same when the dataset is begun again' in found
        assert "or give the dataset state_dict() and load_state_dict(), whose state holds them" in found
    assert "has made a dataset without a length: RuntimeError: not counted yet" in refused("SizedWrongly")


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        ("(torch.zeros(2 + (i == 7)), 1)", "has inputs of shape [3]\n      allowed: [2], as those of sample 0"),
        ("(torch.zeros(2), 11 * (i == 7))", "has the target 11\n      allowed: 0 to 9, for 10 classes"),
        ("(torch.zeros(2), 1) if i < 7 else None", "is None\n"),
    ],
)
def test_a_sample_of_a_stream_unlike_the_first_is_named(sample: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        read_in_sequence("Stream", 2, sample=sample)
    assert f'data.dataset: sample 7 of "{NAME}:Stream" {text}' in str(caught.value)


def test_a_stream_that_fails_is_named_with_the_sample_to_come() -> None:
    sample = "(torch.zeros(2), 1 // (8 - i))"
    with pytest.raises(JobError) as caught:
        read_in_sequence("Stream", 3, sample=sample)
    assert str(caught.value).startswith(f'data.dataset "{NAME}:Stream" failed at sample 8: ZeroDivisionError: ')
    assert "\n" not in str(caught.value)
    assert f'"{NAME}:Stream" failed at sample 0: ZeroDivisionError' in refused("Stream", sample="1 // i")
    with pytest.raises(JobError, match="failed at sample 8: ZeroDivisionError"):
        list(validation_stream(HeldOutStream(stream(sample=sample)), 12, Share(5)))


@pytest.mark.parametrize(("count", "given"), [(8, "8"), (13, "more")])
def test_a_length_that_is_not_what_a_stream_gives_is_shown_once(count: int, given: str) -> None:
    shown = list[str]()
    read_in_sequence("Sized", ranks=2, count=count, options=LoaderOptions(tell=shown.append))
    said = f"says that its length is 12, and gives {given} in epoch 1: what the run file says in epochs is counted by"
    assert shown == [f'data.dataset "{NAME}:Sized" {said} its length.']


def test_the_class_of_the_page_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[3] / "docs" / "own-data.md"
    _, _, block = page.read_text().partition("test_own_stream.py -->\n```python\n")
    code, _, _ = block.partition("```")
    (tmp_path / "stream_of_the_page.py").write_text(
        f"import torch\nfrom torch.utils.data import IterableDataset\n\n{code}"
    )
    monkeypatch.chdir(tmp_path)
    Path("lines.csv").write_text("".join(f"{number % 10},{number},0.5\n" for number in range(250)))
    section = DataSection(kind="dataset", dataset="stream_of_the_page:Lines", settings={"path": "lines.csv"})
    data = open_data(section, 7, "images", classes=10)
    sys.modules.pop("stream_of_the_page")
    found = [
        next(StreamLoader(source, 7, Share(3)).batches(0)).data["inputs"].tolist()
        for source in (data.train, data.validation)
    ]
    assert found == [[[1, 0.5], [2, 0.5], [3, 0.5]], [[0, 0.5], [100, 0.5], [200, 0.5]]]
