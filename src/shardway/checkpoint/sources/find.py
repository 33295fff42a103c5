"""Which source a path is.

Invariant: decided by what is there, never by the ending of a name. This module must not read tensors.
"""

from __future__ import annotations

from pathlib import Path

from shardway.checkpoint.find import find_checkpoint
from shardway.checkpoint.manifest import NAME
from shardway.checkpoint.sources.base import ForeignSource, source_error
from shardway.checkpoint.sources.distributed import METADATA, open_distributed
from shardway.checkpoint.sources.hub import HubSource
from shardway.checkpoint.sources.own import OwnSource
from shardway.checkpoint.sources.torch_file import open_torch_file
from shardway.checkpoint.tensors import TensorReader
from shardway.errors import UserError
from shardway.models.huggingface.files import find_weights, read_weight_file
from shardway.rundir.directory import RunDir
from shardway.rundir.steps import step_of_checkpoint

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_KNOWN = (
    "a folder or a file of safetensors, a folder of torch.distributed.checkpoint (.metadata and *.distcp), a file of "
    "torch.save, a run directory of Shardway or one of its checkpoints"
)


def open_source(path: Path, step: int | None = None) -> ForeignSource:
    """The source at a path; `step` chooses among the checkpoints of a run. Raises UserError where it is none, or is
    damaged; Damaged for a checkpoint of Shardway's."""
    if path.is_dir() and is_own(path):
        found = find_checkpoint(path, step)
        return OwnSource(found, TensorReader(found.folder))
    if step is not None:
        raise UserError(f"--step {step}: {path} is no run directory of Shardway.\n  To do: leave out --step.")
    if path.is_dir():
        return _open_folder(path)
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError as error:
        raise source_error(path, f"cannot be read: {error.strerror}", f"name {_KNOWN}") from None
    return _open_file(path, head)


def is_own(path: Path) -> bool:
    """Whether this is a run directory with checkpoints, or a checkpoint."""
    has_manifest = (path / NAME).is_file()
    return has_manifest or step_of_checkpoint(path) is not None or bool(RunDir(path).checkpoint_steps())


def _open_folder(path: Path) -> ForeignSource:
    if (path / METADATA).is_file():
        return open_distributed(path)
    files = find_weights(path)
    if files is None:
        raise source_error(path, "holds no weights that can be imported", f"name {_KNOWN}")
    return HubSource(path, files)


def _open_file(path: Path, head: bytes) -> ForeignSource:
    if head.startswith(_ZIP):
        return open_torch_file(path)
    if head[8:9] == b"{":  # after eight bytes with the length of the header
        return HubSource(path, read_weight_file(path))
    if head.startswith(_PICKLE):
        raise source_error(
            path,
            "is a bare pickle, as torch wrote before release 1.6; reading it could run code, so nothing of it was read",
            "load it where you trust it, and save it again with torch.save",
        )
    raise source_error(path, "is no file of weights that can be imported", f"name {_KNOWN}")
