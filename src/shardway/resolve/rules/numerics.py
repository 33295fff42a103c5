"""Rules of number formats and of the optimizer.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files or look at the machine.
"""

from __future__ import annotations

from shardway.resolve.draft import Draft


def tf32_needs_a_device_that_has_it(draft: Draft) -> None:
    if draft.get("precision.tf32") and draft.get("run.device") == "cpu":
        draft.refuse("precision.tf32", "true has no effect on a CPU", "false")


def bf16_weights_need_bf16_products(draft: Draft) -> None:
    compute = draft.get("precision.compute")
    if draft.get("precision.weights") == "bf16" and compute in ("fp32", "fp16"):
        draft.refuse(
            "precision.weights",
            f'"bf16" holds fewer digits than precision.compute = "{compute}" multiplies',
            '"fp32"; or precision.compute = "bf16" or "float8"',
        )


def cudnn_tries_kernels_where_it_runs_and_may(draft: Draft) -> None:
    if not draft.get("train.cudnn_benchmark"):
        return
    if draft.get("run.device") == "cpu":
        draft.refuse("train.cudnn_benchmark", "true has no effect on a CPU", "false")
    elif draft.get("train.deterministic"):
        draft.refuse(
            "train.cudnn_benchmark",
            "true may choose another kernel in each run, and train.deterministic is true",
            "one of the two",
        )


def nesterov_needs_momentum(draft: Draft) -> None:
    if draft.get("optim.nesterov") and draft.get("optim.momentum") == 0:
        draft.refuse("optim.nesterov", "true needs optim.momentum above 0", "false, or a momentum")


def muon_needs_matrices(draft: Draft) -> None:
    """The kernels of convolutions are not orthogonalised, nor is an output layer."""
    kind = draft.get("model.kind")
    without = kind == "convnet" or (kind == "mlp" and not draft.get("model.hidden"))
    if draft.get("optim.name") == "muon" and without and not draft.get("model.hf"):
        what = f'"muon" is for the matrices of blocks, and this model.kind = "{kind}" has none'
        draft.refuse("optim.name", what, '"adamw"')


def bf16_weights_need_an_optimizer_that_rounds_them(draft: Draft) -> None:
    """To the nearest, weights lose every update below 1/512 of themselves; torchao's rounding is each replica's own."""
    name = draft.get("optim.name")
    if draft.get("precision.weights") == "bf16" and name in ("adafactor", "adamw8bit"):
        draft.refuse(
            "optim.name",
            f'"{name}" does not round stochastically, and precision.weights = "bf16" would lose its small updates',
            '"adamw", "sgd", "muon"; or precision.weights = "fp32"',
        )


def narrow_momentum_needs_momentum(draft: Draft) -> None:
    without = draft.get("optim.name") == "sgd" and draft.get("optim.momentum") == 0
    if without and draft.get("optim.state_dtype") == "bf16":
        draft.refuse("optim.state_dtype", '"bf16": without momentum there is no state', '"fp32", or a momentum')
