"""Rules of number formats, of the optimizer and of the compiler."""

from __future__ import annotations

from rule_cases import CONVNET, EMULATED, GPU, PIPELINE, Derives, Refuses

DERIVATIONS: list[Derives] = [
    Derives(
        "what_nodes_save_has_a_folder",
        ("checkpoint.local_every=10 steps",),
        "checkpoint.local_dir",
        "$TMPDIR",
        "node.local_disk of the site laptop",
        {"local_disk": "$TMPDIR"},
    ),
    Derives(
        "float8_gathers_what_has_one_scale",
        (*EMULATED, "parallel.dp_shard=2"),
        "precision.float8_all_gather",
        True,
        "one scale a weight",
        {"ranks": 2},
    ),
    Derives(
        "float8_gathers_what_has_one_scale",
        EMULATED,
        "precision.float8_all_gather",
        False,
        "weights are not sharded",
    ),
    Derives(
        "what_is_measured_at_the_start_says_so",
        ("train.tune=auto",),
        "train.micro_batch",
        16,
        "16 samples / 1 data-parallel ranks; measured at the start (train.tune)",
    ),
]

REFUSALS: list[Refuses] = [
    Refuses(
        "a_model_that_is_measured_can_be_built_again",
        ("train.tune=auto",),
        '  train.tune (command line): "auto": a script builds its model itself, and measuring needs one for each try\n'
        '      allowed: "off"\n'
        "      to do: set train.compile and train.micro_batch in turn, and compare: `shardway compare RUN RUN`",
        {"own_model": True},
    ),
    Refuses(
        "what_nodes_save_has_a_folder",
        ("checkpoint.local_every=10 steps",),
        "  checkpoint.local_every (command line): each node saves on its own disk, and the site laptop says of no "
        "folder there (node.local_disk)\n"
        '      allowed: "off"; or a checkpoint.local_dir such as "$TMPDIR" or "/local/scratch"',
    ),
    Refuses(
        "what_nodes_save_has_a_folder",
        ("checkpoint.local_every=10 steps", "checkpoint.local_dir=scratch"),
        '  checkpoint.local_dir (command line): "scratch" is no whole path, and each node would look for it elsewhere\n'
        '      allowed: a string that begins with /, ~ or $, such as "$TMPDIR"',
    ),
    Refuses(
        "the_best_is_found_by_validating",
        ("checkpoint.keep_best=2", "train.validate_every=off"),
        "  checkpoint.keep_best (command line): 2 is of steps with the best validation, and train.validate_every = "
        '"off" (command line) makes none\n'
        "      allowed: 0\n"
        '      to do: set train.validate_every, such as "100 steps"',
    ),
    Refuses(
        "the_best_is_found_by_validating",
        ("train.patience=3", "data.validation_fraction=0.0"),
        '  train.patience (command line): 3 is a number of validations, and train.validate_every = "off" (derived: '
        "nothing is held out) makes none\n"
        '      allowed: "off"\n'
        '      to do: set train.validate_every, such as "100 steps"',
    ),
    Refuses(
        "a_probe_repeats_what_has_one_result",
        ("run.device=cuda", "guard.probe_every=500 steps"),
        "  guard.probe_every (command line): two runs of the same passes are compared bit by bit, and on a GPU "
        "operations have one result only with train.deterministic = true\n"
        '      allowed: "off"; or train.deterministic = true',
        GPU,
    ),
    Refuses(
        "a_run_goes_back_before_spikes_that_are_looked_for",
        ("guard.on_spike=roll_back",),
        '  guard.on_spike (command line): "roll_back", and guard.spike = "off" looks for no spike\n'
        '      allowed: "warn"; or a guard.spike such as 8.0',
    ),
    Refuses(
        "a_run_goes_back_to_what_was_saved",
        ("guard.spike=8.0", "guard.on_spike=roll_back", "checkpoint.every=off"),
        '  guard.on_spike (command line): "roll_back" goes back to a checkpoint, and checkpoint.every = "off" makes '
        'none\n      allowed: "warn"; or a checkpoint.every such as "200 steps"',
    ),
    Refuses(
        "a_spike_that_is_left_out_is_left_out_whole",
        ("guard.spike=8.0", "guard.on_spike=roll_back", "guard.max_left_out=2"),
        "  guard.max_left_out (command line): 2 batches do not reach back to the beginning of a spike of "
        "guard.spike_steps = 3 steps\n      allowed: at least 3",
    ),
    Refuses(
        "a_key_of_another_kind_is_not_ignored",
        ("guard.spike=8.0", "guard.max_roll_backs=2"),
        '  guard.max_roll_backs (command line): has no effect with guard.on_spike = "warn"\n'
        "      allowed: only with guard.on_spike = roll_back\n"
        "      to do: remove the key",
    ),
    Refuses(
        "tf32_needs_a_device_that_has_it",
        ("precision.tf32=true",),
        "  precision.tf32 (command line): true has no effect on a CPU\n      allowed: false",
    ),
    *(
        Refuses(
            "bf16_weights_need_bf16_products",
            (f"precision.compute={compute}", "precision.weights=bf16"),
            f'  precision.weights (command line): "bf16" holds fewer digits than precision.compute = "{compute}" '
            "multiplies\n"
            '      allowed: "fp32"; or precision.compute = "bf16" or "float8"',
        )
        for compute in ("fp32", "fp16")
    ),
    Refuses(
        "cudnn_tries_kernels_where_it_runs_and_may",
        ("train.cudnn_benchmark=true",),
        "  train.cudnn_benchmark (command line): true has no effect on a CPU\n      allowed: false",
    ),
    Refuses(
        "cudnn_tries_kernels_where_it_runs_and_may",
        ("train.cudnn_benchmark=true", "train.deterministic=true"),
        "  train.cudnn_benchmark (command line): true may choose another kernel in each run, and train.deterministic "
        "is true\n"
        "      allowed: one of the two",
        GPU,
    ),
    Refuses(
        "nesterov_needs_momentum",
        ("optim.name=sgd", "optim.nesterov=true", "optim.momentum=0"),
        "  optim.nesterov (command line): true needs optim.momentum above 0\n      allowed: false, or a momentum",
    ),
    Refuses(
        "muon_needs_matrices",
        (*CONVNET, "optim.name=muon"),
        '  optim.name (command line): "muon" is for the matrices of blocks, and this model.kind = "convnet" has none\n'
        '      allowed: "adamw"',
    ),
    Refuses(
        "muon_needs_matrices",
        ("model.kind=mlp", "model.hidden=[]", "data.kind=synthetic", "optim.name=muon"),
        '  optim.name (command line): "muon" is for the matrices of blocks, and this model.kind = "mlp" has none\n'
        '      allowed: "adamw"',
    ),
    Refuses(
        "bf16_weights_need_an_optimizer_that_rounds_them",
        ("optim.name=adafactor", "precision.compute=bf16", "precision.weights=bf16"),
        '  optim.name (command line): "adafactor" does not round stochastically, and precision.weights = "bf16" would '
        'lose its small updates\n      allowed: "adamw", "sgd", "muon"; or precision.weights = "fp32"',
    ),
    Refuses(
        "narrow_momentum_needs_momentum",
        ("optim.name=sgd", "optim.momentum=0", "optim.state_dtype=bf16"),
        '  optim.state_dtype (command line): "bf16": without momentum there is no state\n'
        '      allowed: "fp32", or a momentum',
    ),
    Refuses(
        "float8_needs_a_device_that_has_it",
        ("precision.compute=float8",),
        '  precision.compute (command line): "float8": a CPU has no such matrix products\n'
        '      allowed: "fp32", "bf16", "fp16"; or precision.float8_emulate = true, which is slow and for tests',
    ),
    Refuses(
        "float8_needs_a_device_that_has_it",
        (*EMULATED, "precision.float8_recipe=blockwise"),
        '  precision.float8_recipe (command line): "blockwise" is not emulated\n      allowed: any other recipe',
    ),
    Refuses(
        "transformer_engine_knows_other_recipes",
        ("precision.compute=float8", "precision.float8_engine=transformer_engine", "precision.float8_recipe=rowwise"),
        '  precision.float8_recipe (command line): "rowwise" is not for precision.float8_engine = '
        '"transformer_engine"\n'
        '      allowed: "tensorwise", "mxfp8", "blockwise"\n'
        '      to do: change it, or set float8_engine = "torchao"',
        GPU,
    ),
    Refuses(
        "transformer_engine_knows_other_recipes",
        (*EMULATED, "precision.float8_engine=transformer_engine"),
        '  precision.float8_emulate (command line): true is not for precision.float8_engine = "transformer_engine"\n'
        "      allowed: false\n"
        '      to do: change it, or set float8_engine = "torchao"',
        GPU,
    ),
    *(
        Refuses(
            "float8_gathers_what_has_one_scale",
            (*EMULATED, "precision.float8_all_gather=true", "parallel.dp_shard=auto", *words),
            f"  precision.float8_all_gather (command line): true, but {reason}\n      allowed: false",
            {"ranks": ranks},
        )
        for words, reason, ranks in (
            ((), "weights are not sharded", 1),
            (
                ("precision.float8_recipe=rowwise",),
                'only torchao\'s recipe "tensorwise" does, and this is torchao\'s "rowwise"',
                4,
            ),
            (
                ("parallel.reshard_after_forward=2",),
                "parallel.reshard_after_forward = 2 gathers within smaller groups",
                4,
            ),
        )
    ),
    Refuses(
        "float8_multiplies_whole_groups_of_tokens",
        ("precision.compute=float8", "data.seq_len=120"),
        "  data.seq_len (command line): 120 tokens are no whole groups of 16, as float8 products take them\n"
        "      allowed: a multiple of 16",
        GPU,
    ),
    Refuses(
        "a_pipeline_compiles_blocks",
        (*PIPELINE, "train.compile=model"),
        '  train.compile (command line): "model" does not go with parallel.pp = 2\n      allowed: "blocks" or "off"',
        {"ranks": 2},
    ),
    Refuses(
        "a_memory_budget_needs_the_compiler",
        ("recompute.mode=budget", "train.compile=off"),
        '  recompute.mode (command line): "budget": it is the compiler that chooses, and train.compile is "off"\n'
        '      allowed: "none", "selective", "full"; or train.compile = "blocks"',
    ),
]
