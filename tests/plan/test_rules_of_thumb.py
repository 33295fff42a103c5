"""Rules of thumb against the numbers that their sources print."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workshop_formulas import (
    PF_DAY,
    bubble_share,
    flops_utilisation,
    gpt_parameters,
    gpt_step_flops,
    layer_activation_bytes,
    matmul_intensity,
    recompute_days,
    ridge_intensity,
    roofline_flops,
    state_bytes,
    training_flops,
    training_tokens,
    utilised_days,
    young_interval,
)

# --- Narayanan et al., arXiv:2104.04473

VOCAB, SEQ_LEN = 51200, 2048


@pytest.mark.parametrize(
    ("layers", "hidden", "billions"),
    [
        (24, 2304, 1.7),
        (30, 3072, 3.6),
        (36, 4096, 7.5),
        (40, 6144, 18.4),
        (48, 8192, 39.1),
        (60, 10240, 76.1),
        (80, 12288, 145.6),
        (96, 16384, 310.1),
        (105, 20480, 529.6),
        (128, 25600, 1008.0),
    ],
)
def test_parameters_of_table_1(layers: int, hidden: int, billions: float) -> None:
    assert gpt_parameters(layers, hidden, VOCAB, SEQ_LEN) / 1e9 == pytest.approx(billions, abs=0.051)


@pytest.mark.parametrize(
    ("billions", "tokens", "gpus", "teraflops", "days"), [(175, 300e9, 1024, 140, 34), (1008, 450e9, 3072, 163, 84)]
)
def test_days_of_section_5_1(billions: float, tokens: float, gpus: int, teraflops: float, days: int) -> None:
    assert round(recompute_days(billions * 1e9, tokens, gpus, teraflops * 1e12)) == days


@dataclass(frozen=True)
class Gpt:
    """A model of table 2."""

    billions: float
    layers: int
    hidden: int


GPT_175B, GPT_530B = Gpt(174.6, 96, 12288), Gpt(529.6, 105, 20480)


@pytest.mark.parametrize(
    ("model", "gpus", "teraflops", "days"),
    [
        (GPT_175B, 384, 144, 90),
        (GPT_175B, 768, 88, 74),
        (GPT_175B, 1536, 44, 74),
        (GPT_530B, 640, 138, 169),
        (GPT_530B, 1120, 98, 137),
        (GPT_530B, 2240, 48, 140),
        (GPT_175B, 384, 153, 84),
        (GPT_175B, 768, 149, 43),
        (GPT_175B, 1536, 141, 23),
        (GPT_530B, 560, 171, 156),
        (GPT_530B, 1120, 167, 80),
        (GPT_530B, 2240, 159, 42),
    ],
)
def test_days_of_table_2(model: Gpt, gpus: int, teraflops: float, days: int) -> None:
    """For 300 billion tokens: by FLOPs of a step as the paper has them, by 8 T P / (n X) a little less."""
    batch, rate = 1536, gpus * teraflops * 1e12
    steps = 300e9 / (batch * SEQ_LEN)
    exact = steps * gpt_step_flops(batch, SEQ_LEN, model.layers, model.hidden, VOCAB) / rate / 86400
    assert exact == pytest.approx(days, rel=0.015)
    rule = recompute_days(model.billions * 1e9, 300e9, gpus, teraflops * 1e12)
    assert 0.965 * days < rule < days


def test_a_pipeline_idles_less_with_more_micro_batches_and_with_interleaved_stages() -> None:
    assert bubble_share(4, 8) == 3 / 8
    assert bubble_share(4, 16) == bubble_share(4, 8, stages_per_rank=2) == 3 / 16
    assert bubble_share(1, 8) == 0


# --- Brown et al., GPT-3, arXiv:2005.14165, table D.1


@pytest.mark.parametrize(
    ("millions", "billion_tokens", "active", "flops", "pf_days"),
    [
        pytest.param(60, 1000, 0.5, 1.80e20, 2.08, id="T5-Small"),
        pytest.param(220, 1000, 0.5, 6.60e20, 7.64, id="T5-Base"),
        pytest.param(770, 1000, 0.5, 2.31e21, 26.7, id="T5-Large"),
        pytest.param(3000, 1000, 0.5, 9.00e21, 104, id="T5-3B"),
        pytest.param(11000, 1000, 0.5, 3.30e22, 382, id="T5-11B"),
        pytest.param(109, 250, 1, 1.64e20, 1.89, id="BERT-Base"),
        pytest.param(355, 250, 1, 5.33e20, 6.16, id="BERT-Large"),
        pytest.param(125, 2000, 1, 1.50e21, 17.4, id="RoBERTa-Base"),
        pytest.param(355, 2000, 1, 4.26e21, 49.3, id="RoBERTa-Large"),
        pytest.param(125, 300, 1, 2.25e20, 2.60, id="GPT-3 Small"),
        pytest.param(356, 300, 1, 6.41e20, 7.42, id="GPT-3 Medium"),
        pytest.param(760, 300, 1, 1.37e21, 15.8, id="GPT-3 Large"),
        pytest.param(1320, 300, 1, 2.38e21, 27.5, id="GPT-3 XL"),
        pytest.param(2650, 300, 1, 4.77e21, 55.2, id="GPT-3 2.7B"),
        pytest.param(6660, 300, 1, 1.20e22, 139, id="GPT-3 6.7B"),
        pytest.param(12850, 300, 1, 2.31e22, 268, id="GPT-3 13B"),
        pytest.param(174600, 300, 1, 3.14e23, 3640, id="GPT-3 175B"),
    ],
)
def test_compute_of_published_models(
    millions: float, billion_tokens: float, active: float, flops: float, pf_days: float
) -> None:
    """To the three figures that are printed."""
    found = training_flops(millions * 1e6, billion_tokens * 1e9, active)
    assert found == pytest.approx(flops, rel=0.004)
    assert found / PF_DAY == pytest.approx(pf_days, rel=0.004)


def test_tokens_of_chinchilla() -> None:
    """70 B parameters and 1.4 T tokens (Hoffmann et al., arXiv:2203.15556, table 4)."""
    assert training_tokens(70e9) == 1.4e12


# --- whole runs


@dataclass(frozen=True)
class WholeRun:
    """A published run: what it says of itself. `goodput` is the share of the days that went into training, if said."""

    billions: float
    tokens: float
    gpus: int
    peak_teraflops: float
    mfu: float
    days: float
    goodput: float = 1.0

    def days_by_rule(self) -> float:
        """Days that the rule gives for its MFU."""
        ideal = utilised_days(self.billions * 1e9, self.tokens, self.gpus, self.peak_teraflops * 1e12, self.mfu)
        return ideal / self.goodput


@pytest.mark.parametrize(
    "run",
    [
        # MFU: PaLM, arXiv:2204.02311, table 3; chips and hours (920): Rae et al., arXiv:2112.11446.
        pytest.param(WholeRun(280, 300e9, 4096, 123, 0.325, 38.3), id="Gopher"),
        # MFU: PaLM, table 3; GPUs and days: Patterson et al., arXiv:2104.10350, table 4.
        pytest.param(WholeRun(175, 300e9, 10_000, 125, 0.213, 14.8), id="GPT-3"),
        # arXiv:2407.21783, table 4 (16,384 GPUs, 8,192 tokens) and section 3.3.4 (over 90 % of the time effective);
        # 30.84 million GPU-hours: the model card of Llama 3.1.
        pytest.param(WholeRun(405, 15.6e12, 16_384, 989, 0.41, 30.84e6 / 16_384 / 24, 0.9), id="Llama 3.1 405B"),
    ],
)
def test_days_of_runs_that_state_their_utilisation(run: WholeRun) -> None:
    assert run.days_by_rule() == pytest.approx(run.days, rel=0.15)


@pytest.mark.parametrize(
    "run",
    [
        # 1,200 hours on 6,144 chips and 336 on 3,072 (arXiv:2204.02311, appendix B): the same chip-hours on 6,144.
        pytest.param(WholeRun(540.35, 780e9, 6144, 275, 0.462, (1200 + 336 / 2) / 24), id="PaLM"),
        # Zeng et al., arXiv:2210.02414: 60 days on 96 nodes of 8 A100, which include failures.
        pytest.param(WholeRun(130, 400e9, 768, 312, 0.325, 60), id="GLM-130B"),
    ],
)
def test_runs_whose_days_hold_more_than_training(run: WholeRun) -> None:
    """A quarter to a third of their time is in no utilisation: a plan needs a goodput besides."""
    assert 0.6 < run.days_by_rule() / run.days < 0.85


def test_days_of_a_run_that_states_what_its_gpus_reach() -> None:
    """BloombergGPT (arXiv:2303.17564, section 3): 102 TFLOP/s with all activations recomputed, 53 days on 512 A100."""
    assert recompute_days(50.6e9, 569e9, 512, 102e12) == pytest.approx(53, rel=0.05)


def test_utilisation_of_palm() -> None:
    """arXiv:2204.02311, section 4.1: 238.3 thousand tokens per second, 46.2 %, and 45.7 % without attention."""
    peak = 6144 * 275e12
    whole = flops_utilisation(238.3e3, peak, 540.35e9, layers=118, attention_width=48 * 256, seq_len=2048)
    bare = flops_utilisation(238.3e3, peak, 540.35e9, layers=118, attention_width=0, seq_len=2048)
    assert (round(whole, 3), round(bare, 3)) == (0.462, 0.457)


# --- bytes


def test_a_billion_parameters() -> None:
    """16 bytes each with AdamW: 14.90 GiB before a single activation."""
    assert round(state_bytes(1e9) / 2**30, 2) == 14.90


@pytest.mark.parametrize(("optimizer", "each"), [("adamw", 16), ("adamw8bit", 10), ("adafactor", 12), ("sgd", 12)])
def test_bytes_of_a_parameter(optimizer: str, each: int) -> None:
    assert state_bytes(1, optimizer) == each


def test_weights_of_175_billion_parameters() -> None:
    """In fp32, as workshops print them: 651.92 GiB, cut off rather than rounded."""
    assert math.floor(100 * 4 * 175e9 / 2**30) / 100 == 651.92


def test_scores_of_attention_are_most_of_what_gpt_3_keeps() -> None:
    """Korthikanti et al., arXiv:2205.05198, section 5: 5 a s / h is 80 for GPT-3 and 64 for MT-NLG, against 34."""
    for heads, hidden, scores in ((96, 12288, 80), (128, 20480, 64)):
        assert layer_activation_bytes(2048, 1, hidden, heads) / (2048 * hidden) == 34 + scores


# --- rates


def test_ridge_of_an_a100() -> None:
    """Of an A100 SXM 80 GB, 312 TFLOP/s in bf16 and 2,039 GB/s: 153. Workshops that say 143 took GiB for GB."""
    assert round(ridge_intensity(312e12, 2039e9)) == 153
    assert round(ridge_intensity(312e12, 2039 * 2**30)) == 143


def test_intensities_of_the_guide() -> None:
    """NVIDIA, Matrix Multiplication Background User's Guide, section 2: on a V100 the smaller is bound by memory."""
    assert round(ridge_intensity(125e12, 900e9), 1) == 138.9
    assert round(matmul_intensity(8192, 128, 8192), 1) == 124.1
    assert math.floor(matmul_intensity(8192, 8192, 8192)) == 2730


@given(st.floats(1e-3, 1e6), st.floats(1e9, 1e16), st.floats(1e6, 1e13))
def test_a_kernel_reaches_the_peak_from_the_ridge_on(intensity: float, peak: float, bandwidth: float) -> None:
    reached = roofline_flops(intensity, peak, bandwidth)
    assert (reached == peak) == (intensity * bandwidth >= peak)
    assert reached <= peak
    assert roofline_flops(2 * ridge_intensity(peak, bandwidth), peak, bandwidth) == peak


@given(st.floats(1, 1e4), st.floats(1, 1e8))
def test_half_of_what_young_loses_goes_into_saves(save: float, mtbf: float) -> None:
    """At his optimum saves, save / interval, cost as much as lost work, interval / 2 M (Young 1974)."""
    interval = young_interval(save, mtbf)
    assert save / interval == pytest.approx(interval / (2 * mtbf))
