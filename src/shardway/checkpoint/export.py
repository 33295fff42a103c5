"""Exports the models of a checkpoint: a folder for `from_pretrained` of transformers, or plain state dicts for any
PyTorch script.

Invariants:
- The folder appears complete or not at all, and an existing one is never touched.
- Hugging Face: beside its own part, no rank holds more than one whole parameter at a time.
- State dicts: names, shapes and formats are those of each model's own `state_dict`, whatever layout saved it, and the
  class of the model is not needed. One tensor is in memory at a time: `model.pt` is written from the memory-mapped
  safetensors file beside it.

A safetensors file is eight bytes with the length of the header (little endian), the header (JSON: dtype, shape and
offsets of each tensor), then the tensors one after the other (https://github.com/huggingface/safetensors, "Format").
It is written here, because the library wants all tensors of a file in memory.

Weights that a model uses under several names are in a checkpoint, and in these files, under each name.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from torch.distributed.tensor import DTensor

from shardway.checkpoint.catalog import VALUE, FoundCheckpoint, TensorEntry
from shardway.checkpoint.reader import TensorReader
from shardway.checkpoint.state import Tensors, dtype_name, find_dtype, memory_of
from shardway.errors import JobError, LostContact, UserError
from shardway.hfconfig import CONFIG, TOKENIZER_FILES
from shardway.models.huggingface.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from shardway.models.huggingface.model import Form
from shardway.models.huggingface.weights import INDEX, SINGLE, Names, Shape, WeightPiece
from shardway.ranks.start import Ranks
from shardway.refusals import find_remedy
from shardway.rundir.file_io import fsync_folder, render_json

FILE_BYTES = 4 * 2**30  # about how large a file may become
_BESIDE = ("generation_config.json", *TOKENIZER_FILES)

SAFETENSORS_FORMATS: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.complex64: "C64",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint64: "U64",
        torch.uint32: "U32",
        torch.uint16: "U16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
"""torch dtype -> its name in a safetensors file."""


@dataclass(frozen=True)
class _File:
    """A file to write: its pieces in order, each with the parameter it comes from, and the rank that writes it."""

    name: str
    writer: int
    pieces: tuple[tuple[str, WeightPiece], ...]


def save_weights(
    state: Tensors, form: Form, folder: Path, ranks: Ranks, *, dtype: torch.dtype, file_bytes: int = FILE_BYTES
) -> Path:
    """Write the parameters of a model (names of the whole model -> tensors or DTensors) on all ranks together. Each
    rank passes what it holds. The first rank that holds a part of a parameter writes it, in `dtype`. Returns the
    folder. Raises UserError if the folder exists, JobError on every rank if it cannot be written."""
    partial = folder.with_name(f".{folder.name}.unfinished")
    ranks.together(lambda: begin_folder(folder, partial) if ranks.is_first else None)
    held = {name: tuple(tensor.shape) for name, tensor in state.items()}
    files = _plan_files(ranks.gather(held), form.names, file_bytes // dtype.itemsize)
    writers = [_TensorFileWriter(partial / file.name, file, dtype) for file in files if file.writer == ranks.rank]

    def write() -> None:
        """Gather one parameter after the other and append it to the files that need a part of it."""
        for name, tensor in state.items():
            whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
            if not any(writer.failure for writer in writers):  # a rank that fails still gathers, which needs all
                for writer in writers:
                    writer.take(name, whole)
        for writer in writers:
            writer.close()
        failures = [writer.failure for writer in writers if writer.failure]
        if failures:
            raise JobError(f"{failures[0].strerror or failures[0]}")

    def finish() -> None:
        """Write everything beside the tensors, then make the folder appear by a rename."""
        try:
            if len(files) > 1:
                pieces = [(piece, file.name) for file in files for _, piece in file.pieces]
                total = sum(piece.elements for piece, _ in pieces) * dtype.itemsize
                placed = dict(sorted((piece.name, file) for piece, file in pieces))
                _write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})
            _write_json(partial / CONFIG, {**form.config, "dtype": dtype_name(dtype)})
            found = {path for name in _BESIDE for path in form.source.glob(name)} if form.source is not None else ()
            for path in sorted(found):
                shutil.copyfile(path, partial / path.name)
            finish_folder(partial, folder)
        except OSError as error:
            raise JobError(error.strerror or str(error)) from error

    try:
        with ranks.contact("while gathering weights"):
            ranks.together(write)
        ranks.together(lambda: finish() if ranks.is_first else None)
    except JobError as error:
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, LostContact):
            raise
        raise JobError(
            f"the model could not be written to {folder}: {error}\n  Nothing was left there. To do: "
            f"{find_remedy(str(error), 'name another folder')}; then run the same command again."
        ) from error
    return folder


def begin_folder(folder: Path, partial: Path) -> None:
    """Make the hidden neighbour that will be renamed to `folder`. Raises UserError if `folder` exists or cannot be
    made."""
    if folder.exists():
        raise UserError(
            f"{folder} exists, and is not overwritten.\n  To do: name a folder that does not exist, or move it away."
        )
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}.\n  To do: name another folder.") from error


def finish_folder(partial: Path, folder: Path) -> None:
    """Rename the folder to its final name. Raises OSError."""
    fsync_folder(partial)
    os.rename(partial, folder)
    fsync_folder(folder.parent)


def _plan_files(held: Sequence[Mapping[str, Shape]], names: Names, limit: int) -> list[_File]:
    """The files of all ranks, the same on every rank: each rank writes the parameters that no earlier rank holds, cut
    at `limit` elements."""
    seen: set[str] = set()
    groups: list[tuple[int, list[tuple[str, WeightPiece]]]] = []
    for rank, shapes in enumerate(held):
        size = limit + 1  # so that each rank begins a file
        for name in [name for name in shapes if name not in seen]:
            seen.add(name)
            for piece in names(name, shapes[name])[0]:
                if size + piece.elements > limit:
                    groups.append((rank, []))
                    size = 0
                groups[-1][1].append((name, piece))
                size += piece.elements
    total = len(groups)
    file_names = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)] if total > 1 else [SINGLE]
    return [_File(name, rank, tuple(group)) for name, (rank, group) in zip(file_names, groups, strict=True)]


class _TensorFileWriter:
    """One file: the header at once, tensors in the order in which they come, until the file system refuses."""

    def __init__(self, path: Path, file: _File, dtype: torch.dtype) -> None:
        self._path, self._dtype = path, dtype
        self._pieces = {name: [p for owner, p in file.pieces if owner == name] for name, _ in file.pieces}
        self._header = render_header([(piece.name, dtype, piece.whole) for _, piece in file.pieces])
        self._stream: Any = None
        self.failure: OSError | None = None

    def take(self, name: str, whole: torch.Tensor) -> None:
        """Append the pieces of a parameter that belong here."""
        try:
            for piece in self._pieces.get(name, ()):
                self._append(whole[piece.region.slices])
        except OSError as error:
            self.failure = error

    def close(self) -> None:
        try:
            if self._stream is not None:
                with self._stream:
                    _sync(self._stream)
        except OSError as error:
            self.failure = self.failure or error

    def _append(self, values: torch.Tensor) -> None:
        if self._stream is None:
            self._stream = open(self._path, "xb")  # noqa: SIM115 - closed by `close`, after tensors to come
            self._stream.write(self._header)
        self._stream.write(memory_of(values.to(self._dtype).contiguous()))


def render_header(tensors: Sequence[tuple[str, torch.dtype, Shape]]) -> bytes:
    """The beginning of a safetensors file whose tensors (name, format, shape) follow in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS_FORMATS[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that tensors start at a multiple of eight
    return len(text).to_bytes(8, "little") + text


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(render_json(content, indent=2) + "\n")
        _sync(file)


# --- state dicts: model.safetensors and model.pt

NO_MODEL = ("optimizer", "random", "kept", "script")  # prefixes of the parts of a checkpoint that are not weights
_EXTRA = "_extra_state"  # the name in a `state_dict` of what `nn.Module.get_extra_state` returns


@dataclass(frozen=True)
class Written:
    """The files of one export, and why one is missing ("" if none is)."""

    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def write_state_dicts(found: FoundCheckpoint, folder: Path, dtype: torch.dtype | None) -> Written:
    """Write each model of a checkpoint; `dtype` None keeps the format of each tensor, another one converts weights.
    Raises UserError if the checkpoint has no weights in Shardway's form or the folder exists, Damaged if it is not what
    was saved, JobError if it cannot be written."""
    reader = TensorReader(found.folder)
    models = find_models(list(reader.entries.values()))
    if not models:
        raise no_weights(found.folder)
    partial = folder.with_name(f".{folder.name}.unfinished")
    begin_folder(folder, partial)
    try:
        written = [_write_model(reader, partial, name, entries, dtype) for name, entries in models.items()]
        finish_folder(partial, folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise _unwritten(folder, error) from error
        raise
    return Written(sum((each.files for each in written), ()), sum((each.left_out for each in written), ()))


def write_adapter(
    found: FoundCheckpoint, folder: Path, names: Mapping[str, str], config: Mapping[str, Any], dtype: torch.dtype
) -> Written:
    """Write an adapter of a checkpoint as `PeftModel.from_pretrained` reads it: its tensors (name in the checkpoint ->
    name in the file) in `dtype`, and its config. Raises as `write_state_dicts`."""
    reader = TensorReader(found.folder)
    if missing := sorted(names.keys() - reader.entries.keys()):
        raise UserError(
            f"{found.folder} lacks {len(missing)} tensors of its run's adapter, such as {missing[0]}.\n"
            "  To do: export the run that saved it."
        )
    partial = folder.with_name(f".{folder.name}.unfinished")
    begin_folder(folder, partial)
    try:
        ordered = sorted(names, key=reader.place)
        with open(partial / ADAPTER_WEIGHTS, "xb") as file:
            file.write(render_header([(names[name], dtype, reader.entries[name].shape) for name in ordered]))
            for name in ordered:
                file.write(memory_of(reader.read(name).to(dtype).contiguous()))
            _sync(file)
        _write_json(partial / ADAPTER_CONFIG, config)
        finish_folder(partial, folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise _unwritten(folder, error) from error
        raise
    return Written((ADAPTER_WEIGHTS, ADAPTER_CONFIG))


def _unwritten(folder: Path, error: OSError) -> JobError:
    why = error.strerror or str(error)
    return JobError(
        f"the weights could not be written to {folder}: {why}.\n  Nothing was left there. To do: "
        f"{find_remedy(why, 'name another folder')}; then run the same command again."
    )


def find_models(entries: Sequence[TensorEntry]) -> dict[str, list[TensorEntry]]:
    """The models of a checkpoint: `model`, and `model-NAME` for each further one that a script has named."""
    parts: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        if not entry.part.startswith(NO_MODEL):
            parts.setdefault(entry.name.partition(".")[0], []).append(entry)
    return {name: part for name, part in parts.items() if any(entry.dtype != VALUE for entry in part)}


def no_weights(folder: Path) -> UserError:
    """The error for a checkpoint that holds only DeepSpeed's files."""
    return UserError(
        f"{folder} holds no weights in Shardway's form: what DeepSpeed trained is saved in DeepSpeed's own files.\n"
        "  To do: take the weights out with `python zero_to_fp32.py . OUTPUT` in that folder."
    )


def _write_model(
    reader: TensorReader, folder: Path, model: str, entries: Sequence[TensorEntry], dtype: torch.dtype | None
) -> Written:
    weights, state = [], {}
    for entry in sorted(entries, key=lambda each: reader.place(each.name)):
        name = entry.name.removeprefix(f"{model}.")
        if entry.dtype == VALUE:
            state[name] = json.loads(bytes(reader.read(entry.name).tolist()))
        else:
            saved = find_dtype(entry.dtype)
            kept = saved if dtype is None or not saved.is_floating_point else dtype
            weights.append((name, kept, entry.shape))
    # Wide formats first, so that every tensor begins at a multiple of its item size.
    weights.sort(key=lambda each: -each[1].itemsize)
    unknown = [f"{name} is {dtype_name(kept)}" for name, kept, _ in weights if kept not in SAFETENSORS_FORMATS]
    path = folder / f"{model}.safetensors"
    with open(path, "x+b") as file:
        start = end = 0 if unknown else file.write(render_header(weights))
        for name, kept, _ in weights:
            # No name for the tensor: it is gone when the next one is read.
            end += file.write(memory_of(reader.read(f"{model}.{name}").to(kept).contiguous()))
        _sync(file)
        # torch takes no memory that may not be written.
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if end > start else b""
        mapped = {}
        for name, kept, shape in weights:
            count = math.prod(shape)
            flat = (
                torch.frombuffer(pages, dtype=kept, count=count, offset=start) if count else torch.empty(0, dtype=kept)
            )
            mapped[name] = flat.view(shape)
            start += count * kept.itemsize
        _save(_nest({**mapped, **state}), folder / f"{model}.pt")
    if not unknown:
        return Written((path.name, f"{model}.pt"))
    path.unlink()
    return Written((f"{model}.pt",), (f"no {path.name}, which has no name for that format: {unknown[0]}",))


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A `state_dict` with its extra states as nested dicts again."""
    state: dict[str, Any] = {}
    for name, value in flat.items():
        owner, found, inner = name.partition(f"{_EXTRA}.")
        place, path = (state, [name]) if not found else (state.setdefault(owner + _EXTRA, {}), inner.split("."))
        for each in path[:-1]:
            place = place.setdefault(each, {})
        place[path[-1]] = value
    return state


def _save(state: Mapping[str, Any], path: Path) -> None:
    with open(path, "xb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # torch's zip writer reports a failed write so
            raise OSError(f"torch.save: {error}") from error
        _sync(file)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
