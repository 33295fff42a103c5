"""Rules of the axes that split a model, and of what travels between copies."""

from __future__ import annotations

from rule_cases import CONVNET, Derives, Refuses

DERIVATIONS: list[Derives] = []

TWO, FOUR, SIX = {"ranks": 2}, {"ranks": 4}, {"ranks": 6}
LEARNED = ("model.positions=learned",)
EXPERTS = ("model.experts=6", "parallel.dp_shard=auto")
VIT = ("model.kind=vit", "data.kind=synthetic")

REFUSALS: list[Refuses] = [
    *(
        Refuses(
            "a_model_splits_along_the_axes_it_is_made_for",
            (*kind, f"parallel.{axis}=2"),
            f'  parallel.{axis} (command line): 2: model.kind = "{kind[0][11:]}" does not split along {axis} '
            f"({others})\n"
            "      allowed: 1\n"
            "      to do: split over parallel.dp_replicate or parallel.dp_shard, which take any model",
            TWO,
        )
        for kind, axis, others in (
            (("model.kind=encoder_decoder",), "tp", '"transformer" and "vit" do'),
            (("model.kind=encoder_decoder",), "cp", '"transformer" does'),
            (("model.kind=encoder_decoder",), "pp", '"transformer", "vit", "convnet" and "mlp" do'),
            (CONVNET, "tp", '"transformer" and "vit" do'),
            (("model.kind=mlp", "data.kind=synthetic"), "cp", '"transformer" does'),
            (VIT, "cp", '"transformer" does'),
        )
    ),
    Refuses(
        "a_model_splits_along_the_axes_it_is_made_for",
        (*VIT, "parallel.ep=2", "parallel.dp_shard=2"),
        '  parallel.ep (command line): 2: model.kind = "vit" does not split along ep ("transformer" does)\n'
        "      allowed: 1\n"
        "      to do: split over parallel.dp_replicate or parallel.dp_shard, which take any model",
        TWO,
    ),
    Refuses(
        "the_tensor_axis_splits_evenly",
        ("parallel.tp=3", "model.vocab=258", "model.ffn_dim=96", "model.kv_heads=1", "data.seq_len=129"),
        "  parallel.tp (command line): 3 does not divide model.heads = 4\n      allowed: a divisor of it, such as 1",
        {"ranks": 3},
    ),
    Refuses(
        "the_tensor_axis_splits_evenly",
        ("parallel.tp=4", "model.vocab=258"),
        "  parallel.tp (command line): 4 does not divide model.vocab = 258\n"
        "      allowed: a divisor of it, such as 2\n"
        "      to do: or pad the vocabulary: set model.vocab = 260",
        FOUR,
    ),
    Refuses(
        "the_tensor_axis_splits_evenly",
        ("parallel.tp=4", "model.heads=6", "model.dim=96", "model.kv_heads=1", "model.ffn_dim=90", "model.vocab=258"),
        "  parallel.tp (command line): 4 does not divide model.heads = 6, model.ffn_dim = 90 and model.vocab = 258\n"
        "      allowed: a divisor of them all, such as 2",
        FOUR,
    ),
    Refuses(
        "the_tensor_axis_splits_evenly",
        ("parallel.tp=4", "model.experts=2", "model.expert_dim=34", "model.ffn_dim=34"),
        "  parallel.tp (command line): 4 does not divide model.expert_dim = 34\n"
        "      allowed: a divisor of it, such as 2",
        FOUR,
    ),
    Refuses(
        "the_tensor_axis_splits_evenly",
        ("parallel.tp=2", "model.experts=2", "model.expert_dim=34", "model.ffn_dim=33", "model.dense_layers=1"),
        "  parallel.tp (command line): 2 does not divide model.ffn_dim = 33\n      allowed: a divisor of it, such as 1",
        TWO,
    ),
    Refuses(
        "the_tensor_axis_splits_evenly",
        (*VIT, "parallel.tp=2", "model.heads=3", "model.dim=96"),
        "  parallel.tp (command line): 2 does not divide model.heads = 3\n      allowed: a divisor of it, such as 1",
        TWO,
    ),
    Refuses(
        "key_value_heads_split_or_are_repeated",
        ("parallel.tp=4", "model.heads=12", "model.dim=96", "model.kv_heads=6"),
        "  parallel.tp (command line): 4 neither divides model.kv_heads = 6 nor is a multiple of it\n"
        "      allowed: a divisor or a multiple of 6, such as 2",
        FOUR,
    ),
    Refuses(
        "a_sequence_splits_into_equal_parts",
        ("parallel.cp=4", "data.seq_len=100"),
        "  parallel.cp (command line): 4: data.seq_len = 100 does not split into 2 x 4 equal chunks, two for "
        "each rank\n"
        "      allowed: a degree of which twice divides 100, such as 2\n"
        "      to do: or set data.seq_len = 104",
        FOUR,
    ),
    Refuses(
        "a_sequence_splits_into_equal_parts",
        ("parallel.cp=2", "data.seq_len=101", "parallel.tp=2", "parallel.tp_sequence=false"),
        "  parallel.cp (command line): 2: data.seq_len = 101 does not split into 2 x 2 equal chunks, two for "
        "each rank\n"
        "      allowed: a degree of which twice divides 101, such as 1\n"
        "      to do: or set data.seq_len = 100",
        FOUR,
    ),
    Refuses(
        "a_sequence_splits_into_equal_parts",
        ("parallel.tp=4", "data.seq_len=130"),
        "  parallel.tp (command line): 4: the 130 tokens of a sequence that a rank has do not split into 4 "
        "equal parts\n"
        "      allowed: a divisor of 130, such as 2\n"
        "      to do: or set parallel.tp_sequence = false, or set data.seq_len = 132",
        FOUR,
    ),
    Refuses(
        "a_sequence_splits_into_equal_parts",
        ("parallel.tp=4", "parallel.cp=2", "data.seq_len=132"),
        "  parallel.tp (command line): 4: the 66 tokens of a sequence that a rank has do not split into 4 equal parts\n"
        "      allowed: a divisor of 66, such as 2\n"
        "      to do: or set parallel.tp_sequence = false, or set data.seq_len = 136",
        {"ranks": 8},
    ),
    Refuses(
        "experts_split_over_the_ranks_that_share_the_states",
        (*EXPERTS, "parallel.ep=3", "parallel.cp=2"),
        "  parallel.ep (command line): 3 does not divide parallel.dp_shard 2 x parallel.cp 2 = 4\n"
        "      allowed: a divisor of it, such as 2",
        FOUR,
    ),
    Refuses(
        "experts_split_evenly",
        (*EXPERTS, "parallel.ep=4"),
        "  parallel.ep (command line): 4 does not divide model.experts = 6\n      allowed: a divisor, such as 2",
        FOUR,
    ),
    Refuses(
        "experts_split_evenly",
        ("parallel.ep=2", "parallel.dp_shard=2"),
        "  parallel.ep (command line): 2, and the model has no experts (model.experts = 0)\n      allowed: 1",
        TWO,
    ),
    *(
        Refuses(
            "gathered_weights_are_kept_over_a_part_of_the_ranks",
            ("parallel.dp_shard=auto", f"parallel.reshard_after_forward={group}"),
            f"  parallel.reshard_after_forward (command line): {group}: {told}\n"
            f'      allowed: true, false, "auto"{near}',
            {"ranks": ranks},
        )
        for group, ranks, told, near in (
            (
                4,
                6,
                "groups of 4 are no equal parts of the 6 ranks that share the states",
                ", or a divisor of 6 such as 3",
            ),
            (
                6,
                6,
                "groups of 6 are no equal parts of the 6 ranks that share the states",
                ", or a divisor of 6 such as 3",
            ),
            (2, 3, "groups of 2 are no equal parts of the 3 ranks that share the states", ""),
            (2, 1, "the states are not shared (parallel.dp_shard = 1)", ""),
        )
    ),
    *(
        Refuses(
            "only_plain_copies_compress_their_gradients",
            ("parallel.compress=fp16", *words, "train.global_batch=4"),
            f'  parallel.compress (command line): "fp16" is for runs of copies alone (dp_replicate), and '
            f"parallel.{axis} is 2\n"
            '      allowed: "none"\n'
            "      to do: choose with precision.reduce what the gradients of shards are added up in",
            TWO,
        )
        for axis, words in (
            ("dp_shard", ("parallel.dp_shard=auto",)),
            ("cp", ("parallel.cp=2",)),
            ("tp", ("parallel.tp=2",)),
            ("pp", ("parallel.pp=2", "model.tied=false")),
        )
    ),
    Refuses(
        "only_plain_copies_compress_their_gradients",
        ("parallel.compress=bf16",),
        '  parallel.compress (command line): "bf16": gloo does not add bf16 up\n'
        '      allowed: "fp16", "powersgd", "none"',
        TWO,
    ),
    Refuses(
        "only_shared_states_are_kept_in_cpu_memory",
        ("parallel.cpu_offload=true",),
        "  parallel.cpu_offload (command line): true, and the states are not shared (parallel.dp_shard = 1)\n"
        "      allowed: false, or parallel.dp_shard above 1",
        TWO,
    ),
]

LEGAL: list[tuple[tuple[str, ...], int]] = [
    (("parallel.tp=4", "model.kv_heads=1"), 4),
    (("parallel.tp=2", *LEARNED, "model.bias=true"), 2),
    (("parallel.tp=2", "model.kv_rank=16"), 2),
    ((*VIT, "parallel.tp=4"), 4),
    ((*VIT, "parallel.pp=2"), 2),
    (("parallel.cp=2", "data.seq_len=12", *LEARNED), 2),
    (("parallel.tp=2", "data.seq_len=13", "parallel.tp_sequence=false"), 2),
    (("parallel.tp=2", "model.experts=2", "model.expert_dim=32", "model.ffn_dim=33"), 2),
    (("parallel.ep=2", "parallel.cp=2", "model.experts=4"), 2),
    (("parallel.dp_shard=4", "parallel.reshard_after_forward=2"), 4),
    (("parallel.cp=2", "parallel.cpu_offload=true"), 2),
    (("parallel.compress=powersgd", "parallel.powersgd_rank=2"), 2),
    (("parallel.cp=2", "train.deterministic=true"), 2),
    (("train.deterministic=true", "parallel.dp_shard=2", "parallel.cp=2", "parallel.cp_method=gather"), 4),
]
"""Words that a number of ranks takes."""
