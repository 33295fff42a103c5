"""The ranks of each node of a mesh, as data and as a picture.

Invariant: ranks fill one node after the other, as every supported launcher numbers them; the coordinates of a rank are
those of `shardway.layout`. No degree is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardway.layout import AXES, SHARD, Layout
from shardway.units import render_plural

TRAVELS: Mapping[str, str] = {
    "tp": "activations, several times in every layer",
    "cp": "keys and values, in every layer",
    SHARD: "weights and gradients, in every micro-batch",
    "ep": "tokens, in every layer with experts",
    "dp_replicate": "gradients, once a step",
    "pp": "activations between stages",
}
"""What the ranks of a group exchange, by dim: the dims with a group of their own, innermost first."""

SHOWN_NODES = 4  # nodes drawn one by one at the start of a picture; beyond these and the last, nodes are only counted

SHOWN_GROUPS = 3
SHOWN_RANKS = 8


@dataclass(frozen=True)
class DimPlacement:
    """The groups of one dim, each of `degree` ranks; `nodes` is the most nodes that one of them spans."""

    dim: str
    degree: int
    groups: tuple[tuple[int, ...], ...]
    nodes: int

    @property
    def crosses(self) -> bool:  # whether some group spans more than one node
        return self.nodes > 1


@dataclass(frozen=True)
class MeshPlacement:
    """A layout on nodes of `ranks_per_node` ranks (the last may have fewer); `dims` are those above 1."""

    layout: Layout
    ranks_per_node: int
    dims: tuple[DimPlacement, ...]

    @property
    def nodes(self) -> int:
        return -(-self.layout.world // self.ranks_per_node)

    def ranks_of(self, node: int) -> range:
        first = node * self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.layout.world))

    def facts(self) -> dict[str, object]:
        """The same as JSON data, with every group written out."""
        return {
            "ranks": self.layout.world,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "dims": {
                each.dim: {"degree": each.degree, "nodes_of_a_group": each.nodes, "groups": each.groups}
                for each in self.dims
            },
        }


def place_mesh(layout: Layout, ranks_per_node: int) -> MeshPlacement:
    """The placement of a layout's ranks on nodes."""
    placed = []
    for dim in TRAVELS:
        if layout.degree(dim) > 1:
            firsts = [rank for rank in range(layout.world) if layout.coordinate(rank, dim) == 0]
            groups = tuple(layout.peers(rank, dim) for rank in firsts)
            nodes = max(len({rank // ranks_per_node for rank in group}) for group in groups)
            placed.append(DimPlacement(dim, layout.degree(dim), groups, nodes))
    return MeshPlacement(layout, ranks_per_node, tuple(placed))


def render_placement(placement: MeshPlacement) -> str:
    """The picture: degrees, a line per node, the groups of each dim, and a sentence on those that cross nodes."""
    layout, nodes = placement.layout, placement.nodes
    axes = [axis for axis in AXES if layout.degree(axis) > 1]
    degrees = " x ".join(f"{axis} {layout.degree(axis)}" for axis in axes) or "nothing is split"
    experts = f", ep {layout.ep} over dp_shard x cp" if layout.ep > 1 else ""
    shape = f" of {placement.ranks_per_node}" if nodes > 1 else ""
    parts = [
        f"{render_plural(layout.world, 'rank', ',')} on {render_plural(nodes, 'node', ',')}{shape}: {degrees}{experts}"
    ]
    # A line for each node that is shown: its ranks, tp groups in brackets, and their coordinates
    last, numbers, lines = nodes - 1, len(str(layout.world - 1)), []
    shown = [node for node in range(nodes) if node < SHOWN_NODES or node == last]
    width = max(len(_render_ranks_of(placement, node, numbers)) for node in shown)
    for node in shown:
        if node == last and last > SHOWN_NODES:
            lines.append(f"  ... {render_plural(last - SHOWN_NODES, 'node', ',')} more, in the same order")
        named = [(axis, sorted({layout.coordinate(rank, axis) for rank in placement.ranks_of(node)})) for axis in axes]
        places = ", ".join(f"{axis} {_render_span(each)}" for axis, each in named)
        ranks = _render_ranks_of(placement, node, numbers)
        lines.append(f"  node {node:>{len(str(last))}}  {ranks:<{width}}  {places}".rstrip())
    parts.append("\n".join(lines))
    if placement.dims:
        rows: list[tuple[str, ...]] = [("dim", "degree", "groups", "nodes of a group", "ranks of a group")]
        for each in placement.dims:
            groups = " | ".join(map(_render_group, each.groups[:SHOWN_GROUPS]))
            groups += " | ..." if len(each.groups) > SHOWN_GROUPS else ""
            name = dim_name(layout, each.dim)
            rows.append((name, str(each.degree), str(len(each.groups)), str(each.nodes), groups))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, *sizes, groups in rows:
            cells = [f"{size:>{width}}" for size, width in zip(sizes, widths[1:], strict=False)]
            lines.append(f"  {name:<{widths[0]}}  {'  '.join(cells)}  {groups}")
        parts += ["\n".join(lines), "\n".join(_crossing_lines(placement))]
    return "\n\n".join(parts) + "\n"


def _render_ranks_of(placement: MeshPlacement, node: int, digits: int) -> str:
    """ "[ 0  1][ 2  3]" with tp 2; a group that continues on another node has no bracket on that side."""
    tp, ranks = placement.layout.degree("tp"), placement.ranks_of(node)
    cells = (
        ("[" if rank % tp == 0 else " ") + f"{rank:>{digits}}" + ("]" if rank % tp == tp - 1 else "") for rank in ranks
    )
    return "".join(cells) if tp > 1 else " ".join(f"{rank:>{digits}}" for rank in ranks)


def _render_span(numbers: Sequence[int]) -> str:
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return " ".join(map(str, numbers))


def _render_group(ranks: Sequence[int]) -> str:
    if ranks[1] - ranks[0] == 1 and len(ranks) > 2:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= SHOWN_RANKS:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} {ranks[2]} .. {ranks[-1]}"


def _crossing_lines(placement: MeshPlacement) -> Iterator[str]:
    """The dims that stay inside a node and those that cross nodes, with what they exchange."""
    inside = [dim_name(placement.layout, each.dim) for each in placement.dims if not each.crosses]
    if inside:
        yield f"inside a node: {', '.join(inside)}"
    for each in placement.dims:
        if each.crosses:
            name = dim_name(placement.layout, each.dim)
            yield f"across nodes: {name} ({TRAVELS[each.dim]}), over {each.nodes} nodes"
    for each in placement.dims:
        if each.dim == "tp" and each.crosses:
            best = max(degree for degree in range(1, each.degree) if placement.ranks_per_node % degree == 0)
            ranks = render_plural(placement.ranks_per_node, "rank")
            yield (
                f"\nwarning: a tp group is on {each.nodes} nodes, and its ranks exchange {TRAVELS['tp']}.\n"
                f"  To do: choose a parallel.tp that divides the {ranks} of a node, such as {best}."
            )


def dim_name(layout: Layout, dim: str) -> str:
    """The name of a dim for people: a merged one by the axes that it combines here."""
    if dim != SHARD:
        return dim
    axes = [axis for axis in ("dp_shard", "cp") if layout.degree(axis) > 1]
    return "states over cp" if axes == ["cp"] else " x ".join(axes)
