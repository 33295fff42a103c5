from __future__ import annotations

import itertools
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardway.data.sources.grouped as grouped
from shardway.data.batch_tree import LengthGroups
from shardway.data.content import DataPath
from shardway.data.formats.token_store import TokenFile, TokenStore
from shardway.data.grouping import DocumentGroups, LengthGroupedBatches, group_documents
from shardway.data.loader import Share, StepLoader
from shardway.data.order import SampleOrder
from shardway.data.samplers import BatchOrder
from shardway.data.sources.base import DataRequest, DataSource, SourceFacts
from shardway.data.sources.grouped import GroupedDocuments, open_grouped
from shardway.data.sources.packed import NOT_COUNTED
from shardway.errors import UserError
from shardway.models.transformer import Transformer, TransformerShape
from shardway.runfile.schema import DataSection

# --- which documents are together


def draw_lengths(kind: str, count: int = 600) -> np.ndarray:
    drawn = np.random.default_rng(7)
    found = {
        "log-normal": lambda: drawn.lognormal(5.2, 1.1, count),
        "uniform": lambda: drawn.integers(2, 1500, count),
        "exponential": lambda: drawn.exponential(300, count),
        "two kinds": lambda: np.concatenate(
            (drawn.normal(90, 20, 2 * count // 3), drawn.normal(1200, 150, count // 3))
        ),
        "short": lambda: drawn.integers(2, 40, count),
        "alike": lambda: np.full(count, 100),
    }[kind]()
    return np.maximum(2, found.astype(np.int64))


def find_optimum(pairs: np.ndarray, tokens: int) -> tuple[int, int]:
    """The fewest groups, and of all divisions into so many the fewest places: by trying every end of every group."""
    lengths = np.sort(pairs)[::-1]
    never = 2**60
    least, number = np.full(len(lengths) + 1, never), 0
    least[0] = 0
    while least[-1] == never:
        after = np.full(len(lengths) + 1, never)
        for begin in np.flatnonzero(least[:-1] < never).tolist():
            ends = np.arange(begin + 1, min(len(lengths), begin + tokens // int(lengths[begin])) + 1)
            after[ends] = np.minimum(after[ends], least[begin] + (ends - begin) * lengths[begin])
        least, number = after, number + 1
    return number, int(least[-1])


@pytest.mark.parametrize(("seq_len", "tokens"), [(1024, 1024), (1024, 8192), (700, 20_000)])
@pytest.mark.parametrize("kind", ["log-normal", "uniform", "exponential", "two kinds", "short", "alike"])
def test_groups_are_the_fewest_with_the_least_padding(kind: str, seq_len: int, tokens: int) -> None:
    groups = group_documents(np.cumsum(draw_lengths(kind)), seq_len, tokens)
    assert (len(groups), groups.places) == find_optimum(groups.pairs, tokens)
    assert (np.diff(groups.firsts) * groups.lengths <= tokens).all()


@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    seq_len=st.integers(1, 20),
    more=st.integers(0, 100),
    window=st.integers(1, 70),
)
def test_every_pair_is_in_one_group(lengths: list[int], seq_len: int, more: int, window: int) -> None:
    ends, tokens = np.cumsum(np.array(lengths, np.int64)), seq_len + more
    groups = group_documents(ends, seq_len, tokens, window)
    assert groups.firsts[0] == 0
    assert groups.firsts[-1] == len(groups.starts) == len(groups.pairs)
    rows = np.diff(groups.firsts)
    assert (rows > 0).all(), "no group is empty"
    assert (rows * groups.lengths <= tokens).all()
    pieces = zip(groups.starts, groups.pairs, strict=True)
    inputs = np.concatenate([np.zeros(0, int), *(start + np.arange(count) for start, count in pieces)])
    expected = [start + i for end, n in zip(ends, lengths, strict=True) for start in [end - n] for i in range(n - 1)]
    assert sorted(inputs.tolist()) == expected, "each token but the last of a document is an input once"
    assert groups.cuts == sum(max(0, -(-(n - 1) // seq_len) - 1) for n in lengths)
    for number, (start, stop) in enumerate(zip(groups.firsts, groups.firsts[1:], strict=False)):
        assert (np.diff(groups.starts[start:stop]) > 0).all(), "in the order of the store"
        assert groups.pairs[start:stop].max() == groups.lengths[number]
    if window >= len(lengths) > 0 and len(groups):
        assert (len(groups), groups.places) == find_optimum(groups.pairs, tokens)
    assert 0 <= groups.padding < 1


def list_groups(groups: DocumentGroups) -> list[list[tuple[int, int]]]:
    pieces = list(zip(groups.starts.tolist(), groups.pairs.tolist(), strict=True))
    return [pieces[first:stop] for first, stop in zip(groups.firsts, groups.firsts[1:], strict=False)]


def test_groups_are_the_same_forever() -> None:
    """A new version of the grouping would change what a run goes on with."""
    groups = group_documents(np.cumsum([5, 1, 9, 3, 0, 4, 12, 2, 7]), 8, 16)
    assert list_groups(groups) == [
        [(15, 2), (18, 3), (30, 3), (34, 1)],
        [(6, 8), (22, 8)],
        [(0, 4), (36, 6)],
    ]
    assert groups.lengths.tolist() == [3, 8, 6]
    assert groups.cuts == 1


def test_the_last_groups_are_like_the_others() -> None:
    """Those may be held out: long documents are not all in the first groups of a window."""
    groups = group_documents(np.cumsum(draw_lengths("log-normal", 20_000)), 1024, 4096)
    half = len(groups) // 2
    assert groups.lengths[:half].mean() == pytest.approx(groups.lengths[half:].mean(), rel=0.1)


def test_many_documents_take_a_fraction_of_a_second() -> None:
    ends, started = np.cumsum(draw_lengths("log-normal", 200_000)), time.process_time()
    assert group_documents(ends, 1024, 8192).padding < 0.001
    assert time.process_time() - started < 3.0, "0.2 s on the machine that it was written on"


@pytest.mark.parametrize("lengths", [[], [0], [1, 1, 0, 1]])
def test_documents_without_a_pair_give_no_group(lengths: list[int]) -> None:
    groups = group_documents(np.cumsum(np.array(lengths, np.int64)), 8, 8)
    assert len(groups) == groups.places == 0
    assert groups.padding == 0.0


# --- batches of a script's own dataset


def test_batches_of_a_script_hold_samples_of_similar_length() -> None:
    lengths = draw_lengths("exponential", 300)
    batches = LengthGroupedBatches(lengths.tolist(), 4096, seed=3)
    first, again = list(batches), list(batches)
    assert first == again
    assert len(first) == len(batches)
    assert sorted(itertools.chain.from_iterable(first)) == list(range(300)), "each sample once"
    places = sum(len(batch) * lengths[batch].max() for batch in first)
    assert (len(batches), places) == find_optimum(lengths, 4096)
    batches.set_epoch(1)
    assert list(batches) != first
    assert sorted(map(len, batches)) == sorted(map(len, first))


def test_a_resume_finds_the_batch_of_any_step() -> None:
    lengths = draw_lengths("uniform", 50).tolist()
    order, other = (BatchOrder(LengthGroupedBatches(lengths, 4096, seed=3), 0) for _ in range(2))
    steps = 3 * len(LengthGroupedBatches(lengths, 4096))
    through = [order.batch(step).tolist() for step in range(steps)]
    assert other.batch(steps - 1).tolist() == through[-1]
    assert other.batch(2).tolist() == through[2]
    assert through[: steps // 3] != through[steps // 3 : 2 * steps // 3]


@pytest.mark.parametrize("wrong", [0, 101])
def test_a_length_that_no_batch_holds_is_refused(wrong: int) -> None:
    with pytest.raises(UserError, match=f"sample 2 has the length {wrong}, and a batch is to have at most 100 tokens"):
        LengthGroupedBatches([5, 100, wrong], 100)


# --- what a batch of them holds


class GroupedStore(TokenStore):
    """A store whose ends of documents are in memory; token i is i."""

    ends: np.ndarray | None = None

    def read_ends(self) -> np.ndarray | None:
        return self.ends


LENGTHS = [5, 1, 9, 3, 0, 4, 12, 2, 7]


def open_store(
    folder: Path, lengths: list[int], seq_len: int = 8, tokens: int = 16, counted: np.ndarray | None = None
) -> GroupedDocuments:
    np.arange(sum(lengths), dtype=np.uint16).tofile(folder / "tokens.bin")
    if counted is not None:
        counted.tofile(folder / "counted.bin")
    files = [
        TokenFile(folder / f"{name}.bin", dtype, 0, sum(lengths))
        for name, dtype in (("tokens", "uint16"), ("counted", "uint8"))
    ]
    store = GroupedStore((files[0],), (files[1],) if counted is not None else ())
    store.ends = np.cumsum(np.array(lengths, np.int64))
    section = DataSection(kind="tokens", path=str(folder), seq_len=seq_len, group_tokens=tokens)
    facts = SourceFacts("made-up tokens", "content", (seq_len,))
    return open_grouped(store, DataPath("data.path", str(folder)), DataRequest(section, 0, "tokens"), facts)


def test_a_batch_holds_a_rectangle_for_each_group(tmp_path: Path) -> None:
    source = open_store(tmp_path, LENGTHS)
    assert isinstance(source, DataSource)
    batch = source.batch(np.array([2, 0]))
    assert [each.tolist() for each in batch["inputs"]] == [
        [[0, 1, 2, 3, 0, 0], [36, 37, 38, 39, 40, 41]],
        [[15, 16, 0], [18, 19, 20], [30, 31, 32], [34, 0, 0]],
    ]
    out = NOT_COUNTED
    assert [each.tolist() for each in batch["targets"]] == [
        [[1, 2, 3, 4, out, out], [37, 38, 39, 40, 41, 42]],
        [[16, 17, out], [19, 20, 21], [31, 32, 33], [35, out, out]],
    ]
    assert {each.dtype for array in batch.values() for each in array} == {np.dtype(np.int64)}
    assert {array.shape for array in source.batch(np.empty(0, np.int64)).values()} == {(0,)}


def test_tokens_that_do_not_count_are_context_alone(tmp_path: Path) -> None:
    counted = np.ones(sum(LENGTHS), np.uint8)
    counted[[0, 2, 3, 37]] = 0
    batch = open_store(tmp_path, LENGTHS, counted=counted).batch(np.array([2]))
    assert batch["inputs"][0].tolist() == [[0, 1, 2, 3, 0, 0], [36, 37, 38, 39, 40, 41]]
    assert batch["targets"][0][0].tolist() == [1, NOT_COUNTED, NOT_COUNTED, 4, NOT_COUNTED, NOT_COUNTED]
    assert batch["targets"][0][1].tolist() == [NOT_COUNTED, 38, 39, 40, 41, 42]


def test_facts_say_how_much_is_padding(tmp_path: Path) -> None:
    source = open_store(tmp_path, LENGTHS)
    assert source.facts.description.endswith(
        "9 documents in 3 groups of at most 16 tokens, 12.50 % padding, cuts of longer ones: 1"
    )
    assert source.tokens_per_sample == round(35 / 3), "pairs, not places"
    assert source.locate(2) == f"{tmp_path}/tokens.bin, tokens 0 to 4, {tmp_path}/tokens.bin, tokens 36 to 42"
    assert open_store(tmp_path, LENGTHS, tokens=24).facts.fingerprint != source.facts.fingerprint


def test_groups_are_kept_and_not_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_store(tmp_path, [2, 3] * 9000)
    expected = source.batch(np.array([7, 3]))
    store, ends = source.store, source.store.read_ends()
    store.ends = None  # type: ignore[attr-defined]
    pickled = pickle.dumps(source)
    assert len(pickled) < 3000
    monkeypatch.setattr(grouped, "group_documents", lambda *_: pytest.fail("the groups are computed again"))
    copy = pickle.loads(pickled)
    copy.store.ends = ends
    found = copy.batch(np.array([7, 3]))
    for name, arrays in expected.items():
        assert [each.tolist() for each in found[name]] == [each.tolist() for each in arrays]


def test_a_loader_gives_a_pair_for_each_group(tmp_path: Path) -> None:
    source = open_store(tmp_path, LENGTHS)
    order, shapes = SampleOrder(3, 0, shuffle=False), []
    for rank in range(4):
        (batch,) = StepLoader(source, order, Share(3, rank, 4)).batches(0, 1)
        assert isinstance(batch.data, LengthGroups)
        shapes += [(inputs.shape, targets.shape) for inputs, targets in batch.data if len(batch.ids)]
        assert len(batch.data) == 1, "a rank without a sample has one that does not count"
    assert shapes == [(shape, shape) for shape in ((4, 3), (2, 8), (2, 6))]


def test_logits_are_those_of_each_document_alone(tmp_path: Path) -> None:
    lengths = np.random.default_rng(3).integers(2, 30, 40).tolist()
    model = Transformer(TransformerShape(vocab=sum(lengths), dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=40))
    model.init_weights(3)
    source = open_store(tmp_path, lengths, seq_len=24, tokens=120)
    batch, documents = source.batch(np.arange(len(source))), 0
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
        logits = model(torch.from_numpy(inputs))
        for row, wanted in enumerate(targets):
            length = int((wanted != NOT_COUNTED).sum())
            alone = model(torch.from_numpy(inputs[row : row + 1, :length]))[0]
            torch.testing.assert_close(logits[row, :length], alone, rtol=0, atol=1e-5)
            documents += 1
    assert documents >= 40
