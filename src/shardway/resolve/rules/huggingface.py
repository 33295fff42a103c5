"""Rules of a model that model.hf names: its config.json says what the keys of [model] say of a reference model.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files: what the config says comes with the circumstances.
"""

from __future__ import annotations

from shardway.hfconfig import ModelFacts
from shardway.resolve.applies import SHAPE_KEYS
from shardway.resolve.draft import Draft


def a_hugging_face_model_brings_its_own_shape(draft: Draft) -> None:
    """What the config says stands in the keys of [model], so that the rules of layouts hold for it as well."""
    hf = draft.get("model.hf")
    if not hf:
        return
    if draft.get("model.kind") != "transformer":
        what = f'"{draft.get("model.kind")}" is another model than model.hf = "{hf}"'
        draft.refuse("model.kind", what, "one of the two", "remove one of them")
    said = _said(draft.circumstances.hf) if draft.circumstances.hf is not None else {}
    for name in SHAPE_KEYS:
        if draft.is_set(f"model.{name}") and draft.get(f"model.{name}") != said.get(name):
            what = f'has no effect with model.hf = "{hf}", whose config.json says it'
            draft.refuse(f"model.{name}", what, "only without model.hf", "remove the key")
        elif name in said:
            draft.derive(f"model.{name}", said[name], f"config.json of {hf}")


def _said(facts: ModelFacts) -> dict[str, int | bool]:
    mixture = {name: getattr(facts, name) for name in ("experts", "experts_per_token", "expert_dim")}
    dense = ("vocab", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "tied")
    return {**{name: getattr(facts, name) for name in dense}, **(mixture if facts.experts else {})}


def only_a_hugging_face_model_has_weights_to_start_from(draft: Draft) -> None:
    if draft.is_set("model.hf_weights") and not draft.get("model.hf"):
        draft.refuse("model.hf_weights", "has no effect without model.hf", "only with model.hf", "remove the key")


def a_sample_fits_the_positions_of_a_hugging_face_model(draft: Draft) -> None:
    facts, seq_len = draft.circumstances.hf, draft.get("data.seq_len")
    if draft.get("model.hf") and facts is not None and seq_len > facts.max_positions:
        what = f"{seq_len} is more than the {facts.max_positions} positions that the model knows"
        draft.refuse("data.seq_len", what, f"at most {facts.max_positions}")


def a_hugging_face_model_brings_its_tokenizer(draft: Draft) -> None:
    """Tokens mean what they meant when the weights were trained."""
    facts = draft.circumstances.hf
    reads_text = draft.get("model.hf") and draft.get("data.kind") == "text"
    if not reads_text or facts is None or draft.is_set("data.tokenizer"):
        return
    if facts.tokenizer:
        draft.derive("data.tokenizer", facts.tokenizer, f"tokenizer of {draft.get('model.hf')}")
    else:
        draft.refuse(
            "data.tokenizer",
            f'"{draft.get("data.tokenizer")}" is not what the model was trained with, and there is no tokenizer.json '
            "beside its config",
            'a tokenizer.json or .model file; "bytes" where that is meant',
        )
