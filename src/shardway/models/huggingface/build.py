"""From `model.hf` to a model on the meta device that knows where its weights are.

Invariant: whatever does not fit (family, config, files, data) is a UserError here, before any weight exists. This
module must not download: `shardway.hfconfig.locate_model` does.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardway.errors import Problem, check_no_problems
from shardway.hfconfig import CONFIG, hf_error, import_extra, read_config
from shardway.models.huggingface.families import EMBEDDING, FAMILIES, HEAD, SPARE, SPARE_IF_TIED, list_config_problems
from shardway.models.huggingface.files import find_weights
from shardway.models.huggingface.load import TensorFiles, are_equal, fit_weights
from shardway.models.huggingface.model import ATTENTION, HuggingFaceModel, mix_positions
from shardway.models.huggingface.pieces import Arrangement, Names, Shape, keep_name


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
