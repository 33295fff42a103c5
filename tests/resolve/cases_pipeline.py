"""Rules of the pipeline axis: stages, schedules, micro-batches."""

from __future__ import annotations

from rule_cases import CONVNET, PIPELINE, Derives, Refuses

TWO, FOUR = {"ranks": 2}, {"ranks": 4}
FOUR_STAGES = ("parallel.pp=4", "model.tied=false")
INTERLEAVED = (*PIPELINE, "parallel.pp_schedule=interleaved")
V = (*PIPELINE, "parallel.pp_schedule=zbv")
MLP = ("model.kind=mlp", "data.kind=synthetic")
ROUTED = (*PIPELINE, "model.experts=4")

DERIVATIONS: list[Derives] = [
    Derives("stages_follow_the_schedule", (), "parallel.pp_stages_per_rank", 1, "no pipeline"),
    *(
        Derives(
            "stages_follow_the_schedule",
            (*PIPELINE, f"parallel.pp_schedule={schedule}"),
            "parallel.pp_stages_per_rank",
            stages,
            f'pp_schedule = "{schedule}"',
            TWO,
        )
        for schedule, stages in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2), ("zbv", 2))
    ),
    Derives("micro_batches_fill_the_pipeline", (), "parallel.pp_micro_batches", 1, "no pipeline"),
    Derives(
        "micro_batches_fill_the_pipeline",
        (*PIPELINE, "train.global_batch=13", "train.micro_batch=2"),
        "parallel.pp_micro_batches",
        7,
        "all micro-batches of a step",
        TWO,
    ),
    *(
        Derives(
            "a_micro_batch_is_a_part_of_a_rank_share",
            (*words, f"train.global_batch={batch}"),
            "train.micro_batch",
            size,
            f"{batch} samples of a rank's share for a pipeline of 2",
            TWO,
        )
        for words, batch, size in (
            (PIPELINE, 16, 4),
            (PIPELINE, 2, 1),
            (INTERLEAVED, 17, 3),
            ((*PIPELINE, "parallel.pp_micro_batches=3"), 18, 3),
            (ROUTED, 14, 2),
            (ROUTED, 17, 1),
        )
    ),
]

REFUSALS: list[Refuses] = [
    Refuses(
        "a_pipeline_takes_samples_of_one_shape",
        (*PIPELINE, "data.group_tokens=4096"),
        "  parallel.pp (command line): 2: all micro-batches of a pipeline have one shape, and data.group_tokens = 4096 "
        "gives groups of different ones\n"
        "      allowed: 1\n"
        "      to do: split over dp_shard, dp_replicate, tp or cp, or take data.pack in place of data.group_tokens",
        TWO,
    ),
    Refuses(
        "stages_follow_the_schedule",
        (*PIPELINE, "parallel.pp_stages_per_rank=2"),
        '  parallel.pp_stages_per_rank (command line): 2: parallel.pp_schedule = "1f1b" wants 1 stage on each rank\n'
        "      allowed: 1\n"
        '      to do: or set parallel.pp_schedule = "interleaved"',
        TWO,
    ),
    Refuses(
        "stages_follow_the_schedule",
        (*V, "parallel.pp_stages_per_rank=1"),
        '  parallel.pp_stages_per_rank (command line): 1: parallel.pp_schedule = "zbv" wants 2 stages on each rank\n'
        "      allowed: 2\n"
        '      to do: or set parallel.pp_schedule = "1f1b"',
        TWO,
    ),
    Refuses(
        "stages_follow_the_schedule",
        (*INTERLEAVED, "parallel.pp_stages_per_rank=1"),
        '  parallel.pp_stages_per_rank (command line): 1: parallel.pp_schedule = "interleaved" wants at least 2 stages '
        "on each rank\n"
        "      allowed: 2 or more\n"
        '      to do: or set parallel.pp_schedule = "1f1b"',
        TWO,
    ),
    Refuses(
        "every_rank_has_a_block",
        (*FOUR_STAGES, "model.layers=3"),
        "  parallel.pp (command line): 4 ranks of 1 stage need 4 blocks, and model.layers has 3\n"
        "      allowed: such as 2",
        FOUR,
    ),
    Refuses(
        "every_rank_has_a_block",
        (*INTERLEAVED, "model.layers=3"),
        "  parallel.pp (command line): 2 ranks of 2 stages need 4 blocks, and model.layers has 3\n"
        "      allowed: such as 1",
        TWO,
    ),
    Refuses(
        "every_rank_has_a_block",
        (*CONVNET, "parallel.pp=4"),
        "  parallel.pp (command line): 4 ranks of 1 stage need 4 blocks, and model.channels has 2\n"
        "      allowed: such as 2",
        FOUR,
    ),
    Refuses(
        "every_rank_has_a_block",
        (*MLP, "parallel.pp=2"),
        "  parallel.pp (command line): 2 ranks of 1 stage need 2 blocks, and model.hidden has 1\n"
        "      allowed: such as 1",
        TWO,
    ),
    Refuses(
        "every_rank_has_a_block",
        (*PIPELINE, "parallel.pp_split=[3, 2]"),
        "  parallel.pp_split (command line): [3, 2] deals 5 blocks out to 2 stages; model.layers has 4 for 2 stages on "
        "2 ranks, of which each needs a block\n"
        "      allowed: such as [2, 2], or [] for a balance by cost",
        TWO,
    ),
    Refuses(
        "every_rank_has_a_block",
        (*INTERLEAVED, "parallel.pp_split=[2, 2]"),
        "  parallel.pp_split (command line): [2, 2] deals 4 blocks out to 2 stages; model.layers has 4 for 4 stages on "
        "2 ranks, of which each needs a block\n"
        "      allowed: such as [1, 1, 1, 1], or [] for a balance by cost",
        TWO,
    ),
    Refuses(
        "every_rank_has_a_block",
        (*V, "parallel.pp_split=[2, 0, 0, 2]"),
        "  parallel.pp_split (command line): [2, 0, 0, 2] deals 4 blocks out to 4 stages; model.layers has 4 "
        "for 4 stages "
        "on 2 ranks, of which each needs a block\n"
        "      allowed: such as [1, 1, 1, 1], or [] for a balance by cost",
        TWO,
    ),
    Refuses(
        "every_rank_has_a_block",
        (*INTERLEAVED, "parallel.pp_split=[1]", "model.layers=2"),
        "  parallel.pp_split (command line): [1] deals 1 block out to 1 stage; model.layers has 2 for 4 stages on "
        "2 ranks, of which each needs a block\n"
        "      allowed: such as [1, 1, 0, 0]",
        TWO,
    ),
    Refuses(
        "every_rank_has_a_block",
        (*MLP, "parallel.pp=2", "parallel.pp_split=[0, 2]", "model.hidden=[8, 8]"),
        "  parallel.pp_split (command line): [0, 2] deals 2 blocks out to 2 stages; model.hidden has 2 for 2 stages on "
        "2 ranks, of which each needs a block\n"
        "      allowed: such as [1, 1], or [] for a balance by cost",
        TWO,
    ),
    Refuses(
        "tied_weights_stay_together",
        ("parallel.pp=2",),
        "  model.tied (default): true, and parallel.pp = 2 puts the embedding into the first stage and the "
        "output layer "
        "into the last\n"
        "      allowed: false, or parallel.pp = 1",
        TWO,
    ),
    *(
        Refuses(
            "a_pipeline_keeps_gathered_weights",
            (*V, "parallel.dp_shard=2", f"parallel.reshard_after_forward={wish}"),
            f"  parallel.reshard_after_forward (command line): {wish} would give wrong gradients with "
            'parallel.pp_schedule = "zbv", whose weight passes come later\n'
            '      allowed: false, "auto"\n'
            '      to do: or set parallel.pp_schedule = "1f1b"',
            FOUR,
        )
        for wish in ("true",)
    ),
    Refuses(
        "a_pipeline_keeps_gathered_weights",
        (
            *INTERLEAVED[:2],
            "parallel.pp_schedule=zero_bubble",
            "parallel.dp_shard=4",
            "parallel.reshard_after_forward=2",
        ),
        "  parallel.reshard_after_forward (command line): 2 would give wrong gradients with "
        'parallel.pp_schedule = "zero_bubble", whose weight passes come later\n'
        '      allowed: false, "auto"\n'
        '      to do: or set parallel.pp_schedule = "1f1b"',
        {"ranks": 8},
    ),
    Refuses(
        "zero_bubbles_are_not_compiled",
        (*V, "train.compile=blocks"),
        '  train.compile (command line): "blocks": a compiled backward pass runs as a whole, and '
        'parallel.pp_schedule = "zbv" splits it\n'
        '      allowed: "off"\n'
        '      to do: or set parallel.pp_schedule = "1f1b"',
        TWO,
    ),
    Refuses(
        "micro_batches_fill_the_pipeline",
        (*FOUR_STAGES, "train.micro_batch=8"),
        "  train.micro_batch (command line): 8 cuts a rank's share of 16 into 2 micro-batches, and "
        'parallel.pp_schedule = "1f1b" on 4 ranks needs at least 4\n'
        "      allowed: such as 5\n"
        '      to do: set train.global_batch = 32, or set parallel.pp_schedule = "gpipe"',
        FOUR,
    ),
    Refuses(
        "micro_batches_fill_the_pipeline",
        (*FOUR_STAGES, "train.global_batch=3"),
        "  train.micro_batch (derived: 3 samples of a rank's share for a pipeline of 4): 1 cuts a rank's "
        "share of 3 into "
        '3 micro-batches, and parallel.pp_schedule = "1f1b" on 4 ranks needs at least 4\n'
        "      allowed: none with a share of 3\n"
        '      to do: set train.global_batch = 4, or set parallel.pp_schedule = "gpipe"',
        FOUR,
    ),
    Refuses(
        "micro_batches_fill_the_pipeline",
        (*INTERLEAVED, "train.global_batch=17", "train.micro_batch=4"),
        "  train.micro_batch (command line): 4 cuts a rank's share of 17 into 5 micro-batches, and "
        'parallel.pp_schedule = "interleaved" on 2 ranks takes 5 in 2 rounds of equal length\n'
        "      allowed: such as 3\n"
        '      to do: set train.global_batch = 8, or set parallel.pp_schedule = "gpipe"',
        TWO,
    ),
    Refuses(
        "micro_batches_fill_the_pipeline",
        (*PIPELINE, "train.micro_batch=2", "parallel.pp_micro_batches=3"),
        "  parallel.pp_micro_batches (command line): 3 does not divide the 8 micro-batches of a step\n"
        "      allowed: a divisor of 8, such as 2",
        TWO,
    ),
    Refuses(
        "micro_batches_fill_the_pipeline",
        (*PIPELINE, "train.micro_batch=2", "parallel.pp_micro_batches=1"),
        '  parallel.pp_micro_batches (command line): 1 to a pass, and parallel.pp_schedule = "1f1b" on 2 '
        "ranks needs at "
        "least 2\n"
        "      allowed: a divisor of 8, such as 2",
        TWO,
    ),
    Refuses(
        "micro_batches_fill_the_pipeline",
        (*PIPELINE, "train.micro_batch=16", "parallel.pp_micro_batches=2"),
        "  parallel.pp_micro_batches (command line): 2 does not divide the 1 micro-batch of a step\n"
        '      allowed: "auto"',
        TWO,
    ),
    Refuses(
        "what_counts_samples_gets_whole_micro_batches",
        (*ROUTED, "train.global_batch=14", "train.micro_batch=4"),
        "  train.global_batch (command line): 14 samples do not fill micro-batches of 4 on 1 data-parallel rank, and a "
        "pipeline fills them up with samples that its routers would count\n"
        "      allowed: a multiple of 4, such as 16\n"
        "      to do: or set train.micro_batch = 2",
        TWO,
    ),
    Refuses(
        "what_counts_samples_gets_whole_micro_batches",
        (*ROUTED, "train.global_batch=[[0, 8], [99, 16]]", "train.micro_batch=4"),
        "  train.global_batch (command line): 8 samples do not fill passes of 4 micro-batches of 4 on 1 data-parallel "
        "rank, and a pipeline fills them up with samples that its routers would count\n"
        "      allowed: a multiple of 16, such as 16\n"
        "      to do: or set parallel.pp_micro_batches, so that a pass takes no more than the smallest step has",
        TWO,
    ),
    Refuses(
        "what_counts_samples_gets_whole_micro_batches",
        (*CONVNET, "parallel.pp=2", "parallel.dp_replicate=2", "train.global_batch=15", "train.micro_batch=2"),
        "  train.global_batch (command line): 15 samples do not fill micro-batches of 2 on 2 data-parallel "
        "ranks, and a "
        "pipeline fills them up with samples that its batch norms would count\n"
        "      allowed: a multiple of 4, such as 16",
        FOUR,
    ),
]

LEGAL: list[tuple[tuple[str, ...], int]] = [
    ((*PIPELINE, "parallel.pp_split=[0, 4]"), 2),
    ((*INTERLEAVED, "parallel.pp_split=[2, 0, 0, 2]"), 2),
    ((*INTERLEAVED, "parallel.pp_split=[1, 1, 0, 0]", "model.layers=2"), 2),
    ((*INTERLEAVED, "train.global_batch=3", "train.micro_batch=3"), 2),
    ((*V, "train.micro_batch=16"), 2),
    ((*PIPELINE, "parallel.pp_schedule=gpipe", "train.micro_batch=16"), 2),
    ((*PIPELINE, "train.global_batch=13", "train.micro_batch=2"), 2),
    ((*ROUTED, "model.balance=none", "train.global_batch=13", "train.micro_batch=2"), 2),
    ((*ROUTED, "train.global_batch=[[0, 8], [99, 16]]", "train.micro_batch=4", "parallel.pp_micro_batches=2"), 2),
    ((*PIPELINE, "train.global_batch=[[0, 7], [99, 16]]", "train.micro_batch=4"), 2),
    ((*V, "parallel.reshard_after_forward=true"), 2),
    ((*PIPELINE, "parallel.dp_shard=2", "parallel.reshard_after_forward=true"), 4),
    ((*PIPELINE, "train.compile=blocks"), 2),
    ((*V, "precision.compute=float8", "precision.float8_emulate=true"), 2),
    ((*CONVNET, "parallel.pp=2"), 2),
    ((*MLP, "parallel.pp=2", "model.hidden=[8, 8]"), 2),
]
"""Words that a number of ranks takes."""
