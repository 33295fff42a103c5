"""What layers keep for the way back: the formulas of Korthikanti et al. (arXiv:2205.05198), and what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plan_cases import case_of, cases, gpt_layer, model_of
from shardway.plan.case import Case
from shardway.plan.memory import estimate_memory, kept_bytes, load_overheads, whole_bytes

BRIEF = settings.get_profile("brief")


def megatron(layers: int = 4, engine: str = "megatron-2021", **changes: Any) -> Case:
    """What the paper counts: 16 bits, attention with its scores in memory, dropout."""
    values = {"precision": "fp16", "attention": "plain", "dropout": True, "seq_len": 2048, "sequence": False}
    return case_of(model_of(gpt_layer(2048, 16), layers), engine, **{**values, **changes})


def kept(case: Case) -> float:
    """Bytes of one micro-batch in one layer, in units of sequence x batch x hidden."""
    return kept_bytes(case.model.layers[0], case) / case.model.hidden


SCORES = 5 * 16 * 2048 / 2048
"""5 a s / h."""


@pytest.mark.parametrize("engine", ["megatron-2021", "megatron"])
@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize(
    ("changes", "formula"),
    [
        ({}, lambda t: 10 + 24 / t + SCORES / t),
        ({"sequence": True}, lambda t: 34 / t + SCORES / t),
        ({"recompute": "selective"}, lambda t: 10 + 24 / t),
        ({"sequence": True, "recompute": "selective"}, lambda t: 34 / t),
        ({"recompute": "full"}, lambda t: 2),
    ],
    ids=["tensor", "tensor, sequence", "tensor, selective", "tensor, sequence, selective", "full"],
)
def test_table_2_of_korthikanti(changes: dict[str, Any], formula: Any, t: int, engine: str) -> None:
    assert kept(megatron(engine=engine, tp=t, **changes)) == pytest.approx(formula(t))


def test_flash_keeps_no_scores() -> None:
    """It keeps two sums per query and head instead (arXiv:2205.14135, section 3.1)."""
    case = megatron(attention="flash2")
    assert kept(case) == pytest.approx(34 + 4 * 16 / 2048)


@pytest.mark.parametrize("p", [2, 4])
def test_the_first_stage_of_1f1b_keeps_as_many_layers_as_the_model_has(p: int) -> None:
    """Section 4.2.3, equation 5: s b h L / t (34 + 5 a s / h); that of interleaving is 1 + (p - 1) / (p v) times it."""
    case = megatron(layers=8, pp=p, tp=2, sequence=True)
    first = estimate_memory(case, load_overheads())[0]
    embedding = p * case.tokens * case.model.hidden / 2
    whole = 8 * (34 + SCORES) / 2 * case.tokens * case.model.hidden
    assert first.activations == pytest.approx(whole + embedding)
    interleaved = replace(case, schedule="interleaved", stages_per_rank=2)
    grown = estimate_memory(interleaved, load_overheads())[0]
    assert grown.activations / first.activations == pytest.approx(1 + (p - 1) / (p * 2))


def test_the_ends_are_counted_as_in_section_4_3() -> None:
    """Dropout of the embedding s b h; the last norm 2 s b h, the output layer's input 2 s b h, all over t."""
    case = megatron(tp=2, sequence=True, layers=1)
    (stage,) = estimate_memory(case, load_overheads())
    ends = stage.activations / (case.tokens * case.model.hidden) - kept(case)
    assert ends == pytest.approx((1 + 2 + 2) / 2)


# --- what holds for any engine


SUMS = case_of(model_of(gpt_layer(512, 8), 4), "shardway", tp=8, sequence=False, precision="fp32", recompute="none")
"""Results of products, before and after their sum over ranks, are more here than what computing again saves."""


@BRIEF
@given(cases(recompute="none"))
@example(SUMS)
def test_more_recompute_never_keeps_more(case: Case) -> None:
    """But for sums over the tensor axis: "products" keeps the last products' results before and after they are summed,
    and the backward pass needs neither (measured: `test_kept_products_may_be_more_than_all_that_is_needed`)."""

    def keep(mode: str) -> float:
        return kept_bytes(case.model.layers[0], replace(case, recompute=mode))

    summed = case.engine.whole_regions and case.degrees.tp > 1 and not case.sequence
    sums = 2 * case.model.hidden * case.value_bytes if summed else 0
    assert keep("full") <= keep("operators") <= keep("products") <= keep("none") + sums
    assert keep("full") <= keep("selective") <= keep("none")


def test_products_keep_their_sums_too() -> None:
    kept_products, kept_all = (
        kept_bytes(SUMS.model.layers[0], replace(SUMS, recompute=mode)) for mode in ("products", "none")
    )
    assert (kept_products, kept_all) == (12_292, 11_268)


@BRIEF
@given(cases(recompute="none", tp=1), st.sampled_from([2, 8]))
def test_more_tensor_ranks_never_keep_more(case: Case, tp: int) -> None:
    split = replace(case, degrees=replace(case.degrees, tp=tp))
    assert kept_bytes(case.model.layers[0], split) <= kept_bytes(case.model.layers[0], case)
    sequence = replace(split, sequence=True)
    assert kept_bytes(case.model.layers[0], sequence) <= kept_bytes(
        case.model.layers[0], replace(split, sequence=False)
    )


@BRIEF
@given(cases())
def test_what_is_kept_grows_with_the_micro_batch_alone(case: Case) -> None:
    """A token keeps as many bytes whatever batch it is in."""
    more = replace(case, micro_batch=2 * case.micro_batch, global_batch=2 * case.global_batch)
    assert kept_bytes(case.model.layers[0], more) == kept_bytes(case.model.layers[0], case)


@BRIEF
@given(cases(recompute="none"))
def test_nothing_is_kept_that_a_layer_does_not_have(case: Case) -> None:
    """Without recompute all is there already, so that computing a layer again needs nothing more."""
    layer = case.model.layers[0]
    assert kept_bytes(layer, case) == pytest.approx(whole_bytes(layer, case))


@BRIEF
@given(cases(recompute="none", engine="megatron"))
def test_sixteen_bits_halve_it_but_for_masks_and_statistics(case: Case) -> None:
    wide, narrow = (
        kept_bytes(case.model.layers[0], replace(case, precision=each, dropout=False)) for each in ("fp32", "bf16")
    )
    assert wide / 2 <= narrow <= 0.6 * wide
