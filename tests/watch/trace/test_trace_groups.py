"""What operators are for, what they compute and move, and when: real captures of a CPU with counts by hand, and traces
of a device that are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made_traces import DEVICE_FAULTS, MadeTrace, make_training
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from shardway.watch.trace.groups import GroupTime, count_pointwise, find_group, find_kernel_group, measure_groups
from shardway.watch.trace.operators import Operator, count_traffic
from shardway.watch.trace.reader import read_trace
from shardway.watch.trace.timeline import Timeline, build_timeline

ROWS, WIDE, CLASSES = 24, 16, 10


def capture(path: Path, step: Callable[[], object]) -> Timeline:
    """Three steps of it, of which the one in the middle counts."""
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        record_shapes=True,
    ) as prof:
        for _ in range(4):
            step()
            prof.step()
    return build_timeline(read_trace(path))


def groups_of(timeline: Timeline) -> dict[str, GroupTime]:
    return {each.group: each for each in measure_groups(timeline)}


def total(operators: Sequence[Operator], name: str = "") -> tuple[float, float]:
    """FLOP and bytes of a step of all operators, or of those of a name."""
    mine = [each for each in operators if not name or each.name == name]
    return sum(each.flop or 0.0 for each in mine), sum(each.bytes or 0.0 for each in mine)


def adds_up(timeline: Timeline) -> None:
    found = measure_groups(timeline)
    idle = timeline.break_down().idle_ms
    assert sum(each.ms for each in found) + idle == pytest.approx(timeline.step_ms, rel=1e-9)


# --- a CPU, by hand


class WrittenNorm(nn.Module):
    """A norm of single operators, as Hugging Face writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_products_norms_and_output_of_a_small_model_are_as_by_hand(tmp_path: Path) -> None:
    """Widths are alike, so that only their places show which product is the output layer."""
    torch.manual_seed(0)
    first, last, norm = nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, WIDE, bias=False), WrittenNorm()
    optimizer = torch.optim.AdamW([*first.parameters(), *last.parameters(), *norm.parameters()], fused=True)
    x = torch.randn(ROWS, WIDE, requires_grad=True)
    targets = torch.arange(ROWS) % WIDE

    def step() -> None:
        F.cross_entropy(last(norm(first(x))), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    timeline = capture(tmp_path / "step.json", step)
    found = groups_of(timeline)
    adds_up(timeline)
    product = 2 * ROWS * WIDE * WIDE
    moved = 4 * (2 * ROWS * WIDE + WIDE * WIDE)
    assert total(found["products"].operators) == (3 * product, 3 * moved)
    assert total(found["output"].operators, "aten::mm") == (3 * product, 3 * moved)
    logits = 4 * ROWS * WIDE
    assert total(found["output"].operators, "aten::_log_softmax") == (5 * ROWS * WIDE, 2 * logits)
    assert total(found["output"].operators, "aten::_log_softmax_backward_data") == (4 * ROWS * WIDE, 3 * logits)
    losses = 2 * logits + 3 * logits + ROWS * (4 + 8) + logits  # of the last: zeros, of which one in a row is changed
    assert total(found["output"].operators)[1] == pytest.approx(3 * moved + losses, rel=0.02)
    # The square, and its gradient; x by the root; the gain. The gradient of the gain is a product, then a sum.
    norm_parts = found["norms"].operators
    gained = [each for each in norm_parts if each.name == "aten::mul" and each.shapes[0] == [WIDE]]
    assert total(gained) == (ROWS * WIDE, 2 * logits + 4 * WIDE)
    assert {"aten::pow", "aten::rsqrt", "aten::mul", "aten::sum"} <= {each.name for each in norm_parts if each.calls}
    assert total(found["elementwise"].operators) == (ROWS * WIDE, 3 * logits)  # the gradient of x is added up
    [update] = [each for each in found["optimizer"].operators if each.name == "aten::_fused_adamw_"]
    assert (update.bytes, update.calls) == (None, 1.0)


def test_convolutions_count_by_stride_padding_and_the_gradients_that_are_needed(tmp_path: Path) -> None:
    first, second = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 4, 3, padding=2)
    images = torch.randn(2, 3, 9, 9)

    def step() -> None:
        second(first(images)).sum().backward()
        first.zero_grad()
        second.zero_grad()

    found = groups_of(capture(tmp_path / "step.json", step))
    one = 2 * 2 * 5 * 5 * 8 * 3 * 9  # 9 x 9 points become 5 x 5, and those 7 x 7
    other = 2 * 2 * 7 * 7 * 4 * 8 * 9
    assert total(found["products"].operators)[0] == 2 * one + 3 * other  # the images need no gradient


def test_casts_of_autocast_count_by_both_formats(tmp_path: Path) -> None:
    layer, x = nn.Linear(WIDE, WIDE, bias=False), torch.randn(ROWS, WIDE)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            layer(x).float().sum().backward()
        layer.weight.grad = None

    found = groups_of(capture(tmp_path / "step.json", step))
    weight, rows = WIDE * WIDE, ROWS * WIDE
    # To bf16: input and weight. Back: the result, its gradient again to bf16, the weight's gradient.
    assert total(found["casts"].operators)[1] == 6 * (weight + rows + rows + rows + weight)
    assert {each.format for each in found["products"].operators if each.flop} == {"bf16"}
    assert total(found["products"].operators)[0] == 2 * 2 * ROWS * WIDE * WIDE


def test_compiled_code_of_a_cpu_is_of_unknown_work(tmp_path: Path) -> None:
    made = MadeTrace(gpu=None)
    for number in range(3):
        start = made.now
        made.spend(10.0)
        begun = made.now
        made.spend(100.0)
        made.event("cpu_op", "CompiledFunction", begun, 100.0, **{"Input Dims": [[8, 4]], "Input type": ["float"]})
        made.spend(10.0)
        made.annotate(f"ProfilerStep#{number}", start)
    found = groups_of(build_timeline(read_trace(made.write(tmp_path / "made.json"))))
    [compiled] = found["elementwise"].operators
    assert (compiled.name, compiled.bytes) == ("CompiledFunction", None)
    assert compiled.ms == pytest.approx(0.1, rel=1e-6)


def test_work_that_others_do_counts_once(tmp_path: Path) -> None:
    x = torch.randn(4, ROWS, WIDE)
    query = torch.randn(2, 4, ROWS, WIDE)

    def step() -> None:
        F.linear(x, x[0])
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
        x.clone()
        torch.cat([x, x])

    found = groups_of(capture(tmp_path / "step.json", step))
    assert total(found["products"].operators)[0] == 2 * 4 * ROWS * WIDE * ROWS
    assert total(found["attention"].operators)[0] == 0.5 * 4 * 2 * 4 * ROWS * ROWS * WIDE
    assert total(found["copies"].operators)[1] == 4 * (2 + 4) * x.numel()


# --- counts by shape


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "expected"),
    [
        ("aten::add", [[8, 4], [8, 4]], ["fp32", "fp32"], 3 * 32 * 4),
        ("aten::mul", [[8, 1], [1, 4]], ["fp32", "bf16"], 8 * 4 + 4 * 2 + 32 * 4),
        ("aten::mul", [[8, 4], []], ["bf16", "fp64"], 2 * 32 * 2 + 8),
        ("aten::add_", [[8, 4], [8, 4]], ["fp32", "fp32"], 3 * 32 * 4),
        ("aten::copy_", [[8, 4], [8, 4]], ["fp32", "bf16"], 32 * 6),
        ("aten::fill_", [[8, 4]], ["fp32"], 32 * 4),
        ("aten::sum", [[8, 4]], ["fp32"], 32 * 4),
        ("aten::ne", [[8], []], ["int64", ""], 8 * 8 + 8),
        ("aten::index_select", [[99, 4], [], [8]], ["fp32", "", "int64"], 2 * 8 * 4 * 4 + 8 * 8),
        ("aten::embedding", [[99, 4], [2, 4]], ["bf16", "int64"], 2 * 8 * 4 * 2 + 8 * 8),
        ("aten::nll_loss_backward", [[], [8, 4], [8]], ["fp32", "fp32", "int64"], 32 * 4),
        ("aten::max_pool2d_with_indices", [[2, 4, 8, 8]], ["fp32"], 512 * 4),
        ("aten::silu_backward", [[8, 4], [8, 4]], ["bf16", "bf16"], 3 * 32 * 2),
        ("aten::transpose", [[8, 4]], ["fp32"], 0),
        ("aten::empty", [[]], [""], 0),
        ("triton_poi_fused_add_0", [[8, 4], [8, 4], [8, 4]], ["fp32", "fp32", "fp32"], 3 * 32 * 4),
        ("aten::mul", [[], []], ["", ""], None),
    ],
)
def test_bytes_of_a_call(name: str, shapes: list[Any], dtypes: list[str], expected: float | None) -> None:
    assert count_traffic(name, tuple(shapes), tuple(dtypes)) == expected


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("aten::mul", 1.0),
        ("aten::_fused_rms_norm", 4.0),
        ("aten::_softmax", 5.0),
        ("aten::copy_", 0.0),
        ("aten::ne", 0.0),
        ("aten::_fused_adamw_", 14.0),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", 5.0),
    ],
)
def test_arithmetic_of_a_call(name: str, each: float) -> None:
    assert count_pointwise(name, [[8, 4], [4]]) == 32 * each


@pytest.mark.parametrize(
    ("name", "dtypes", "scope", "moves", "group"),
    [
        ("aten::mul", ("fp32",), None, True, "elementwise"),
        ("aten::mul", ("fp32",), "norms", True, "norms"),
        ("aten::copy_", ("bf16", "fp32"), "norms", True, "casts"),
        ("aten::copy_", ("bf16", "bf16"), None, True, "copies"),
        ("aten::copy_", ("bf16", "fp32"), "optimizer", True, "optimizer"),
        ("aten::mm", ("bf16", "bf16"), None, True, "products"),
        ("aten::convolution_backward", ("bf16",), None, True, "products"),
        ("aten::transpose", ("bf16",), None, False, "other"),
        ("autograd::engine::evaluate_function: MulBackward0", (), None, False, "other"),
        ("triton_poi_fused__to_copy_0", ("fp32", "bf16"), None, False, "casts"),
        ("triton_poi_fused_add_mul_silu_0", ("bf16",), None, False, "elementwise"),
        ("CompiledFunctionBackward", ("bf16",), None, False, "elementwise"),
        ("fsdp::all_gather_copy_in", ("fp32",), None, False, "copies"),
    ],
)
def test_groups_by_name_and_scope(name: str, dtypes: tuple[str, ...], scope: Any, moves: bool, group: str) -> None:
    assert find_group(name, dtypes, scope, moves=moves) == group


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_per_fused__log_softmax_nll_loss_forward_0", "output"),
        ("triton_red_fused_mean_mul_pow_rsqrt_1", "norms"),
        ("void at::native::vectorized_elementwise_kernel", "elementwise"),
        ("unheard_of", "other"),
    ],
)
def test_groups_of_kernels_that_no_operator_launched(kernel: str, group: str) -> None:
    assert find_kernel_group(kernel) == group


# --- a device


@pytest.mark.parametrize("fault", ["", *DEVICE_FAULTS])
def test_groups_and_idle_time_of_a_device_add_up_to_the_step(fault: str, tmp_path: Path) -> None:
    timeline = build_timeline(read_trace(make_training(fault).write(tmp_path / "made.json")))
    adds_up(timeline)
    breakdown, found = timeline.break_down(), groups_of(timeline)
    computing = sum(each.ms for name, each in found.items() if name not in ("communication", "copies"))
    assert computing <= breakdown.compute_ms + 1e-6
    exposed = found["communication"].ms if "communication" in found else 0.0
    assert exposed == pytest.approx(breakdown.comm_exposed_ms, abs=1e-6)
    assert {"products", "optimizer"} <= set(found) or fault == "tiny"


def test_kernels_count_for_the_operator_that_launched_them(tmp_path: Path) -> None:
    made = MadeTrace()
    for number in range(3):
        start = made.now
        made.product(4096, 4096, 4096)
        kernel = "void at::native::vectorized_elementwise_kernel"
        made.operator("aten::add", [[4096, 4096]] * 2, ["c10::BFloat16"] * 2, kernel, 50.0)
        made.launch("Memcpy DtoD (Device -> Device)", 10.0, category="gpu_memcpy", bytes=1000)
        made.wait_for_device()
        made.annotate(f"ProfilerStep#{number}", start)
    timeline = build_timeline(read_trace(made.write(tmp_path / "made.json")))
    found = groups_of(timeline)
    adds_up(timeline)
    assert total(found["products"].operators) == (2 * 4096**3, 3 * 2 * 4096**2)
    assert total(found["elementwise"].operators) == (4096**2, 3 * 2 * 4096**2)
    assert total(found["copies"].operators) == (0.0, 2000.0)
    assert found["elementwise"].ms == pytest.approx(0.05, rel=0.03)
