"""Rules of the model, named by the run file or by model.hf, and of the data that it reads.

Invariant: a rule derives an open key or refuses; it never changes what the user set.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardway.plugins import GROUPS, load_plugin
from shardway.resolve.draft import (
    DOORS,
    OWNERS,
    SAMPLE_KEYS,
    SHAPE_KEYS,
    Draft,
    Rule,
    ceil_div,
    fact_of,
    has_effect,
    kinds_of,
    list_rules,
    name_choice,
    nearest_divisor,
    of_what_is_described,
    takes_of,
)
from shardway.runfile.load import render_value

LEFT_TO_THE_DEVICE: Mapping[str, tuple[str, ...]] = {"train.compile": ("blocks",)}
"""Selector -> its possible values on another device if it is open: keys of those are no mistake here."""


def a_key_of_another_kind_is_not_ignored(draft: Draft) -> None:
    """A setting without effect is an error, not ignored."""
    for selector in DOORS:
        chosen = draft.data_kinds if selector == "data.kind" else (draft.get(selector),)
        for dotted, kinds in kinds_of(selector).items():
            if draft.is_set(dotted) and not any(has_effect(dotted, selector, each) for each in chosen):
                _refuse_ineffective(draft, dotted, selector, kinds)
    for selector, owners in OWNERS.items():
        chosen = draft.get(selector)
        possible = {name_choice(chosen), *(LEFT_TO_THE_DEVICE.get(selector, ()) if draft.is_derived(selector) else ())}
        for dotted, kinds in owners.items():
            if draft.is_set(dotted) and possible.isdisjoint(kinds):
                _refuse_ineffective(draft, dotted, selector, kinds)


def _refuse_ineffective(draft: Draft, dotted: str, selector: str, kinds: tuple[str, ...]) -> None:
    what = f"has no effect with {selector} = {render_value(draft.get(selector))}"
    draft.refuse(dotted, what, f"only with {selector} = {' or '.join(kinds)}", "remove the key")


def settings_are_those_of_the_plugin(draft: Draft) -> None:
    """Those of a chosen optimizer, model, data source, and of each tracker by its name."""
    for selector, group in DOORS.items():
        _check_settings(draft, group, draft.get(selector), f"{selector.partition('.')[0]}.settings")
    trackers = draft.get("track.to")
    for name, given in draft.get("track.settings").items():
        if name not in trackers:
            allowed = ", ".join(trackers) or "none, since track.to is empty"
            draft.refuse("track.settings", f'"{name}" is no tracker of this run', allowed, "name it in track.to")
        elif not isinstance(given, dict):
            draft.refuse("track.settings", f"{name} = {given!r} is no table", f"a table, such as {{{name} = {{}}}}")
    for name in trackers:
        if isinstance(draft.get("track.settings").get(name, {}), dict):
            _check_settings(draft, "trackers", name, "track.settings")


def _check_settings(draft: Draft, group: str, name: str, dotted: str) -> None:
    given = draft.get(dotted)
    try:
        load_plugin(group, name).read_settings(given.get(name, {}) if group == "trackers" else given)
    except ValueError as error:
        what, _, allowed = str(error).partition("; allowed: ")
        draft.refuse(dotted, f'{what} of {GROUPS[group].noun} "{name}"', allowed)


# --- models of model.hf


def a_hugging_face_model_brings_its_own_shape(draft: Draft) -> None:
    """The values of config.json become the keys of [model], so that the rules of layouts apply as well."""
    hf = draft.get("model.hf")
    if not hf:
        return
    if draft.get("model.kind") != "transformer":
        what = f'"{draft.get("model.kind")}" is another model than model.hf = "{hf}"'
        draft.refuse("model.kind", what, "one of the two", "remove one of them")
    facts, sizes = draft.circumstances.hf, {}
    if facts is not None:
        mixture = ("experts", "experts_per_token", "expert_dim") if facts.experts else ()
        names = ("vocab", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "tied", *mixture)
        sizes = {name: getattr(facts, name) for name in names}
    for name in SHAPE_KEYS:
        if draft.is_set(f"model.{name}") and draft.get(f"model.{name}") != sizes.get(name):
            what = f'has no effect with model.hf = "{hf}", whose config.json says it'
            draft.refuse(f"model.{name}", what, "only without model.hf", "remove the key")
        elif name in sizes:
            draft.derive(f"model.{name}", sizes[name], f"config.json of {hf}")


def only_a_hugging_face_model_has_weights_to_start_from(draft: Draft) -> None:
    if draft.is_set("model.hf_weights") and not draft.get("model.hf"):
        draft.refuse("model.hf_weights", "has no effect without model.hf", "only with model.hf", "remove the key")


def a_sample_fits_the_positions_of_a_hugging_face_model(draft: Draft) -> None:
    facts, seq_len = draft.circumstances.hf, draft.get("data.seq_len")
    if draft.get("model.hf") and facts is not None and seq_len > facts.max_positions:
        what = f"{seq_len} is more than the {facts.max_positions} positions that the model knows"
        draft.refuse("data.seq_len", what, f"at most {facts.max_positions}")


def a_hugging_face_model_brings_its_tokenizer(draft: Draft) -> None:
    """Token ids must have the meaning with which the weights were trained."""
    facts = draft.circumstances.hf
    reads = any("data.tokenizer" in fact_of("data.kind", kind, "keys") for kind in draft.data_kinds)
    if not draft.get("model.hf") or not reads or facts is None or draft.is_set("data.tokenizer"):
        return
    if facts.tokenizer:
        draft.derive("data.tokenizer", facts.tokenizer, f"tokenizer of {draft.get('model.hf')}")
    elif "text" in draft.data_kinds:  # records may hold tokens
        what = (
            f'"{draft.get("data.tokenizer")}" is not what the model was trained with, and there is no tokenizer.json '
            "beside its config"
        )
        draft.refuse("data.tokenizer", what, 'a tokenizer.json or .model file; "bytes" where that is meant')


# --- adapters: weights that are trained beside frozen ones


def an_adapter_goes_beside_a_hugging_face_model(draft: Draft) -> None:
    if draft.get("model.adapter") == "none":
        return
    if draft.circumstances.own_model:
        what = '"lora": a script brings its own model'
        remedy = "call peft.get_peft_model(model, config) in the script, and give run.shard what it returns"
        draft.refuse("model.adapter", what, '"none"', remedy)
    elif not draft.get("model.hf"):
        what = '"lora" leaves the weights of a model as they are, and a reference model has none to start from'
        remedy = "name a model in model.hf; `shardway checkpoint export` writes one of a run's own transformer"
        draft.refuse("model.adapter", what, '"none"; or model.hf', remedy)
    if draft.get("model.lora_alpha") == "auto":
        draft.derive("model.lora_alpha", 2.0 * draft.get("model.lora_rank"), "2 x lora_rank")


def the_rank_of_an_adapter_is_below_the_width_of_the_model(draft: Draft) -> None:
    """Every linear layer has the width on one side, so no change of its weight has a higher rank. The layers that are
    chosen may have a smaller side, which `apply_lora` compares."""
    facts, rank = draft.circumstances.hf, draft.get("model.lora_rank")
    if draft.get("model.adapter") != "none" and facts is not None and rank > facts.dim:
        what = f"{rank} is more than {facts.dim}, the width of {draft.get('model.hf')}: no layer there has such a rank"
        draft.refuse("model.lora_rank", what, f"1 to {facts.dim}")


# --- what [model] and [data] describe


@of_what_is_described
def a_model_reads_the_data_it_is_made_for(draft: Draft) -> None:
    kind, takes = draft.get("model.kind"), takes_of(draft.get("model.kind"))
    for data in draft.data_kinds:
        if takes not in fact_of("data.kind", data, "gives"):
            fitting = [name for name in GROUPS["data_sources"].own if takes in fact_of("data.kind", name, "gives")]
            dotted = "data.kind" if data == draft.get("data.kind") else "data.blend"
            draft.refuse(dotted, f'"{data}" cannot feed model.kind = "{kind}"', ", ".join(fitting))


@of_what_is_described
def data_other_than_text_name_their_path(draft: Draft) -> None:
    needs = fact_of("data.kind", draft.get("data.kind"), "needs_path") and not draft.get("data.blend")
    if needs and not draft.is_set("data.path"):
        draft.refuse("data.path", "is not set", "the file or folder that holds the data")


@of_what_is_described
def a_dataset_of_the_user_is_named(draft: Draft) -> None:
    if "dataset" in draft.data_kinds and not draft.get("data.dataset"):
        draft.refuse("data.dataset", "is not set", '"module:name" of the function or class that makes the dataset')


@of_what_is_described
def arrays_are_called_x_and_y(draft: Draft) -> None:
    """Fields of records have names of their own; those of arrays that a run writes for itself are x and y."""
    named = {"data.transform", "data.dataset"}
    if any(named.intersection(fact_of("data.kind", kind, "keys")) for kind in draft.data_kinds):
        return
    for name, usual in (("inputs", "x"), ("targets", "y")):
        if draft.get(f"data.{name}") == "auto":
            draft.derive(f"data.{name}", usual, "the usual name in an .npz file")


@of_what_is_described
def a_blend_names_the_paths_of_its_parts(draft: Draft) -> None:
    if not draft.get("data.blend"):
        return
    if draft.is_set("data.path"):
        what = (
            f"{render_value(draft.get('data.path'))} has no effect with data.blend, whose parts have paths of their own"
        )
        draft.refuse("data.path", what, "only without data.blend", "remove the key, or make it a part of the blend")
    for number, part in enumerate(draft.get("data.blend")):
        kind = part.kind or draft.get("data.kind")
        if "data.path" not in fact_of("data.kind", kind, "keys"):
            reading = (name for name in GROUPS["data_sources"].own if "data.path" in fact_of("data.kind", name, "keys"))
            what = f'[{number}] "{part.path}" is of the kind "{kind}", which reads no files'
            draft.refuse("data.blend", what, f"parts of {', '.join(reading)}")


@of_what_is_described
def documents_are_packed_for_models_that_keep_them_apart(draft: Draft) -> None:
    """Attention of another kind of model would see all documents of a sample."""
    if not draft.get("data.pack"):
        return
    kind = draft.get("model.kind")
    if kind != "transformer":
        what = f'true, and model.kind = "{kind}" does not keep the documents of a sample apart'
        draft.refuse("data.pack", what, 'false; or model.kind = "transformer"')
    for own in (name for name in ("synthetic", "dataset") if name in draft.data_kinds):
        what = f'true, and data.kind = "{own}" has no documents'
        draft.refuse("data.pack", what, "false; or data with documents, such as text, jsonl, parquet or megatron")
    if factor := (draft.get("model.capacity_factor") if draft.get("model.experts") else 0):
        what = f"{factor} lets documents of a sample take places of experts from each other, and data.pack is true"
        draft.refuse("model.capacity_factor", what, "0", "set data.pack = false")


@of_what_is_described
def documents_are_grouped_where_padding_changes_nothing(draft: Draft) -> None:
    """Padding stands behind each document, where causal attention alone does not see it."""
    tokens, seq_len, off = draft.get("data.group_tokens"), draft.get("data.seq_len"), "set data.group_tokens = 0"
    if not tokens:
        return
    if draft.get("data.pack"):
        what = f"{tokens}, and data.pack = true fills samples in another way"
        draft.refuse("data.group_tokens", what, "one of the two", "set data.pack = false")
    if tokens < seq_len:
        what = f"{tokens} is less than one document of data.seq_len = {seq_len} tokens"
        draft.refuse("data.group_tokens", what, f"0, or at least {seq_len}")
    kind = draft.get("model.kind")
    if kind != "transformer":
        what = f'{tokens}, and model.kind = "{kind}" would see the padding behind documents'
        draft.refuse("data.group_tokens", what, '0; or model.kind = "transformer"')
    for own in (name for name in ("synthetic", "dataset") if name in draft.data_kinds):
        what = f'{tokens}, and data.kind = "{own}" has no documents'
        draft.refuse("data.group_tokens", what, "0; or data with documents, such as text, jsonl, parquet or megatron")
    if factor := (draft.get("model.capacity_factor") if draft.get("model.experts") else 0):
        what = f"{factor} lets padding take places of experts, and data.group_tokens is {tokens}"
        draft.refuse("model.capacity_factor", what, "0", off)
    if draft.get("precision.compute") == "float8" and not draft.get("precision.float8_emulate"):
        what = f'"float8": its products take multiples of 16 tokens, and data.group_tokens = {tokens} gives any number'
        draft.refuse("precision.compute", what, '"bf16"', off)


def a_group_is_a_micro_batch(draft: Draft) -> None:
    """Groups have different shapes."""
    micro, tokens = draft.get("train.micro_batch"), draft.get("data.group_tokens")
    if tokens and micro == "auto":
        draft.derive("train.micro_batch", 1, "a pass takes one group of data.group_tokens")
    elif tokens and micro != 1:
        what = f"{micro}: a pass takes one group of documents (data.group_tokens = {tokens})"
        draft.refuse("train.micro_batch", what, "1", "raise data.group_tokens for larger passes")


@of_what_is_described
def heads_divide_the_width(draft: Draft) -> None:
    """Unless their width is set. With latent attention, rope_head_dim is the width that rotary positions rotate."""
    dim, heads, width = (draft.get(f"model.{name}") for name in ("dim", "heads", "head_dim"))
    rotary = draft.get("model.kind") == "transformer" and draft.get("model.positions") == "rope"
    pairs = rotary and not draft.get("model.kv_rank")
    if width != "auto":
        if pairs and width % 2:
            draft.refuse("model.head_dim", f"{width}: rotary positions need an even width", "an even number")
    elif dim % heads:
        near = nearest_divisor(dim, heads)
        draft.refuse("model.heads", f"{heads} does not divide model.dim = {dim}", f"a divisor, such as {near}")
    elif pairs and dim // heads % 2:
        what = f"{heads} heads of width {dim // heads}: rotary positions need an even width"
        draft.refuse("model.heads", what, "dim / heads even")
    else:
        draft.derive("model.head_dim", dim // heads, "dim / heads")


@of_what_is_described
def key_value_heads_divide_the_heads(draft: Draft) -> None:
    heads, kv_heads = draft.get("model.heads"), draft.get("model.kv_heads")
    if kv_heads == "auto":
        draft.derive("model.kv_heads", heads, "as many as heads")
    elif heads % kv_heads:
        near = nearest_divisor(heads, kv_heads)
        what = f"{kv_heads} does not divide model.heads = {heads}"
        draft.refuse("model.kv_heads", what, f"a divisor, such as {near}")


@of_what_is_described
def latent_attention_has_widths_of_its_own(draft: Draft) -> None:
    """A key has head_dim features without a position, then rope_head_dim with one; values are at most as wide."""
    head = draft.get("model.head_dim")
    if not draft.get("model.kv_rank") or head == "auto":
        return
    if draft.get("model.rope_head_dim") == "auto":
        draft.derive("model.rope_head_dim", ceil_div(head, 4) * 2, "half of head_dim, rounded up to even")
    if draft.get("model.value_head_dim") == "auto":
        draft.derive("model.value_head_dim", head, "as wide as head_dim")
    rotary, values = draft.get("model.rope_head_dim"), draft.get("model.value_head_dim")
    if rotary % 2:
        draft.refuse("model.rope_head_dim", f"{rotary}: rotary positions need an even width", "an even number")
    if values > head + rotary:
        what = f"{values} is wider than keys are (head_dim {head} + rope_head_dim {rotary})"
        draft.refuse("model.value_head_dim", what, f"at most {head + rotary}")


@of_what_is_described
def learned_positions_reach_the_end_of_a_sample(draft: Draft) -> None:
    if (draft.get("model.kind"), draft.get("model.positions")) != ("transformer", "learned"):
        return
    rows, seq_len = draft.get("model.max_positions"), draft.get("data.seq_len")
    if rows == "auto":
        draft.derive("model.max_positions", seq_len, "data.seq_len")
    elif rows < seq_len:
        what = f"{rows} is fewer than the tokens of a sample, data.seq_len = {seq_len}"
        draft.refuse("model.max_positions", what, f"at least {seq_len}")


@of_what_is_described
def the_feed_forward_width_follows_the_activation(draft: Draft) -> None:
    """swiglu has three matrices, gelu two: 8/3 dim keeps the parameters equal (Shazeer, arXiv:2002.05202)."""
    if draft.get("model.ffn_dim") != "auto":
        return
    dim, gated = draft.get("model.dim"), draft.get("model.activation") == "swiglu"
    if gated and draft.get("model.kind") != "encoder_decoder":
        draft.derive("model.ffn_dim", ceil_div(8 * dim, 3 * 32) * 32, "8/3 dim, rounded up to a multiple of 32")
    else:
        draft.derive("model.ffn_dim", 4 * dim, "4 dim")


@of_what_is_described
def a_mixture_has_enough_experts_and_layers(draft: Draft) -> None:
    experts, k = draft.get("model.experts"), draft.get("model.experts_per_token")
    if not experts:
        return
    if k > experts:
        draft.refuse("model.experts_per_token", f"{k} is more than model.experts = {experts}", f"1 to {experts}")
    dense, layers = draft.get("model.dense_layers"), draft.get("model.layers")
    if dense >= layers:
        what = f"{dense} leaves none of model.layers = {layers} for experts"
        draft.refuse("model.dense_layers", what, f"0 to {layers - 1}")
    if draft.get("model.expert_dim") == "auto":
        width = ceil_div(draft.get("model.ffn_dim"), k * 16) * 16
        draft.derive("model.expert_dim", width, f"ffn_dim / {k} experts a token, rounded up to a multiple of 16")


@of_what_is_described
def experts_are_gated(draft: Draft) -> None:
    activation = draft.get("model.activation")
    if draft.get("model.experts") and activation != "swiglu":
        draft.refuse("model.activation", f'"{activation}", and experts (model.experts) are gated', '"swiglu"')


@of_what_is_described
def the_weight_of_one_expert_is_its_score(draft: Draft) -> None:
    """Normalised, a single weight would always be 1, and its router would learn nothing from the loss."""
    if not draft.get("model.experts") or draft.get("model.experts_per_token") != 1:
        return
    if not draft.is_set("model.router_normalise"):
        draft.derive("model.router_normalise", False, "one expert a token")
    elif draft.get("model.router_normalise"):
        what = "true makes the weight of the one expert of a token 1, and a router without gradient"
        draft.refuse("model.router_normalise", what, "false, or model.experts_per_token above 1")


@of_what_is_described
def bytes_have_256_values(draft: Draft) -> None:
    if takes_of(draft.get("model.kind")) != "tokens" or draft.get("model.vocab") != "auto":
        return
    of_bytes = {"synthetic", "text"} if draft.get("data.tokenizer") == "bytes" else {"synthetic"}
    if of_bytes.issuperset(draft.data_kinds):
        draft.derive("model.vocab", 256, "one entry a byte")


@of_what_is_described
def a_token_file_does_not_say_its_vocabulary(draft: Draft) -> None:
    if takes_of(draft.get("model.kind")) != "tokens" or draft.get("model.vocab") != "auto":
        return
    kind, path = draft.get("data.kind"), draft.get("data.path")
    parts = [(part.kind or kind, part.path) for part in draft.get("data.blend")] or [(kind, path)]
    if not all(fact_of("data.kind", each, "states_vocabulary")(at) for each, at in parts):
        what = '"auto" follows a tokenizer, and a token file does not name the one that made it'
        if "dataset" in draft.data_kinds:
            what = '"auto" follows a tokenizer, and data.kind = "dataset" names none'
        allowed = "the number of entries of the vocabulary"
        draft.refuse("model.vocab", what, allowed, "set model.vocab, such as 50257 for GPT-2's tokenizer")


@of_what_is_described
def validation_needs_something_held_out(draft: Draft) -> None:
    brings = any(fact_of("data.kind", kind, "brings_validation") for kind in draft.data_kinds)
    held_out = draft.get("data.validation") or draft.get("data.validation_fraction") or brings
    if draft.get("train.validate_every") == "off" or held_out:
        return
    if draft.is_set("train.validate_every"):
        what = f"{draft.get('train.validate_every')}, and nothing is held out: data.validation_fraction is 0"
        draft.refuse("train.validate_every", what, '"off"', "name data.validation, or hold out a fraction")
    else:
        draft.derive("train.validate_every", "off", "nothing is held out")


def the_best_is_found_by_validating(draft: Draft) -> None:
    """Whether a script passes in validation data is checked later (`train.loop_state`)."""
    off = f'train.validate_every = "off" ({draft.origins["train.validate_every"]}) makes none'
    remedy = 'set train.validate_every, such as "100 steps"'
    if draft.get("train.validate_every") != "off":
        return
    if best := draft.get("checkpoint.keep_best"):
        draft.refuse("checkpoint.keep_best", f"{best} is of steps with the best validation, and {off}", "0", remedy)
    if (patience := draft.get("train.patience")) != "off":
        draft.refuse("train.patience", f"{patience} is a number of validations, and {off}", '"off"', remedy)


# --- texts that the model in training continues


def samples_continue_prompts_of_text(draft: Draft) -> None:
    every, prompts = draft.get("train.sample_every"), "train.sample_prompts"
    if every == "off":
        for dotted in SAMPLE_KEYS:
            if draft.is_set(dotted) and not draft.is_set("train.sample_every"):
                remedy = 'set it, such as train.sample_every = "500 steps"; or remove the key'
                draft.refuse(dotted, "has no effect without train.sample_every", "", remedy)
        return
    kinds = draft.data_kinds
    if draft.circumstances.own_model:
        what = f'"{every}": Shardway does not know how a model of a script is asked for text'
        draft.refuse("train.sample_every", what, '"off"', "generate in the script, between two batches")
    elif takes_of(draft.get("model.kind")) != "tokens":
        draft.refuse("train.sample_every", f'"{every}": the model takes images', '"off"')
    elif not any(has_effect("data.tokenizer", "data.kind", kind) for kind in kinds):
        what = f'"{every}": data of kind {" and ".join(kinds)} name no tokenizer, and prompts are text'
        draft.refuse("train.sample_every", what, '"off"', 'train on text or records, with data.tokenizer; or set "off"')
    elif not draft.get(prompts):
        what = f"names none, and train.sample_every is {every}"
        draft.refuse(prompts, what, "texts that the model continues", f'{prompts} = ["Once upon a time"]')


RULES: tuple[Rule, ...] = list_rules(globals())
