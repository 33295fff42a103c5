"""Kinds of data by name: the contract of the group `shardway.data_sources`, and our own.

Invariants:
- A kind states facts without importing what reads the data, so that a run file is checked on a login node in no time.
- Each value of data.kind is one class here. This module must not import torch or numpy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardway.places import expand_place
from shardway.plugins import HasSettings
from shardway.runfile.schema import STDLIB, DataSection

if TYPE_CHECKING:
    from shardway.data.content import DataPath
    from shardway.data.formats.base import Records
    from shardway.data.sources.base import DataRequest, DataSource, StreamSource

FILES = ("data.path", "data.validation")
"""Keys of a kind that reads files."""
RECORD_KEYS = (
    *FILES,
    *(
        f"data.{name}"
        for name in ("inputs", "targets", "tokenizer", "chat_template", "transform", "decode", "shape", "mean", "std")
    ),
)
"""Keys of a kind that reads records."""

MANIFEST = "shards.json"
"""What `shardway data prepare` writes beside its shards."""

_FORMATS = "shardway.data.formats"


class DataKind(HasSettings):
    """One value of `data.kind`. Derive from it, state the facts and write `open`.

    `open` returns a `shardway.data.sources.base.DataSource`: numbered samples with random access (or a `StreamSource`,
    for what comes in sequence alone; it cannot be shuffled, blended, or held out in part). Sample i is the same
    at every call and in every process; the order of a run, its shares for ranks and its exact position after a restart
    follow from the length alone. Length, facts and fingerprint come without reading all samples: from a header, an
    index, sizes. A source is pickled to loader processes, so it opens files when the first batch is asked for.
    """

    gives: ClassVar[tuple[Literal["tokens", "images"], ...]]
    """What its samples are: rows of tokens, images (or arrays of numbers) with a label, or either as the model asks."""
    keys: ClassVar[tuple[str, ...]] = FILES
    """Keys that have an effect ("data.mean"), besides those of every kind (validation_fraction, shuffle, workers)."""
    needs_path: ClassVar[bool] = True
    """Whether data.path must be set."""
    names_vocabulary: ClassVar[bool] = True
    """Whether the facts of a source of tokens have a vocabulary, so that model.vocab may follow it."""
    brings_validation: ClassVar[bool] = False
    """Whether samples for validation may lie beside those for training by convention (`open_held_out`)."""
    computes: ClassVar[tuple[Literal["tokens", "images"], ...]] = ("tokens", "images")
    """Which of these are computed in Python for each batch, so that loader processes may be faster; not what is only
    gathered."""
    records: ClassVar[str] = ""
    """The class that reads the files as numbered records, "module:class" derived from
    `shardway.data.formats.base.Records`, for `shardway data`; "" where there are none."""

    magic: ClassVar[bytes] = b""
    """What its files begin with, whatever their name, at most 8 bytes; b"": nothing of their own."""

    @classmethod
    def states_vocabulary(cls, path: str) -> bool:
        """Whether the data at a path say how many tokens their vocabulary has: as all of the kind do, unless it
        overrides this."""
        return cls.names_vocabulary

    @abstractmethod
    def open(self, place: DataPath, request: DataRequest) -> DataSource | StreamSource:
        """The samples at a path (the key is "data.path" or "data.validation"), checked as far as that is quick.

        `request` has the [data] section, train.seed and what the model takes. Raises UserError (`place.error`) for
        anything wrong, with the file; an OSError becomes one. Rank 0 opens first, so it may prepare a cache.
        """

    def open_validation(self, place: DataPath, request: DataRequest) -> DataSource | StreamSource:
        """The samples at data.validation."""
        return self.open(place, request)

    def open_held_out(self, place: DataPath, request: DataRequest) -> DataSource | StreamSource | None:
        """The samples for validation that lie beside those at data.path, if there are some."""
        return None

    def exists(self, section: DataSection) -> bool:
        """Whether there is something at data.path."""
        return not self.reads_files() or expand_place(section.path).exists()

    @classmethod
    def reads_files(cls) -> bool:
        """Whether it reads files at all."""
        return "data.path" in cls.keys


class RecordsKind(DataKind):
    """A format of records with named fields: made into samples as the model asks.

    For tokens: documents of the text field data.inputs (or rows of tokens, or conversations), prepared once. For
    images: the field data.inputs is decoded and transformed, data.targets is the class.
    """

    gives: ClassVar[tuple[Literal["tokens", "images"], ...]] = ("tokens", "images")
    computes = ("images",)
    keys = RECORD_KEYS

    def open(self, place: DataPath, request: DataRequest) -> DataSource:
        from shardway.data.sources.decoded import open_decoded
        from shardway.data.sources.tokens import open_documents

        opened = self.open_records(place)
        return (
            open_documents(opened, place, request)
            if request.wants == "tokens"
            else open_decoded(opened, place, request)
        )

    def exists(self, section: DataSection) -> bool:
        path = expand_place(section.path)
        if path.exists() or not any(sign in path.name for sign in "*?[{"):
            return path.exists()
        from shardway.data.formats.base import match_files

        return bool(match_files(path))

    def open_records(self, place: DataPath) -> Records:
        """The records at a path."""
        module, _, name = self.records.partition(":")
        reader: type[Records] = getattr(import_module(module), name)
        return reader.open(place)


# --- Shardway's own


class TextKind(DataKind):
    """Text files, read as bytes or by a tokenizer."""

    gives = ("tokens",)
    computes = ()
    keys = (*FILES, "data.include", "data.tokenizer")
    records = f"{_FORMATS}.text:TextRecords"
    needs_path = False

    def open(self, place: DataPath, request: DataRequest) -> DataSource:
        from shardway.data.sources import tokens

        return tokens.open_text(place, request)

    def exists(self, section: DataSection) -> bool:
        return section.path == STDLIB or super().exists(section)


class TokensKind(DataKind):
    """A file of tokens."""

    gives = ("tokens",)
    computes = ()
    keys = (*FILES, "data.token_dtype")
    records = f"{_FORMATS}.tokens:TokenRecords"
    names_vocabulary = False

    magic: ClassVar[bytes] = b""
    """What its files begin with, whatever their name, at most 8 bytes; b"": nothing of their own."""

    @classmethod
    def states_vocabulary(cls, path: str) -> bool:
        """A folder of `shardway data prepare` does."""
        return (expand_place(path) / MANIFEST).is_file()

    def open(self, place: DataPath, request: DataRequest) -> DataSource:
        from shardway.data.sources import tokens

        return tokens.open_tokens(place, request)


class MegatronKind(DataKind):
    """Documents of tokens as Megatron-LM indexes them: name.bin and name.idx."""

    gives = ("tokens",)
    computes = ()
    records = f"{_FORMATS}.megatron:MegatronRecords"
    names_vocabulary = False

    def open(self, place: DataPath, request: DataRequest) -> DataSource:
        from shardway.data.sources import tokens

        return tokens.open_megatron(place, request)

    def exists(self, section: DataSection) -> bool:
        from shardway.data.formats.megatron import is_megatron

        return super().exists(section) or is_megatron(expand_place(section.path))


class ArraysKind(DataKind):
    """Arrays of a .npz file, or of a folder of .npy files."""

    gives = ("images",)
    computes = ()
    keys = (*FILES, "data.inputs", "data.targets", "data.mean", "data.std")
    records = f"{_FORMATS}.arrays:ArrayRecords"

    def open(self, place: DataPath, request: DataRequest) -> DataSource:
        from shardway.data.sources import images

        return images.open_arrays(place, request)


class IdxKind(DataKind):
    """A folder of MNIST's idx files; its t10k part is for validation, or its train part if it has no t10k files."""

    gives = ("images",)
    computes = ()
    keys = (*FILES, "data.mean", "data.std")
    records = f"{_FORMATS}.arrays:IdxRecords"
    brings_validation = True

    def open(self, place: DataPath, request: DataRequest) -> DataSource:
        from shardway.data.formats import arrays
        from shardway.data.sources import images

        return images.open_idx(place, request, arrays.TRAIN)

    def open_validation(self, place: DataPath, request: DataRequest) -> DataSource:
        held_out = self.open_held_out(place, request)
        return self.open(place, request) if held_out is None else held_out

    def open_held_out(self, place: DataPath, request: DataRequest) -> DataSource | None:
        from shardway.data.formats import arrays
        from shardway.data.sources import images

        return images.open_idx(place, request, arrays.TEST) if arrays.has_part(place, arrays.TEST) else None


class SyntheticKind(DataKind):
    """Made-up samples of what the model takes."""

    gives = ("tokens", "images")
    computes = ()
    keys = ("data.samples", "data.shape")
    needs_path = False

    def open(self, place: DataPath, request: DataRequest) -> DataSource:
        from shardway.data.sources import synthetic

        return synthetic.open_synthetic(request)


class JsonlKind(RecordsKind):
    """Lines of JSON, perhaps compressed with gzip or zstd."""

    records = f"{_FORMATS}.jsonl:JsonlRecords"


class ParquetKind(RecordsKind):
    """Parquet files."""

    records = f"{_FORMATS}.parquet:ParquetRecords"
    magic = b"PAR1"


class ArrowKind(RecordsKind):
    """Arrow files, such as a folder or a cache of Hugging Face `datasets`."""

    records = f"{_FORMATS}.parquet:ArrowRecords"
    magic = b"ARROW1"


class WebDatasetKind(RecordsKind):
    """Tar shards in which members with one key are a record."""

    records = f"{_FORMATS}.webdataset:WebDatasetRecords"


class MdsKind(RecordsKind):
    """Shards of MosaicML Streaming."""

    records = f"{_FORMATS}.mds:MdsRecords"


class EnergonKind(RecordsKind):
    """A folder prepared by Megatron Energon."""

    records = f"{_FORMATS}.energon:EnergonRecords"


class Hdf5Kind(RecordsKind):
    """Data sets of an HDF5 file along their first axis."""

    records = f"{_FORMATS}.hdf5:Hdf5Records"
    magic = b"\x89HDF\r\n\x1a\n"


class LmdbKind(RecordsKind):
    """Values of an LMDB environment."""

    records = f"{_FORMATS}.lmdb_records:LmdbRecords"


class ImagesKind(RecordsKind):
    """A folder of images with a folder for each class."""

    gives = ("images",)
    records = f"{_FORMATS}.image_folder:ImageFolder"


class ShardsKind(RecordsKind):
    """Records that `shardway data` has written."""

    records = f"{_FORMATS}.shards:ShardRecords"


class DatasetKind(DataKind):
    """A torch Dataset of the user's own, map-style or iterable, made by the function that data.dataset names.

    The function has data.settings as keyword arguments, and "train" or "validation" as `split` if it takes that.
    """

    gives = ("tokens", "images")
    keys = ("data.dataset", "data.inputs", "data.targets", "data.mean", "data.std")
    needs_path = False
    names_vocabulary = False
    brings_validation = True

    @classmethod
    def takes_settings(cls) -> bool:
        return True

    @classmethod
    def read_settings(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """All of them: the function refuses those that it does not take."""
        return dict(given)

    def open(self, place: DataPath, request: DataRequest) -> DataSource | StreamSource:
        from shardway.data.sources.own_dataset import TRAIN, open_dataset

        return open_dataset(request, TRAIN)

    def open_held_out(self, place: DataPath, request: DataRequest) -> DataSource | StreamSource | None:
        from shardway.data.sources.own_dataset import open_validation_split

        return open_validation_split(request)
