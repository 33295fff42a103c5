"""The rules between keys, one function each, named as a sentence; `RULES` is their order.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This package must not
read files or look at the machine.
"""

from __future__ import annotations

from shardway.resolve.draft import Rule
from shardway.resolve.rules.axes import (
    a_model_splits_along_the_axes_it_is_made_for,
    a_sequence_splits_into_equal_parts,
    experts_split_evenly,
    experts_split_over_the_ranks_that_share_the_states,
    gathered_weights_are_kept_over_a_part_of_the_ranks,
    key_value_heads_split_or_are_repeated,
    only_plain_copies_compress_their_gradients,
    only_shared_states_are_kept_in_cpu_memory,
    the_tensor_axis_splits_evenly,
)
from shardway.resolve.rules.checkpoint import (
    the_best_is_found_by_validating,
    what_nodes_save_has_a_folder,
    what_nodes_save_is_written_by_shardway,
)
from shardway.resolve.rules.compiler import (
    a_memory_budget_needs_the_compiler,
    a_pipeline_compiles_blocks,
)
from shardway.resolve.rules.deepspeed import (
    settings_of_deepspeed_do_not_contradict_the_run_file,
    zero_1_does_not_accumulate_in_bf16,
    zero_3_compiles_blocks,
    zero_has_formats_of_its_own,
    zero_offloads_what_it_shards,
    zero_shards_over_copies_alone,
    zero_updates_parts_without_shape,
)
from shardway.resolve.rules.device import what_is_left_to_the_device_is_what_it_does_fast
from shardway.resolve.rules.float8 import (
    float8_gathers_what_has_one_scale,
    float8_multiplies_whole_groups_of_tokens,
    float8_needs_a_device_that_has_it,
    transformer_engine_knows_other_recipes,
)
from shardway.resolve.rules.guard import (
    a_probe_repeats_what_has_one_result,
    a_run_goes_back_before_spikes_that_are_looked_for,
    a_run_goes_back_to_what_was_saved,
    a_spike_that_is_left_out_is_left_out_whole,
)
from shardway.resolve.rules.huggingface import (
    a_hugging_face_model_brings_its_own_shape,
    a_hugging_face_model_brings_its_tokenizer,
    a_sample_fits_the_positions_of_a_hugging_face_model,
    only_a_hugging_face_model_has_weights_to_start_from,
)
from shardway.resolve.rules.layout import (
    a_micro_batch_is_a_part_of_a_rank_share,
    degrees_multiply_to_the_ranks,
    every_replica_gets_a_sample,
)
from shardway.resolve.rules.model import (
    a_key_of_another_kind_is_not_ignored,
    a_mixture_has_enough_experts_and_layers,
    a_model_reads_the_data_it_is_made_for,
    a_token_file_does_not_say_its_vocabulary,
    bytes_have_256_values,
    data_other_than_text_name_their_path,
    experts_are_gated,
    experts_drop_tokens_of_whole_sequences,
    heads_divide_the_width,
    key_value_heads_divide_the_heads,
    latent_attention_has_widths_of_its_own,
    learned_positions_reach_the_end_of_a_sample,
    the_feed_forward_width_follows_the_activation,
    the_weight_of_one_expert_is_its_score,
    validation_needs_something_held_out,
)
from shardway.resolve.rules.numerics import (
    bf16_weights_need_an_optimizer_that_rounds_them,
    bf16_weights_need_bf16_products,
    cudnn_tries_kernels_where_it_runs_and_may,
    muon_needs_matrices,
    narrow_momentum_needs_momentum,
    nesterov_needs_momentum,
    tf32_needs_a_device_that_has_it,
)
from shardway.resolve.rules.pipeline import (
    a_pipeline_keeps_gathered_weights,
    every_rank_has_a_block,
    micro_batches_fill_the_pipeline,
    stages_follow_the_schedule,
    tied_weights_stay_together,
    what_counts_samples_gets_whole_micro_batches,
    zero_bubbles_are_not_compiled,
)
from shardway.resolve.rules.planned import bind_layout_rule
from shardway.resolve.rules.run import (
    a_job_has_as_many_nodes_as_the_run_may,
    a_run_uses_the_accelerator_where_there_is_one,
    ranks_of_a_node_share_its_cores,
    timeouts_are_nested,
)

BEFORE_A_LAYOUT: tuple[Rule, ...] = (
    a_run_uses_the_accelerator_where_there_is_one,
    what_is_left_to_the_device_is_what_it_does_fast,
    ranks_of_a_node_share_its_cores,
    timeouts_are_nested,
    a_job_has_as_many_nodes_as_the_run_may,
    a_probe_repeats_what_has_one_result,
    a_run_goes_back_before_spikes_that_are_looked_for,
    a_run_goes_back_to_what_was_saved,
    a_spike_that_is_left_out_is_left_out_whole,
    what_nodes_save_has_a_folder,
    what_nodes_save_is_written_by_shardway,
    a_key_of_another_kind_is_not_ignored,
    a_hugging_face_model_brings_its_own_shape,
    only_a_hugging_face_model_has_weights_to_start_from,
    a_sample_fits_the_positions_of_a_hugging_face_model,
    a_hugging_face_model_brings_its_tokenizer,
    a_model_reads_the_data_it_is_made_for,
    data_other_than_text_name_their_path,
    heads_divide_the_width,
    key_value_heads_divide_the_heads,
    latent_attention_has_widths_of_its_own,
    learned_positions_reach_the_end_of_a_sample,
    the_feed_forward_width_follows_the_activation,
    a_mixture_has_enough_experts_and_layers,
    experts_are_gated,
    the_weight_of_one_expert_is_its_score,
    bytes_have_256_values,
    a_token_file_does_not_say_its_vocabulary,
    validation_needs_something_held_out,
    the_best_is_found_by_validating,
    tf32_needs_a_device_that_has_it,
)

OF_A_LAYOUT: tuple[Rule, ...] = (
    degrees_multiply_to_the_ranks,
    a_model_splits_along_the_axes_it_is_made_for,
    the_tensor_axis_splits_evenly,
    key_value_heads_split_or_are_repeated,
    a_sequence_splits_into_equal_parts,
    experts_split_over_the_ranks_that_share_the_states,
    experts_split_evenly,
    experts_drop_tokens_of_whole_sequences,
    gathered_weights_are_kept_over_a_part_of_the_ranks,
    only_plain_copies_compress_their_gradients,
    only_shared_states_are_kept_in_cpu_memory,
    stages_follow_the_schedule,
    every_rank_has_a_block,
    tied_weights_stay_together,
    a_pipeline_keeps_gathered_weights,
    zero_bubbles_are_not_compiled,
    every_replica_gets_a_sample,
    a_micro_batch_is_a_part_of_a_rank_share,
    what_counts_samples_gets_whole_micro_batches,
    micro_batches_fill_the_pipeline,
    nesterov_needs_momentum,
    muon_needs_matrices,
    bf16_weights_need_an_optimizer_that_rounds_them,
    narrow_momentum_needs_momentum,
    bf16_weights_need_bf16_products,
    cudnn_tries_kernels_where_it_runs_and_may,
    float8_needs_a_device_that_has_it,
    transformer_engine_knows_other_recipes,
    float8_gathers_what_has_one_scale,
    float8_multiplies_whole_groups_of_tokens,
    a_pipeline_compiles_blocks,
    a_memory_budget_needs_the_compiler,
    zero_shards_over_copies_alone,
    zero_updates_parts_without_shape,
    zero_has_formats_of_its_own,
    zero_1_does_not_accumulate_in_bf16,
    zero_3_compiles_blocks,
    zero_offloads_what_it_shards,
    settings_of_deepspeed_do_not_contradict_the_run_file,
)

RULES: tuple[Rule, ...] = (*BEFORE_A_LAYOUT, bind_layout_rule(OF_A_LAYOUT), *OF_A_LAYOUT)

OF_WHAT_IS_DESCRIBED: frozenset[Rule] = frozenset(
    {
        a_model_reads_the_data_it_is_made_for,
        data_other_than_text_name_their_path,
        heads_divide_the_width,
        key_value_heads_divide_the_heads,
        latent_attention_has_widths_of_its_own,
        learned_positions_reach_the_end_of_a_sample,
        the_feed_forward_width_follows_the_activation,
        a_mixture_has_enough_experts_and_layers,
        experts_are_gated,
        the_weight_of_one_expert_is_its_score,
        experts_drop_tokens_of_whole_sequences,
        bytes_have_256_values,
        a_token_file_does_not_say_its_vocabulary,
        validation_needs_something_held_out,
        a_model_splits_along_the_axes_it_is_made_for,
        the_tensor_axis_splits_evenly,
        key_value_heads_split_or_are_repeated,
        a_sequence_splits_into_equal_parts,
        experts_split_evenly,
        every_rank_has_a_block,
        tied_weights_stay_together,
        what_counts_samples_gets_whole_micro_batches,
        float8_multiplies_whole_groups_of_tokens,
    }
)
"""Rules of what [model] and [data] describe: a script that brings its own is told the same when it hands them over."""
