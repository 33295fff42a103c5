"""What only the opened data can settle: the vocabulary, and lengths in steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from resolving import refusal_of, resolve_words, value_of

from shardway.batch_ramp import BatchRamp
from shardway.errors import UserError
from shardway.resolve import DataFacts, Resolved, resolve_with_data, scale_of
from shardway.units import Scale, Span

TEXT = DataFacts(samples=1000, tokens_per_sample=128, vocab=256)
WORDS = DataFacts(samples=1000, tokens_per_sample=128, vocab=32000)
IMAGES = DataFacts(samples=600, tokens_per_sample=1, vocab=None)
CONVNET = ("model.kind=convnet", "data.kind=synthetic")


def complete(*overrides: str, facts: DataFacts = TEXT) -> Resolved:
    return resolve_with_data(resolve_words(*overrides), facts)


def refusal_of_data(*overrides: str, facts: DataFacts = TEXT) -> str:
    with pytest.raises(UserError) as told:
        complete(*overrides, facts=facts)
    return str(told.value)


# --- vocabulary


def test_an_open_vocabulary_is_that_of_the_data() -> None:
    resolved = complete("data.tokenizer=words.json", facts=WORDS)
    assert value_of(resolved, "model.vocab") == 32000
    assert resolved.origins["model.vocab"] == "derived: vocabulary of the data"


def test_a_larger_vocabulary_stands() -> None:
    resolved = complete("data.tokenizer=words.json", "model.vocab=32768", facts=WORDS)
    assert value_of(resolved, "model.vocab") == 32768
    assert resolved.origins["model.vocab"] == "command line"


def test_a_vocabulary_that_is_too_small() -> None:
    assert refusal_of_data("model.vocab=100") == (
        "1 problem in the run file\n"
        "  model.vocab (command line): 100 is smaller than the vocabulary of the data, 256\n"
        "      allowed: at least 256"
    )


def test_an_open_vocabulary_has_to_split_over_the_tensor_axis() -> None:
    resolved = resolve_words("data.tokenizer=words.json", "parallel.tp=2", ranks=2)
    assert value_of(resolve_with_data(resolved, WORDS), "model.vocab") == 32000
    with pytest.raises(UserError) as told:
        resolve_with_data(resolved, replace(WORDS, vocab=50257))
    assert str(told.value) == (
        "1 problem in the run file\n"
        "  model.vocab (derived: vocabulary of the data): 50257 entries do not split into parallel.tp = 2 equal parts\n"
        "      allowed: a multiple of 2, such as 50258\n"
        "      to do: set model.vocab = 50258: it may be larger than that of the data"
    )


def test_images_have_no_vocabulary() -> None:
    assert value_of(complete(*CONVNET, facts=IMAGES), "model.vocab") == "auto"


# --- lengths


@pytest.mark.parametrize(
    ("length", "steps"),
    [("100 steps", 100), ("3 epochs", 188), ("0.5 epochs", 32), ("204800 tokens", 100), ("1601 samples", 101)],
)
def test_the_length_in_steps(length: str, steps: int) -> None:
    resolved = complete(f"train.steps={length}", "train.global_batch=16", "optim.warmup=0 steps")
    assert resolved.derived.total_steps == steps
    assert str(value_of(resolved, "train.steps")) == length


def test_the_scale_is_that_of_run_and_data() -> None:
    assert scale_of(resolve_words("train.global_batch=48"), TEXT) == Scale(BatchRamp.of(48), 128, 1000)


def test_a_run_of_no_step() -> None:
    assert refusal_of_data("train.steps=0 tokens") == (
        "1 problem in the run file\n"
        "  train.steps (command line): 0 tokens is no step at all\n"
        "      allowed: at least 1 step"
    )


def test_all_that_does_not_fit_the_data_is_told_at_once() -> None:
    told = refusal_of_data("train.steps=0 tokens", "model.vocab=100")
    assert told.splitlines()[0] == "2 problems in the run file"


# --- warm-up and decay


def test_a_default_warm_up_shrinks_with_a_short_run() -> None:
    resolved = complete("train.steps=75")
    assert resolved.derived.warmup_steps == 7
    assert value_of(resolved, "optim.warmup") == Span(7, "steps")
    assert resolved.origins["optim.warmup"] == "derived: at most a tenth of 75 steps"


def test_a_default_warm_up_stands_in_a_long_run() -> None:
    resolved = complete("train.steps=500")
    assert resolved.derived.warmup_steps == 50
    assert resolved.origins["optim.warmup"] == "default"


def test_a_warm_up_that_is_set_is_never_shrunk() -> None:
    resolved = complete("train.steps=75", "optim.warmup=75")
    assert resolved.derived.warmup_steps == 75
    assert resolved.origins["optim.warmup"] == "command line"


def test_a_warm_up_longer_than_the_run() -> None:
    assert refusal_of_data("train.steps=153600 tokens", "optim.warmup=80") == (
        "1 problem in the run file\n"
        "  optim.warmup (command line): warmup 80 steps do not fit into a run of 75 steps\n"
        "      allowed: at most 75 steps"
    )


def test_warm_up_and_decay_share_the_run() -> None:
    words = ("train.steps=100", "optim.schedule=wsd", "optim.warmup=20", "optim.decay=80")
    derived = complete(*words).derived
    assert (derived.total_steps, derived.warmup_steps, derived.decay_steps) == (100, 20, 80)


def test_warm_up_and_decay_longer_than_the_run() -> None:
    words = ("train.steps=204800 tokens", "optim.schedule=wsd", "optim.warmup=20", "optim.decay=81")
    assert refusal_of_data(*words) == (
        "1 problem in the run file\n"
        "  optim.decay (command line): warmup 20 and decay 81 steps do not fit into a run of 100 steps\n"
        "      allowed: at most 80 steps"
    )


def test_a_default_decay_shrinks_and_counts_only_where_it_is_used() -> None:
    resolved = complete("train.steps=100", "optim.schedule=wsd")
    assert (resolved.derived.warmup_steps, resolved.derived.decay_steps) == (10, 10)
    assert complete("train.steps=100").derived.decay_steps == 0


def test_nothing_else_changes() -> None:
    before = resolve_words("train.steps=153600 tokens")
    after = resolve_with_data(before, TEXT)
    changed = {dotted for dotted, origin in after.origins.items() if origin != before.origins[dotted]}
    assert changed == {"optim.warmup"}
    assert after.values.model_copy(update={"optim": before.values.optim}) == before.values
    assert before.derived.total_steps == 0


# --- lengths that need no data


def test_lengths_in_steps_are_checked_before_any_data_are_opened() -> None:
    assert refusal_of("train.steps=0") == (
        "1 problem in the run\n  train.steps (command line): 0 steps is no step at all\n      allowed: at least 1 step"
    )
    assert refusal_of("train.steps=160 samples", "train.global_batch=16", "optim.warmup=11") == (
        "1 problem in the run\n"
        "  optim.warmup (command line): warmup 11 steps do not fit into a run of 10 steps\n"
        "      allowed: at most 10 steps"
    )


def test_lengths_in_steps_are_settled_before_any_data_are_opened() -> None:
    before = resolve_words("train.steps=75")
    assert (before.derived.total_steps, before.derived.warmup_steps) == (75, 7)
    after = resolve_with_data(before, TEXT)
    assert after.values == before.values
    assert after.derived == before.derived
    assert after.origins == before.origins


@pytest.mark.parametrize("length", ["2 epochs", "1e6 tokens"])
def test_other_lengths_wait_for_the_data(length: str) -> None:
    assert resolve_words(f"train.steps={length}").derived.total_steps == 0
