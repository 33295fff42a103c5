"""Traces as torch's profiler writes them, made by simulating a host that launches work on a device.

`MadeTrace` has two clocks: the host's, which each call moves on, and one of each stream, on which work begins when it
is launched and the stream is free. `make_training` is a loop without faults, and with one that is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

H100 = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}
NVJET = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"


class MadeTrace:
    """A trace that grows. Times are microseconds."""

    def __init__(
        self, *, gpu: dict[str, Any] | None = H100, rank: int | None = None, seed: int = 0, process: int = 100
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.properties: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [gpu] if gpu else []}
        if rank is not None:
            self.properties["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 4}
        self.random = Random(seed)
        self.now, self.process, self.thread, self.number = 1_000_000.0, process, 101, 0
        self.streams: dict[int, float] = {}

    def event(self, category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
        on_device = category in ("kernel", "gpu_memcpy", "gpu_memset")
        where = {"pid": 0, "tid": args["stream"]} if on_device else {"pid": self.process, "tid": self.thread}
        made = {
            "ph": "X",
            "cat": category,
            "name": name,
            **where,
            "ts": round(start, 3),
            "dur": round(duration, 3),
            "args": args,
        }
        self.events.append(made)
        return made

    def spend(self, microseconds: float) -> None:
        self.now += microseconds

    def annotate(self, name: str, start: float, category: str = "user_annotation", **args: Any) -> None:
        """What ends now."""
        self.event(category, name, start, self.now - start, **args)

    def launch(
        self,
        name: str,
        microseconds: float,
        *,
        stream: int = 7,
        category: str = "kernel",
        call: str = "cudaLaunchKernel",
        call_us: float = 4.0,
        blocks: bool = False,
        **args: Any,
    ) -> float:
        """One call of the runtime and its work; when that ends. A call that blocks returns when the work has ended."""
        self.number += 1
        start = self.now
        begin = max(start + call_us, self.streams.get(stream, 0.0))
        end = begin + microseconds * self.random.uniform(0.98, 1.02)
        self.streams[stream] = end
        self.now = end + 2.0 if blocks else start + call_us
        self.event(
            "cuda_runtime", call, start, self.now - start, correlation=self.number, **{"External id": self.number}
        )
        device: dict[str, Any] = {"device": 0, "stream": stream, "correlation": self.number, "External id": self.number}
        if category == "kernel":
            device |= {"grid": [264, 1, 1], "block": [128, 1, 1]}
        self.event(category, name, begin, end - begin, **device, **args)
        return end

    def operator(
        self,
        name: str,
        dims: list[Any],
        types: list[str],
        kernel: str,
        microseconds: float,
        *,
        host_us: float = 6.0,
        **launch: Any,
    ) -> float:
        """An operator that launches one kernel."""
        start = self.now
        self.spend(host_us / 2)
        end = self.launch(kernel, microseconds, **launch)
        self.spend(host_us / 2)
        args = {"External id": self.number, "Input Dims": dims, "Input type": types}
        self.event("cpu_op", name, start, self.now - start, **args)
        return end

    def product(
        self,
        m: int,
        k: int,
        n: int,
        *,
        share: float = 0.7,
        dtype: str = "c10::BFloat16",
        kernel: str = NVJET,
        **more: Any,
    ) -> None:
        """A product at a share of the H100's peak in bf16."""
        microseconds = 2 * m * n * k / (989e12 * share) * 1e6
        self.operator("aten::mm", [[m, k], [k, n]], [dtype, dtype], kernel, microseconds, **more)

    def wait_for_device(self, call: str = "cudaStreamSynchronize") -> None:
        start = self.now
        self.now = max(self.now + 1.0, *self.streams.values()) + 1.0
        self.event("cuda_runtime", call, start, self.now - start)

    def item(self) -> None:
        """What `.item()` does."""
        start = self.now
        self.launch("Memcpy DtoH (Device -> Pageable)", 1.5, category="gpu_memcpy", call="cudaMemcpyAsync", bytes=4)
        number = self.number
        self.wait_for_device()
        self.event(
            "cpu_op",
            "aten::item",
            start,
            self.now - start,
            **{"External id": number, "Input Dims": [[]], "Input type": ["float"]},
        )

    def as_dict(self) -> dict[str, Any]:
        return {**self.properties, "traceEvents": self.events, "traceName": "made.json", "displayTimeUnit": "ms"}

    def write(self, path: Path, **how: Any) -> Path:
        path.write_text(json.dumps(self.as_dict(), **how), encoding="utf-8")
        return path


Fault = Callable[[MadeTrace], None]

DEVICE_FAULTS = {
    "item": "host-sync",
    "nonzero": "host-sync",
    "pageable": "pageable-copy",
    "loader": "data-loader",
    "fp32": "fp32-products",
    "vocabulary": "vocabulary",
    "misaligned": "alignment",
    "no_tensor_cores": "no-tensor-cores",
    "tiny": "launch-bound",
    "all_reduce": "exposed-communication",
    "optimizer": "optimizer",
    "attention_math": "attention-math",
    "recompute": "recompute",
    "malloc": "allocator",
    "casts": "casts",
    "few_tiles": "few-tiles",
    "elementwise": "unfused",
}
"""A fault that `make_training` knows -> the rule whose advice must come first."""


def make_training(
    fault: str = "", *, steps: int = 6, seed: int = 0, rank: int | None = None, slow: float = 1.0, **more: Any
) -> MadeTrace:
    """Training eight layers in bf16 with fused kernels and a fused optimizer; the host runs ahead of the device."""
    made = MadeTrace(rank=rank, seed=seed, **more)
    for number in range(2, 2 + steps):
        start = made.now
        _make_step(made, fault, slow, rank)
        made.annotate(f"ProfilerStep#{number}", start)
    made.wait_for_device("cudaDeviceSynchronize")
    return made


def _make_step(made: MadeTrace, fault: str, slow: float, rank: int | None) -> None:
    start = made.now
    made.spend(45_000 if fault == "loader" else 60)
    made.annotate("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start)
    pageable = fault == "pageable"
    made.operator(
        "aten::copy_",
        [[64, 4096], [64, 4096]],
        ["long int", "long int"],
        f"Memcpy HtoD ({'Pageable' if pageable else 'Pinned'} -> Device)",
        5000 if pageable else 12,
        category="gpu_memcpy",
        call="cudaMemcpyAsync",
        bytes=64 << 20 if pageable else 2 << 20,
        blocks=pageable,
    )
    if pageable:
        made.spend(1500)
    if fault == "tiny":
        for _ in range(300):
            made.operator(
                "aten::add",
                [[512, 64], [512, 64], []],
                ["c10::BFloat16", "c10::BFloat16", "Scalar"],
                "triton_poi_fused_add_0",
                3,
                host_us=14,
            )
        return
    for layer in range(8):
        _make_layer(made, fault, layer, slow)
    if fault == "vocabulary":
        made.product(
            8192, 4096, 50257, share=0.22, kernel="sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_align1"
        )
    else:
        made.product(8192, 4096, 50304, share=0.72)
    if fault == "few_tiles":
        for _ in range(6):
            made.product(256, 65536, 256, share=0.01)
    if fault == "recompute":
        for _ in range(8):
            begin = made.now
            inner = made.now
            made.product(8192, 4096, 4096)
            made.product(8192, 4096, 4096)
            made.annotate("aten::linear", inner, "cpu_op")
            made.annotate("autograd::engine::evaluate_function: CheckpointFunctionBackward", begin, "cpu_op")
    if fault == "all_reduce" or rank is not None:
        compute_ends = made.streams[7]
        made.streams[20] = max(made.streams.get(20, 0.0), compute_ends)
        length = 6000.0 if fault == "all_reduce" else 300.0
        if rank is not None:  # it ends everywhere when the last rank has come
            length += 1500.0 * (1.5 - slow) / 0.5 if slow < 1.5 else 0.0
        made.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", length, stream=20)
        made.streams[7] = made.streams[20]
    if fault in ("item", "nonzero"):
        made.item()
        if fault == "nonzero":
            made.events[-1]["name"] = "aten::nonzero"
        made.spend(4000)
    begin = made.now
    if fault == "optimizer":
        for _ in range(700):
            made.operator(
                "aten::mul_",
                [[4096], []],
                ["float", "Scalar"],
                "void at::native::vectorized_elementwise_kernel<4, Mul>",
                8,
                host_us=2,
            )
    else:
        made.operator(
            "aten::_fused_adamw_",
            [[[4096, 4096]]],
            ["TensorList"],
            "multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            900,
        )
    made.annotate("Optimizer.step#AdamW.step", begin)
    if fault == "malloc":
        made.wait_for_device("cudaDeviceSynchronize")
        made.spend(20)
        for _ in range(8):
            begin = made.now
            made.spend(700)
            made.annotate("cudaMalloc", begin, "cuda_runtime")


def _make_layer(made: MadeTrace, fault: str, layer: int, slow: float) -> None:
    bf16, odd = "c10::BFloat16", fault == "misaligned"
    width = 4091 if odd else 4096
    for _ in range(3):
        if fault == "fp32" and layer % 2:
            made.product(
                8192,
                4096,
                4096,
                share=0.05,
                dtype="float",
                kernel="sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x64x8",
            )
        elif fault == "no_tensor_cores" and layer % 2:
            made.product(8192, 4096, 4096, share=0.05, kernel="cutlass_80_simt_sgemm_128x128_8x4_nn_align1")
        elif odd and layer % 2:
            made.product(
                8192, 4096, width, share=0.25, kernel="cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_32x3_nn_align1"
            )
        else:
            made.product(8192, 4096, 4096, share=0.7 / slow)
    if fault == "attention_math":
        shape = [64, 2048, 2048]
        made.operator("aten::bmm", [[64, 2048, 128], [64, 128, 2048]], [bf16, bf16], NVJET, 250)
        made.operator(
            "aten::_softmax", [shape, [], []], [bf16, "Scalar", "Scalar"], "void softmax_warp_forward<bf16>", 900
        )
        made.operator("aten::bmm", [shape, [64, 2048, 128]], [bf16, bf16], NVJET, 250)
    else:
        shape = [4, 32, 2048, 128]
        made.operator(
            "aten::_scaled_dot_product_cudnn_attention",
            [shape, shape, shape, []],
            [bf16, bf16, bf16, ""],
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop",
            430,
        )
    if fault == "casts":
        made.operator(
            "aten::copy_",
            [[8192, 4096], [8192, 4096]],
            [bf16, "float"],
            "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>",
            500,
        )
    if fault == "elementwise":
        for _ in range(6):
            made.operator(
                "aten::mul",
                [[8192, 4096], [8192, 4096]],
                [bf16, bf16],
                "void at::native::vectorized_elementwise_kernel<4, MulFunctor>",
                75,
            )
    else:
        made.operator(
            "triton_poi_fused_silu_mul_0", [[8192, 4096], [8192, 4096]], [bf16, bf16], "triton_poi_fused_silu_mul_0", 70
        )
