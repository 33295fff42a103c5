"""Exact resume of every loader: what a stop, and another number of ranks or workers after it, do to one epoch.

    python bench/data/resume.py [--only NAME ...]

1000 ids in global batches of 20 on two ranks, stopped after 20 steps; a new process for each rank goes on from the
saved state to the end of the epoch: on as many ranks, on four, on one, and on two with one loader process each. A cell
counts the ids that came again or never came, and the global batches (as sets of ids) that are those of a run without a
stop; "exact" means none, none, all. An exception is given by its name, with its text below the table. Peers that cannot
be imported are named as not installed. Ranks are processes of this machine, joined by gloo where there are several, and
have the variables of torchrun; each loader gets its share as its documentation says, and of the saved states the one of
the same rank (modulo their number), or rank 0's or all of them where it asks for that.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IDS, BATCH, STOP_AFTER, RANKS, SEED, SHARDS = 1000, 20, 20, 2, 1, 8
STEPS = IDS // BATCH
SHOWN = "RESUME_SHOW"
"""A variable that shows what libraries say, and where they fail."""
LONGEST_S = 120.0
"""A run that takes longer hangs."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands, and how many loader processes it has."""

    folder: Path
    rank: int
    ranks: int
    workers: int

    @property
    def batch(self) -> int:
        return BATCH // self.ranks


class Reader:
    """The batches of ids of one rank, and the state after the last of them."""

    def __init__(self, batches: Iterable[Any], state: Callable[[], Any]) -> None:
        self.batches, self.state = batches, state


class NoState(Exception):
    """The loader has no state to save."""


class Loader:
    """One row of the table. `modules` must be importable, `package` gives the version."""

    name: str
    package: str = ""
    modules: Sequence[str] = ()
    workers: Sequence[int] = (0, 2)

    def prepare(self, folder: Path) -> None:
        """Write the data, once."""

    def open(self, place: Place, states: Sequence[Any] | None) -> Reader:
        """The rank's batches from the beginning, or from the states that all ranks of an earlier run have saved."""
        raise NotImplementedError

    def clean(self) -> None:
        """Remove what killed ranks have left outside of the folder."""

    @property
    def title(self) -> str:
        return f"{self.name} {importlib.metadata.version(self.package)}" if self.package else self.name


def as_ids(batch: Any) -> list[int]:
    """Whatever a loader calls a batch, as ids."""
    if isinstance(batch, dict):
        batch = batch["id"]
    return [int(each) for each in (batch.tolist() if hasattr(batch, "tolist") else batch)]


# --- Shardway


class Shardway(Loader):
    """A kind of data, opened as a run opens them; the state is the position."""

    def __init__(self, kind: str, workers: Sequence[int] = (0,)) -> None:
        self.kind, self.workers = kind, workers
        self.name = f"Shardway, {kind}"

    def prepare(self, folder: Path) -> None:
        from shardway.data.convert import WRITERS

        formats = {"tokens": "tokens", "packed": "megatron", "blend": "webdataset"}
        for part in range(3 if self.kind == "blend" else 1):
            first, stop = (0, 500, 800, IDS)[part : part + 2] if self.kind == "blend" else (0, IDS)
            WRITERS[formats.get(self.kind, self.kind)](self._records(first, stop), self._path(folder, part))

    def _path(self, folder: Path, part: int) -> Path:
        suffix = {"parquet": ".parquet", "arrow": ".arrow", "hdf5": ".h5", "jsonl": ".jsonl"}.get(self.kind, "")
        return folder / f"data{part}{suffix}"

    def _records(self, first: int, stop: int) -> Iterator[dict[str, Any]]:
        import io

        import numpy as np
        from PIL import Image

        if self.kind == "tokens":
            yield {"tokens": np.arange(IDS + 1)}
            return
        stream = io.BytesIO()
        Image.new("RGB", (1, 1)).save(stream, "PNG")
        for number in range(first, stop):
            if self.kind == "packed":
                yield {"tokens": np.full(3 + number % 2, number)}
            elif self.kind in ("arrays", "hdf5"):
                yield {"x": np.zeros(1, np.float32), "y": np.int64(number)}
            elif self.kind == "jsonl":
                yield {"x": [0.0], "y": number}
            else:
                yield {"png": stream.getvalue(), "cls": number}

    def open(self, place: Place, states: Sequence[Any] | None) -> Reader:
        from shardway.data.loader import LoaderOptions, Share, StepLoader
        from shardway.data.open import open_data, order_of
        from shardway.runfile.schema import DataSection, RunFile

        text = self.kind in ("tokens", "packed")
        shape = [1] if self.kind in ("arrays", "hdf5", "jsonl") else [3, 1, 1]
        keys: dict[str, Any] = {"kind": self.kind, "shape": shape, "validation_fraction": 0.0}
        if self.kind == "blend":
            weights = (0.5, 0.3, 0.2)
            parts = [{"path": str(self._path(place.folder, n)), "weight": weight} for n, weight in enumerate(weights)]
            keys |= {"kind": "webdataset", "blend": parts}
        else:
            keys["path"] = str(self._path(place.folder, 0))
        if text:
            keys |= {"seq_len": 1, "cache": str(place.folder / f"cache{place.rank}")}
        if self.kind == "packed":
            keys |= {"kind": "megatron", "pack": True, "seq_len": 3}
        section = DataSection(**keys)
        known: dict[str, Any] = {"vocab": IDS + 1} if text else {"classes": IDS}
        source = open_data(section, SEED, "tokens" if text else "images", **known).train
        order = order_of(RunFile.model_validate({"data": section.model_dump(), "train": {"seed": SEED}}), source)
        options = LoaderOptions(workers=place.workers)
        loader = StepLoader(source, order, Share(BATCH, place.rank, place.ranks), options)
        at = {"position": 0 if states is None else json.loads(states[0])["position"]}

        def batches() -> Iterator[list[int]]:
            steps = (len(source) - at["position"]) // BATCH
            for batch in loader.batches(at["position"], steps):
                at["position"] = batch.next_position
                found = batch.data["inputs"] if text else batch.data["targets"]
                found = getattr(found, "tokens", found)
                yield as_ids(found.reshape(len(found), -1)[:, 0])[: len(batch.ids)]

        return Reader(batches(), lambda: json.dumps(at))


# --- peers


class Ids:
    """A map-style dataset of ids."""

    def __len__(self) -> int:
        return IDS

    def __getitem__(self, index: int) -> int:
        return int(index)


class TorchData(Loader):
    name, package, modules = "torchdata StatefulDataLoader", "torchdata", ("torchdata.stateful_dataloader",)

    def open(self, place: Place, states: Sequence[Any] | None) -> Reader:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        sampler = StatefulDistributedSampler(Ids(), place.ranks, place.rank, shuffle=True, seed=SEED)
        loader = StatefulDataLoader(Ids(), place.batch, sampler=sampler, num_workers=place.workers)
        if states is not None:
            loader.load_state_dict(states[place.rank % len(states)])
        return Reader(loader, loader.state_dict)


class Grain(Loader):
    """Both ways that its documentation shows: the numbered dataset is batched (its state then counts batches), or the
    iterator over it (it counts samples)."""

    package, modules = "grain", ("grain",)

    def __init__(self, numbered: bool) -> None:
        self.numbered = numbered
        self.name = f"Grain, [rank::ranks], batch() on the {'MapDataset' if numbered else 'IterDataset'},"

    def open(self, place: Place, states: Sequence[Any] | None) -> Reader:
        import grain

        data = grain.MapDataset.source(Ids()).shuffle(seed=SEED)[place.rank :: place.ranks]
        if self.numbered:
            steps = data.batch(place.batch).to_iter_dataset()
        else:
            steps = data.to_iter_dataset().batch(place.batch)
        if place.workers:
            steps = steps.mp_prefetch(grain.MultiprocessingOptions(num_workers=place.workers))
        iterator = iter(steps)
        if states is not None:
            iterator.set_state(states[place.rank % len(states)])
        return Reader(iterator, iterator.get_state)


class HuggingFace(Loader):
    name, package, modules = "datasets, iterable", "datasets", ("datasets", "torchdata.stateful_dataloader")

    def open(self, place: Place, states: Sequence[Any] | None) -> Reader:
        from datasets import Dataset
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader

        data = Dataset.from_dict({"id": list(range(IDS))}).to_iterable_dataset(num_shards=SHARDS)
        data = split_dataset_by_node(data.shuffle(seed=SEED, buffer_size=100), place.rank, place.ranks)
        loader = StatefulDataLoader(data, place.batch, num_workers=place.workers)
        if states is not None:
            loader.load_state_dict(states[place.rank % len(states)])
        return Reader(loader, loader.state_dict)


def write_tars(folder: Path) -> list[Path]:
    """Tar shards with a member for each id."""
    import tarfile
    from io import BytesIO

    paths = [folder / f"part-{number:03d}.tar" for number in range(SHARDS)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as shard:
            for each in range(number * IDS // SHARDS, (number + 1) * IDS // SHARDS):
                member = tarfile.TarInfo(f"{each:06d}.txt")
                member.size = len(str(each))
                shard.addfile(member, BytesIO(str(each).encode()))
    return paths


class WebDataset(Loader):
    name, package, modules = "WebDataset", "webdataset", ("webdataset",)

    def prepare(self, folder: Path) -> None:
        write_tars(folder)

    def open(self, place: Place, states: Sequence[Any] | None) -> Reader:
        import webdataset

        shards = [str(path) for path in sorted(place.folder.glob("*.tar"))]
        data = webdataset.WebDataset(
            shards, shardshuffle=100, seed=SEED, nodesplitter=webdataset.split_by_node, empty_check=False
        )
        data = data.shuffle(100).decode().map(lambda sample: (int(sample["txt"]),)).batched(place.batch)
        loader = webdataset.WebLoader(data, batch_size=None, num_workers=place.workers)
        if states is not None:
            raise NoState
        return Reader((batch[0] for batch in loader), lambda: None)


def list_segments() -> Iterator[Path]:
    """Blocks of shared memory under the names that Streaming gives them."""
    return Path("/dev/shm").glob("[0-9][0-9][0-9][0-9][0-9][0-9]_*")


class Streaming(Loader):
    name, package, modules = "MosaicML Streaming", "mosaicml-streaming", ("streaming",)

    def prepare(self, folder: Path) -> None:
        from streaming import MDSWriter

        self.before = set(list_segments())
        with MDSWriter(out=str(folder / "mds"), columns={"id": "int"}, size_limit=1024) as writer:
            for number in range(IDS):
                writer.write({"id": number})

    def open(self, place: Place, states: Sequence[Any] | None) -> Reader:
        from streaming import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(
            local=str(place.folder / "mds"), batch_size=place.batch, shuffle=True, shuffle_seed=SEED
        )
        loader = StreamingDataLoader(data, batch_size=place.batch, num_workers=place.workers)
        if states is not None:
            loader.load_state_dict(states[0])
        return Reader(loader, loader.state_dict)

    def clean(self) -> None:
        for path in set(list_segments()) - self.before:
            path.unlink(missing_ok=True)


def keep_id(number: int) -> dict[str, int]:
    """What LitData stores for an id."""
    return {"id": number}


class LitData(Loader):
    name, package, modules = "LitData", "litdata", ("litdata",)

    def prepare(self, folder: Path) -> None:
        import litdata

        litdata.optimize(keep_id, list(range(IDS)), str(folder / "lit"), chunk_size=50, num_workers=1)

    def open(self, place: Place, states: Sequence[Any] | None) -> Reader:
        import litdata

        data = litdata.StreamingDataset(str(place.folder / "lit"), shuffle=True, seed=SEED)
        loader = litdata.StreamingDataLoader(data, batch_size=place.batch, num_workers=place.workers)
        if states is not None:
            loader.load_state_dict(states[place.rank % len(states)])
        return Reader(loader, loader.state_dict)


class Energon(Loader):
    name, package, modules = "Megatron Energon", "megatron-energon", ("megatron.energon",)

    def prepare(self, folder: Path) -> None:
        from megatron.energon.flavors import BaseWebdatasetFactory

        names = [path.name for path in write_tars(folder)]
        BaseWebdatasetFactory.prepare_dataset(folder, names, split_parts_ratio=[("train", 1.0)], workers=1)
        kind = "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt\n"
        (folder / ".nv-meta" / "dataset.yaml").write_text(
            f"__module__: megatron.energon\n__class__: StandardWebdatasetFactory\n{kind}"
        )

    def open(self, place: Place, states: Sequence[Any] | None) -> Reader:
        from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

        config = WorkerConfig(rank=place.rank, world_size=place.ranks, num_workers=place.workers, seed_offset=SEED)
        data = get_train_dataset(
            place.folder,
            worker_config=config,
            batch_size=place.batch,
            shuffle_buffer_size=100,
            max_samples_per_sequence=50,
            repeat=False,
        )
        loader = get_savable_loader(data)
        if states is not None:
            loader.restore_state_global(states)
        return Reader((map(int, batch.text) for batch in loader), loader.save_state_rank)


OURS = (
    Shardway("blend", (0, 2)),
    *(Shardway(kind) for kind in ("shards", "webdataset", "mds", "parquet", "arrow", "jsonl")),
    *(Shardway(kind) for kind in ("hdf5", "lmdb", "arrays", "images", "tokens", "packed")),
)
LOADERS: tuple[Loader, ...] = (
    *OURS,
    Streaming(),
    LitData(),
    Energon(),
    TorchData(),
    Grain(numbered=True),
    Grain(numbered=False),
    HuggingFace(),
    WebDataset(),
)


# --- runs


@dataclass(frozen=True)
class Outcome:
    """The ids of each step over all ranks, and the state of each rank; or what has failed."""

    steps: list[list[int]]
    states: list[Any]
    failed: str = ""
    text: str = ""


def run(loader: Loader, folder: Path, ranks: int, workers: int, states: list[Any] | None, steps: int) -> Outcome:
    """A run on so many ranks, each a process, of at most so many steps."""
    forks = multiprocessing.get_context("fork")
    pairs = [forks.Pipe(duplex=False) for _ in range(ranks)]
    store = Path(tempfile.mkdtemp(dir=folder)) / "store"
    processes = []
    for rank, (_, sender) in enumerate(pairs):
        place = Place(folder, rank, ranks, workers)
        processes.append(forks.Process(target=be_rank, args=(sender, loader, place, states, steps, store)))
        processes[-1].start()
        sender.close()
    deadline, answers = time.monotonic() + LONGEST_S, list[Any]()
    for receiver, _ in pairs:
        # After an error the others may wait for the rank in vain.
        failed = any(answer[0] for answer in answers)
        if receiver.poll(2.0 if failed else max(0.0, deadline - time.monotonic())):
            try:
                answers.append(pickle.loads(receiver.recv_bytes()))
            except EOFError:
                answers.append(("dies", "", [], None))
        elif not failed:
            answers.append(("hangs", "", [], None))
    for process in processes:
        process.join(5.0 if not any(answer[0] for answer in answers) else 0.5)
        if process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
    wrong = next((answer for answer in answers if answer[0]), None)
    if wrong is not None:
        return Outcome([], [], wrong[0], wrong[1])
    shares = itertools.zip_longest(*(answer[2] for answer in answers), fillvalue=[])
    return Outcome([list(itertools.chain(*step)) for step in shares], [answer[3] for answer in answers])


def be_rank(sender: Any, loader: Loader, place: Place, states: Any, steps: int, store: Path) -> None:
    """The process of a rank."""
    os.setpgid(0, 0)
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.ranks),
        LOCAL_WORLD_SIZE=str(place.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29555",
    )
    try:
        if place.ranks > 1 and not isinstance(loader, Shardway):
            import torch.distributed

            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{store}", rank=place.rank, world_size=place.ranks
            )
        reader = loader.open(place, states)
        batches = []
        for batch in reader.batches:
            batches.append(as_ids(batch))
            if len(batches) == steps:
                break
        answer: Any = ("", "", batches, reader.state() if steps < STEPS and states is None else None)
        content = pickle.dumps(answer)
    except NoState:
        content = pickle.dumps(("no state", "", [], None))
    except BaseException as error:
        if SHOWN in os.environ:
            traceback.print_exc()
        lines = str(error).strip().splitlines()
        content = pickle.dumps((type(error).__name__, lines[0][:160] if lines else "", [], None))
    sender.send_bytes(content)
    sender.close()
    os.killpg(0, signal.SIGKILL) if place.workers else os._exit(0)


def compare(whole: Outcome, before: Outcome, after: Outcome) -> str:
    """One cell."""
    if after.failed:
        return after.failed
    counts = Counter(itertools.chain(*before.steps, *after.steps))
    repeated, lost = counts.total() - len(counts), IDS - len(counts)
    rest = whole.steps[STOP_AFTER:]
    same = sum(sorted(one) == sorted(other) for one, other in zip(after.steps, rest, strict=False))
    if (repeated, lost, same, len(after.steps)) == (0, 0, len(rest), len(rest)):
        return "exact"
    return f"repeats {repeated}, loses {lost}, {same} of {len(rest)} batches"


def measure(loader: Loader, workers: int, folder: Path, notes: list[str]) -> list[str]:
    """The cells of a row."""
    whole = run(loader, folder, RANKS, workers, None, STEPS)
    before = run(loader, folder, RANKS, workers, None, STOP_AFTER)
    if whole.failed or before.failed:
        wrong = whole if whole.failed else before
        notes.append(f"{loader.title}, {workers} workers: does not run: {wrong.failed}: {wrong.text}")
        return [f"does not run: {wrong.failed}", "", "", "", ""]
    cells = []
    for ranks, changed in ((RANKS, workers), (4, workers), (1, workers), (RANKS, 1)):
        after = run(loader, folder, ranks, changed, before.states, STEPS)
        cells.append(compare(whole, before, after))
        if after.text:
            notes.append(f"{loader.title}, {RANKS}x{workers} -> {ranks}x{changed}: {after.failed}: {after.text}")
    again = run(loader, folder, RANKS, workers, None, STEPS)
    alike = [sorted(step) for step in again.steps] == [sorted(step) for step in whole.steps]
    sizes = Counter(itertools.chain(*whole.steps))
    if (len(sizes), sizes.total()) != (IDS, IDS):
        notes.append(
            f"{loader.title}, {workers} workers: an epoch without a stop gives {sizes.total()} of {len(sizes)}"
        )
    return [*cells, "yes" if alike else "no"]


def be_silent() -> None:
    """Drop what libraries say, unless `SHOWN` is set."""
    if SHOWN not in os.environ:
        warnings.simplefilter("ignore")
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)


def host(loader: Loader, sender: Any) -> None:
    """A process for one loader and what it imports: its rows and notes."""
    be_silent()
    notes, rows = list[str](), list[list[str]]()
    try:
        for module in loader.modules:
            importlib.import_module(module)
    except Exception as error:
        sender.send(([[loader.name, "", f"n/a: not installed ({type(error).__name__})", "", "", "", ""]], notes))
        return
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="resume-", ignore_cleanup_errors=True) as folder:
        loader.prepare(Path(folder))
        for workers in loader.workers:
            rows.append([loader.title, str(workers), *measure(loader, workers, Path(folder), notes)])
    loader.clean()
    sender.send((rows, notes))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name contains one of these")
    options = parser.parse_args()
    head = ["loader", "workers", "same", "2 -> 4 ranks", "2 -> 1 rank", "1 worker", "deterministic"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    forks, said = multiprocessing.get_context("fork"), list[str]()
    for loader in LOADERS:
        if options.only and not any(each.lower() in loader.name.lower() for each in options.only):
            continue
        receiver, sender = forks.Pipe(duplex=False)
        process = forks.Process(target=host, args=(loader, sender))
        process.start()
        sender.close()
        try:
            rows, notes = receiver.recv()
        except EOFError:
            rows, notes = [[loader.name, "", "fails to prepare its data", "", "", "", ""]], []
        process.join()
        for row in rows:
            print(f"| {' | '.join(row)} |", flush=True)
        said += notes
    print("", *said, sep="\n")


if __name__ == "__main__":
    main()
