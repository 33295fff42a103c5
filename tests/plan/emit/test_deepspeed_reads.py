"""DeepSpeed's own configuration class reads what is written for it, where DeepSpeed is installed."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed_reading import load_with_deepspeed
from emit_cases import GOLDEN_CASES, PREDICTION, cases
from emit_reading import texts_of
from hypothesis import given

from shardway.plan.case import Case
from shardway.plan.export.common import Emitted, emit


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> Iterator[None]:
    """Imported, and silent about what it reads."""
    pytest.importorskip("deepspeed.runtime.config")
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


def written(case: Case) -> tuple[dict[str, Any], Emitted]:
    emitted = emit("deepspeed", case, PREDICTION)
    return json.loads(texts_of(emitted)["ds_config.json"]), emitted


def check(config: Any, case: Case) -> None:
    zero = config.zero_config
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (
        case.micro_batch,
        case.micro_batches,
    )
    assert int(zero.stage) == case.zero
    assert (zero.offload_optimizer is not None) == (case.offload and case.zero > 0)
    assert (zero.offload_param is not None) == (case.offload and case.zero == 3)
    assert config.float16_config.enabled == (case.precision == "fp16")
    assert config.bfloat16_config.enabled == (case.value_bytes == 2 and case.precision != "fp16")
    assert config.tensor_parallel_config.autotp_size in (0, case.degrees.tp)
    known = ("adamw", "muon")
    assert config.optimizer_name in known or hasattr(torch.optim, config.optimizer_name)
    if case.zero == 3 and case.reshard:
        assert (zero.max_reuse_distance, zero.param_persistence_threshold) == (0, 0)


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_a_plan_is_read_as_it_was_meant(name: str) -> None:
    case = GOLDEN_CASES[name]
    said, _ = written(case)
    config = load_with_deepspeed(said, case, case.degrees.world)
    check(config, case)
    assert config.train_batch_size == case.global_batch


@given(cases())
def test_any_plan_is_read_or_its_refusal_is_told(case: Case) -> None:
    said, emitted = written(case)
    try:
        config = load_with_deepspeed(said, case, case.degrees.world)
    except ValueError as error:
        assert re.search(r"AutoEP|expert_tensor_parallel_size|mutually exclusive", str(error))
        assert any(re.search("^DeepSpeed refuses .*(AutoEP|experts that are split)", line) for line in emitted.notes)
    else:
        check(config, case)


@given(cases())
def test_twice_as_many_ranks_are_refused(case: Case) -> None:
    """Wherever the file has the batch of a step."""
    said, _ = written(case)
    if "train_batch_size" in said and "sequence_parallel_size" not in said and case.degrees.ep == 1:
        with pytest.raises(AssertionError, match="train_batch_size is not equal"):
            load_with_deepspeed(said, case, 2 * case.degrees.world)
