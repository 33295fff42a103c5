"""What MODEL on a command line names, and how it is opened: a hub name, a folder, a run of ours, or one checkpoint.

Invariants:
- What is opened is always a model of transformers, so tokens are those of its `generate`. Everything is only read: of a
  run, tensors go from the checkpoint into the model, under the names that an export would write, and no folder is made.
- Every byte of a checkpoint that is used is compared with its checksum. A damaged checkpoint is passed over only if
  the user did not choose it, and then this is a note.
- Split over ranks, each keeps its part. No rank waits for one that failed.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from shardway.checkpoint.catalog import (
    VALUE,
    CheckpointHead,
    FoundCheckpoint,
    check_base,
    choose_best,
    find_checkpoint,
    find_checkpoints,
    find_tie,
    read_head,
)
from shardway.checkpoint.file_format import MANIFEST, Damaged
from shardway.checkpoint.reader import TensorReader
from shardway.data.kinds import MANIFEST as DATA_MANIFEST
from shardway.data.tokenizers import BYTES
from shardway.errors import Bug, JobError, SiteError, UserError, list_some
from shardway.hfconfig import CONFIG, import_extra, locate_model, read_config, without_warnings
from shardway.infer.split import split_class, split_options
from shardway.infer.tokenizer import ModelTokenizer, open_data_tokenizer, open_library_tokenizer
from shardway.models.build import build_model
from shardway.models.contract import canonical_name
from shardway.models.huggingface.lora import ADAPTER_CONFIG, LoraShape, names_beside, read_lora
from shardway.models.huggingface.model import Form, HuggingFaceModel, build_huggingface, form_of, load_config
from shardway.models.huggingface.weights import Fit, Shape, WeightPiece
from shardway.parallel.precision import FORMATS
from shardway.places import expand_place
from shardway.ranks.launcher import variables_for_libraries
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from shardway.rundir.names import step_of_checkpoint
from shardway.runfile.load import load_run
from shardway.runfile.schema import RunFile

T = TypeVar("T")

QUANTIZE = ("off", "fp8", "int8", "int4")
"""Number formats of weights that `ModelRequest.quantize` may ask for."""


@dataclass(frozen=True)
class ModelRequest:
    """What a verb was given. `word`: a hub name ("org/name[@revision]"), the folder of a model, a run directory, or the
    folder of one checkpoint; `step` and `best` choose among those of a run. `dtype`: auto, fp32, bf16 or fp16, where
    auto is bf16 on an accelerator that computes in it, fp16 on an older one if the files are, else fp32. `device`:
    auto, cpu or cuda. `quantize`: one of `QUANTIZE`. `random_weights`: from the config alone, drawn by `seed`.
    `tokenizer` and `template` replace those of the model ("": its own)."""

    word: str
    step: int | None = None
    best: bool = False
    dtype: str = "auto"
    device: str = "auto"
    quantize: str = "off"
    random_weights: bool = False
    seed: int = 0
    trust_remote_code: bool = False
    tokenizer: str = ""
    template: str = ""


@dataclass
class OpenedModel:
    """A model to be used: the library's, in eval mode, on `device`; `tokenizer` is None if none was found. `name` is
    for people, `origin` states what was opened ("run runs/x, step 400"), `notes` what they are to know of it."""

    model: Any
    tokenizer: ModelTokenizer | None
    name: str
    origin: str
    device: torch.device
    dtype: torch.dtype
    notes: tuple[str, ...] = ()
    run: RunDir | None = None
    """The run that it is of, with `step`, that of its checkpoint."""
    step: int = 0

    @property
    def positions(self) -> int | None:
        """How many tokens the model has positions for; None if its config states none."""
        config = self.model.config.get_text_config()
        found = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
        return next((int(each) for each in found if isinstance(each, int) and each > 0), None)


def open_model(request: ModelRequest, ranks: Ranks | None = None) -> OpenedModel:
    """Open what a request names; over several `ranks` it is split between them (tensor parallel). Raises UserError if
    it names no model, or one that cannot be used so; JobError if it is damaged; SiteError if the device is not
    there."""
    device = _choose_device(request, ranks)
    world = ranks.world if ranks is not None else 1
    place = expand_place(request.word)
    with _quiet():
        _check_quantize(request, device, world)
        if is_run(place):
            return _open_run(request, place, device, ranks)
        if request.step is not None or request.best:
            option = "--best" if request.best else f"--step {request.step}"
            raise UserError(
                f"{option}: {request.word} is no run directory, which alone has steps.\n  To do: leave out {option}."
            )
        return _open_folder(request, device, ranks)


def is_run(place: Path) -> bool:
    """Whether a path is a run directory, or the folder of one checkpoint."""
    if not place.is_dir():
        return False
    return (place / MANIFEST).is_file() or step_of_checkpoint(place) is not None or RunDir(place).exists()


def is_model(place: Path) -> bool:
    """Whether a path holds a model: of a run, or of the library."""
    return is_run(place) or (place / CONFIG).is_file()


# --- a folder or a name of the hub


def _open_folder(request: ModelRequest, device: torch.device, ranks: Ranks | None) -> OpenedModel:
    weights = not request.random_weights
    with _named_as_word():
        folder = _locate(request, ranks)
    if not (folder / CONFIG).is_file():
        if (folder / ADAPTER_CONFIG).is_file():
            raise UserError(
                f"{request.word} is an adapter alone, without the model that it stands beside.\n"
                "  To do: name the run that trained it, or a whole model: `shardway checkpoint export ... --merge`."
            )
        raise UserError(
            f"{request.word} is neither a model nor a run: it has no {CONFIG} and no checkpoint.\n"
            "  To do: name a run directory (`shardway status` lists runs), a folder that save_pretrained or `shardway "
            "checkpoint export` wrote, or a hub name such as Qwen/Qwen3-0.6B."
        )
    with _named_as_word():
        read_config(folder)  # reports a damaged file
    if weights and not any(next(folder.glob(each), None) for each in ("*.safetensors", "*.bin")):
        raise UserError(
            f"{request.word} has a {CONFIG} and no weights.\n  To do: fetch the model again; `shardway bench infer` "
            "draws weights (--load-format dummy)."
        )
    library = import_extra("transformers")
    if request.trust_remote_code:
        try:
            config = library.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=True)
        except Exception as error:  # anything that code of the folder raises
            raise UserError(
                f"the config of {request.word}, or code of its folder, fails: {type(error).__name__}: {error}\n"
                "  To do: install what it needs, or leave out --trust-remote-code."
            ) from error
    else:
        with _named_as_word():
            config = load_config(folder)
    kind = _find_class(library, config, folder, request)
    dtype = _choose_dtype(request, device, getattr(config, "dtype", None))
    if request.random_weights:
        model = _draw(kind, config, dtype, device, request, ranks)
    else:
        model = _load(
            kind, {"config": config, "pretrained_model_name_or_path": str(folder)}, dtype, device, ranks, request
        )
    tokenizer = _choose_tokenizer(
        request, lambda: open_library_tokenizer(folder, trust_remote_code=request.trust_remote_code)
    )
    is_hub = folder != expand_place(request.word)
    origin = f"hub {request.word}" if is_hub else f"folder {request.word}"
    if request.random_weights:
        origin += f", weights drawn by seed {request.seed}"
    model, notes = _finish(model, request, device)
    return OpenedModel(model, tokenizer, request.word, origin, device, dtype, notes)


@contextlib.contextmanager
def _named_as_word() -> Iterator[None]:
    """Errors about `model.hf`, the key of a run file, as errors about MODEL."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.hf", "MODEL")) from error


def _locate(request: ModelRequest, ranks: Ranks | None) -> Path:
    """The folder of the model; what is downloaded is downloaded by the first rank of all."""

    def find() -> Path:
        place = expand_place(request.word)
        try:
            return locate_model(request.word, weights=not request.random_weights)
        except UserError as error:
            if place.is_file() and is_run(place.parent):
                raise UserError(
                    f"{request.word} is a file of the run {place.parent}.\n  To do: name the run: {place.parent}"
                ) from error
            beside = sorted(each.name for each in place.parent.iterdir()) if place.parent.is_dir() else []
            beside = [] if place.is_file() else beside
            if place.parent != Path() and beside:
                raise UserError(
                    f"there is no {request.word}; {place.parent} holds {list_some(beside, 8)}.\n"
                    "  To do: name a run directory, a folder with a config.json, or a hub name such as Qwen/Qwen3-0.6B."
                ) from error
            if "/" not in request.word:
                raise UserError(
                    f"{error}\n      or name a run: none of this name is here; `shardway status` lists those that are"
                ) from error
            raise

    return ranks.first_then_all(find) if ranks is not None else find()


def _find_class(library: Any, config: Any, folder: Path, request: ModelRequest) -> Any:
    """The library's class of a causal language model with this config. Raises UserError if it has none."""
    remote = getattr(config, "auto_map", None) or {}
    if request.trust_remote_code and "AutoModelForCausalLM" in remote:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(remote["AutoModelForCausalLM"], str(folder))
    table = library.AutoModelForCausalLM._model_mapping
    if type(config) not in table:
        raise UserError(
            f"{request.word} is a {getattr(config, 'model_type', 'model')}, for which transformers "
            f"{library.__version__} has no language model that continues text.\n"
            "  To do: name a decoder-only one, such as Qwen/Qwen3-0.6B."
        )
    kind = table[type(config)]
    return kind[0] if isinstance(kind, tuple) else kind


# --- one of our runs


def _open_run(request: ModelRequest, place: Path, device: torch.device, ranks: Ranks | None) -> OpenedModel:
    run, waiting = _ask_first(ranks, lambda: _find_checkpoints(request, place))
    values = _read_values(run, place)
    source = _RunModel(run, values)
    library = import_extra("transformers")
    config = library.CONFIG_MAPPING[source.form.config["model_type"]].from_dict(dict(source.form.config))
    kind = library.AutoModelForCausalLM._model_mapping[type(config)]
    dtype = _choose_dtype(request, device, FORMATS.get(str(values.precision.weights)))
    passed_over: dict[FoundCheckpoint, str] = {}
    while waiting:
        found = waiting.pop(0)
        try:
            if request.random_weights:
                model = _draw(kind, config, dtype, device, request, ranks)
            else:
                tensors = _agree(ranks, lambda found=found: source.list_tensors(found))  # type: ignore[misc]
                given = {"config": config, "pretrained_model_name_or_path": None, "state_dict": tensors}
                model = _agree(
                    ranks,
                    lambda given=given: _load(kind, given, dtype, device, ranks, request),  # type: ignore[misc]
                )
        except Damaged as damage:
            passed_over[found] = f"{found.folder.name}: {'; '.join(damage.reasons)}"
            waiting = waiting or _ask_first(ranks, lambda: _find_later(request, place, passed_over))
            continue
        break
    else:
        raise _nothing_whole(request, run, list(passed_over.values()))
    still_there = [text for each, text in passed_over.items() if each.folder.is_dir()]  # others were pruned meanwhile
    notes = tuple(f"passed over the damaged checkpoint {each}" for each in still_there)
    tokenizer = _choose_tokenizer(request, source.open_tokenizer)
    origin = f"run {run.path}, step {found.step}"
    if request.random_weights:
        origin = f"run {run.path}, weights drawn by seed {request.seed}"
    model, more = _finish(model, request, device)
    return OpenedModel(model, tokenizer, run.path.name, origin, device, dtype, (*notes, *more), run, found.step or 0)


def _find_checkpoints(request: ModelRequest, place: Path) -> tuple[RunDir, list[FoundCheckpoint]]:
    """The run of a path, and the checkpoints that may be opened, in the order in which they are tried."""
    if request.best and request.step is not None:
        raise UserError(f"--best and --step {request.step} name two checkpoints.\n  To do: leave one of them out.")
    run = RunDir(place)
    if (place / MANIFEST).is_file() or step_of_checkpoint(place) is not None:
        if request.best or request.step is not None:
            raise UserError(
                f"{request.word} is one checkpoint, among which --step and --best choose nothing.\n"
                "  To do: leave them out, or name the run directory."
            )
        return RunDir(place.resolve().parent.parent), [find_checkpoint(place)]
    if request.best:
        return run, [find_checkpoint(place, choose_best(run))]
    if request.step is not None:
        return run, [find_checkpoint(place, request.step)]
    if not run.checkpoint_steps():
        raise UserError(
            f"{request.word} is a run without a checkpoint.\n  To do: train it until its first one (checkpoint.every), "
            "or name another run; `shardway status` lists runs and their steps."
        )
    return run, find_checkpoints(place)


def _find_later(request: ModelRequest, place: Path, tried: Mapping[FoundCheckpoint, str]) -> list[FoundCheckpoint]:
    """The checkpoints that a run in training has written since, the newest first; none where one was chosen. While a
    model is opened, those that were found may be pruned."""
    if request.step is not None or request.best or len(tried) > _MOST_TRIED or not RunDir(place).checkpoint_steps():
        return []
    return [found for found in find_checkpoints(place) if found not in tried]


_MOST_TRIED = 20
"""Checkpoints that are tried at most, so that a run that prunes them ever faster ends the search."""


def _read_values(run: RunDir, place: Path) -> RunFile:
    """The resolved run file. Raises UserError where there is none, or no model of a run file was trained."""
    resolved = run.read_resolved()
    if not resolved:
        raise UserError(
            f"{place} has no {run.resolved_path.name} of its run beside it, which states the model.\n"
            "  To do: name the run directory, or the checkpoint in it."
        )
    if "model" not in resolved:
        raise UserError(
            f"{run.path} is the run of a script, whose model has a class of the script's own.\n"
            "  To do: build the model in a script and load what `shardway checkpoint export --own-names` writes."
        )
    return load_run(run.resolved_path).values


def _nothing_whole(request: ModelRequest, run: RunDir, damages: list[str]) -> JobError:
    lines = "\n".join(f"  {each}" for each in damages)
    few = len(run.checkpoint_steps()) <= len(damages)
    remedy = "restore the files" if few else "choose another step; `shardway checkpoint verify` lists which are whole"
    return JobError(f"no checkpoint of {request.word} that may be opened is whole:\n{lines}\n  To do: {remedy}.")


def open_run_tokenizer(place: Path) -> Any:
    """The tokenizer of a run, with its chat template, as the library has it, for `save_pretrained`. Raises UserError
    where the run names none, or none that the library can have."""
    run = RunDir(place)
    tokenizer = _RunModel(run, _read_values(run, place)).open_tokenizer()
    if tokenizer is None:
        raise UserError(
            f"{place} was trained on prepared tokens, and nothing there names their tokenizer.\n"
            "  To do: export it without --tokenizer, and copy the files of its tokenizer into the folder."
        )
    return tokenizer.as_library()


class _RunModel:
    """The model of a run as the library has it: its config, what files call its tensors, its tokenizer. Raises
    UserError where the library has no such model."""

    def __init__(self, run: RunDir, values: RunFile) -> None:
        self._run, self._values = run, values
        if values.model.kv_rank:  # a resolved run leaves out keys of plain attention, without which none is built
            raise self._refuse(
                f"model.kv_rank = {values.model.kv_rank} (latent attention) has no form in its families."
            )
        self._model = self._build()
        try:
            self.form: Form = form_of(self._model, max_positions=values.data.seq_len)
        except UserError as error:
            raise self._refuse(str(error)) from None

    def _refuse(self, why: str) -> UserError:
        return UserError(
            f"{self._run.path} cannot be used here, since transformers has no such model: {why}\n"
            "  `shardway checkpoint export --own-names` writes its weights, for a script that builds the model."
        )

    def _build(self) -> nn.Module:
        """The model on the meta device."""
        section = self._values.model
        if section.hf:
            beside = section.adapter != "none" and section.hf_weights  # weights that are in no checkpoint
            folder = locate_model(section.hf, weights=beside)
            tied = find_tie(self._run)
            return build_huggingface(folder, vocab=0, seq_len=self._values.data.seq_len, weights=beside, tied=tied)
        if not isinstance(section.vocab, int):
            raise UserError(
                f"{self._run.path} trained a {section.kind} that does not continue text.\n"
                "  To do: name a run of a decoder-only language model."
            )
        return build_model(section, vocab=section.vocab, sample_shape=(self._values.data.seq_len,))

    def list_tensors(self, found: FoundCheckpoint) -> dict[str, _SavedTensor]:
        """The tensors of a checkpoint by their names in files, each read when it is used. Raises Damaged, UserError."""
        head = read_head(found)
        reader = _LockedReader(found.folder)
        if self._values.model.adapter != "none":
            return self._list_merged(head, reader)
        there = {
            name.removeprefix("model."): entry.shape
            for name, entry in reader.entries.items()
            if entry.part == "model" and entry.dtype != VALUE
        }
        wanted = {canonical_name(name): tuple(each.shape) for name, each in self._model.named_parameters()}
        missing = [name for name, shape in wanted.items() if there.get(name) != shape]
        if not there and reader.entries:
            raise UserError(
                f"{found.folder} holds no weights in Shardway's form: what DeepSpeed trained is saved in its own "
                "files.\n  To do: take the weights out with `python zero_to_fp32.py . OUTPUT` in that folder."
            )
        if missing:
            raise Damaged(found.folder, [f"it lacks {list_some(missing, 4)} of the model of its run"])
        return {
            piece.name: _SavedTensor(reader, f"model.{name}", piece)
            for name, shape in wanted.items()
            for piece in self.form.names(name, shape)[0]
        }

    def _list_merged(self, head: CheckpointHead, reader: _LockedReader) -> dict[str, _SavedTensor]:
        """The weights of model.hf, with the adapter of the checkpoint added to them. Raises UserError if they are not
        those that it was trained beside."""
        section, model = self._values.model, self._model
        if not section.hf_weights:
            raise self._refuse("its adapter was trained beside random weights (model.hf_weights = false).")
        lora = read_lora(section)
        if lora is None or not isinstance(model, HuggingFaceModel) or model.fit is None:
            raise Bug("an adapter is opened without a shape or without weights")
        today = model.fingerprint_base(self._values.train.seed)
        check_base(head.manifest.numbers, today, section.hf, "Nothing was opened")
        merged = _AdaptedReader(reader, model.fit, lora)
        return {
            piece.name: _SavedTensor(merged, name, piece)
            for name, parameter in model.named_parameters()
            for piece in self.form.names(canonical_name(name), tuple(parameter.shape))[0]
        }

    def open_tokenizer(self) -> ModelTokenizer | None:
        """The tokenizer of the run's data; for a model that model.hf named, the one beside it."""
        data = self._run.read_resolved().get("data", {})
        if self.form.source is not None and (
            found := open_library_tokenizer(self.form.source, trust_remote_code=False)
        ):
            return found
        name = data.get("tokenizer", "")
        if not name and data.get("kind") == "tokens":
            name = _read_prepared_tokenizer(Path(str(data.get("path", ""))))
        return open_data_tokenizer(name, data.get("chat_template", "")) if name else None


def _read_prepared_tokenizer(folder: Path) -> str:
    """ "bytes" if that prepared a folder of tokens; "" otherwise: such a folder has no path to the tokenizer's file."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        described = json.loads((folder / DATA_MANIFEST).read_text(encoding="utf-8")).get("tokenizer") or {}
        return BYTES if described.get("name") == BYTES else ""
    return ""


class _LockedReader:
    """One reader of a checkpoint for the library's several threads; the last tensor is kept, since its pieces come
    together."""

    def __init__(self, folder: Path) -> None:
        self._reader, self._lock = TensorReader(folder), threading.Lock()
        self._name, self._tensor = "", torch.empty(0)
        self.entries = self._reader.entries
        self.damage: Damaged | None = None

    def read(self, name: str) -> torch.Tensor:
        with self._lock:
            if name != self._name:
                try:
                    self._tensor, self._name = self._reader.read(name), name
                except Damaged as damage:
                    self.damage = damage
                    raise
            return self._tensor


class _AdaptedReader:
    """Reads weights of model.hf, each whole, with the adapter of a checkpoint added to it in fp32."""

    def __init__(self, adapter: _LockedReader, fit: Fit, lora: LoraShape) -> None:
        self._adapter, self._fit, self._lora = adapter, fit, lora

    @property
    def damage(self) -> Damaged | None:
        return self._adapter.damage

    def read(self, name: str) -> torch.Tensor:
        with self._fit.files.open() as files:
            pieces = self._fit.arrangements[name]
            ends = [tuple(map(sum, zip(each.region.start, each.region.shape, strict=True))) for each in pieces]
            whole: torch.Tensor | None = None
            for piece in pieces:
                part = files.read(piece.name, piece.source_of(piece.region))
                if whole is None:
                    whole = torch.empty([max(sizes) for sizes in zip(*ends, strict=True)], dtype=part.dtype)
                whole[piece.region.slices] = part.reshape(piece.region.shape)
        if whole is None:
            raise Bug(f"{name} stands nowhere in {self._fit.files.folder}")
        first, second = (f"model.{each}" for each in names_beside(name))
        if first in self._adapter.entries:
            a, b = self._adapter.read(first).float(), self._adapter.read(second).float()
            whole = whole.float() + b @ a * self._lora.scaling
        return whole


class _SavedTensor:
    """A tensor under the library's name, as safetensors' own slices are: it is read when it is indexed."""

    def __init__(self, reader: _LockedReader | _AdaptedReader, name: str, piece: WeightPiece) -> None:
        self.reader, self._name, self._piece = reader, name, piece

    def get_shape(self) -> list[int]:
        return list(self._piece.whole)

    @property
    def shape(self) -> Shape:
        return self._piece.whole

    def __getitem__(self, index: Any) -> torch.Tensor:
        whole = self.reader.read(self._name)[self._piece.region.slices]
        return whole.reshape(self._piece.whole)[index].clone()


# --- loading


def _ask_first(ranks: Ranks | None, work: Callable[[], T]) -> T:
    """The result of `work` on the first rank: what others see of a folder may be newer."""
    return ranks.ask_first(work) if ranks is not None and ranks.grouped else work()


def _agree(ranks: Ranks | None, work: Callable[[], T]) -> T:
    """Run `work` on every rank; damage that one rank finds is raised on all of them."""
    if ranks is None or not ranks.grouped:
        return work()
    damage: Damaged | None = None
    result: T | None = None

    def attempt() -> None:
        nonlocal damage, result
        try:
            result = work()
        except Damaged as found:
            damage = found

    ranks.together(attempt)
    found = next((each for each in ranks.gather(None if damage is None else damage.reasons) if each), None)
    if damage is not None:
        raise damage
    if found is not None:
        raise Damaged(Path("of another rank"), found)
    return result  # type: ignore[return-value]


def _load(
    kind: Any,
    given: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks | None,
    request: ModelRequest,
) -> Any:
    """The model with its weights; split where there are several ranks. Raises UserError, JobError."""
    options: dict[str, Any] = {**given, "dtype": dtype, "ignore_mismatched_sizes": True}  # they are an error below
    around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if ranks is not None and ranks.world > 1:
        options |= split_options(kind, given["config"], ranks.world, request.word)
        kind = split_class(kind, device)
        around = variables_for_libraries(ranks.placement, {})
    try:
        with around:
            model, info = kind.from_pretrained(**options, output_loading_info=True)
    except (Damaged, UserError):
        raise
    except Exception as error:  # the library's errors share no class
        for each in (given.get("state_dict") or {}).values():
            if each.reader.damage is not None:
                raise each.reader.damage from error
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise
        raise JobError(
            f"transformers cannot open {request.word}: {type(error).__name__}: {' '.join(str(error).split())}\n"
            "  To do: fetch the model again if a file is damaged; install what is missing."
        ) from error
    if other := sorted(info["mismatched_keys"]):
        name, has, wanted = other[0]
        raise JobError(
            f"{request.word} has {len(other)} tensors of other sizes than its {CONFIG} states: {name} is "
            f"{list(has)}, and {list(wanted)} by the config.\n"
            "  To do: fetch the model again; its weights and its config are not of one model."
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise JobError(
            f"{request.word} lacks {len(missing)} tensors of its model: {list_some(missing, 4)}.\n"
            "  To do: fetch the model again; its files are not whole, or of another model than its config.json."
        )
    return model


def _draw(
    kind: Any, config: Any, dtype: torch.dtype, device: torch.device, request: ModelRequest, ranks: Ranks | None
) -> Any:
    """The model with weights drawn by the request's seed; of several ranks, each draws the whole and keeps its part."""
    world = ranks.world if ranks is not None else 1
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(request.seed)
        with torch.device("cpu" if world > 1 else device):
            model = kind._from_config(config, dtype=dtype)
    if world == 1:
        return model
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return _load(
        kind,
        {"config": config, "pretrained_model_name_or_path": None, "state_dict": state},
        dtype,
        device,
        ranks,
        request,
    )


def _finish(model: Any, request: ModelRequest, device: torch.device) -> tuple[Any, tuple[str, ...]]:
    """The model on its device, to be used and not trained, quantized where that is asked for; and notes on this."""
    model = model.eval().requires_grad_(False)
    if getattr(model, "_tp_size", None) is None:
        model = model.to(device)
    return model, (_apply_quantization(model, request.quantize) if request.quantize != "off" else ())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """While entered, the library shows no progress bars, reports and warnings: what matters is an error here."""
    library = import_extra("transformers")
    shown, level = library.utils.logging.is_progress_bar_enabled(), library.utils.logging.get_verbosity()
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity(logging.CRITICAL)
    try:
        with without_warnings(), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        library.utils.logging.set_verbosity(level)
        if shown:
            library.utils.logging.enable_progress_bar()


# --- device and number formats


def _choose_device(request: ModelRequest, ranks: Ranks | None) -> torch.device:
    """Raises SiteError if the device is not there."""
    if ranks is not None:
        return ranks.device
    there = torch.cuda.is_available()
    if request.device == "cuda" and not there:
        raise SiteError(
            f"torch {torch.__version__} sees no CUDA device here.\n  To do: use --device cpu, or a machine with one."
        )
    return (
        torch.device("cuda", torch.cuda.current_device()) if there and request.device != "cpu" else torch.device("cpu")
    )


def _choose_dtype(request: ModelRequest, device: torch.device, saved: Any) -> torch.dtype:
    """The number format of weights; `saved` is that of the files, where it is known."""
    if request.dtype != "auto":
        return FORMATS[request.dtype]
    if device.type == "cpu":
        return torch.float32
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16 if saved == torch.float16 else torch.float32


def _check_quantize(request: ModelRequest, device: torch.device, world: int) -> None:
    """Raise UserError or SiteError if weights cannot be quantized so here."""
    kind = request.quantize
    if kind == "off":
        return
    import_extra("torchao", "float8")
    if world > 1:
        raise UserError(
            f"--quantize {kind} works on one rank, and here are {world}.\n"
            "  To do: leave out one of --quantize and --nproc."
        )
    least = {"fp8": (8, 9), "int4": (8, 0)}.get(kind)
    if least is None:
        return
    if device.type != "cuda":
        raise SiteError(f"--quantize {kind} needs a GPU, and the device is the CPU.\n      allowed here: off, int8")
    has = torch.cuda.get_device_capability(device)
    if has < least:
        raise SiteError(
            f"--quantize {kind} needs compute capability {least[0]}.{least[1]}, and this GPU "
            f"({torch.cuda.get_device_name(device)}) has {has[0]}.{has[1]}.\n      allowed here: off, int8"
        )


def _apply_quantization(model: nn.Module, kind: str) -> tuple[str, ...]:
    """Quantize the weights of linear layers in place, but for the output layer; what people are to know of the rest.
    Raises SiteError."""
    from torchao import quantization as library

    configs: dict[str, Callable[[], Any]] = {
        "fp8": lambda: library.Float8DynamicActivationFloat8WeightConfig(),
        "int8": lambda: library.Int8WeightOnlyConfig(),
        "int4": lambda: library.Int4WeightOnlyConfig(),
    }

    def is_quantized(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not name.endswith("lm_head")

    _make_linear(model)
    kept = {id(each) for module in model.modules() if isinstance(module, nn.Embedding) for each in module.parameters()}
    others = {
        name: each.numel()
        for path, module in model.named_modules()
        for name, each in module.named_parameters(path, recurse=False)
        if each.ndim > 1 and not is_quantized(module, path) and not path.endswith("lm_head") and id(each) not in kept
    }
    try:
        library.quantize_(model, configs[kind](), filter_fn=is_quantized)
    except (ImportError, AttributeError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise SiteError(
            f"torchao cannot quantize this model to {kind} here: {type(error).__name__}: "
            f"{' '.join(str(error).split())}\n  To do: leave out --quantize, or install what is missing."
        ) from error
    if not others:
        return ()
    share, names = sum(others.values()) / sum(each.numel() for each in model.parameters()), list_some(sorted(others), 2)
    return (f"{share:.0%} of the weights are in no linear layers and not quantized to {kind}: {names}",)


def _make_linear(model: nn.Module) -> None:
    """Put linear layers in the place of Conv1D, GPT-2's, whose weights are (in, out)."""
    from transformers.pytorch_utils import Conv1D

    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Conv1D):
                linear = nn.Linear(child.nx, child.nf, device="meta")
                linear.weight = nn.Parameter(child.weight.T.contiguous(), requires_grad=False)
                linear.bias = nn.Parameter(child.bias, requires_grad=False)
                setattr(module, name, linear)


def _choose_tokenizer(request: ModelRequest, find: Callable[[], ModelTokenizer | None]) -> ModelTokenizer | None:
    """The tokenizer that the request names, else that of the model; with the template that the request names."""
    if request.tokenizer:
        named = expand_place(request.tokenizer)
        found: Any = open_library_tokenizer(named, trust_remote_code=False) if named.is_dir() else None
        try:
            found = found or open_data_tokenizer(request.tokenizer, "")
        except UserError as error:
            raise UserError(str(error).replace("data.tokenizer", "--tokenizer")) from error
    else:
        found = find()
    if request.template and found is not None:
        try:
            found.use_template(request.template)
        except UserError as error:
            raise UserError(str(error).replace("data.chat_template", "--template")) from error
    return found
