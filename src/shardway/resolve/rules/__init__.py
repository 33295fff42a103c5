"""The rules between keys, one function each, named as a sentence; `RULES` is their order.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This package must not
read files or look at the machine.
"""

from __future__ import annotations

from shardway.resolve.draft import Rule
from shardway.resolve.rules.layout import (
    a_micro_batch_is_a_part_of_a_rank_share,
    degrees_multiply_to_the_ranks,
    every_replica_gets_a_sample,
)
from shardway.resolve.rules.model import (
    a_key_of_another_kind_is_not_ignored,
    a_model_reads_the_data_it_is_made_for,
    a_token_file_does_not_say_its_vocabulary,
    bytes_have_256_values,
    data_other_than_text_name_their_path,
    heads_divide_the_width,
    key_value_heads_divide_the_heads,
    the_feed_forward_width_follows_the_activation,
    validation_needs_something_held_out,
)
from shardway.resolve.rules.numerics import (
    nesterov_needs_momentum,
    tf32_needs_a_device_that_has_it,
    what_this_version_lacks_is_refused,
)
from shardway.resolve.rules.run import (
    a_run_uses_the_accelerator_where_there_is_one,
    ranks_of_a_node_share_its_cores,
    timeouts_are_nested,
)

RULES: tuple[Rule, ...] = (
    a_run_uses_the_accelerator_where_there_is_one,
    ranks_of_a_node_share_its_cores,
    timeouts_are_nested,
    a_key_of_another_kind_is_not_ignored,
    a_model_reads_the_data_it_is_made_for,
    data_other_than_text_name_their_path,
    heads_divide_the_width,
    key_value_heads_divide_the_heads,
    the_feed_forward_width_follows_the_activation,
    bytes_have_256_values,
    a_token_file_does_not_say_its_vocabulary,
    validation_needs_something_held_out,
    what_this_version_lacks_is_refused,
    tf32_needs_a_device_that_has_it,
    degrees_multiply_to_the_ranks,
    every_replica_gets_a_sample,
    a_micro_batch_is_a_part_of_a_rank_share,
    nesterov_needs_momentum,
)
