"""Rules of the model and its data."""

from __future__ import annotations

from rule_cases import CONVNET, GPU, LATENT, Derives, Refuses

DERIVATIONS: list[Derives] = [
    Derives(
        "a_group_is_a_micro_batch",
        ("data.group_tokens=4096",),
        "train.micro_batch",
        1,
        "a pass takes one group of data.group_tokens",
    ),
    Derives("key_value_heads_divide_the_heads", ("model.heads=8",), "model.kv_heads", 8, "as many as heads"),
    Derives(
        "the_feed_forward_width_follows_the_activation",
        ("model.dim=128",),
        "model.ffn_dim",
        352,
        "8/3 dim, rounded up to a multiple of 32",
    ),
    Derives(
        "the_feed_forward_width_follows_the_activation",
        ("model.dim=96",),
        "model.ffn_dim",
        256,
        "8/3 dim, rounded up to a multiple of 32",
    ),
    Derives(
        "the_feed_forward_width_follows_the_activation",
        ("model.dim=128", "model.activation=gelu"),
        "model.ffn_dim",
        512,
        "4 dim",
    ),
    Derives(
        "the_feed_forward_width_follows_the_activation",
        ("model.kind=encoder_decoder", "model.dim=96"),
        "model.ffn_dim",
        384,
        "4 dim",
    ),
    Derives(
        "arrays_are_called_x_and_y",
        (*CONVNET, "data.kind=arrays", "data.path=a.npz"),
        "data.targets",
        "y",
        "the usual name in an .npz file",
    ),
    Derives(
        "what_is_only_gathered_needs_no_loader_process",
        (),
        "data.workers",
        0,
        "the samples are only gathered, which the rank does fastest",
    ),
    Derives("data_are_staged_to_a_whole_path", (), "data.stage", "off", "no node.local_disk in the site profile"),
    Derives("heads_divide_the_width", ("model.dim=96",), "model.head_dim", 24, "dim / heads"),
    Derives(
        "latent_attention_has_widths_of_its_own",
        (*LATENT, "model.head_dim=10"),
        "model.rope_head_dim",
        6,
        "half of head_dim, rounded up to even",
    ),
    Derives(
        "latent_attention_has_widths_of_its_own",
        (*LATENT, "model.head_dim=10"),
        "model.value_head_dim",
        10,
        "as wide as head_dim",
    ),
    Derives(
        "learned_positions_reach_the_end_of_a_sample",
        ("model.positions=learned", "data.seq_len=77"),
        "model.max_positions",
        77,
        "data.seq_len",
    ),
    Derives(
        "a_mixture_has_enough_experts_and_layers",
        ("model.experts=8", "model.experts_per_token=3", "model.ffn_dim=200"),
        "model.expert_dim",
        80,
        "ffn_dim / 3 experts a token, rounded up to a multiple of 16",
    ),
    Derives(
        "the_weight_of_one_expert_is_its_score",
        ("model.experts=8", "model.experts_per_token=1"),
        "model.router_normalise",
        False,
        "one expert a token",
    ),
    Derives("bytes_have_256_values", (), "model.vocab", 256, "one entry a byte"),
    Derives("bytes_have_256_values", ("model.kind=encoder_decoder",), "model.vocab", 256, "one entry a byte"),
    Derives("bytes_have_256_values", ("data.kind=synthetic",), "model.vocab", 256, "one entry a byte"),
    Derives(
        "validation_needs_something_held_out",
        ("data.validation_fraction=0.0",),
        "train.validate_every",
        "off",
        "nothing is held out",
    ),
]

REFUSALS: list[Refuses] = [
    Refuses(
        "a_key_of_another_kind_is_not_ignored",
        (*CONVNET, "model.dropout=0.1"),
        '  model.dropout (command line): has no effect with model.kind = "convnet"\n'
        "      allowed: only with model.kind = transformer or encoder_decoder or vit or mlp\n"
        "      to do: remove the key",
    ),
    Refuses(
        "a_key_of_another_kind_is_not_ignored",
        ("optim.decay=5",),
        '  optim.decay (command line): has no effect with optim.schedule = "cosine"\n'
        "      allowed: only with optim.schedule = wsd\n"
        "      to do: remove the key",
    ),
    Refuses(
        "settings_are_those_of_the_plugin",
        ("data.settings={rows = 3}",),
        '  data.settings (command line): there is no setting "rows" of data source "text"\n'
        "      allowed: no setting at all",
    ),
    Refuses(
        "settings_are_those_of_the_plugin",
        ('track.to=["tensorboard"]', "track.settings={tensorboard = {foldr = 3}}"),
        '  track.settings (command line): there is no setting "foldr" (did you mean folder?) of tracker "tensorboard"\n'
        "      allowed: folder = ''",
    ),
    Refuses(
        "settings_are_those_of_the_plugin",
        ('track.to=["tensorboard"]', "track.settings={tensorboard = {folder = 3}}"),
        "  track.settings (command line): folder = 3 is no str of tracker \"tensorboard\"\n      allowed: folder = ''",
    ),
    Refuses(
        "settings_are_those_of_the_plugin",
        ("track.settings={tensorboard = {}}",),
        '  track.settings (command line): "tensorboard" is no tracker of this run\n'
        "      allowed: none, since track.to is empty\n"
        "      to do: name it in track.to",
    ),
    Refuses(
        "settings_are_those_of_the_plugin",
        ('track.to=["tensorboard"]', "track.settings={tensorboard = 3}"),
        "  track.settings (command line): tensorboard = 3 is no table\n"
        "      allowed: a table, such as {tensorboard = {}}",
    ),
    Refuses(
        "a_model_reads_the_data_it_is_made_for",
        ("model.kind=convnet",),
        '  data.kind (default): "text" cannot feed model.kind = "convnet"\n'
        "      allowed: jsonl, parquet, arrow, webdataset, mds, energon, hdf5, lmdb, arrays, images, idx, shards, "
        "dataset, synthetic",
    ),
    Refuses(
        "a_model_reads_the_data_it_is_made_for",
        ("data.kind=idx", "data.path=x"),
        '  data.kind (command line): "idx" cannot feed model.kind = "transformer"\n'
        "      allowed: text, jsonl, tokens, megatron, parquet, arrow, webdataset, mds, energon, hdf5, lmdb, shards, "
        "dataset, synthetic",
    ),
    Refuses(
        "data_are_staged_to_a_whole_path",
        ("data.stage=scratch",),
        '  data.stage (command line): "scratch" is no whole path, and each node would look for it elsewhere\n'
        '      allowed: "auto", "off", or a string that begins with /, ~ or $, such as "$TMPDIR"',
    ),
    Refuses(
        "windows_are_those_of_one_data_set",
        ("data.shuffle=windows", "data.pack=true"),
        '  data.shuffle (command line): "windows" visits the samples of one data set file by file, and data.pack = '
        "true packs those of several files\n"
        "      allowed: true or false",
    ),
    Refuses(
        "windows_are_those_of_one_data_set",
        ("data.shuffle=windows", 'data.blend=[{path = "y", weight = 1}]'),
        '  data.shuffle (command line): "windows" visits the samples of one data set file by file, and data.blend '
        "names several\n"
        "      allowed: true or false",
    ),
    Refuses(
        "data_other_than_text_name_their_path",
        ("data.kind=tokens", "model.vocab=9"),
        "  data.path (default): is not set\n      allowed: the file or folder that holds the data",
    ),
    Refuses(
        "a_dataset_of_the_user_is_named",
        ("data.kind=dataset", "model.vocab=9"),
        "  data.dataset (default): is not set\n"
        '      allowed: "module:name" of the function or class that makes the dataset',
    ),
    Refuses(
        "a_token_file_does_not_say_its_vocabulary",
        ("data.kind=dataset", "data.dataset=mydata:Rows"),
        '  model.vocab (default): "auto" follows a tokenizer, and data.kind = "dataset" names none\n'
        "      allowed: the number of entries of the vocabulary\n"
        "      to do: set model.vocab, such as 50257 for GPT-2's tokenizer",
    ),
    Refuses(
        "a_blend_names_the_paths_of_its_parts",
        ("data.path=x", 'data.blend=[{path = "y", weight = 1}]'),
        '  data.path (command line): "x" has no effect with data.blend, whose parts have paths of their own\n'
        "      allowed: only without data.blend\n"
        "      to do: remove the key, or make it a part of the blend",
    ),
    Refuses(
        "a_blend_names_the_paths_of_its_parts",
        ('data.blend=[{path = "y", weight = 1}, {path = "z", weight = 1, kind = "synthetic"}]',),
        '  data.blend (command line): [1] "z" is of the kind "synthetic", which reads no files\n'
        "      allowed: parts of text, jsonl, tokens, megatron, parquet, arrow, webdataset, mds, energon, hdf5, lmdb, "
        "arrays, images, idx, shards",
    ),
    Refuses(
        "a_model_reads_the_data_it_is_made_for",
        ('data.blend=[{path = "y", weight = 1}, {path = "z", weight = 1, kind = "idx"}]',),
        '  data.blend (command line): "idx" cannot feed model.kind = "transformer"\n'
        "      allowed: text, jsonl, tokens, megatron, parquet, arrow, webdataset, mds, energon, hdf5, lmdb, shards, "
        "dataset, synthetic",
    ),
    Refuses(
        "documents_are_packed_for_models_that_keep_them_apart",
        ("data.pack=true", "model.kind=encoder_decoder"),
        '  data.pack (command line): true, and model.kind = "encoder_decoder" does not keep the documents of a sample '
        'apart\n      allowed: false; or model.kind = "transformer"',
    ),
    Refuses(
        "documents_are_packed_for_models_that_keep_them_apart",
        ("data.pack=true", "data.kind=dataset", "data.dataset=mydata:Rows", "model.vocab=9"),
        '  data.pack (command line): true, and data.kind = "dataset" has no documents\n'
        "      allowed: false; or data with documents, such as text, jsonl, parquet or megatron",
    ),
    Refuses(
        "documents_are_packed_for_models_that_keep_them_apart",
        ("data.pack=true", "data.kind=synthetic"),
        '  data.pack (command line): true, and data.kind = "synthetic" has no documents\n'
        "      allowed: false; or data with documents, such as text, jsonl, parquet or megatron",
    ),
    Refuses(
        "documents_are_packed_for_models_that_keep_them_apart",
        ("data.pack=true", "model.experts=4", "model.capacity_factor=1.5"),
        "  model.capacity_factor (command line): 1.5 lets documents of a sample take places of experts from each other"
        ", and data.pack is true\n      allowed: 0\n      to do: set data.pack = false",
    ),
    Refuses(
        "documents_are_grouped_where_padding_changes_nothing",
        ("data.group_tokens=4096", "data.pack=true"),
        "  data.group_tokens (command line): 4096, and data.pack = true fills samples in another way\n"
        "      allowed: one of the two\n      to do: set data.pack = false",
    ),
    Refuses(
        "documents_are_grouped_where_padding_changes_nothing",
        ("data.group_tokens=127",),
        "  data.group_tokens (command line): 127 is less than one document of data.seq_len = 128 tokens\n"
        "      allowed: 0, or at least 128",
    ),
    Refuses(
        "documents_are_grouped_where_padding_changes_nothing",
        ("data.group_tokens=4096", "model.kind=encoder_decoder"),
        '  data.group_tokens (command line): 4096, and model.kind = "encoder_decoder" would see the padding behind '
        'documents\n      allowed: 0; or model.kind = "transformer"',
    ),
    Refuses(
        "documents_are_grouped_where_padding_changes_nothing",
        ("data.group_tokens=4096", "data.kind=synthetic"),
        '  data.group_tokens (command line): 4096, and data.kind = "synthetic" has no documents\n'
        "      allowed: 0; or data with documents, such as text, jsonl, parquet or megatron",
    ),
    Refuses(
        "documents_are_grouped_where_padding_changes_nothing",
        ("data.group_tokens=4096", "model.experts=4", "model.capacity_factor=1.5"),
        "  model.capacity_factor (command line): 1.5 lets padding take places of experts, and data.group_tokens is 4096"
        "\n      allowed: 0\n      to do: set data.group_tokens = 0",
    ),
    Refuses(
        "documents_are_grouped_where_padding_changes_nothing",
        ("data.group_tokens=4096", "precision.compute=float8"),
        '  precision.compute (command line): "float8": its products take multiples of 16 tokens, and '
        'data.group_tokens = 4096 gives any number\n      allowed: "bf16"\n      to do: set data.group_tokens = 0',
        GPU,
    ),
    Refuses(
        "a_group_is_a_micro_batch",
        ("data.group_tokens=4096", "train.micro_batch=2"),
        "  train.micro_batch (command line): 2: a pass takes one group of documents (data.group_tokens = 4096)\n"
        "      allowed: 1\n      to do: raise data.group_tokens for larger passes",
    ),
    Refuses(
        "heads_divide_the_width",
        ("model.dim=128", "model.heads=7"),
        "  model.heads (command line): 7 does not divide model.dim = 128\n      allowed: a divisor, such as 8",
    ),
    Refuses(
        "heads_divide_the_width",
        ("model.dim=128", "model.heads=200", "model.kv_heads=1"),
        "  model.heads (command line): 200 does not divide model.dim = 128\n      allowed: a divisor, such as 128",
    ),
    Refuses(
        "heads_divide_the_width",
        (f"model.dim={10**15}", "model.heads=3"),
        f"  model.heads (command line): 3 does not divide model.dim = {10**15}\n      allowed: a divisor, such as 2",
    ),
    Refuses(
        "heads_divide_the_width",
        ("model.dim=12", "model.heads=4"),
        "  model.heads (command line): 4 heads of width 3: rotary positions need an even width\n"
        "      allowed: dim / heads even",
    ),
    Refuses(
        "heads_divide_the_width",
        ("model.head_dim=7",),
        "  model.head_dim (command line): 7: rotary positions need an even width\n      allowed: an even number",
    ),
    Refuses(
        "a_key_of_another_kind_is_not_ignored",
        ("model.shared_experts=2",),
        "  model.shared_experts (command line): has no effect with model.experts = 0\n"
        "      allowed: only with model.experts = above 0\n"
        "      to do: remove the key",
    ),
    Refuses(
        "a_key_of_another_kind_is_not_ignored",
        (*LATENT, "model.kv_heads=4"),
        "  model.kv_heads (command line): has no effect with model.kv_rank = 16\n"
        "      allowed: only with model.kv_rank = 0\n"
        "      to do: remove the key",
    ),
    Refuses(
        "latent_attention_has_widths_of_its_own",
        (*LATENT, "model.rope_head_dim=5"),
        "  model.rope_head_dim (command line): 5: rotary positions need an even width\n      allowed: an even number",
    ),
    Refuses(
        "latent_attention_has_widths_of_its_own",
        (*LATENT, "model.rope_head_dim=8", "model.value_head_dim=41"),
        "  model.value_head_dim (command line): 41 is wider than keys are (head_dim 32 + rope_head_dim 8)\n"
        "      allowed: at most 40",
    ),
    Refuses(
        "learned_positions_reach_the_end_of_a_sample",
        ("model.positions=learned", "model.max_positions=100"),
        "  model.max_positions (command line): 100 is fewer than the tokens of a sample, data.seq_len = 128\n"
        "      allowed: at least 128",
    ),
    Refuses(
        "a_mixture_has_enough_experts_and_layers",
        ("model.experts=4", "model.experts_per_token=5"),
        "  model.experts_per_token (command line): 5 is more than model.experts = 4\n      allowed: 1 to 4",
    ),
    Refuses(
        "a_mixture_has_enough_experts_and_layers",
        ("model.experts=4", "model.dense_layers=4"),
        "  model.dense_layers (command line): 4 leaves none of model.layers = 4 for experts\n      allowed: 0 to 3",
    ),
    Refuses(
        "experts_are_gated",
        ("model.experts=4", "model.activation=gelu"),
        '  model.activation (command line): "gelu", and experts (model.experts) are gated\n      allowed: "swiglu"',
    ),
    Refuses(
        "the_weight_of_one_expert_is_its_score",
        ("model.experts=4", "model.experts_per_token=1", "model.router_normalise=true"),
        "  model.router_normalise (command line): true makes the weight of the one expert of a token 1, and a router "
        "without gradient\n"
        "      allowed: false, or model.experts_per_token above 1",
    ),
    Refuses(
        "samples_continue_prompts_of_text",
        ('train.sample_prompts=["a"]',),
        "  train.sample_prompts (command line): has no effect without train.sample_every\n"
        '      to do: set it, such as train.sample_every = "500 steps"; or remove the key',
    ),
    Refuses(
        "samples_continue_prompts_of_text",
        (*CONVNET, "data.kind=synthetic", "train.sample_every=9 steps"),
        '  train.sample_every (command line): "9 steps": the model takes images\n      allowed: "off"',
    ),
    Refuses(
        "samples_continue_prompts_of_text",
        ("data.kind=synthetic", "train.sample_every=9 steps"),
        '  train.sample_every (command line): "9 steps": data of kind synthetic name no tokenizer, and prompts are '
        "text\n"
        '      allowed: "off"\n'
        '      to do: train on text or records, with data.tokenizer; or set "off"',
    ),
    Refuses(
        "samples_continue_prompts_of_text",
        ("train.sample_every=9 steps",),
        "  train.sample_prompts (default): names none, and train.sample_every is 9 steps\n"
        "      allowed: texts that the model continues\n"
        '      to do: train.sample_prompts = ["Once upon a time"]',
    ),
    Refuses(
        "samples_are_generated_where_a_rank_has_whole_sequences",
        ("train.sample_every=9 steps", 'train.sample_prompts=["a"]', "parallel.tp=2"),
        '  train.sample_every (command line): "9 steps", and parallel.tp = 2 cuts the model or its sequences into '
        "parts\n"
        '      allowed: "off"\n'
        "      to do: split over dp_shard and dp_replicate, or generate from the checkpoints",
        {"ranks": 2},
    ),
    Refuses(
        "experts_drop_tokens_of_whole_sequences",
        ("model.experts=4", "model.capacity_factor=1.5", "parallel.cp=2"),
        "  model.capacity_factor (command line): 1.5 drops tokens by their place in a sequence, and parallel.cp = 2 "
        "splits sequences\n"
        "      allowed: 0, or parallel.cp = 1",
        {"ranks": 2},
    ),
    Refuses(
        "key_value_heads_divide_the_heads",
        ("model.heads=4", "model.kv_heads=3"),
        "  model.kv_heads (command line): 3 does not divide model.heads = 4\n      allowed: a divisor, such as 2",
    ),
    Refuses(
        "a_token_file_does_not_say_its_vocabulary",
        ("data.kind=tokens", "data.path=x.bin"),
        '  model.vocab (default): "auto" follows a tokenizer, and a token file does not name the one that made it\n'
        "      allowed: the number of entries of the vocabulary\n"
        "      to do: set model.vocab, such as 50257 for GPT-2's tokenizer",
    ),
    Refuses(
        "validation_needs_something_held_out",
        ("train.validate_every=5", "data.validation_fraction=0.0"),
        "  train.validate_every (command line): 5 steps, and nothing is held out: data.validation_fraction is 0\n"
        '      allowed: "off"\n'
        "      to do: name data.validation, or hold out a fraction",
    ),
    Refuses(
        "a_key_of_another_kind_is_not_ignored",
        ("optim.name=adafactor", "optim.state_dtype=bf16"),
        '  optim.state_dtype (command line): has no effect with optim.name = "adafactor"\n'
        "      allowed: only with optim.name = adamw or sgd or muon\n      to do: remove the key",
    ),
]
