"""Which checkpoints on the disks of nodes hold together, and who sends what to whom."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from shardway.checkpoint.catalog import PassedOver
from shardway.checkpoint.local_tier import LocalCopy, Transfer, plan_transfers, survey

FILES = ("rank-00000.bin", "rank-00001.bin", "tensors.json")


def held(step: int, present: Iterable[str] = FILES, digest: str = "d", wrong: str = "", short: str = "") -> LocalCopy:
    return LocalCopy(step, digest, FILES, dict.fromkeys(present, "/disk"), wrong, (short,) if short else ())


def test_files_of_all_nodes_together_make_one() -> None:
    found = survey([[held(4, FILES[:1]), held(8, FILES[:1])], [held(4, FILES[1:]), held(8, FILES[1:])]], 1)
    assert [each.step for each in found.local] == [8, 4]
    assert found.passed_over == ()
    assert dict(found.local[0].holders) == {FILES[0]: (0,), FILES[1]: (1,), FILES[2]: (1,)}
    assert set(found.local[0].here) == set(FILES[1:])


def test_why_one_is_passed_over() -> None:
    shares = [
        [
            held(9, FILES[:1]),
            held(8),
            held(7, wrong="off the line"),
            held(6, FILES[:1], short="rank-00001.bin has 3 bytes"),
        ],
        [held(9, FILES[:1]), held(8, digest="e"), held(5, wrong="off the line"), held(5)],
    ]
    found = survey(shares, 0)
    assert [each.step for each in found.local] == [5]
    assert found.passed_over == (
        PassedOver(9, "no node has rank-00001.bin; no node has tensors.json"),
        PassedOver(8, "what the nodes have of it is not of one checkpoint"),
        PassedOver(7, "off the line"),
        PassedOver(6, "rank-00001.bin has 3 bytes; no node has rank-00001.bin; no node has tensors.json"),
    )


def test_one_that_was_damaged_on_a_node_is_whole_where_others_have_its_files() -> None:
    found = survey([[held(4)], [held(4, wrong="its manifest.json is missing")]], 1)
    assert [each.step for each in found.local] == [4]
    assert dict(found.local[0].here) == {}


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)),
    st.data(),
)
def test_each_wish_is_sent_once_by_one_who_has_it(holders: dict[str, list[int]], data: st.DataObject) -> None:
    wanted = {
        rank: frozenset(name for name in holders if rank not in holders[name] and data.draw(st.booleans()))
        for rank in range(6)
    }
    transfers = plan_transfers(holders, wanted)
    assert sorted((each.receiver, each.name) for each in transfers) == sorted(
        (rank, name) for rank, names in wanted.items() for name in names
    )
    assert all(each.sender in holders[each.name] and each.sender != each.receiver for each in transfers)


def test_those_who_have_a_file_take_turns() -> None:
    wanted = {rank: frozenset({"a"}) for rank in (2, 3, 4)}
    assert plan_transfers({"a": (0, 1)}, wanted) == [Transfer("a", 0, 2), Transfer("a", 1, 3), Transfer("a", 0, 4)]


def test_copies_of_two_checkpoints_may_name_other_files() -> None:
    other = LocalCopy(4, "e", (*FILES, "rank-00002.bin"), dict.fromkeys((*FILES, "rank-00002.bin"), "/disk"))
    found = survey([[held(4)], [other]], 0)
    assert found.passed_over == (PassedOver(4, "what the nodes have of it is not of one checkpoint"),)
