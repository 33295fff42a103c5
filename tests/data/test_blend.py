"""Blends: the order of their parts, their samples, what opens them and what is said of wrong ones."""

from __future__ import annotations

import math
import pickle
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.data.content import DataPath
from shardway.data.formats import energon
from shardway.data.kinds import EnergonKind
from shardway.data.loader import Share, StepSampler
from shardway.data.open import Data, are_there, find_missing, find_sample, open_data, order_of
from shardway.data.order import MOST_SLOTS, ORDER_VERSION, BlendOrder, SampleOrder, Skips, count_slots
from shardway.data.sources.base import BlendPart, ConcatSource, DataRequest, DataSource, Mixed, Slice
from shardway.data.sources.tokens import open_tokens
from shardway.errors import UserError
from shardway.runfile.load import load_run
from shardway.runfile.schema import DataSection

Weights = tuple[tuple[tuple[int, float], ...], ...]


def steady(*weights: float) -> Weights:
    return tuple(((0, weight),) for weight in weights)


def places(order: BlendOrder, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The part of each id, and its number in that part."""
    firsts = np.cumsum([0, *order.sizes[:-1]])
    parts = np.searchsorted(firsts, ids, side="right") - 1
    return parts, ids - firsts[parts]


# --- the order

GOLDEN_POSITIONS = np.array([0, 1, 2, 9, 10, 11, 10**6, 10**9 + 7, 10**12], np.int64)
TWO, MANY = (100, 7), (10**12, 70000, 65536, 3)
GOLDEN: dict[tuple[tuple[int, ...], Weights, int, bool], list[int]] = {
    (TWO, steady(0.7, 0.3), 0, True): [96, 88, 101, 42, 12, 69, 26, 43, 84],
    (TWO, steady(0.7, 0.3), 2**64 - 1, True): [50, 91, 80, 25, 75, 26, 26, 106, 59],
    (TWO, steady(0.7, 0.3), 0, False): [0, 100, 1, 6, 7, 103, 0, 5, 0],
    (MANY, steady(0.4, 0.3, 0.2, 0.1), 42, True): [
        1000000085243,
        1000000016078,
        693466399682,
        927232397961,
        1269289271,
        1000000135536,
        414536825542,
        59649902751,
        1000000135538,
    ],
    (MANY, steady(1 / 3, math.pi, 1e-9, 1), 42, True): [
        1000000016078,
        1000000027602,
        1000000024735,
        1000000135536,
        1000000135538,
        1000000025747,
        1000000135536,
        1000000055765,
        1000000034641,
    ],
    (MANY, (((0, 0.5), (10, 0.1)), ((0, 0.5),), ((0, 0.0), (11, 0.4)), ((0, 1),)), 7, True): [
        307622215672,
        1000000008497,
        1000000135536,
        510773093129,
        1000000135537,
        1000000135536,
        1000000135536,
        1000000135536,
        1000000135538,
    ],
}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_the_order_is_what_it_always_was(case: tuple[tuple[int, ...], Weights, int, bool]) -> None:
    assert ORDER_VERSION == 1
    assert BlendOrder(*case).ids(GOLDEN_POSITIONS).tolist() == GOLDEN[case]


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ((0.7, 0.3), (7, 3)),
        ((70, 30), (7, 3)),
        ((1, 1, 1), (1, 1, 1)),
        ((5,), (1,)),
        ((0.1, 0.25, 0.65), (2, 5, 13)),
        ((0.2, 0.0), (1, 0)),
        ((0.123, 0.877), (123, 877)),
        ((Fraction(1, 3), Fraction(2, 3)), (1, 2)),
        ((1e-12, 1.0), (1, 65535)),
        ((1.0, 1e-12, 1e-12, 0), (65534, 1, 1, 0)),
        ((1 / 3, 2 / 3), (1, 2)),
        ((1 / 3, 0.7), (21141, 44395)),
    ],
)
def test_weights_become_slots(weights: tuple[float, ...], counts: tuple[int, ...]) -> None:
    assert count_slots(weights) == counts


@given(st.lists(st.one_of(st.just(0), st.floats(1e-9, 1e9), st.integers(1, 99)), min_size=1, max_size=40).filter(any))
def test_slots_are_as_near_to_the_weights_as_a_cycle_allows(weights: list[float]) -> None:
    counts, whole = count_slots(weights), sum(map(Fraction, map(str, weights)))
    slots = sum(counts)
    assert slots <= MOST_SLOTS
    assert [count > 0 for count in counts] == [weight > 0 for weight in weights]
    for count, weight in zip(counts, weights, strict=True):
        share = Fraction(str(weight)) / whole * slots
        assert abs(count - share) <= (0 if slots < MOST_SLOTS else len(weights)) or count == 1


def test_as_many_parts_as_slots_have_one_each() -> None:
    weights = [1.0, *[1e-9] * 70]
    assert count_slots(weights) == (MOST_SLOTS - 70, *[1] * 70)


sizes_of = st.lists(st.integers(1, 60), min_size=1, max_size=5)


@st.composite
def orders(draw: st.DrawFn) -> BlendOrder:
    """Any small blend: its weights may change up to three times, to zero and back."""
    sizes = draw(sizes_of)
    starts = [0, *sorted(draw(st.sets(st.integers(1, 200), max_size=3)))]
    weight = st.one_of(st.integers(0, 5), st.sampled_from([0.1, 0.35, 1 / 3]))
    rows = [draw(st.lists(weight, min_size=len(sizes), max_size=len(sizes)).filter(any)) for _ in starts]
    weights = tuple(tuple(zip(starts, column, strict=True)) for column in zip(*rows, strict=True))
    return BlendOrder(tuple(sizes), weights, draw(st.integers(0, 2**64 - 1)), draw(st.booleans()))


@settings(max_examples=60)
@given(orders())
def test_each_part_takes_its_own_order_whatever_the_weights(order: BlendOrder) -> None:
    """By a simulation: the n-th sample of a part is the n-th of an order that its size and number give."""
    ids = order.ids(np.arange(400))
    parts, numbers = places(order, ids)
    epochs = order.epochs(np.arange(400))
    steady_order = BlendOrder(order.sizes, steady(*[1] * len(order.sizes)), order.seed, order.shuffle)
    alone = steady_order.ids(np.arange(400 * len(order.sizes)))
    for part, size in enumerate(order.sizes):
        own = numbers[parts == part]
        of_part, of_alone = places(steady_order, alone)
        assert own.tolist() == of_alone[of_part == part][: len(own)].tolist()
        assert epochs[parts == part].tolist() == (np.arange(len(own)) // size).tolist()
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))


@settings(max_examples=60)
@given(orders())
def test_counts_of_parts_are_those_of_a_simulation(order: BlendOrder) -> None:
    parts, _ = order.locate(np.arange(400))
    one_hot = np.eye(len(order.sizes), dtype=np.int64)[parts]
    before = np.cumsum(one_hot, axis=0) - one_hot
    for position in range(0, 400, 7):
        assert order.part_counts(position).tolist() == before[position].tolist()
    starts = [*(segment.start for segment in order.segments), 400]
    for segment, following in zip(order.segments, starts[1:], strict=True):
        for cycle in range((following - segment.start) // segment.slots):
            first = segment.start + cycle * segment.slots
            counts = np.bincount(parts[first : first + segment.slots], minlength=len(order.sizes))
            assert tuple(counts.tolist()) == segment.counts


@settings(max_examples=40)
@given(orders(), st.integers(0, 10**12), st.data())
def test_ids_depend_on_the_position_alone(order: BlendOrder, base: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, 500), min_size=1, max_size=30))) + base
    ids = order.ids(positions)
    assert ids.dtype == np.int64
    assert ids.min() >= 0
    assert ids.max() < order.samples
    assert [int(order.ids(np.array([position]))[0]) for position in positions] == ids.tolist()
    assert order.ids(positions[:, None]).shape == (len(positions), 1)
    parts, numbers = order.locate(positions)
    for position, part, number in zip(positions.tolist(), parts.tolist(), numbers.tolist(), strict=True):
        assert order.part_counts(position)[part] == number


@settings(max_examples=40)
@given(orders(), st.integers(0, 300), st.data())
def test_a_sample_is_found_again(order: BlendOrder, start: int, data: st.DataObject) -> None:
    sample = data.draw(st.integers(0, order.samples - 1))
    expected = [position for position in np.flatnonzero(order.ids(np.arange(900)) == sample) if position >= start]
    found = []
    for position in order.find_positions(sample, start):
        if position >= 900:
            break
        found.append(position)
    assert found == expected


@pytest.mark.parametrize("size", [7, 3000, 65536, 65537, 10**12 + 39])
def test_a_sample_of_one_source_is_found_again(size: int) -> None:
    order = SampleOrder(size, 5)
    for position in (0, 3 * size + 5, 10**15):
        sample = int(order.ids(np.array([position]))[0])
        found = order.find_positions(sample, position)
        assert next(found) == position
        following = next(found)
        assert following // size == position // size + 1
        assert int(order.ids(np.array([following]))[0]) == sample
    assert next(SampleOrder(size, 5, shuffle=False).find_positions(6, size)) == size + 6


@settings(max_examples=30)
@given(orders(), st.integers(1, 24), st.integers(1, 9), st.lists(st.integers(0, 60), max_size=4))
def test_any_batch_over_any_ranks_takes_the_same_samples(
    order: BlendOrder, batch: int, world: int, ends: list[int]
) -> None:
    spans = [list(pair) for pair in zip(sorted(set(ends))[::2], sorted(set(ends))[1::2], strict=False)]
    skips = Skips(spans)
    requests = [list(StepSampler(order, Share(batch, rank, world), 0, 4, skips)) for rank in range(world)]
    found = [sample for step in zip(*requests, strict=True) for each in step for sample in each.ids.tolist()]
    assert found == order.ids(skips.find_kept(np.arange(4 * batch))).tolist()


def test_large_parts_and_large_cycles_have_each_sample_once() -> None:
    """Parts above and below the size of a table, cycles of 65536 slots."""
    order = BlendOrder((70001, 65536, 5, 66000), steady(1 / 3, 0.31, 0.00001, 0.3), 9)
    (segment,) = order.segments
    assert segment.slots == MOST_SLOTS
    ids = np.concatenate([order.ids(np.arange(first, first + 16384)) for first in range(0, 240000, 16384)])
    parts, numbers = places(order, ids)
    for part, size in enumerate(order.sizes):
        own = numbers[parts == part]
        assert len(own) >= min(size, 3)
        assert np.array_equal(np.sort(own[:size]), np.arange(size) if len(own) >= size else np.unique(own))


def test_two_parts_of_one_size_have_orders_of_their_own() -> None:
    order = BlendOrder((500, 500), steady(1, 1), 3)
    parts, numbers = places(order, order.ids(np.arange(1000)))
    assert np.sum(numbers[parts == 0] == numbers[parts == 1]) < 10


def test_without_shuffle_parts_are_spread_evenly_and_read_in_order() -> None:
    order = BlendOrder((4, 10), steady(0.75, 0.25), 3, shuffle=False)
    assert order.ids(np.arange(12)).tolist() == [0, 1, 4, 2, 3, 0, 5, 1, 2, 3, 6, 0]


def test_a_weight_that_stays_begins_no_cycle_anew() -> None:
    plain = BlendOrder((40, 30), steady(0.7, 0.3), 5)
    stated = BlendOrder((40, 30), (((0, 7), (33, 0.7)), ((0, 3), (33, 0.3))), 5)
    assert stated.segments == plain.segments
    assert stated.ids(np.arange(99)).tolist() == plain.ids(np.arange(99)).tolist()


def test_a_part_may_be_added_behind_the_others() -> None:
    before = BlendOrder((40, 30), steady(0.7, 0.3), 5)
    after = BlendOrder((40, 30, 20), (((0, 0.7),), ((0, 0.3),), ((0, 0), (50, 1.0))), 5)
    assert after.ids(np.arange(50)).tolist() == before.ids(np.arange(50)).tolist()
    assert after.ids(np.arange(50, 90)).max() >= 70


def test_parts_are_mixed_within_a_cycle() -> None:
    """Each slot of a cycle is as likely of the first part as its share says, and neighbours do not depend."""
    order = BlendOrder((10**6, 10**6), steady(0.7, 0.3), 1)
    parts, _ = order.locate(np.arange(200000))
    first = (parts == 0).reshape(-1, 10).mean(axis=0)
    assert np.abs(first - 0.7).max() < 5 * math.sqrt(0.21 / 20000)
    both = float((parts[:-1] == parts[1:]).mean())
    # Two slots of one cycle agree with probability (7*6 + 3*2) / 90, two of neighbouring cycles with 0.58.
    assert abs(both - (0.9 * 48 / 90 + 0.1 * 0.58)) < 5 * math.sqrt(0.25 / 200000)


def test_samples_of_a_part_are_mixed_over_its_epoch() -> None:
    order = BlendOrder((10**6, 65537, 900), steady(0.5, 0.3, 0.2), 1)
    parts, numbers = places(order, order.ids(np.arange(20000)))
    for part, size in enumerate(order.sizes):
        own = numbers[parts == part].astype(np.float64)
        assert abs(np.abs(np.diff(own)).mean() / size - 1 / 3) < 5 / math.sqrt(18 * len(own))
        assert abs(np.corrcoef(own[:-1], own[1:])[0, 1]) < 5 / math.sqrt(len(own))


def test_the_time_of_an_index_does_not_grow_with_the_position() -> None:
    order = BlendOrder((10**9, 10**8, 10**6), steady(0.5, 0.3, 0.2), 0)

    def best_s(base: int) -> float:
        times = []
        for _ in range(7):
            start = time.process_time()
            order.ids(np.arange(base, base + 16384))
            times.append(time.process_time() - start)
        return min(times)

    assert best_s(10**12) < 4 * best_s(0)


@pytest.mark.parametrize(
    ("sizes", "seed", "text"),
    [
        ((4, 0), 0, "there are no samples to put in order; each part of a blend must have at least one"),
        ((4, 1), 2**64, "train.seed is 18446744073709551616; allowed: 0 to 18446744073709551615"),
    ],
)
def test_an_order_that_cannot_be_is_refused(sizes: tuple[int, ...], seed: int, text: str) -> None:
    with pytest.raises(UserError) as caught:
        BlendOrder(sizes, steady(1, 1), seed)
    assert str(caught.value) == text


# --- sources together


def write_tokens(path: Path, first: int, count: int, dtype: type = np.uint16) -> Path:
    np.save(path, np.arange(first, first + count, dtype=dtype))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three token files: 40, 25 and 10 samples of 4, whose tokens begin at 0, 1000 and 2000."""
    for name, first, count in (("a", 0, 161), ("b", 1000, 101), ("c", 2000, 41)):
        write_tokens(tmp_path / f"{name}.npy", first, count)
    return tmp_path


def section_of(folder: Path, *weights: Any, **keys: Any) -> DataSection:
    parts: Any = [
        {"path": str(folder / f"{name}.npy"), "weight": each} for name, each in zip("abc", weights, strict=False)
    ]
    return DataSection(**{"kind": "tokens", "seq_len": 4, "validation_fraction": 0.0, "blend": parts, **keys})


def read(section: DataSection, wants: Any = "tokens", **model: Any) -> Data:
    return open_data(section, 0, wants, **model)


def refused(section: DataSection, wants: Any = "tokens", **model: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(section, wants, **model)
    return str(caught.value)


def test_samples_come_from_their_parts_in_the_order_asked(folder: Path) -> None:
    train = read(section_of(folder, 0.5, 0.3, 0.2)).train
    assert isinstance(train, DataSource)
    assert isinstance(train, ConcatSource)
    assert (len(train), train.tokens_per_sample) == (75, 4)
    ids = np.array([74, 0, 40, 39, 64, 65, 0])
    firsts = [2036, 0, 1000, 156, 1096, 2000, 0]
    for source in (train, pickle.loads(pickle.dumps(train))):
        assert source.batch(ids)["inputs"][:, 0].tolist() == firsts
        assert source.batch(ids)["targets"][:, 0].tolist() == [first + 1 for first in firsts]
        assert source.batch(np.array([41, 40]))["inputs"][:, 0].tolist() == [1004, 1000]
        assert source.batch(np.empty(0, np.int64))["inputs"].shape == (0, 4)
    assert [train.place_of(number)[0].name[-5:] for number in (0, 39, 40, 65, 74)] == [
        "a.npy",
        "a.npy",
        "b.npy",
        "c.npy",
        "c.npy",
    ]
    assert [train.place_of(number)[1] for number in (0, 39, 40, 65, 74)] == [0, 39, 0, 0, 9]


def test_facts_are_those_of_the_parts(folder: Path) -> None:
    facts = read(section_of(folder, 0.5, 0.3, 0.2), vocab=5000).train.facts
    assert (facts.sample_shape, facts.vocab, facts.classes, facts.bytes_per_token) == ((4,), 5000, None, None)
    assert facts.description.count("; ") == 2
    other_weights = read(section_of(folder, 0.1, 0.3, [[0, 0.2], [9, 0.6]]), vocab=5000).train.facts
    assert other_weights.fingerprint == facts.fingerprint
    assert read(section_of(folder, 0.5, 0.3), vocab=5000).train.facts.fingerprint != facts.fingerprint


def test_bytes_of_a_token_are_the_mean_of_the_parts(tmp_path: Path) -> None:
    for name, size in (("a.py", 41), ("b.py", 21)):
        (tmp_path / name).write_text("x" * size)
    parts: Any = [{"path": str(tmp_path / name), "weight": 1} for name in ("a.py", "b.py")]
    data = read(DataSection(blend=parts, seq_len=4, validation_fraction=0.0))
    assert (data.train.facts.bytes_per_token, data.train.facts.vocab) == (1.0, 256)
    assert data.validation is None


class Drawn:
    """Samples that say the epoch in which they are drawn."""

    draws = True
    tokens_per_sample = 1

    def __init__(self, source: Any) -> None:
        self.source, self.facts = source, source.facts

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return self.batch_of(ids, np.zeros_like(ids))

    def batch_of(self, ids: np.ndarray, epochs: np.ndarray) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = self.source.batch(ids)
        return {**found, "targets": found["targets"] * 0 + epochs[:, None]}


def test_a_part_that_draws_is_given_epochs_of_its_own(folder: Path) -> None:
    plain = read(section_of(folder, 1, 1)).train
    assert isinstance(plain, ConcatSource)
    assert not plain.draws
    first, second = plain.parts
    source = ConcatSource((first, BlendPart("drawn", Drawn(second.source), ((0, 1),))))
    assert source.draws
    found = source.batch_of(np.array([0, 40, 41]), np.array([5, 6, 7]))
    assert found["targets"][:, 0].tolist() == [1, 6, 7]
    assert source.batch(np.array([0, 40]))["targets"][:, 0].tolist() == [1, 0]


# --- opened by a run file


def test_each_part_holds_out_its_own_end(folder: Path) -> None:
    data = read(section_of(folder, 0.5, 0.3, 0.2, validation_fraction=0.2))
    assert isinstance(data.train, ConcatSource)
    assert [len(part.source) for part in data.train.parts] == [32, 20, 8]
    assert isinstance(data.validation, Mixed)
    assert (len(data.validation), data.validation.tokens_per_sample) == (15, 4)
    assert data.validation.facts.fingerprint != data.train.facts.fingerprint
    firsts = data.validation.batch(np.arange(15))["inputs"][:, 0]
    held = [*range(128, 160, 4), *range(1080, 1100, 4), *range(2032, 2040, 4)]
    assert sorted(firsts.tolist()) == held
    assert len({int(first) // 1000 for first in firsts[:8]}) > 1


def test_data_validation_leaves_all_parts_whole(folder: Path) -> None:
    section = section_of(folder, 0.5, 0.3, validation=str(folder / "c.npy"), validation_fraction=0.2)
    data = read(section)
    assert data.validation is not None
    assert (len(data.train), len(data.validation)) == (65, 10)
    wrong = section.model_copy(update={"validation": str(folder / "d.npy")})
    assert refused(wrong).startswith(f'1 problem in the data\n  data.validation: "{folder / "d.npy"}" does not exist')


def test_parts_may_be_of_several_kinds(folder: Path) -> None:
    (folder / "text.py").write_text("abcdefghijklmnopq" * 3)
    parts: Any = [
        {"path": str(folder / "a.npy"), "weight": 1, "kind": "tokens", "name": "numbers"},
        {"path": str(folder / "text.py"), "weight": 1},
    ]
    data = read(DataSection(seq_len=4, validation_fraction=0.0, blend=parts), vocab=300)
    assert isinstance(data.train, ConcatSource)
    assert [part.name for part in data.train.parts] == ["numbers", str(folder / "text.py")]
    assert data.train.batch(np.array([0, 40]))["inputs"].tolist() == [[0, 1, 2, 3], [97, 98, 99, 100]]


def test_images_with_test_files_validate_on_those_of_all_parts(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for part, count in (("train", 40), ("t10k", 7)):
            dims = count.to_bytes(4, "big")
            images = b"\0\0\x08\x03" + dims + (2).to_bytes(4, "big") * 2 + bytes(4 * count)
            (tmp_path / folder / f"{part}-images-idx3-ubyte").write_bytes(images)
            labels = b"\0\0\x08\x01" + dims + bytes(range(count))
            (tmp_path / folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    parts: Any = [{"path": str(tmp_path / folder), "weight": 1} for folder in ("a", "b")]
    data = read(DataSection(kind="idx", blend=parts), "images")
    assert data.validation is not None
    assert (len(data.train), len(data.validation), data.train.facts.classes) == (80, 14, 40)


def test_the_problems_of_all_parts_are_said_at_once(folder: Path) -> None:
    write_tokens(folder / "b.npy", 0, 3)
    (folder / "c.npy").unlink()
    assert refused(section_of(folder, 0.5, 0.3, 0.2)) == (
        "2 problems in the data\n"
        f'  data.blend[1].path: "{folder / "b.npy"}" holds 3 tokens, too few for one sample\n'
        "      allowed: at least data.seq_len + 1 = 5\n"
        "      to do: give more data or a smaller data.seq_len\n"
        f'  data.blend[2].path: "{folder / "c.npy"}" does not exist\n'
        "      allowed: a .npy or .bin token file"
    )


def test_samples_that_cannot_stand_in_one_batch_are_refused(tmp_path: Path) -> None:
    for name, width in (("a", 3), ("b", 4), ("c", 5)):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((5, width), np.uint8), y=np.zeros(5, np.uint8))
    parts: Any = [{"path": str(tmp_path / f"{name}.npz"), "weight": 1} for name in "abc"]
    section = DataSection(kind="arrays", inputs="x", targets="y", validation_fraction=0.0, blend=parts)
    assert refused(section, "images", classes=2) == (
        "2 problems in the data\n"
        f'  data.blend[1].path: "{tmp_path / "b.npz"}" has samples of inputs float32[4], targets int64[]\n'
        f'      allowed: inputs float32[3], targets int64[], as those of "{tmp_path / "a.npz"}"\n'
        f'  data.blend[2].path: "{tmp_path / "c.npz"}" has samples of inputs float32[5], targets int64[]\n'
        f'      allowed: inputs float32[3], targets int64[], as those of "{tmp_path / "a.npz"}"'
    )


def test_a_part_too_small_to_hold_out_of_is_named(folder: Path) -> None:
    write_tokens(folder / "b.npy", 0, 5)
    assert refused(section_of(folder, 0.5, 0.3, validation_fraction=0.1)).startswith(
        "1 problem in the data\n"
        "  data.blend[1].path: has too few samples (1) to hold out data.validation_fraction = 0.1 of them"
    )


def blend_run(folder: Path, *words: str) -> Any:
    parts = ", ".join(f'{{path = "{folder / f"{name}.npy"}", weight = 1}}' for name in "ab")
    return load_run(None, [f"data.blend=[{parts}]", "data.kind=tokens", "data.seq_len=4", *words]).values


def test_the_order_of_a_run_is_that_of_its_source(folder: Path) -> None:
    values = blend_run(folder, "model.vocab=2000", "train.seed=3")
    blended = read(values.data).train
    order = order_of(values, blended)
    assert isinstance(order, BlendOrder)
    assert (order.sizes, order.seed, order.shuffle, order.samples) == ((39, 24), 3, True, len(blended))
    alone = order_of(values, Slice(blended, 0, 9))
    assert alone == SampleOrder(9, 3)


def test_parts_that_are_not_there_are_named(folder: Path) -> None:
    values = blend_run(folder)
    assert are_there(values)
    (folder / "b.npy").unlink()
    assert not are_there(values)
    assert find_missing(values.data) == str(folder / "b.npy")
    with pytest.raises(UserError) as caught:
        find_sample(values)
    assert str(caught.value).startswith(
        f'1 problem in the data\n  data.blend: "{folder / "b.npy"}" is not there, so its vocabulary is not known'
    )


# --- metadatasets of Energon


@pytest.fixture
def metadataset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A metadataset of token files, as a stand-in for prepared folders: the data sets and their splits."""
    (folder / "meta.yaml").write_text("splits:\n")

    def read_splits(place: DataPath, split: str) -> list[tuple[str, float, str]]:
        assert place.path == folder / "meta.yaml"
        names = {"train": ("a", "b", "c"), "val": ("b", "c")}[split]
        return [(str(folder / f"{name}.npy"), {"a": 0.5, "b": 0.5, "c": 0.0}[name], split) for name in names]

    def open_split(kind: Any, place: DataPath, request: DataRequest) -> DataSource:
        return open_tokens(place, request)

    monkeypatch.setattr(energon, "read_metadataset", read_splits)
    monkeypatch.setattr(EnergonKind, "open", open_split)
    return folder / "meta.yaml"


def test_a_metadataset_is_a_blend(folder: Path, metadataset: Path) -> None:
    keys: dict[str, Any] = {"kind": "energon", "path": str(metadataset), "seq_len": 4}
    data = read(DataSection(**keys, validation_fraction=0.0))
    assert isinstance(data.train, ConcatSource)
    assert [part.name for part in data.train.parts] == [str(folder / "a.npy"), str(folder / "b.npy")]
    assert data.train.order(0, True).segments[0].counts == (1, 1)
    held = read(DataSection(**keys, validation_fraction=0.2))
    assert held.validation is not None
    assert len(held.validation) == 8 + 5
    validated = read(DataSection(**keys, validation=str(metadataset)))
    assert validated.validation is not None
    assert (len(validated.train), len(validated.validation)) == (65, 25)


def test_a_metadataset_may_be_a_part_of_a_blend(folder: Path, metadataset: Path) -> None:
    parts: Any = [
        {"path": str(metadataset), "kind": "energon", "weight": [[0, 0.5], [40, 0.8]]},
        {"path": str(folder / "c.npy"), "weight": [[0, 0.5], [40, 0.2]]},
    ]
    data = read(DataSection(kind="tokens", seq_len=4, validation_fraction=0.0, blend=parts))
    assert isinstance(data.train, ConcatSource)
    assert [len(part.source) for part in data.train.parts] == [40, 25, 10]
    assert [segment.counts for segment in data.train.order(0, True).segments] == [(1, 1, 2), (2, 2, 1)]


# --- the key data.blend


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("7", "7 is no list of tables"),
        ("[7, {}]", "[0] 7 is no table; [1] names no path; [1] has no weight"),
        (
            '[{path = "", weight = 1}, {path = 5, weight = 1, pth = 2, other = 3}]',
            '[0] names no path; [1] has a key "other"; [1] has a key "pth" (did you mean path?); '
            "[1] path = 5 is no string",
        ),
        ('[{path = "a", weight = 0}]', "[0] weight 0 is not above 0"),
        ('[{path = "a", weight = -0.5}]', "[0] weight -0.5 is not above 0"),
        ('[{path = "a", weight = true}]', "[0] weight True is no number"),
        ('[{path = "a", weight = inf}]', "[0] weight inf is no number"),
        ('[{path = "a", weight = []}]', "[0] weight does not begin at position 0"),
        ('[{path = "a", weight = [[1, 0.5]]}]', "[0] weight does not begin at position 0"),
        ('[{path = "a", weight = [[0, 0]]}]', "[0] weight is 0 everywhere"),
        (
            '[{path = "a", weight = [[0, 1], [9, 2], [9, 3], [4, 4], [5], [10, -1]]}]',
            "[0] weight [9, 3] does not come after position 9; [0] weight [4, 4] does not come after position 9; "
            "[0] weight [5] is no pair; [0] weight [10, -1] is to no weight (0 and above)",
        ),
        (
            '[{path = "a", weight = [[0.5, 1], [-1, 2], [2000000000000000000, 2]]}]',
            "[0] weight does not begin at position 0; "
            "[0] weight [0.5, 1] is from no position (0 to 1000000000000000000); "
            "[0] weight [-1, 2] is from no position (0 to 1000000000000000000); "
            "[0] weight [2000000000000000000, 2] is from no position (0 to 1000000000000000000)",
        ),
        (
            '[{path = "a", weight = 1, name = "x"}, {path = "b", weight = 1, name = "x"}]',
            '[0] name "x" is used twice; [1] name "x" is used twice',
        ),
        (
            '[{path = "a", weight = [[0, 1], [9, 0]]}, {path = "b", weight = [[0, 0], [4, 1], [8, 0]]}]',
            "no part has a weight above 0 from position 9 on",
        ),
    ],
)
def test_all_that_is_wrong_with_a_list_is_said_at_once(given: str, what: str) -> None:
    with pytest.raises(UserError) as told:
        load_run(None, [f"data.blend={given}"])
    assert str(told.value).partition("data.blend (command line): ")[2] == (
        f'{what}\n      allowed: tables such as {{path = "web", weight = 0.7}}, also with kind and name; a '
        "weight is a number above 0, or pairs [position, weight] such as [[0, 0.7], [100000, 0.2]], from position 0 on"
    )


def test_a_kind_that_does_not_exist_is_told_with_all_that_do() -> None:
    with pytest.raises(UserError) as told:
        load_run(None, ['data.blend=[{path = "a", weight = 1, kind = "txt"}]'])
    assert 'data.blend (command line): [0] kind "txt" is none of text, ' in str(told.value)


def test_parts_stand_as_tables_in_a_run_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\nkind = "tokens"\n\n[[data.blend]]\npath = "a"\nweight = 0.7\n\n'
        '[[data.blend]]\npath = "b"\nweight = [[0, 1], [50, 0.25]]\nkind = "text"\nname = "B"\n'
    )
    loaded = load_run(path)
    assert [part.steps for part in loaded.values.data.blend] == [((0, 0.7),), ((0, 1), (50, 0.25))]
    assert [part.title for part in loaded.values.data.blend] == ["a", "B"]
    assert loaded.origins["data.blend"] == "run.toml:4"
    assert loaded.values.model_dump(mode="json")["data"]["blend"] == [
        {"path": "a", "weight": 0.7},
        {"path": "b", "weight": [[0, 1], [50, 0.25]], "kind": "text", "name": "B"},
    ]
