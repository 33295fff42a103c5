"""From `model.hf` to a model on the meta device that knows where its weights are.

Invariant: whatever does not fit (family, config, files, data) is a UserError here, before any weight exists. This
module must not download: `shardway.hfconfig.locate_model` does.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from shardway.errors import Problem, check_no_problems
from shardway.hfconfig import CONFIG, hf_error, import_extra, read_config
from shardway.models.huggingface.families import FAMILIES, SPARE, SPARE_IF_TIED, list_config_problems
from shardway.models.huggingface.files import find_weights
from shardway.models.huggingface.load import fit_weights
from shardway.models.huggingface.model import ATTENTION, HuggingFaceModel, mix_positions


def build_huggingface(folder: Path, *, vocab: int, seq_len: int) -> HuggingFaceModel:
    """The model of a folder on the meta device, its weights not yet read: `init_weights(seed)` does that, after the
    model was laid out, or draws them where the folder has a config alone.

    `vocab` and `seq_len` are the data's: tokens below `vocab`, samples of `seq_len`. Raises UserError that names all
    that does not fit.
    """
    config = load_config(folder)
    problems = [*list_config_problems(config, seq_len), *_list_vocab_problems(config.vocab_size, vocab)]
    check_no_problems(str(folder / CONFIG), problems)
    model = build_meta(config)
    model.source = folder
    files = find_weights(folder)
    if files is not None:
        spare = (*SPARE, *SPARE_IF_TIED) if config.tie_word_embeddings else SPARE
        model.fit = fit_weights(model, files, FAMILIES[config.model_type], spare)
    return model


def load_config(folder: Path) -> Any:
    """The config of a folder as an object of the library's. Raises UserError."""
    read_config(folder)  # says what is wrong with the file in our words
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
