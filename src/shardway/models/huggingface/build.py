"""Builds the model of `model.hf` on the meta device, and gives the names and config.json of a model for the hub.

Invariants:
- Export: a form is complete before anything is written. A model that the hub has no form for is a UserError.
- Build: all that does not fit (family, config, files, data) is a UserError before any weight exists.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardway.errors import Problem, UserError, check_no_problems
from shardway.hfconfig import CONFIG, hf_error, import_extra, read_config
from shardway.models.huggingface.families import EMBEDDING, FAMILIES, HEAD, SPARE, SPARE_IF_TIED, list_config_problems
from shardway.models.huggingface.model import ATTENTION, HuggingFaceModel, mix_positions
from shardway.models.huggingface.own import names_of_transformer, to_huggingface_config
from shardway.models.huggingface.pieces import Arrangement, Names, Shape, keep_name
from shardway.models.huggingface.weights import TensorFiles, are_equal, find_weights, fit_weights
from shardway.models.transformer import Transformer

# --- config.json and tensor names for the hub


@dataclass(frozen=True)
class Form:
    """How a model is written for the hub."""

    config: Mapping[str, Any]
    """The content of config.json."""
    names: Names
    """What files call its parameters: the first arrangement of each is written."""
    source: Path | None = None
    """The folder that the model came from: its tokenizer and its generation config go along."""


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
    problems = [*list_config_problems(config, seq_len), *_list_vocab_problems(config.vocab_size, vocab)]
    check_no_problems(str(folder / CONFIG), problems)
    files = find_weights(folder) if weights else None
    says_tied = bool(config.tie_word_embeddings)
    if says_tied:
        config.tie_word_embeddings = holds_tie(files) if tied is None else tied
    model = build_meta(config)
    model.source = folder
    if files is not None:
        spare = (*SPARE, *SPARE_IF_TIED) if config.tie_word_embeddings else SPARE
        model.fit = fit_weights(model, files, _names_of(config), spare)
    if says_tied and not config.tie_word_embeddings:
        model.notes = (_describe_contradiction(folder),)
    return model


def holds_tie(files: TensorFiles | None) -> bool:
    """Whether files hold one matrix for embedding and output layer; also where one of the two stands for both."""
    if files is None or not {EMBEDDING, HEAD} <= files.shapes.keys():
        return True
    return are_equal(files, EMBEDDING, HEAD)


def _names_of(config: Any) -> Names:
    """How files name the parameters; the embedding of a tied model may stand there as the output layer alone."""
    family = FAMILIES[config.model_type]
    if not config.tie_word_embeddings:
        return family

    def names(name: str, shape: Shape) -> Sequence[Arrangement]:
        return [*family(name, shape), *([keep_name(HEAD, shape)] if name == EMBEDDING else ())]

    return names


def _describe_contradiction(folder: Path) -> str:
    return (
        f"{folder}: its config.json says that the output layer is the embedding (tie_word_embeddings = true), and its "
        f"{HEAD} has other values. Both are trained, each by itself, as transformers loads them. To do: set "
        "tie_word_embeddings = false there, which says so."
    )


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
    library.AttentionInterface.register(ATTENTION, mix_positions)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = library.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    return HuggingFaceModel(built)


def _list_vocab_problems(vocab: int, data_vocab: int) -> list[Problem]:
    if vocab >= data_vocab:
        return []
    return [
        Problem(
            "vocab_size",
            f"{vocab} is smaller than the data's vocabulary of {data_vocab}",
            allowed=f"data of at most {vocab} different tokens",
            remedy="set data.tokenizer to the tokenizer.json of the model",
        )
    ]
