"""Decoder-only models of `transformers` behind Shardway's contract: built from a folder, their experts, their plan; and
the form in which a model is written for the hub.

Invariants:
- Layers, norms and embeddings are the library's own modules under the library's own names. The loop around them, the
  mixing of positions and the experts are ours, so that a model can be cut, and the axes find a module to replace.
- All that does not fit (family, config, files, data) is a UserError before any weight exists. A setting of a config
  that this package does not compute is refused, never ignored; each family has a test that compares its logits with the
  library's own.
- An unknown word in the library's plan is not guessed. The tensor axis then has no plan, and states so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardway.errors import Problem, UserError, check_no_problems
from shardway.hfconfig import CONFIG, hf_error, import_extra, read_config, without_warnings
from shardway.models.contract import ModelPlan, Split, canonical_name, matches
from shardway.models.documents import DocumentMarks
from shardway.models.experts import Experts
from shardway.models.huggingface.lora import (
    LoraShape,
    apply_lora,
    base_name,
    fill_lora,
    fingerprint_weights,
)
from shardway.models.huggingface.own import names_of_transformer, to_huggingface_config
from shardway.models.huggingface.weights import (
    EMBEDDING,
    FAMILIES,
    HEAD,
    SPARE,
    SPARE_IF_TIED,
    Arrangement,
    ExpertNames,
    Fit,
    Names,
    Shape,
    TensorFiles,
    are_equal,
    find_weights,
    fit_weights,
    keep_name,
    load_weights,
)
from shardway.models.initialise import fill_parameters
from shardway.models.transformer import CausalAttention, TiedHead, Transformer

# --- the form for the hub


@dataclass(frozen=True)
class Form:
    """How a model is written for the hub: the content of config.json, what files call its parameters, and the folder
    that it came from, whose tokenizer and generation config go along."""

    config: Mapping[str, Any]
    names: Names
    source: Path | None = None


def form_of(model: nn.Module, *, max_positions: int, source: Path | None = None) -> Form:
    """The form of a model that is not wrapped. `max_positions`: the longest sample that a transformer of Shardway's own
    was trained on. Raises UserError where there is none."""
    if isinstance(model, HuggingFaceModel):
        return Form(model.config.to_dict(), FAMILIES[model.config.model_type], source or model.source)
    if isinstance(model, Transformer):
        config = to_huggingface_config(model.shape, max_positions)
        return Form(config, names_of_transformer(model.shape), source)
    raise UserError(
        f"a {type(model).__name__} has no form among Hugging Face's decoder-only families.\n"
        "  To do: export a transformer, or a model that model.hf named."
    )


# --- from model.hf to a model on meta

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies do not depend on the length of the input."""

_NEUTRAL = {
    "quantization_config": (None, "weights that are not quantized"),
    "attention_dropout": (0.0, "no dropout of attention weights"),
    "router_jitter_noise": (0.0, "no noise in the router"),
    "output_router_logits": (False, "a mixture without the library's balancing loss"),
}
"""Options of a config that change what is computed, in ways that stop at the borders between ranks."""


def build_huggingface(
    folder: Path, *, vocab: int, seq_len: int, weights: bool = True, tied: bool | None = None
) -> HuggingFaceModel:
    """The model of a folder on the meta device, its weights not yet read: `init_weights(seed)` does that, after the
    model was laid out, or draws them where the folder has a config alone or `weights` is false.

    `vocab` and `seq_len` are the data's: tokens below `vocab`, samples of `seq_len`. `tied` says whether the output
    layer of a config that ties it is the embedding; None looks into the files, as the library does. Raises UserError
    that names all that does not fit.
    """
    config = load_config(folder)
    check_no_problems(str(folder / CONFIG), list(_list_config_problems(config, seq_len, vocab)))
    files = find_weights(folder) if weights else None
    says_tied = bool(config.tie_word_embeddings)
    if says_tied:
        config.tie_word_embeddings = _holds_tie(files) if tied is None else tied
    model = build_meta(config)
    model.source = folder
    if files is not None:
        spare = (*SPARE, *SPARE_IF_TIED) if config.tie_word_embeddings else SPARE
        model.fit = fit_weights(model, files, _names_of(config), spare)
    if says_tied and not config.tie_word_embeddings:
        model.notes = (
            f"{folder}: its config.json says that the output layer is the embedding (tie_word_embeddings = true), and "
            f"its {HEAD} has other values. Both are trained, each by itself, as transformers loads them. To do: set "
            "tie_word_embeddings = false there, which says so.",
        )
    return model


def _holds_tie(files: TensorFiles | None) -> bool:
    """Whether files hold one matrix for embedding and output layer; also where one of the two stands for both."""
    return files is None or not {EMBEDDING, HEAD} <= files.shapes.keys() or are_equal(files, EMBEDDING, HEAD)


def _names_of(config: Any) -> Names:
    """How files name the parameters; the embedding of a tied model may stand there as the output layer alone."""
    family = FAMILIES[config.model_type]
    if not config.tie_word_embeddings:
        return family

    def names(name: str, shape: Shape) -> Sequence[Arrangement]:
        return [*family(name, shape), *([keep_name(HEAD, shape)] if name == EMBEDDING else ())]

    return names


def load_config(folder: Path) -> Any:
    """The config of a folder as an object of the library's. Raises UserError."""
    read_config(folder)  # reports a damaged file with Shardway's message
    library = import_extra("transformers")
    try:
        return library.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the library raises bare ValueError, KeyError and validation errors of its own
        raise hf_error(
            str(folder), f"has a {CONFIG} that transformers refuses: {' '.join(str(error).split())}"
        ) from error


def build_meta(config: Any) -> HuggingFaceModel:
    """A model of this config on the meta device, in float32."""
    library = import_extra("transformers")
    with torch.device("meta"), without_warnings():
        library.AttentionInterface.register(_ATTENTION, _mix_positions)
        built = library.AutoModelForCausalLM.from_config(config, attn_implementation=_ATTENTION, dtype=torch.float32)
    return HuggingFaceModel(built)


def _list_config_problems(config: Any, seq_len: int, data_vocab: int) -> Iterator[Problem]:
    """What of a config this package cannot train on samples of `seq_len` tokens below `data_vocab`."""
    if config.model_type not in FAMILIES:
        yield Problem(
            "model_type",
            f'"{config.model_type}" is a family that Shardway has not been tested with',
            allowed=", ".join(FAMILIES),
            remedy="train it with `run.shard(model)` in a script of your own",
        )
    for key, (neutral, why) in _NEUTRAL.items():
        if getattr(config, key, None) not in (neutral, None):
            what = f"{getattr(config, key)} is set"
            yield Problem(key, what, allowed=f"{neutral}: {why}", remedy="change it in config.json")
    if isinstance(FAMILIES.get(config.model_type), ExpertNames) and config.hidden_act != "silu":
        # Experts are computed by Shardway's own module, which knows one activation.
        yield Problem("hidden_act", f'"{config.hidden_act}" in a mixture of experts', allowed='"silu"')
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _STATIC_ROPE:
        what = f'"{kind}" positions depend on the length of the input'
        yield Problem("rope_parameters.rope_type", what, allowed=", ".join(_STATIC_ROPE))
    kinds = getattr(config, "layer_types", None)  # a window may be written but not used
    window = getattr(config, "sliding_window", None) if kinds is None or "sliding_attention" in kinds else None
    limits = {"max_position_embeddings": getattr(config, "max_position_embeddings", None), "sliding_window": window}
    for key, limit in limits.items():
        if limit is not None and seq_len > limit:
            what = f"{limit} is less than data.seq_len = {seq_len}"
            yield Problem(key, what, allowed="samples that are no longer")
    if config.vocab_size < data_vocab:
        yield Problem(
            "vocab_size",
            f"{config.vocab_size} is smaller than the data's vocabulary of {data_vocab}",
            allowed=f"data of at most {config.vocab_size} different tokens",
            remedy="set data.tokenizer to the tokenizer.json of the model",
        )


# --- from tp_plan and pp_plan to a ModelPlan

_LAYERS = "model.layers"
_SPLITS: Mapping[str, Split] = {"colwise": "column", "rowwise": "row", "embedding_rowwise": "vocabulary"}
_INSIDE_A_REGION = ("replicated_with_grad_allreduce", "packed_colwise", "moe_tp_experts")
"""Styles of what lies within a region: norms of heads, which need no split, and experts, which `held` splits."""
_SHARED: Mapping[str, Split] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}


def _derive_plan(model: nn.Module, library: Any) -> ModelPlan:
    """The plan of an adapted `model`; `library` is the causal language model that it was made of."""
    modules, config = dict(model.named_modules()), library.config
    mixtures = [module for module in modules.values() if isinstance(module, MixtureBlock)]
    experts = f"{_LAYERS}.*.mlp.experts"
    tensor = _derive_splits(modules, library.tp_plan)
    around = [name for name in library.pp_plan if name != "lm_head"]
    cut = around.index(_LAYERS)
    held = {f"{experts}.gate": 1, f"{experts}.up": 1, f"{experts}.down": 2}
    return ModelPlan(
        blocks=(f"{_LAYERS}.*",),
        tensor=tensor,
        regions=(f"{_LAYERS}.*.self_attn", f"{_LAYERS}.*.mlp") if tensor else (),
        held=held if tensor and mixtures else {},
        kv_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        attention=(f"{_LAYERS}.*.self_attn.core",),
        positions="positions",
        experts=(experts,) if mixtures else (),
        active=float(mixtures[0].gate.top_k / mixtures[0].gate.num_experts) if mixtures else 1.0,
        first=tuple(around[:cut]),
        last=(*around[cut + 1 :], "lm_head"),
        shared=(("model.embed_tokens", "lm_head"),) if config.tie_word_embeddings else (),
    )


def _derive_splits(modules: Mapping[str, nn.Module], styles: Mapping[str, str]) -> dict[str, Split]:
    """How modules split; empty where the library splits one in a way that has no word here."""
    splits: dict[str, Split] = {}
    for pattern, style in styles.items():
        if not any(matches(name, pattern) for name in modules) or style in _INSIDE_A_REGION:
            continue
        if pattern == "lm_head":
            splits[pattern] = "logits"
        elif style not in _SPLITS:
            return {}
        else:
            splits[pattern] = "key_value" if pattern.endswith((".k_proj", ".v_proj")) else _SPLITS[style]
    # The library computes a shared expert whole on every rank; in a region, whose outputs are added up, it splits.
    if any(name.endswith(".mlp.shared_expert") for name in modules):
        splits |= {f"{_LAYERS}.*.mlp.shared_expert.{leaf}": split for leaf, split in _SHARED.items()}
    # Norms of the residual stream: beside the attention of a layer, and after the last one.
    names = [name.removeprefix(f"{_LAYERS}.0.") for name in modules if name.startswith(f"{_LAYERS}.0.")]
    splits |= {f"{_LAYERS}.*.{name}": "sequence" for name in names if "." not in name and name.endswith("norm")}
    return {**splits, "model.norm": "sequence"}


# --- the model

_ATTENTION = "shardway"
"""Name under which `_mix_positions` is known to the library."""


def _mix_positions(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    marks: torch.Tensor | None = None,
    *_: Any,
    scaling: float,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """The library's attention interface: [batch, heads, seq, head_dim] each -> [batch, seq, heads, head_dim].

    `marks` of documents stand where the library has a mask. Key and value may have fewer heads. Goes through
    `module.core`, whose place the context axis can take; that has the usual factor 1 / sqrt(head_dim), so another one
    goes into the query.
    """
    factor = scaling * query.shape[-1] ** 0.5
    query = query if abs(factor - 1.0) < 1e-6 else query * factor
    mixed = module.core(query, key, value) if marks is None else module.core(query, key, value, marks)
    return mixed.transpose(1, 2), None


class HuggingFaceModel(nn.Module):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]."""

    fit: Fit | None = None
    """Where `init_weights` finds values; None draws them at random."""
    source: Path | None = None
    """The folder that the model came from."""
    notes: tuple[str, ...] = ()
    """What a person is to know of how that folder was read."""
    lora: LoraShape | None = None
    """The adapter that is trained in place of the model's own weights."""
    targets: tuple[str, ...] = ()
    """The layers that have one."""
    base_fingerprint: str = ""
    """Of the weights beside it, which `init_weights` brings again (`models.contract.find_base`)."""

    def __init__(self, library: Any) -> None:
        """Takes the modules of a causal language model that was built with `_ATTENTION`."""
        super().__init__()
        self.config = library.config
        self.model = _Decoder(library.model)
        self.lm_head: nn.Module | None = TiedHead() if self.config.tie_word_embeddings else library.lm_head
        self.marks = DocumentMarks()
        self._plan = _derive_plan(self, library)

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor | None = None, *, packed: bool = False
    ) -> torch.Tensor:
        """Logits for int64 `inputs` [batch, seq]; `positions` [seq] or [batch, seq] default to 0, 1, 2 ...

        `packed`: a document begins wherever `positions` [batch, seq] are 0, and no token sees those of another one.
        A pipeline stage takes and returns [batch, seq, dim] where it lacks the first or the last modules, and needs
        `positions` then.
        """
        if positions is None:
            positions = torch.arange(inputs.shape[-1], device=inputs.device)
        embedding = self.model.embed_tokens
        x = inputs if embedding is None else embedding(inputs)
        angles = self.model.rotary_emb(x, positions if positions.dim() == 2 else positions[None])
        marks = self.marks(positions, x, self._plan.kv_width) if packed else None
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=angles, attention_mask=marks)
        if self.lm_head is None or self.model.norm is None:
            return x
        x = self.model.norm(x)
        if embedding is None or not self.config.tie_word_embeddings:
            return self.lm_head(x)
        return self.lm_head(x, embedding.weight)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter and buffer: from the files of the model, or, where it has a config alone, with values
        that depend on seed and name alone, of the standard deviation that the config names. An adapter begins as one
        that changes nothing."""
        # Frequencies of the rotary positions, which no file holds and the meta device has lost.
        rotary = self.model.rotary_emb
        with torch.device("cpu"):
            fresh = type(rotary)(rotary.config)
        for name, buffer in rotary.named_buffers():
            buffer.copy_(fresh.get_buffer(name))
        name_of = canonical_name if self.lora is None else base_name
        if self.fit is not None:
            load_weights(self, self.fit, name_of)
        else:
            fill_parameters(self, seed, lambda name, weight: self.config.initializer_range, name_of=name_of)
        if self.lora is not None:
            fill_lora(self, seed)

    def add_lora(self, lora: LoraShape, dtype: torch.dtype | None) -> None:
        """Freeze the model and train an adapter beside its weights, which are held in `dtype` where they are matrices
        (None: as they are). On the meta device. Raises UserError if a target names no layer, or peft is missing."""
        self.targets = apply_lora(self, self._plan, lora, dtype)
        self.lora = lora

    def fingerprint_base(self, seed: int) -> str:
        """The fingerprint of what `init_weights(seed)` fills a model with, beside an adapter."""
        return fingerprint_weights(self.fit.files) if self.fit is not None else f"drawn with train.seed = {seed}"

    def plan(self) -> ModelPlan:
        """The library's own plans for tensor and pipeline parallelism, in Shardway's words."""
        return self._plan


class _Decoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens: nn.Embedding | None = model.embed_tokens
        model.embed_tokens.padding_idx = None  # its gradient would be dropped in some layouts and not in others
        region = _as_region(type(model.layers[0].self_attn))
        for layer in model.layers:
            layer.self_attn.core = CausalAttention()
            layer.self_attn.__class__ = region
            if hasattr(layer.mlp, "experts"):
                layer.mlp = MixtureBlock(layer.mlp)
        # A dict, so that a pipeline stage that drops layers keeps the names of the others.
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(model.layers)})
        self.norm: nn.Module | None = model.norm
        self.rotary_emb = model.rotary_emb


def _as_region(kind: type[Any]) -> type[Any]:
    """The library's attention as hooks of a region want it: input first and by place, one tensor out.

    The layer that calls it passes `hidden_states` by keyword and takes a pair.
    """

    class Region(kind):
        def __call__(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
            return super().__call__(hidden_states, **others), None

        def forward(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
            mixed: torch.Tensor = super().forward(hidden_states=hidden_states, **others)[0]
            return mixed

    return Region


class MixtureBlock(nn.Module):
    """The library's router (and shared expert, where there is one) around experts that take sorted tokens.

    [batch, seq, dim] -> the same, with the numbers of the library's block with SwiGLU experts. Gate and up projections,
    one stack in the library, are separate here, so that each splits by columns.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate = block.gate
        experts, dim, hidden = block.experts.down_proj.shape
        with block.experts.down_proj.device:
            self.experts = Experts(experts, dim, hidden)
        self.shared_expert: nn.Module | None = getattr(block, "shared_expert", None)
        self.shared_expert_gate: nn.Module | None = getattr(block, "shared_expert_gate", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        _, weights, chosen = self.gate(tokens)  # the latter [tokens, top_k] each
        order = chosen.flatten().argsort(stable=True)
        owners = order // chosen.shape[-1]
        counts = torch.bincount(chosen.flatten(), minlength=self.gate.num_experts)
        outputs = self.experts(tokens[owners], counts) * weights.flatten()[order, None].type_as(tokens)
        y = torch.zeros_like(tokens).index_add(0, owners, outputs)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y = y + torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        return y.view_as(x)
