"""What of a run file reaches the planner's case."""

from __future__ import annotations

import pytest
from planned_runs import SMALL
from resolving import resolve_words

from shardway.errors import UserError
from shardway.plan.case import Case, Degrees, find_engine
from shardway.plan.huggingface import find_named
from shardway.resolve.planned import ASSUMED_VOCAB, case_of, list_assumptions, shape_of_run


def case_for(*words: str, ranks: int = 1) -> Case:
    values = resolve_words(*SMALL, *words, ranks=ranks).values
    return case_of(values, shape_of_run(values))


def test_every_part_of_a_layout() -> None:
    words = ("parallel.dp_shard=2", "parallel.cp=2", "parallel.tp=2", "parallel.pp=2", "parallel.dp_replicate=2")
    case = case_for(
        *words,
        "parallel.pp_schedule=interleaved",
        "train.global_batch=32",
        "train.micro_batch=2",
        "recompute.mode=full",
        "optim.name=adamw8bit",
        "train.compile=blocks",
        "model.dropout=0.1",
        ranks=32,
    )
    assert case.degrees == Degrees(dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=2)
    assert (case.seq_len, case.global_batch, case.micro_batch, case.micro_batches) == (1024, 32, 2, 4)
    assert (case.schedule, case.stages_per_rank, case.zero, case.reshard) == ("interleaved", 2, 3, False)
    assert (case.recompute, case.optimizer, case.precision) == ("full", "adamw8bit", "bf16")
    assert (case.compiled, case.dropout, case.sequence, case.offload) == (True, True, True, False)
    assert (case.engine, case.model.depth, case.model.vocab) == (find_engine("shardway"), 8, 32768)


@pytest.mark.parametrize(
    ("words", "zero", "reshard"),
    [
        ((), 0, True),
        (("parallel.dp_shard=2",), 3, True),
        (("parallel.cp=2",), 3, True),
        (("parallel.dp_shard=2", "parallel.reshard_after_forward=false"), 3, False),
        (("train.engine=deepspeed", "deepspeed.stage=1", "train.micro_batch=8"), 1, True),
        (("train.engine=deepspeed", "deepspeed.stage=3"), 3, True),
    ],
)
def test_what_ranks_share(words: tuple[str, ...], zero: int, reshard: bool) -> None:
    case = case_for(*words, ranks=2)
    assert (case.zero, case.reshard) == (zero, reshard)
    assert case.degrees.shards == (1 if zero == 0 else 2)
    assert case.engine.name == ("deepspeed" if "train.engine=deepspeed" in words else "shardway")


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        (("precision.compute=fp32",), "fp32"),
        (("precision.compute=fp32", "precision.tf32=true"), "tf32"),
        (("precision.compute=fp16",), "fp16"),
        (("precision.compute=float8",), "fp8"),
        (("precision.compute=float8", "precision.float8_recipe=mxfp8"), "mxfp8"),
    ],
)
def test_formats_of_products(words: tuple[str, ...], precision: str) -> None:
    values = resolve_words(*SMALL, *words, accelerators=1).values
    assert case_of(values, shape_of_run(values)).precision == precision


def test_weights_in_16_bits_have_no_copy() -> None:
    narrow, wide = case_for("precision.weights=bf16"), case_for()
    assert (narrow.kept_weight_bytes, narrow.gradient_bytes) == (2, 2)
    assert (wide.kept_weight_bytes, wide.gradient_bytes) == (4, 4)


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        (("recompute.mode=selective",), "products"),
        (("recompute.mode=selective", "recompute.save_ops=[]"), "full"),
        (("recompute.mode=full", "recompute.every=2"), "none"),
        (("recompute.mode=budget", "train.compile=blocks"), "products"),
        ((), "none"),
    ],
)
def test_modes_of_recompute_never_keep_less_than_the_run(words: tuple[str, ...], mode: str) -> None:
    assert case_for(*words).recompute == mode


def test_the_tensor_axis_splits_experts_as_well() -> None:
    words = ("model.experts=4", "model.expert_dim=512", "parallel.ep=2", "parallel.dp_shard=2", "parallel.tp=2")
    assert case_for(*words, ranks=4).degrees == Degrees(dp_shard=2, tp=2, ep=2, etp=2)


def test_a_share_that_does_not_divide_is_rounded_up() -> None:
    case = case_for("train.global_batch=10", "train.micro_batch=2", ranks=4)
    assert (case.global_batch, case.micro_batches) == (16, 2)  # the largest share has 3 samples


def test_a_group_of_documents_counts_as_sequences() -> None:
    words = ("data.seq_len=256", "data.group_tokens=1000", "train.global_batch=10", "model.kind=transformer")
    case = case_for(*words, "data.kind=text", ranks=4)
    assert (case.micro_batch, case.micro_batches, case.global_batch) == (4, 3, 48)
    assert case.tokens == 1024
    values = resolve_words(*SMALL, *words, "data.kind=text").values
    assert "groups of 4 x 256 tokens, the most that data.group_tokens allows" in list_assumptions(values)


def test_offload_of_either_engine() -> None:
    assert case_for("parallel.dp_shard=2", "parallel.cpu_offload=true", ranks=2).offload
    assert case_for("train.engine=deepspeed", "deepspeed.offload_optimizer=cpu", ranks=2).offload


def test_a_vision_transformer_has_as_many_positions_as_patches() -> None:
    values = resolve_words("model.kind=vit", "data.kind=synthetic", "model.patch=7", "data.shape=[3, 28, 28]").values
    case = case_of(values, shape_of_run(values))
    assert (case.seq_len, case.model.vocab) == (17, 10)
    arrays = values.model_copy(update={"data": values.data.model_copy(update={"kind": "arrays"})})
    assert case_of(arrays, shape_of_run(arrays, sample=(3, 28, 28))) == case
    with pytest.raises(UserError, match="arrays data say the size of their images only once they are open"):
        shape_of_run(arrays)


def test_a_hugging_face_model_is_its_config() -> None:
    values = resolve_words(*SMALL).values
    named = values.model_copy(update={"model": values.model.model_copy(update={"hf": "org/name"})})
    shape = find_named("llama3-8b")
    assert shape_of_run(named, shape) is shape
    with pytest.raises(UserError, match=r'model.hf: "org/name" has no layers that the planner knows'):
        shape_of_run(named)


@pytest.mark.parametrize("kind", ["convnet", "mlp"])
def test_a_model_without_layers_is_told(kind: str) -> None:
    values = resolve_words(f"model.kind={kind}", "data.kind=synthetic").values
    with pytest.raises(UserError) as told:
        shape_of_run(values)
    assert str(told.value) == (
        "1 problem in the plan\n"
        f'  model.kind: "{kind}" has no layers that the planner knows how to split\n'
        "      allowed: a transformer that it knows"
    )


def test_what_is_not_known_is_told() -> None:
    open_vocab = resolve_words("data.tokenizer=words.json").values
    assert shape_of_run(open_vocab).vocab == ASSUMED_VOCAB
    assert list_assumptions(open_vocab) == ("a vocabulary of 32,768, since only the data say it",)
    assert list_assumptions(resolve_words(*SMALL).values) == ()
    told = list_assumptions(
        resolve_words(
            *SMALL,
            "recompute.mode=full",
            "recompute.every=2",
            "optim.state_dtype=bf16",
            "parallel.pp=2",
            "parallel.pp_split=[5, 3]",
            ranks=2,
        ).values
    )
    assert [sentence.split(",")[0] for sentence in told] == [
        "all blocks keep what they compute",
        "moments are kept in fp32",
        "stages have equal numbers of layers",
    ]
