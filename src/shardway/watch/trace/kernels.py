"""What a kernel's name shows: its kind, and whether it computes on matrix units (tensor cores).

Invariants: a name that no rule knows is of kind "other", and its use of matrix units is unknown, never "no".
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["product", "attention", "convolution", "communication", "optimizer", "elementwise", "reduction", "other"]

COMMUNICATION = re.compile(
    r"nccl|rccl|mscclpp|msccl|nvshmem|rocshmem|deep_ep|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|cross_device_reduce|one_shot_|two_shot_|multimem_",
    re.IGNORECASE,
)
_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("communication", COMMUNICATION),
    (
        "attention",
        re.compile(
            r"flash|fmha|attention|attn|native_sdpa|_sdpa|mem_eff|pytorch_flash|aten.*efficient|mha_", re.IGNORECASE
        ),
    ),
    (
        "optimizer",
        re.compile(r"multi_tensor_apply|FusedAdam|fused_adam|FusedSgd|adam_|Adam.*kernel|_foreach", re.ASCII),
    ),
    (
        "convolution",
        re.compile(
            r"conv(?!ert)|implicit_gemm|winograd|igemm_(fwd|bwd|wrw)|dgrad|wgrad|fprop|miopen|xmma_fprop", re.IGNORECASE
        ),
    ),
    (
        "product",
        re.compile(
            r"gemm|nvjet|cutlass|cublas|matmul|triton_tem.*mm|_mm_|Cijk_|gemv|splitK|xmma|wvSplitK|ck_tile.*Gemm|dot_kernel",
            re.IGNORECASE,
        ),
    ),
    (
        "reduction",
        re.compile(r"reduce|softmax|layer_?norm|rms_?norm|batch_?norm|_norm|cunn_|triton_(red|per)", re.IGNORECASE),
    ),
    (
        "elementwise",
        re.compile(
            r"elementwise|triton_poi|pointwise|copy|CatArray|fill|dropout|index|gather|scatter|cat_|embedding",
            re.IGNORECASE,
        ),
    ),
)

_MATRIX_UNITS = re.compile(
    # Volta to Ampere by the shape of their instruction, Hopper and Blackwell by their instruction's name
    r"h884|s884|h1688|s1688|i8816|s8816|16816|16832|168128|hmma|imma|qmma|dmma|wgmma|gmma|utcmma|tcgen05|tensorop"
    r"|tensor_op|nvjet|tf32|bf16gemm|fp16gemm|fp8|e4m3|e5m2"
    # attention kernels that exist for matrix units alone
    r"|flash_(fwd|bwd)|flash::|pytorch_flash|cudnn_generated_fort_native_sdpa|fmha_cutlass|fmha_v2"
    # AMD: Tensile kernels name the size of their matrix instruction, composable kernels their type
    r"|_MI\d+x\d+|mfma|xdlops|ck_tile|fmha_(fwd|bwd)|wmma",
    re.IGNORECASE,
)
_PLAIN_UNITS = re.compile(r"simt|sgemm|ffma|fp32_kernel|f32f32_f32f32|scalar_gemm|gemv|gemmk1|naive_conv|gemmSN")
_TRITON_PRODUCT = re.compile(r"triton_tem|triton_mm|_attn_(fwd|bwd)|matmul_kernel|grouped_gemm", re.IGNORECASE)
_PRODUCT_OPS = re.compile(
    r"aten::_?(?:scaled_)?(?:grouped_)?(?:mm|addmm|bmm|baddbmm|int_mm|linear|matmul|mv|addmv)(?:_out)?$"
    r"|addmm_activation|extern_kernels|_scaled_mm"
)
_ATTENTION_OPS = re.compile(r"attention|flash_attn|fmha|sdpa", re.IGNORECASE)
_CONVOLUTION_OPS = re.compile(r"conv(?!ert)", re.IGNORECASE)


def find_kind(name: str) -> Kind:
    """What a kernel does."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


def uses_matrix_units(name: str, low_precision: bool | None = None) -> bool | None:
    """Whether a kernel of products computes on matrix units; None where its name does not show it. `low_precision`:
    that its inputs are 16 bits or less, with which Triton's `dot` always does."""
    if _PLAIN_UNITS.search(name) and not re.search(r"tensorop|16816|1688|884|tf32|gmma|_MI\d", name):
        return False
    if _MATRIX_UNITS.search(name):
        return True
    return True if _TRITON_PRODUCT.search(name) and low_precision else None


def find_op_kind(name: str) -> Kind | None:
    """What an operator does, for those that compute products."""
    if _PRODUCT_OPS.search(name):
        return "product"
    if _ATTENTION_OPS.search(name):
        return "attention"
    return "convolution" if _CONVOLUTION_OPS.search(name) else None
