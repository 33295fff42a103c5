"""Counts the parameters of the model that a run file names, or of a user's module, without training it.

Invariant: nothing is written and no weights are read. A user's module is code that the user named on the command line.
This module must not plan.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardway.data.open import find_sample
from shardway.errors import UserError
from shardway.hfconfig import locate_model, read_config
from shardway.models.build import build_model
from shardway.models.trace import trace_module
from shardway.plan.counted import find_counted
from shardway.plan.shapes import Measured
from shardway.resolve.draft import takes_of
from shardway.runfile.schema import RunFile


def count_model(values: RunFile, own: str = "") -> Measured:
    """The counts of the model of a resolved run, or of what `own` makes: "file.py:function", which returns a module, or
    a module and the inputs of its forward pass. Raises UserError if there is none or it cannot be counted."""
    section = values.model
    if takes_of(section.kind) == "tokens" or section.hf:  # one sample as the data of the run have it
        sample = torch.zeros((1, values.data.seq_len), dtype=torch.int64, device="meta")
    else:
        sample = torch.zeros((1, *find_sample(values)[0]), device="meta")
    if own:
        module, inputs = _call(own)
        return trace_module(module, sample if inputs is None else inputs, name=own)
    if section.hf:
        from shardway.models.huggingface.model import build_meta, load_config
        from shardway.models.huggingface.weights import FAMILIES

        folder = locate_model(section.hf, weights=False)
        config = load_config(folder)
        if config.model_type not in FAMILIES:  # as the library computes it
            counted = find_counted(read_config(folder), section.hf, lambda _: None)
            return counted.at_length(section.hf, values.data.seq_len)
        return trace_module(build_meta(config), sample, name=section.hf)
    vocab = section.vocab if isinstance(section.vocab, int) else find_sample(values)[1]
    module = build_model(section, vocab=vocab, sample_shape=tuple(sample.shape[1:]))
    return trace_module(module, sample, name=section.kind)


def _call(own: str) -> tuple[nn.Module, Any]:
    path, _, name = own.rpartition(":")
    try:
        made = _find(Path(path), name, own)()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code raises, or ends with
        raise UserError(
            f'--module "{own}" failed: {type(error).__name__}: {error}\n  To do: call it without arguments from Python.'
        ) from error
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise UserError(
            f"--module {own} returned {type(module).__name__}, which is no torch.nn.Module.\n"
            "  allowed: a module, or a pair of a module and the inputs of its forward pass"
        )
    return module, inputs


def _find(path: Path, name: str, own: str) -> Any:
    if not path.is_file() or not name:
        raise UserError(f'--module "{own}" names no function.\n  allowed: file.py:function, the file being there')
    spec = importlib.util.spec_from_file_location(f"_counted_{path.stem}", path)
    module = importlib.util.module_from_spec(spec) if spec else None
    if module is None or spec is None or spec.loader is None:
        raise UserError(f'--module "{own}": {path} is no Python file.')
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        known = ", ".join(each for each, value in vars(module).items() if _is_own(each, value, spec.name)) or "nothing"
        raise UserError(f'--module "{own}": {path} has no function "{name}".\n  it has: {known}')
    return found


def _is_own(name: str, value: Any, module: str) -> bool:
    """Whether a file defines a name, rather than import it, as something that can be called."""
    if name.startswith("_") or not callable(value):
        return False
    return getattr(value, "__module__", None) == module or not hasattr(value, "__qualname__")
