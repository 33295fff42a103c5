"""Findings about operators: products, attention, casts, chains that are not fused, and the slowest of what is left.

Invariant: a ceiling is an operator's time above what the peaks, or the best product of the trace, allow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from shardway.watch.advice.findings import Advice
from shardway.watch.trace.evidence import TraceEvidence
from shardway.watch.trace.operators import Operator

# --- products


def find_misaligned(seen: TraceEvidence) -> Iterator[Advice]:
    """Dimensions on which matrix units work in part or not at all; a vocabulary is one of them."""
    wrong = []
    for each in seen.free():
        if each.kind != "product" or not each.low_precision or not (sized := each.product):
            continue
        need = 16 if each.dtype == "fp8" else 8
        odd = [size for size in sized[1:] if size % need and size > need * 4]
        if odd and sized[3] % need == 0 and len(odd) == 1 and odd[0] == sized[1] and not _is_by_batch(seen, sized[1]):
            odd = []  # rows of a batch: the product's leading dimensions are aligned
        if odd:
            wrong.append((each, odd))
    if not wrong:
        return
    best = _best_rate(seen, [each for each, _ in wrong])
    ms = 0.0
    for each, odd in wrong:
        padded = math.prod(64 * math.ceil(size / 64) / size for size in odd)
        aligned = each.flop / best / 1e9 * padded if each.flop and best else (each.floor_ms or 0.0)
        ms += max(each.ms - aligned, 0.0)
    if not seen.is_worth(ms):
        return
    seen.take(each for each, _ in wrong)
    worst, odd = max(wrong, key=lambda each: each[0].ms)
    vocabulary = next(
        (size for size in sorted(odd, reverse=True) if size >= 8192 and size > 4 * _smallest_side(worst)), None
    )
    rule = "vocabulary" if vocabulary else "alignment"
    pads = ", ".join(f"{size} to {64 * math.ceil(size / 64)}" for size in dict.fromkeys(odd))
    total = sum(each.ms for each, _ in wrong)
    rate = f" at {worst.tflops:.0f} TFLOP/s" if worst.tflops else ""
    yield seen.advise(
        rule,
        f"{len(wrong)} products with a dimension that is no multiple of {16 if worst.dtype == 'fp8' else 8} take"
        f" {total:.2f} ms of a step,"
        f" most {worst.name} {worst.render_shapes()} in {worst.dtype}, {worst.ms:.2f} ms{rate}"
        + (f"; the best aligned product here has {best:.0f}" if best else ""),
        f"pad {pads} (multiples of 64)"
        + (": `model.vocab` or `model.resize_token_embeddings(pad_to_multiple_of=64)`" if vocabulary else ""),
        "trace again: the product has more TFLOP/s, and its kernel's name no align1 or align2",
        ms,
    )


def _smallest_side(operator: Operator) -> int:
    """The smallest dimension of a product."""
    return min(operator.product[1:]) if operator.product else 0


def _is_by_batch(seen: TraceEvidence, size: int) -> bool:
    """Whether the rows of a product are also a model's dimension."""
    return any(each.product and size in each.product[2:] for each in seen.operators if each.kind == "product")


def _best_rate(seen: TraceEvidence, without: list[Operator]) -> float | None:
    """The best TFLOP/s of a product in this trace that is as large as one percent of a step."""
    rates = [
        each.tflops
        for each in seen.operators
        if each.kind == "product"
        and each not in without
        and each.tflops
        and each.low_precision
        and each.ms > 0.01 * seen.step_ms
    ]
    return max(rates, default=None)


def find_no_matrix_units(seen: TraceEvidence) -> Iterator[Advice]:
    """Products in 16 bits that were not computed on matrix units."""
    wrong = [
        each
        for each in seen.free()
        if each.kind in ("product", "convolution")
        and each.low_precision
        and each.matrix_units is not None
        and each.matrix_units < 0.5
        and not (each.product and min(each.product[1:]) < 8)
        and "depthwise" not in each.top_kernel
    ]
    ms = sum(each.ms - min(each.floor_ms or 0.0, each.ms) for each in wrong)
    if not wrong or not seen.is_worth(ms):
        return
    seen.take(wrong)
    worst = max(wrong, key=lambda each: each.ms)
    yield seen.advise(
        "no-tensor-cores",
        f"{len(wrong)} products in {worst.dtype} take {sum(each.ms for each in wrong):.2f} ms of a step off the"
        " matrix units, most"
        f" {worst.name} {worst.render_shapes()}, {worst.ms:.2f} ms in {worst.top_kernel[:60]}",
        "contiguous tensors with dimensions that are multiples of 8 (16 in fp8); convolutions in `channels_last`; a"
        " cuBLAS that knows the GPU",
        "trace again: the kernel's name shows matrix units (nvjet, gmma, tensorop, s16816)",
        ms,
    )


def find_fp32_products(seen: TraceEvidence) -> Iterator[Advice]:
    """Products in fp32 off the matrix units."""
    products = [each for each in seen.operators if each.kind in ("product", "convolution", "attention")]
    wrong = [each for each in seen.free() if each in products and each.dtype == "fp32" and not _uses_tf32(each)]
    if not seen.timeline.on_device and not any(each.low_precision for each in products):
        return  # a CPU trains in fp32
    spent = sum(each.ms for each in wrong)
    if not wrong or not seen.is_worth(spent):
        return
    fast, plain = (seen.part.peak("bf16"), seen.part.peak("fp32")) if seen.part else (None, None)
    ms = spent * (1 - plain / fast) if fast and plain and fast > plain else spent
    if not seen.is_worth(ms):
        return
    seen.take(wrong)
    worst = max(wrong, key=lambda each: each.ms)
    mixed = any(each.low_precision for each in products)
    yield seen.advise(
        "fp32-products",
        f"{len(wrong)} products in fp32 take {spent:.2f} ms of a step{' beside others in 16 bits' if mixed else ''},"
        f" most {worst.name}"
        f" {worst.render_shapes()}, {worst.ms:.2f} ms"
        + (
            f"; the peak is {plain / 1e12:.0f} TFLOP/s in fp32, {fast / 1e12:.0f} in bf16"
            if fast and plain
            else "; the peaks are n/a"
        ),
        'compute in bf16: `precision.compute = "bf16"` or `torch.autocast("cuda", torch.bfloat16)`'
        + (
            " around these too (look for `.float()`)"
            if mixed
            else '; at least TF32: `torch.set_float32_matmul_precision("high")`'
        ),
        "trace again: these operators have bf16 inputs, or their kernels read tf32",
        ms,
    )


def _uses_tf32(operator: Operator) -> bool:
    return bool(operator.matrix_units) or bool(re.search(r"tf32|s1688|xf32|_S_TF32", operator.top_kernel))


_TILE = re.compile(r"(?:MT|tilesize|tst_|_|hss_|tss_)(\d{2,3})x(\d{2,3})")


def find_few_tiles(seen: TraceEvidence) -> Iterator[Advice]:
    """Products whose tiles leave part of the device without work."""
    if not (processors := seen.multiprocessors):
        return
    wrong = []
    for each in seen.free():
        if each.kind != "product" or not (sized := each.product) or not (tile := _TILE.search(each.top_kernel)):
            continue
        rows, columns = int(tile[1]), int(tile[2])
        tiles = sized[0] * math.ceil(sized[1] / rows) * math.ceil(sized[2] / columns)
        use = tiles / (processors * math.ceil(tiles / processors))
        if use < 0.75 and (each.flop_share is None or each.flop_share < 0.5) and (each.byte_share or 0) < 0.5:
            wrong.append((each, tiles, use))
    ms = sum(each.ms * (1 - use) for each, _, use in wrong)
    if not wrong or not seen.is_worth(ms):
        return
    worst, tiles, use = max(wrong, key=lambda each: each[0].ms * (1 - each[2]))
    seen.take(each for each, _, _ in wrong)
    yield seen.advise(
        "few-tiles",
        f"{len(wrong)} products fill the device's {processors} processors in part, most {worst.name}"
        f" {worst.render_shapes()}:"
        f" {tiles} tiles, {100 * use:.0f} % of the last wave used, {worst.ms:.2f} ms",
        "larger products: a larger micro-batch, merged projections (QKV, gate and up), dimensions whose tiles are a"
        " multiple of the"
        f" {processors} processors",
        "trace again: the product has more TFLOP/s",
        ms,
    )


def find_slow_attention(seen: TraceEvidence) -> Iterator[Advice]:
    """Attention as separate products and a softmax over all pairs."""
    if not seen.timeline.on_device:
        return
    pairs = [
        each
        for each in seen.free()
        if "softmax" in each.name
        and "log_softmax" not in each.name
        and each.shapes
        and isinstance(each.shapes[0], list)
        and len(each.shapes[0]) >= 3
        and all(isinstance(n, int) for n in each.shapes[0])
        and each.shapes[0][-1] >= 64
    ]
    lengths = {tuple(each.shapes[0][-2:]) for each in pairs}
    products = [
        each
        for each in seen.free()
        if each.kind == "product"
        and each.name in ("aten::bmm", "aten::baddbmm", "aten::matmul")
        and each.product
        and any(set(shape) <= set(each.product[1:]) for shape in lengths)
    ]
    if not pairs or not products:
        return
    spent = sum(each.ms for each in (*pairs, *products))
    floor = 0.0
    if seen.part and (peak := seen.part.peak("bf16")):
        floor = sum((each.flop or 0.0) / peak * 1e3 for each in products)
    ms = max(spent - floor, 0.0)
    if not seen.is_worth(ms):
        return
    seen.take([*pairs, *products])
    worst = max(pairs, key=lambda each: each.ms)
    yield seen.advise(
        "attention-math",
        f"attention runs as products and a softmax over all pairs: {spent:.2f} ms of a step, softmax"
        f" {worst.render_shapes()} {worst.ms:.2f} ms",
        '`torch.nn.functional.scaled_dot_product_attention` (`attn_implementation="sdpa"`), with a mask it takes'
        " (`is_causal`, or FlexAttention)",
        "trace again: _scaled_dot_product_flash_attention or _cudnn_attention instead of bmm and softmax",
        ms,
    )


def find_attention_backend(seen: TraceEvidence) -> Iterator[Advice]:
    """FlashAttention 2 on Hopper, where cuDNN's is faster."""
    if not seen.part or not re.search(r"H100|H200|GH200|H800", seen.part.name):
        return
    slow = [
        each
        for each in seen.free()
        if each.kind == "attention" and "flash_attention" in each.name and "pytorch_flash" in each.top_kernel
    ]
    spent = sum(each.ms for each in slow)
    ms = spent * (1 - 310 / 499)  # pytorch pull request 138522: backward at 4096, head width 128
    if not slow or not seen.is_worth(ms):
        return
    seen.take(slow)
    yield seen.advise(
        "attention-backend",
        f"attention takes {spent:.2f} ms of a step in FlashAttention 2 ({slow[0].top_kernel[:40]}); on this GPU"
        " cuDNN's has up to 1.6 times the rate",
        "torch 2.11 or later with its own cuDNN 9.15 or later (a cluster's module may shadow it: `shardway doctor`), or"
        " `sdpa_kernel([SDPBackend.CUDNN_ATTENTION, ...], set_priority=True)`",
        "trace again: _scaled_dot_product_cudnn_attention",
        ms,
    )


# --- casts

_CAST = re.compile(r"^aten::(to|_to_copy|copy_|clone|contiguous|float|half|bfloat16)$")


def find_needless_casts(seen: TraceEvidence) -> Iterator[Advice]:
    """Copies that change a tensor's type or layout."""
    if not seen.timeline.on_device:
        return
    wrong = [
        each
        for each in seen.free()
        if _CAST.match(each.name)
        and each.kind != "other"
        and "Memcpy Hto" not in each.top_kernel
        and "Memcpy Dto" not in each.top_kernel
    ]
    casts = [
        each for each in wrong if len({dtype for dtype in each.dtypes if dtype in ("fp32", "fp16", "bf16", "fp8")}) > 1
    ]
    ms = sum(each.ms for each in casts)
    if not casts or ms < 0.05 * seen.step_ms:
        return
    seen.take(casts)
    worst = max(casts, key=lambda each: each.ms)
    yield seen.advise(
        "casts",
        f"casts take {ms:.2f} ms of a step, most {worst.name} {worst.render_shapes()}"
        f" ({'/'.join(dict.fromkeys(filter(None, worst.dtypes)))}), {worst.calls:.3g} a step",
        "hold the parameters in the type they are used in (FSDP mixed precision, `.to(torch.bfloat16)`) rather than"
        " cast them in each"
        " forward; or let `torch.compile` fuse the casts",
        "trace again: fewer aten::_to_copy and copy_",
        ms,
    )


# --- what no other finding names


def find_unfused(seen: TraceEvidence) -> Iterator[Advice]:
    """Element by element in many kernels."""
    if not seen.timeline.on_device or any("triton_poi" in name for name in seen.timeline.trace.names):
        return
    simple = [
        each
        for each in seen.free()
        if each.kind in ("elementwise", "reduction") and each.ms > 0 and "_foreach" not in each.name
    ]
    spent, calls = sum(each.ms for each in simple), sum(each.calls for each in simple)
    if spent < 0.15 * seen.step_ms or calls < 8 or (len(simple) == 1 and (simple[0].byte_share or 0.0) < 0.5):
        return
    floor = sum(min(each.floor_ms or 0.0, each.ms) for each in simple)
    worst = max(simple, key=lambda each: each.ms)
    ms = max(spent - floor / 2, 0.0)  # a fused chain of two reads and writes half as much
    yield seen.advise(
        "unfused",
        f"{calls:.0f} operators that go element by element take {spent:.2f} ms of a step, most {worst.name}"
        f" {worst.render_shapes()} {worst.ms:.2f} ms",
        "`torch.compile` (`train.compile`), which fuses them; fused norms, rotary embeddings and losses",
        "trace again: triton kernels instead, and a shorter step",
        ms,
    )


_NAMED_KINDS = ("product", "attention", "convolution", "elementwise", "reduction")


def find_slow_operator(seen: TraceEvidence) -> Iterator[Advice]:
    """The operator that loses most against what the device could do with its shapes."""
    candidates = [
        each
        for each in seen.free()
        if each.floor_ms is not None
        and each.kind not in ("communication", "optimizer")
        and each.floor_ms < 0.45 * each.ms
        and not each.top_kernel.startswith("Mem")
    ]
    experts = [
        each
        for each in seen.free()
        if "moe" in each.name.lower() and each.bytes and each.flop and each.floor_ms is None
    ]
    if not candidates and not experts:
        return
    worst = max([*candidates, *experts], key=lambda each: each.ms - (each.floor_ms or 0.0))
    ms = worst.ms - worst.floor_ms if worst.floor_ms is not None else None
    if not seen.is_worth(ms if ms is not None else worst.ms):
        return
    reason, do = _explain(worst)
    shares = []
    if worst.flop_share is not None:
        shares.append(f"{100 * worst.flop_share:.0f} % of the peak in {worst.dtype}")
    if worst.byte_share is not None:
        shares.append(f"{100 * worst.byte_share:.0f} % of the memory's bandwidth")
    seen.take([worst])
    yield seen.advise(
        f"slow-{worst.kind}" if worst.kind in _NAMED_KINDS else "slow-operator",
        f"{worst.name} {worst.render_shapes()} takes {worst.ms:.2f} ms of a step with"
        f" {', '.join(shares) or 'shares of peaks n/a'}: {reason}",
        do,
        "trace again: the operator has a larger share of a peak",
        ms,
    )


def _explain(operator: Operator) -> tuple[str, str]:
    """Why an operator may be far from the peaks, and what to do."""
    shapes = [
        shape
        for shape in operator.shapes
        if isinstance(shape, list) and shape and all(isinstance(n, int) for n in shape)
    ]
    if operator.kind == "product" and operator.product:
        _, m, n, k = operator.product
        if min(m, n, k) <= 64:
            return (
                f"a dimension of {min(m, n, k)} makes it memory-bound",
                "fuse it with its neighbours (`torch.compile`), merge it with products of the same input, or widen"
                " that dimension",
            )
        return (
            "its shapes suit no fast kernel",
            'try `torch.compile(mode="max-autotune")`, dimensions in multiples of 128, a newer cuBLAS',
        )
    if operator.kind == "attention":
        four = [shape for shape in shapes if len(shape) == 4]
        width = four[0][-1] if four else 0
        length = max(sorted(four[0])[-1], 1) if four else 0
        if width and width not in (64, 128):
            return (
                f"heads of width {width}, for which kernels are slower than for 64 and 128",
                "heads of width 128 (64), or a kernel made for this width",
            )
        if four and max(four[0][1:3]) <= 512:
            return (
                f"sequences of {max(four[0][1:3])} are short: starting costs more than computing",
                "longer or packed sequences (varlen attention), a larger batch",
            )
        return (
            f"{length} positions in a kernel far below its peak",
            "another backend (cuDNN, FlashAttention 3, FlexAttention; on AMD the CK or aiter kernels)",
        )
    if operator.kind == "convolution" and len(shapes) >= 2:
        return _explain_convolution(operator, shapes)
    if "moe" in operator.name.lower():
        tokens = shapes[0][0] if shapes else 0
        experts = next((shape[0] for shape in shapes if len(shape) == 3), 0)
        chosen = shapes[-1][-1] if shapes else 1
        if not experts:
            return "it is far from what its shapes need", "look at its kernels in the trace"
        each = tokens * chosen / max(experts, 1)
        if each < 64:
            return (
                f"{each:.3g} tokens an expert: reading the {experts} experts' weights bounds it",
                "more tokens a step, fewer experts a device (expert parallelism)",
            )
        return f"{each:.3g} tokens an expert", "grouped products tuned for these shapes; balance the experts"
    if operator.kind in ("elementwise", "reduction"):
        return (
            "it moves memory, and not as fast as the memory does",
            "let `torch.compile` fuse it; contiguous tensors; a newer torch for this GPU",
        )
    return "it is far from what its shapes need", "look at its kernels in the trace"


def _explain_convolution(operator: Operator, shapes: list[list[int]]) -> tuple[str, str]:
    image, weight = shapes[:2]
    kernel = weight[2:]
    if weight[1] == 1 and weight[0] >= image[1] > 1:
        return (
            "depthwise: one channel a group leaves matrix units without work",
            "`channels_last`, a fused kernel, or groups of 8 channels and more",
        )
    if "True" in operator.concrete:
        return "transposed", "upsample and convolve, or `channels_last` with channels in multiples of 64"
    if image[1] % 8:
        return f"{image[1]} channels are no multiple of 8", "pad the channels to 8 (or space-to-depth), `channels_last`"
    numbers = re.findall(r"\d+", operator.concrete)
    if len(numbers) >= 3 * len(kernel) and any(int(each) > 1 for each in numbers[2 * len(kernel) : 3 * len(kernel)]):
        return (
            "dilated: few kernels are made for it",
            "`torch.backends.cudnn.benchmark = True`, or a strided and dense one",
        )
    if set(kernel) == {1}:
        return "pointwise: it is a product of matrices", "`channels_last`, so that it runs as one, or a Linear"
    if len(set(kernel)) > 1:
        return (
            f"an asymmetric kernel ({'x'.join(map(str, kernel))})",
            "`torch.backends.cudnn.benchmark = True`; a square kernel or one product of unfolded patches",
        )
    if max(image[2:]) <= 8:
        return f"images of {'x'.join(map(str, image[2:]))} give few tiles", "a larger batch, `channels_last`"
    return "its layout or algorithm is slow", "`channels_last`, bf16, `torch.backends.cudnn.benchmark = True`"
