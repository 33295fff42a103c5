"""The rules between keys, one function each, named as a sentence; `RULES` is their order.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files or look at the machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from shardway.resolve.applies import IMAGE_DATA, OWNERS, TOKEN_DATA
from shardway.resolve.draft import Draft, Rule
from shardway.units import render_seconds

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
LATER_AXES = ("cp", "tp", "pp", "ep")


# --- run


def a_run_without_a_name_is_called_after_its_file(name: str) -> Rule:
    """Bound to the file's name, which is no key."""

    def rule(draft: Draft) -> None:
        if draft.get("run.name") == "auto":
            draft.derive("run.name", name, "name of the run file")

    return rule


def a_run_uses_the_accelerator_where_there_is_one(draft: Draft) -> None:
    accelerators = draft.circumstances.accelerators
    if draft.get("run.device") == "auto":
        found = f"{accelerators} accelerators found" if accelerators else "no accelerator found"
        draft.derive("run.device", "cuda" if accelerators else "cpu", found)
    elif draft.get("run.device") == "cuda" and not accelerators:
        draft.refuse("run.device", '"cuda" is asked for and this machine shows no accelerator', '"auto" or "cpu"')


def ranks_of_a_node_share_its_cores(draft: Draft) -> None:
    if draft.get("run.threads") == "auto":
        facts = draft.circumstances
        threads = max(1, facts.usable_cores // facts.ranks_per_node)
        draft.derive("run.threads", threads, f"{facts.usable_cores} cores / {facts.ranks_per_node} ranks on a node")


def timeouts_are_nested(draft: Draft) -> None:
    """The innermost timer must ring first, since only it can name the operation that hangs."""
    collective = draft.get("run.collective_timeout")
    for outer in ("run.start_timeout", "run.stop_timeout"):
        if draft.get(outer) <= collective:
            draft.refuse(
                "run.collective_timeout",
                f"{render_seconds(collective)} is not shorter than {outer} = {render_seconds(draft.get(outer))}, so a "
                "hanging collective would be ended before it can say which operation hangs",
                f"less than {render_seconds(draft.get(outer))}",
                f"lower run.collective_timeout or raise {outer}",
            )


# --- model


def a_key_of_another_kind_is_not_ignored(draft: Draft) -> None:
    """A wish that would have no effect is told, not dropped."""
    for selector, owners in OWNERS.items():
        chosen = draft.get(selector)
        for dotted, kinds in owners.items():
            if draft.is_set(dotted) and chosen not in kinds:
                draft.refuse(
                    dotted,
                    f'has no effect with {selector} = "{chosen}"',
                    f"only with {selector} = {' or '.join(kinds)}",
                    "remove the key",
                )


def a_model_reads_the_data_it_is_made_for(draft: Draft) -> None:
    kind, data = draft.get("model.kind"), draft.get("data.kind")
    wanted = TOKEN_DATA if kind == "transformer" else IMAGE_DATA
    if data not in (*wanted, "synthetic"):
        draft.refuse("data.kind", f'"{data}" cannot feed model.kind = "{kind}"', f"{', '.join(wanted)}, synthetic")


def data_other_than_text_name_their_path(draft: Draft) -> None:
    if draft.get("data.kind") in ("tokens", *IMAGE_DATA) and not draft.is_set("data.path"):
        draft.refuse("data.path", "is not set", "the file or folder that holds the data")


def heads_divide_the_width(draft: Draft) -> None:
    dim, heads = draft.get("model.dim"), draft.get("model.heads")
    if dim % heads:
        near = _nearest_divisor(dim, heads)
        draft.refuse("model.heads", f"{heads} does not divide model.dim = {dim}", f"a divisor, such as {near}")
    elif dim // heads % 2:
        draft.refuse(
            "model.heads",
            f"{heads} heads of width {dim // heads}: rotary positions need an even width",
            "dim / heads even",
        )


def key_value_heads_divide_the_heads(draft: Draft) -> None:
    heads, kv_heads = draft.get("model.heads"), draft.get("model.kv_heads")
    if kv_heads == "auto":
        draft.derive("model.kv_heads", heads, "as many as heads")
    elif heads % kv_heads:
        near = _nearest_divisor(heads, kv_heads)
        what = f"{kv_heads} does not divide model.heads = {heads}"
        draft.refuse("model.kv_heads", what, f"a divisor, such as {near}")


def the_feed_forward_width_follows_the_activation(draft: Draft) -> None:
    """swiglu has three matrices where gelu has two: 8/3 dim keeps the parameters equal (Shazeer, arXiv:2002.05202)."""
    if draft.get("model.ffn_dim") != "auto":
        return
    dim = draft.get("model.dim")
    if draft.get("model.activation") == "swiglu":
        draft.derive("model.ffn_dim", math.ceil(8 * dim / 3 / 32) * 32, "8/3 dim, rounded up to a multiple of 32")
    else:
        draft.derive("model.ffn_dim", 4 * dim, "4 dim")


def bytes_have_256_values(draft: Draft) -> None:
    if draft.get("model.kind") != "transformer" or draft.get("model.vocab") != "auto":
        return
    if draft.get("data.kind") == "synthetic" or (draft.get("data.kind"), draft.get("data.tokenizer")) == (
        "text",
        "bytes",
    ):
        draft.derive("model.vocab", 256, "one entry a byte")


# --- what comes later


def a_token_file_does_not_say_its_vocabulary(draft: Draft) -> None:
    reads_tokens = (draft.get("model.kind"), draft.get("data.kind")) == ("transformer", "tokens")
    if reads_tokens and draft.get("model.vocab") == "auto":
        draft.refuse(
            "model.vocab",
            '"auto" follows a tokenizer, and a token file does not name the one that made it',
            "the number of entries of the vocabulary",
            "set model.vocab, such as 50257 for GPT-2's tokenizer",
        )


def validation_needs_something_held_out(draft: Draft) -> None:
    held_out = draft.get("data.validation") or draft.get("data.validation_fraction") or draft.get("data.kind") == "idx"
    if draft.get("train.validate_every") == "off" or held_out:
        return
    if draft.is_set("train.validate_every"):
        draft.refuse(
            "train.validate_every",
            f"{draft.get('train.validate_every')}, and nothing is held out: data.validation_fraction is 0",
            '"off"',
            "name data.validation, or hold out a fraction",
        )
    else:
        draft.derive("train.validate_every", "off", "nothing is held out")


def what_this_version_lacks_is_refused(draft: Draft) -> None:
    """Refused with a sentence rather than ignored, so that nobody trains something other than what they wrote."""
    for axis in LATER_AXES:
        if draft.get(f"parallel.{axis}") > 1:
            draft.refuse(
                f"parallel.{axis}",
                f"{draft.get(f'parallel.{axis}')}: this version of Shardway does not split a run along {axis} yet",
                "1",
                "use dp_replicate and dp_shard",
            )
    if draft.get("precision.compute") in ("fp16", "float8"):
        wish = draft.get("precision.compute")
        draft.refuse(
            "precision.compute",
            f'"{wish}": this version of Shardway does not train in it yet',
            '"fp32", "bf16"',
        )
    if draft.get("model.hf"):
        draft.refuse(
            "model.hf",
            f'"{draft.get("model.hf")}": this version of Shardway does not load Hugging Face models yet',
            "empty, with model.kind naming a reference model; or `run.shard(your_model)` in a script of your own",
        )


def tf32_needs_a_device_that_has_it(draft: Draft) -> None:
    if draft.get("precision.tf32") and draft.get("run.device") == "cpu":
        draft.refuse("precision.tf32", "true has no effect on a CPU", "false")


# --- parallel


def degrees_multiply_to_the_ranks(draft: Draft) -> None:
    """One of dp_replicate and dp_shard may be "auto" and takes what the other axes leave."""
    if any(draft.get(f"parallel.{axis}") > 1 for axis in LATER_AXES):
        return  # refused already
    ranks = draft.circumstances.ranks
    degrees = {axis: draft.get(f"parallel.{axis}") for axis in AXES}
    open_axes = [axis for axis, degree in degrees.items() if degree == "auto"]
    if len(open_axes) > 1:
        draft.derive("parallel.dp_replicate", 1, "dp_shard is auto and takes all ranks")
        degrees["dp_replicate"] = 1
        open_axes.remove("dp_replicate")
    known = math.prod(degree for degree in degrees.values() if degree != "auto")
    if open_axes and ranks % known == 0:
        draft.derive(f"parallel.{open_axes[0]}", ranks // known, _what_is_left(ranks, degrees))
    elif known != ranks:
        _refuse_product(draft, degrees, known)


def _what_is_left(ranks: int, degrees: Mapping[str, Any]) -> str:
    others = _above_one(degrees)
    return f"{ranks} ranks / {_product(others)}" if others else f"{ranks} ranks"


def _refuse_product(draft: Draft, degrees: Mapping[str, Any], known: int) -> None:
    ranks, above = draft.circumstances.ranks, _above_one(degrees)
    if not above:
        what = f"every degree is 1, and there are {ranks} ranks"
    elif "auto" in degrees.values():
        what = f"{_product(above)} does not divide the number of ranks, {ranks}"
    else:
        product = _product(above) if len(above) == 1 else f"{_product(above)} = {known}"
        what = f"{product} is not the number of ranks, {ranks}"
    start = f"start {known} rank{'s' if known > 1 else ''} (--nproc {known})"
    culprit = next((axis for axis in ("dp_shard", "dp_replicate", *AXES) if axis in above), "dp_replicate")
    draft.refuse(
        f"parallel.{culprit}",
        what,
        "degrees whose product is the number of ranks",
        start
        + (", or change a degree" if len(above) > 1 else ", or change it")
        + '; "auto" takes what the others leave',
    )


def _above_one(degrees: Mapping[str, Any]) -> dict[str, int]:
    return {axis: degree for axis, degree in degrees.items() if degree not in ("auto", 1)}


def _product(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())


def every_replica_gets_a_sample(draft: Draft) -> None:
    replicas, batch = replicas_of(draft), draft.get("train.global_batch")
    if batch < replicas:
        draft.refuse(
            "train.global_batch",
            f"{batch} samples cannot be shared by {replicas} data-parallel ranks",
            f"at least {replicas}",
            "raise train.global_batch or use fewer ranks",
        )


def a_micro_batch_is_a_part_of_a_rank_share(draft: Draft) -> None:
    replicas, batch = replicas_of(draft), draft.get("train.global_batch")
    share = max(1, math.ceil(batch / replicas))
    micro = draft.get("train.micro_batch")
    if micro == "auto":
        draft.derive("train.micro_batch", share, f"{batch} samples / {replicas} data-parallel ranks")
    elif micro > share:
        draft.refuse(
            "train.micro_batch",
            f"{micro} is more than a rank's share of {share} (train.global_batch {batch} / {replicas} ranks)",
            f"1 to {share}",
        )


def replicas_of(draft: Draft) -> int:
    degrees = (draft.get("parallel.dp_replicate"), draft.get("parallel.dp_shard"))
    return math.prod(degree for degree in degrees if degree != "auto")


# --- optim


def nesterov_needs_momentum(draft: Draft) -> None:
    if draft.get("optim.nesterov") and draft.get("optim.momentum") == 0:
        draft.refuse("optim.nesterov", "true needs optim.momentum above 0", "false, or a momentum")


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


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the smaller of two; found from `wanted` outwards, to 1 at worst."""
    near = ((wanted - away, wanted + away) for away in itertools.count())
    found = (divisor for pair in near for divisor in pair if divisor > 0 and number % divisor == 0)
    return number if wanted > number else next(found)
