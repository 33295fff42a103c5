"""Rules of the model and of the data that it reads.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files or look at the machine.
"""

from __future__ import annotations

import math

from shardway.resolve.applies import IMAGE_DATA, OWNERS, TOKEN_DATA
from shardway.resolve.draft import Draft
from shardway.resolve.rules.numbers import nearest_divisor


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
        near = nearest_divisor(dim, heads)
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
        near = nearest_divisor(heads, kv_heads)
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
