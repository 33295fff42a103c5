"""Slurm's host lists and task lists expand as `scontrol show hostnames` prints them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.launch.schedulers.slurm import parse_hostlist, parse_tasks_per_node

STEMS = st.from_regex(r"[a-z][a-z.-]{0,4}", fullmatch=True)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """One part of a bracket and the numbers it stands for, padded to the width of its first."""
    first, count, width = draw(st.integers(0, 120)), draw(st.integers(1, 12)), draw(st.integers(1, 4))
    low = str(first).rjust(width, "0")
    numbers = [str(number).rjust(len(low), "0") for number in range(first, first + count)]
    return (low if count == 1 else f"{low}-{numbers[-1]}"), numbers


@st.composite
def items(draw: st.DrawFn) -> tuple[str, list[str]]:
    """One host list item (a stem, then up to two brackets with stems after them) and its hosts in order."""
    text = draw(STEMS)
    choices = [[text]]
    for _ in range(draw(st.integers(0, 2))):
        parts, stem = draw(st.lists(ranges(), min_size=1, max_size=3)), draw(st.just("") | STEMS)
        text += f"[{','.join(part for part, _ in parts)}]{stem}"
        choices += [[number for _, numbers in parts for number in numbers], [stem]]
    return text, ["".join(chosen) for chosen in itertools.product(*choices)]


@given(st.lists(items(), min_size=1, max_size=3))
def test_every_item_expands_in_order_with_its_padding(drawn: list[tuple[str, list[str]]]) -> None:
    text = ",".join(item for item, _ in drawn)
    assert parse_hostlist(text) == [host for _, hosts in drawn for host in hosts]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[01-03,7],login1", ["n01", "n02", "n03", "n7", "login1"]),
        ("r[1-2]c[0-1]", ["r1c0", "r1c1", "r2c0", "r2c1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("jrc[0099-0101]-ib", ["jrc0099-ib", "jrc0100-ib", "jrc0101-ib"]),
        ("localhost", ["localhost"]),
    ],
)
def test_known_lists(text: str, hosts: list[str]) -> None:
    assert parse_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["", ",", "n1,", "n[1-2", "n1-2]", "n[]", "n[2-1]", "n[a-b]", "n[1[2]]"])
def test_a_damaged_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (Slurm host list|range)"):
        parse_hostlist(text)


@given(st.lists(st.tuples(st.integers(1, 128), st.integers(1, 20)), min_size=1, max_size=5))
def test_tasks_per_node_expand(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else f"{tasks}" for tasks, nodes in runs)
    assert parse_tasks_per_node(text) == [tasks for tasks, nodes in runs for _ in range(nodes)]


@pytest.mark.parametrize("text", ["", "2(x)", "2(3)", "two", "2,,1"])
def test_damaged_tasks_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of tasks per node"):
        parse_tasks_per_node(text)
