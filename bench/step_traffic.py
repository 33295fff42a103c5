"""What one step of ours moves beside products and attention, its kernels and its casts of weights; counted on fake
tensors, so no device is needed.

    python bench/step_traffic.py [--layers 8] [--json FILE] [--max-eager GB] [--max-compiled GB]

The shape: `--layers` blocks of dim 2,048, 32 heads of 64, 8 key/value heads, ffn 8,192, vocabulary 32,000; 4 x 2,048
tokens; weights in fp32, products in bf16 by autocast, one micro-batch. Exit code 1 above a maximum.

How it is counted. Every tensor that a kernel reads or writes counts whole, once, at its size; views are free. RMSNorm
is one kernel each way, as on a device. Compiled: each block's forward and backward graph as the compiler's partitioner
leaves them, with what is between two products fused as far as one kernel may (`fuse`); the embedding, the last norm and
the output layer as they are run, one by one; the loss as one graph. The compiler's own code moves no less.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardway.models.transformer import Transformer, TransformerShape
from shardway.parallel.blocks import apply_compile
from shardway.train import loss as losses

BATCH, SEQ = 4, 2048


def shape_of(layers: int) -> TransformerShape:
    """The shape that is counted."""
    return TransformerShape(layers=layers, dim=2048, heads=32, kv_heads=8, ffn_dim=8192, vocab=32000, tied=False)


# --- operators

VIEWS = frozenset(
    re.findall(
        r"\w+",
        "_reshape_alias _unsafe_view alias as_strided chunk detach device empty empty_like empty_strided expand "
        "lift_fresh new_empty new_empty_strided permute reshape select slice split split_with_sizes squeeze t "
        "transpose unbind unsqueeze view",
    )
)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
CASTS = frozenset(("_to_copy", "clone", "convert_element_type"))
SMALL = 2**20
"""Bytes of a tensor that is read from a cache: two kernels that share it alone are not made one."""
PRODUCTS = frozenset(("addmm", "bmm", "linear", "mm", ATTENTION, f"{ATTENTION}_backward"))


def is_view(name: str) -> bool:
    """Whether an operator of this name moves nothing: it makes a view, or memory that is not yet written."""
    return name in VIEWS


def size_of(tensors: Any) -> int:
    """Bytes of all tensors of a tree."""
    found = (each for each in tree_leaves(tensors) if isinstance(each, torch.Tensor))
    return sum(each.numel() * each.element_size() for each in found)


@dataclass
class Traffic:
    """Kernels beside products and attention, and the bytes that they read and write; products and attention apart."""

    kernels: int = 0
    outside: int = 0
    products: int = 0
    by_name: collections.Counter[str] = field(default_factory=collections.Counter)

    def add(self, name: str, size: int) -> None:
        if name in PRODUCTS:
            self.products += 1
            return
        self.kernels += 1
        self.outside += size
        self.by_name[name] += size

    def plus(self, other: Traffic, times: int = 1) -> Traffic:
        """This and `times` the other."""
        names = collections.Counter(self.by_name)
        for name, size in other.by_name.items():
            names[name] += times * size
        return Traffic(
            self.kernels + times * other.kernels,
            self.outside + times * other.outside,
            self.products + times * other.products,
            names,
        )


class Eager(TorchDispatchMode):
    """Counts operators as they are run: `traffic`, and what is cast, by shape and format."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()
        self.casts = collections.Counter[tuple[tuple[int, ...], torch.dtype]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if is_view(name):
            return result
        self.traffic.add(name, size_of((args, kwargs, result)))
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
            if source.dtype != result.dtype:
                self.casts[tuple(source.shape), result.dtype] += 1
        return result


# --- passes one by one


@torch.library.custom_op("shardway_bench::norm", mutates_args=())
def one_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """A norm as one kernel, as devices have it; a CPU takes it apart."""
    return torch.empty_like(x)


@torch.library.custom_op("shardway_bench::norm_backward", mutates_args=())
def one_norm_backward(x: torch.Tensor, gain: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of its input and of its gain."""
    return torch.empty_like(x), torch.empty_like(gain)


one_norm.register_fake(lambda x, gain: torch.empty_like(x))
one_norm_backward.register_fake(lambda x, gain, grad: (torch.empty_like(x), torch.empty_like(gain)))
one_norm.register_autograd(
    lambda ctx, grad: one_norm_backward(*ctx.saved_tensors, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@contextmanager
def norms_of_a_device() -> Iterator[None]:
    """Meanwhile a norm is one kernel each way."""
    with mock.patch.object(F, "rms_norm", lambda x, shape, weight=None, eps=None: one_norm(x, weight)):
        yield


def count_eager(shape: TransformerShape, *, with_loss: bool = True) -> Eager:
    """One forward and backward pass, operator by operator; without the loss, from the gradient of the logits on."""
    with norms_of_a_device(), FakeTensorMode():
        model, counter = Transformer(shape), Eager()
        inputs, targets = (torch.randint(0, shape.vocab, (BATCH, SEQ)) for _ in "xy")
        with counter:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(inputs)
                total = losses.token_cross_entropy(logits, targets).total if with_loss else None
            if total is None:
                logits.backward(torch.empty_like(logits))
            else:
                total.backward()
    return counter


# --- passes of compiled blocks


def count_compiled(layers: int) -> tuple[Traffic, Traffic]:
    """One forward and backward pass with compiled blocks and a compiled loss; and one block of it."""
    block = _count_block()
    ends = count_eager(shape_of(0), with_loss=False).traffic
    return ends.plus(_count_loss()).plus(block, layers), block


def _count_block() -> Traffic:
    """One graph serves all blocks."""
    shape, found = shape_of(1), Graphs()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Transformer(shape)
        block = model.blocks["0"]
        apply_compile(model, [block], "blocks", found.backend)
        x = torch.empty(BATCH, SEQ, shape.dim, dtype=torch.bfloat16, requires_grad=True)
        turn = model.make_rotation(torch.arange(SEQ), x.dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = block(x, turn)
        y.backward(torch.empty_like(y))
    return found.total(expected=2)


def _count_loss() -> Traffic:
    found = Graphs()
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.empty(BATCH, SEQ, shape_of(0).vocab, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(BATCH, SEQ, dtype=torch.int64)
        total, _ = torch.compile(losses._sum_cross_entropy, backend=found.backend)(logits, targets)
        total.backward()
    return found.total(expected=2)


class Graphs:
    """A compiler that keeps what the partitioner hands it, and runs it as it is."""

    def __init__(self) -> None:
        self.found: list[fx.GraphModule] = []

    def _keep(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.found.append(graph)
        boxed: Callable[..., Any] = make_boxed_func(graph.forward)
        return boxed

    @property
    def backend(self) -> Callable[..., Any]:
        made: Callable[..., Any] = aot_autograd(
            fw_compiler=self._keep,
            bw_compiler=self._keep,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        return made

    def total(self, expected: int) -> Traffic:
        """What all graphs move. Raises ValueError where there are not so many of them."""
        if len(self.found) != expected:
            raise ValueError(f"the compiler made {len(self.found)} graphs, where {expected} were expected")
        total = Traffic()
        for graph in self.found:
            total = total.plus(fuse(graph))
        return total


def name_of(node: fx.Node) -> str:
    """The name of a node's operator, without namespace and overload."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__
    return getattr(target, "__name__", str(target))


def fuse(module: fx.GraphModule) -> Traffic:
    """The kernels of a graph, if what lies between two products is fused as far as one kernel may.

    Operators are in one kernel if no product lies between them and one uses what the other makes, or both read the same
    memory. A kernel reads what others (or the caller) have written and it uses, each once, and writes what others (or
    the caller) use; sums over features and over tokens may be in one. A cast of what is in memory is not written for
    users that are fused: they cast what they read.
    """
    nodes = [each for each in module.graph.nodes if each.op == "call_function" and not is_view(name_of(each))]
    fused = {node for node in nodes if name_of(node) not in PRODUCTS | {"getitem"}}
    casts = {node for node in fused if name_of(node) in CASTS and not fused & set(_operands(node))}
    uses, reads = collections.defaultdict[fx.Node, list[fx.Node]](list), dict[fx.Node, list[fx.Node]]()
    for node in nodes:
        for operand in _operands(node):
            uses[operand].append(node)
        reads[node] = [_operands(each)[0] if node in fused and each in casts else each for each in _operands(node)]
    returned = {_memory_of(each) for each in module.graph.output_node().all_input_nodes}
    kernels = _join(nodes, fused, casts, reads, _count_products_before(nodes, fused, uses))

    traffic = Traffic()
    for node in nodes:
        if name_of(node) in PRODUCTS:
            traffic.add(name_of(node), 0)
    for kernel in kernels:
        others = {
            node: [use for use in uses[node] if use not in (fused if node in casts else kernel)] for node in kernel
        }
        written = [node for node in kernel if node in returned or others[node]]
        read = {operand for node in kernel for operand in reads[node]} - kernel
        if written:
            names = sorted({name_of(node) for node in kernel})
            traffic.add("+".join(names[:4]), sum(size_of(node.meta["val"]) for node in (*read, *written)))
    return traffic


def _join(
    nodes: Sequence[fx.Node],
    fused: AbstractSet[fx.Node],
    casts: AbstractSet[fx.Node],
    reads: Mapping[fx.Node, Sequence[fx.Node]],
    depth: Mapping[fx.Node, int],
) -> list[set[fx.Node]]:
    kernel_of = {node: {node} for node in fused}
    readers: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in nodes:
        for operand in reads[node] if node in fused and node not in casts else ():
            other = operand if operand in fused and operand not in casts else None
            if other is None and size_of(operand.meta["val"]) > SMALL:
                other = readers.setdefault((operand, depth[node]), node)
            if other is not None and depth[other] == depth[node]:
                kernel_of[node] |= kernel_of[other]
                for each in kernel_of[node]:
                    kernel_of[each] = kernel_of[node]
    return list({id(kernel): kernel for kernel in kernel_of.values()}.values())


def _count_products_before(
    nodes: Sequence[fx.Node], fused: AbstractSet[fx.Node], uses: Mapping[fx.Node, Sequence[fx.Node]]
) -> dict[fx.Node, int]:
    """How many products lie before each operator; before a fused one, as many as before the first use of it."""
    depth = collections.defaultdict[fx.Node, int](int)
    for node in nodes:
        depth[node] = max((depth[each] for each in _operands(node)), default=0) + (name_of(node) in PRODUCTS)
    for node in reversed(nodes):
        if node in fused and uses.get(node):
            depth[node] = max(depth[node], min(depth[use] - (name_of(use) in PRODUCTS) for use in uses[node]))
    return depth


def _operands(node: fx.Node) -> list[fx.Node]:
    return list(dict.fromkeys(_memory_of(each) for each in node.all_input_nodes))


def _memory_of(node: fx.Node) -> fx.Node:
    """The node that made what this one is a view of."""
    while node.op == "call_function" and is_view(name_of(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


# --- all of it


@dataclass(frozen=True)
class Counts:
    """What is counted of one step with so many blocks; of one block, what all of them have but for the ends."""

    layers: int
    eager: Eager
    eager_ends: Traffic
    compiled: Traffic
    compiled_block: Traffic

    def weight_casts(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """How often a matrix that products read is cast to bf16, or a gradient of one to fp32; one by one."""
        with torch.device("meta"):
            shapes = {tuple(each.shape) for each in Transformer(shape_of(1)).parameters() if each.dim() == 2}
        return sum(count for (shape, to), count in self.eager.casts.items() if shape in shapes and to == dtype)

    def rows(self) -> list[tuple[str, Traffic]]:
        """What it is, and its traffic."""
        blocks = self.eager.traffic.plus(self.eager_ends, -1)
        kernels, outside, products = (part // self.layers for part in (blocks.kernels, blocks.outside, blocks.products))
        block = Traffic(kernels, outside, products)
        return [
            (f"{self.layers} blocks, one by one", self.eager.traffic),
            ("one block of them", block),
            (f"{self.layers} blocks, compiled", self.compiled),
            ("one block, compiled", self.compiled_block),
        ]


def count_all(layers: int) -> Counts:
    """Everything that is counted here."""
    return Counts(layers, count_eager(shape_of(layers)), count_eager(shape_of(0)).traffic, *count_compiled(layers))


def main() -> None:
    """Print the table of `docs/numbers.md`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--max-eager", type=float, help="GB beside products and attention, one by one")
    parser.add_argument("--max-compiled", type=float, help="GB beside products and attention, compiled")
    parser.add_argument("--json", type=Path, help="file for the bytes by operator")
    arguments = parser.parse_args()
    counts = count_all(arguments.layers)
    print("| step | products and attention | other kernels | GB that those move |\n|---|---:|---:|---:|")
    for name, each in counts.rows():
        print(f"| {name} | {each.products} | {each.kernels} | {each.outside / 1e9:.2f} |")
    print(f"one by one, {counts.weight_casts()} casts of weights")
    if arguments.json:
        rows = {
            name: {"kernels": each.kernels, "bytes": dict(each.by_name.most_common())} for name, each in counts.rows()
        }
        arguments.json.write_text(json.dumps(rows, indent=1))
    limits = (arguments.max_eager, counts.eager.traffic), (arguments.max_compiled, counts.compiled)
    sys.exit(any(limit is not None and each.outside > limit * 1e9 for limit, each in limits))


if __name__ == "__main__":
    main()
