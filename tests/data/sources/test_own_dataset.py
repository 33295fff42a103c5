"""Map-style datasets of the user's own as sources: what samples may be, what they draw, what is refused."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardway.data.kinds import DatasetKind
from shardway.data.loader import LoaderOptions, Share, StepLoader, validation_batches
from shardway.data.open import Data, open_data
from shardway.data.order import SampleOrder
from shardway.data.sources.base import DataSource, Slice, is_drawing
from shardway.data.sources.own_dataset import OwnDataset, outline_sample
from shardway.errors import JobError, UserError
from shardway.plugins import load_plugin
from shardway.runfile.schema import DataSection

MODULE = '''
import collections
import random
import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

class Pairs(Dataset):
    """Twelve images that are drawn anew in each epoch."""

    def __init__(self, count=12, shift=0.0):
        self.count, self.shift, self.noise = count, shift, torch.rand(())

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        image = torch.full((3, 4, 4), float(number)) + torch.rand(3, 1, 1) + np.random.rand() + self.shift
        return image + self.noise, random.randrange(10)

class Given(Dataset):
    """Samples as an expression gives them for number i."""

    def __init__(self, sample, count=3):
        self.sample, self.count = sample, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return eval(self.sample)

def splits(split, count=5):
    return Pairs(count if split == "train" else 2)

def no_validation(*, split):
    return Pairs(20) if split == "train" else None

def picky(split="train"):
    if split not in ("train", "test"):
        raise KeyError(split)
    return Pairs()

def wide(split):
    return Given("(torch.zeros(3, 4, 4), 0)" if split == "train" else "(torch.zeros(3, 8, 8), 0)")

def made(what):
    return eval(what)

def batches():
    return torch.utils.data.DataLoader(Pairs(), batch_size=2)

class Unsized(Dataset):
    def __getitem__(self, number):
        return number

class BadLength(Pairs):
    def __len__(self):
        raise RuntimeError("not indexed yet")

class Changes(Pairs):
    """It is another one each time that it is made."""

    made = 0

    def __init__(self):
        super().__init__()
        Changes.made += 1
        self.shift = float(Changes.made)

class Normalised(Pairs):
    """Sums whose last bits follow from the number of threads."""

    def __getitem__(self, number):
        image = torch.rand(3, 256, 256)
        return (image - image.mean()) / image.std(), 0

class Keeps(Pairs):
    """It draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.drawn = np.random.default_rng()

    def __getitem__(self, number):
        return torch.from_numpy(self.drawn.random((3, 4, 4))), 0

Point = collections.namedtuple("Point", "image label")
number = 3
'''
NAME = "mydata_of_a_test"


@pytest.fixture(scope="module", autouse=True)
def own_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module of the user's that can be imported, also by loader processes."""
    folder = tmp_path_factory.mktemp("user")
    (folder / f"{NAME}.py").write_text(MODULE)
    (folder / "broken_data_of_a_test.py").write_text("import no_such_package_at_all")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
        for name in (NAME, "broken_data_of_a_test"):
            sys.modules.pop(name, None)


def opened(
    name: str = "Pairs",
    wants: Any = "images",
    seed: int = 7,
    fraction: float = 0.0,
    limit: int | None = 10,
    given: dict[str, Any] | None = None,
    **settings: Any,
) -> Data:
    """The data of a section: `given` are further keys of it."""
    keys = {
        "dataset": name if ":" in name else f"{NAME}:{name}",
        "settings": settings,
        "validation_fraction": fraction,
        "seq_len": 4,
        **(given or {}),
    }
    limits = {"vocab" if wants == "tokens" else "classes": limit}
    return open_data(DataSection(kind="dataset", **keys), seed, wants, **limits)


def samples(name: str = "Pairs", **how: Any) -> DataSource:
    return opened(name, **how).train


def shown(sample: str, wants: str = "images", **how: Any) -> tuple[list[Any], list[Any]]:
    """Input and target of sample 0 of what an expression gives."""
    found = samples("Given", wants=wants, sample=sample, **how).batch(np.array([0]))
    return found["inputs"][0].tolist(), found["targets"][0].tolist()


def refused(name: str = "Pairs", **how: Any) -> str:
    with pytest.raises(UserError) as caught:
        opened(name, **how)
    return str(caught.value)


def refused_sample(sample: str, wants: str = "images", **how: Any) -> str:
    found = refused("Given", wants=wants, sample=sample, **how)
    head = f'1 problem in the data\n  data.dataset: sample 0 of "{NAME}:Given" '
    assert found.startswith(head)
    return found[len(head) :]


# --- what it is


def test_images_have_the_facts_of_sample_0() -> None:
    source = samples()
    assert isinstance(source, OwnDataset)
    assert isinstance(source, DataSource)
    assert (len(source), source.tokens_per_sample) == (12, 1)
    assert source.facts.description == f'12 samples of data.dataset "{NAME}:Pairs", shape [3, 4, 4], 10 classes'
    assert (source.facts.sample_shape, source.facts.classes, source.facts.vocab) == ((3, 4, 4), 10, None)
    found = source.batch(np.array([5, 2, 5]))
    assert found["inputs"].dtype == np.float32
    assert found["inputs"].shape == (3, 3, 4, 4)
    assert found["targets"].dtype == np.int64
    assert np.array_equal(found["inputs"][0], found["inputs"][2])
    assert all(number < image.min() < number + 3 for number, image in zip((5, 2, 5), found["inputs"], strict=True))
    assert source.locate(3) == f'sample 3 of data.dataset "{NAME}:Pairs"'


def test_no_ids_give_arrays_of_length_0() -> None:
    none = np.empty(0, np.int64)
    assert {name: array.shape for name, array in samples().batch(none).items()} == {
        "inputs": (0, 3, 4, 4),
        "targets": (0,),
    }
    found = samples("Given", wants="tokens", sample="[1, 2, 3, 4, 5]").batch(none)
    assert {name: array.shape for name, array in found.items()} == {"inputs": (0, 4), "targets": (0, 4)}


def test_tokens_have_the_facts_of_the_run() -> None:
    source = samples("Given", wants="tokens", sample="torch.arange(i, i + 5)")
    assert (source.tokens_per_sample, source.facts.sample_shape, source.facts.vocab) == (4, (4,), 10)
    assert source.facts.description == f'3 samples of data.dataset "{NAME}:Given", 4 tokens, vocabulary 10'
    found = source.batch(np.array([2, 0]))
    assert found["inputs"].tolist() == [[2, 3, 4, 5], [0, 1, 2, 3]]
    assert found["targets"].tolist() == [[3, 4, 5, 6], [1, 2, 3, 4]]


# --- what a sample may be


@pytest.mark.parametrize(
    "sample",
    [
        "(torch.ones(2), 3)",
        "[np.ones(2), np.int32(3)]",
        "(torch.ones(2, dtype=torch.bfloat16, requires_grad=True), torch.tensor(3))",
        "([1.0, 1.0], 3)",
        "Point(torch.ones(2), 3)",
        '{"inputs": torch.ones(2), "targets": 3}',
        '{"label": 3, "image": torch.ones(2), "path": "x.png"}',
        '{"pixel_values": torch.ones(2), "labels": np.array(3)}',
        '{"x": torch.full((2,), 255, dtype=torch.uint8), "y": 3}',
    ],
)
def test_images_come_in_many_forms(sample: str) -> None:
    assert shown(sample) == ([1.0, 1.0], 3)


def test_fields_may_be_named() -> None:
    given = {"inputs": "pixels", "targets": "kind"}
    assert shown('{"pixels": torch.ones(2), "x": 3, "kind": 4}', given=given) == ([1.0, 1.0], 4)
    assert "sample 0" in refused("Given", sample='{"x": torch.ones(2), "y": 1}', given={"inputs": "pixels"})


def test_bytes_are_scaled_and_numbers_are_not() -> None:
    given = {"mean": 0.5, "std": 0.25}
    assert shown("(torch.full((2,), 255, dtype=torch.uint8), 0)", given=given)[0] == [2.0, 2.0]
    assert shown("(torch.full((2,), 255.0), 0)", given=given)[0] == [255.0, 255.0]


def test_a_grey_image_has_one_channel() -> None:
    assert samples("Given", sample="(torch.zeros(4, 6), 0)").facts.sample_shape == (1, 4, 6)


@pytest.mark.parametrize(
    "sample",
    [
        "torch.tensor([1, 2, 3, 4, 5])",
        "np.array([1, 2, 3, 4, 5], np.uint16)",
        "[1, 2, 3, 4, 5]",
        "(torch.tensor([1, 2, 3, 4, 5]),)",
        "([1, 2, 3, 4], [2, 3, 4, 5])",
        '{"input_ids": [1, 2, 3, 4, 5]}',
        '{"input_ids": [1, 2, 3, 4, 5], "labels": [1, 2, 3, 4, 5], "attention_mask": [1] * 5}',
        '{"inputs": torch.tensor([1, 2, 3, 4]), "targets": torch.tensor([2, 3, 4, 5])}',
    ],
)
def test_tokens_come_in_many_forms(sample: str) -> None:
    assert shown(sample, "tokens") == ([1, 2, 3, 4], [2, 3, 4, 5])


def test_targets_may_be_left_out() -> None:
    assert shown("([1, 2, 3, 4], [-100, -100, 4, 5])", "tokens")[1] == [-100, -100, 4, 5]
    labels = '{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, 4, 5]}'
    assert shown(labels, "tokens")[1] == [-100, 3, 4, 5]
    assert shown("([1, 1, 1, 1], [1, 1, 1, 1])", "tokens")[1] == [1, 1, 1, 1]


def test_lists_and_tensors_are_datasets_too() -> None:
    assert len(samples("made", wants="tokens", what="torch.arange(10).reshape(2, 5)")) == 2
    assert len(samples("made", wants="tokens", what="TensorDataset(torch.arange(10).reshape(2, 5))")) == 2
    assert len(samples("made", what="[(torch.zeros(2), 0)] * 4")) == 4


# --- what is drawn


@given(st.data())
def test_a_sample_is_the_same_in_any_batch(data: st.DataObject) -> None:
    source: Any = samples()
    ids = np.array(data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=8)))
    epochs = np.array([data.draw(st.integers(0, 5)) for _ in ids])
    whole = source.batch_of(ids, epochs)
    for at, (number, epoch) in enumerate(zip(ids.tolist(), epochs.tolist(), strict=True)):
        alone = source.batch_of(np.array([number]), np.array([epoch]))
        assert np.array_equal(whole["inputs"][at], alone["inputs"][0])
        assert whole["targets"][at] == alone["targets"][0]


def test_draws_differ_by_epoch_sample_and_seed() -> None:
    first, ids = samples(), np.arange(12)
    assert is_drawing(first)
    found = {first.batch_of(ids, np.full(12, epoch))["inputs"].tobytes() for epoch in (0, 1, 2)} | {
        samples(seed=8).batch(ids)["inputs"].tobytes()
    }
    assert len(found) == 4
    parts = first.batch(ids)["inputs"][:, :, 0, 0] - np.arange(12)[:, None]
    assert len(np.unique(parts)) == 36


def test_the_generators_are_left_as_they_were() -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]

    before = states()
    samples().batch(np.arange(3))
    assert states() == before


# --- in loader processes and on ranks


def read_steps(workers: int = 0, ranks: int = 1) -> list[tuple[bytes, bytes]]:
    """Inputs and targets of four steps over all ranks, which go over the end of an epoch."""
    whole, order, options = Slice(samples(), 2, 12), SampleOrder(10, seed=3), LoaderOptions(workers)
    loaders = [StepLoader(whole, order, Share(6, rank, ranks), options) for rank in range(ranks)]
    found = []
    for step in zip(*(loader.batches(6, 4) for loader in loaders), strict=True):
        inputs, targets = (torch.cat([batch.data[name] for batch in step]) for name in ("inputs", "targets"))
        found.append((inputs.numpy().tobytes(), targets.numpy().tobytes()))
    return found


@pytest.mark.usefixtures("warm_starts")
def test_batches_do_not_depend_on_workers() -> None:
    alone = read_steps()
    for workers in (1, 2):
        assert read_steps(workers) == alone


def test_batches_do_not_depend_on_ranks_and_follow_epochs() -> None:
    whole, order, positions = Slice(samples(), 2, 12), SampleOrder(10, seed=3), np.arange(6, 30)
    expected = whole.batch_of(order.ids(positions), order.epochs(positions))["inputs"]
    for ranks in (1, 3):
        assert b"".join(inputs for inputs, _ in read_steps(ranks=ranks)) == expected.tobytes()


def test_another_process_makes_the_dataset_by_its_name(tmp_path: Path) -> None:
    """Also one that draws when it is made."""
    source = samples()
    (tmp_path / "source").write_bytes(pickle.dumps(source))
    assert b"torch" not in (tmp_path / "source").read_bytes()
    code = (
        "import pickle, numpy; source = pickle.load(open('source', 'rb')); "
        "open('found', 'wb').write(source.batch(numpy.arange(12))['inputs'].tobytes())"
    )
    environ = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environ)
    assert (tmp_path / "found").read_bytes() == source.batch(np.arange(12))["inputs"].tobytes()


def test_a_dataset_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data_here_of_a_test.py").write_text(
        "def rows():\n    import rows_of_a_test\n    return rows_of_a_test.ROWS"
    )
    (tmp_path / "rows_of_a_test.py").write_text("ROWS = [([0.5, 1.5], 0)] * 4")
    monkeypatch.chdir(tmp_path)
    paths = list(sys.path)
    assert samples("data_here_of_a_test:rows").facts.sample_shape == (2,)
    assert sys.path == paths
    for name in ("data_here_of_a_test", "rows_of_a_test"):
        sys.modules.pop(name)


# --- settings, validation, fingerprint


def test_settings_are_arguments() -> None:
    assert len(samples(count=4)) == 4
    assert np.allclose(
        samples(shift=2.0).batch(np.arange(3))["inputs"], samples().batch(np.arange(3))["inputs"] + 2.0, atol=1e-5
    )


def test_a_split_for_validation_is_asked_for() -> None:
    data = opened("splits", fraction=0.5)
    assert data.validation is not None
    assert (len(data.train), len(data.validation)) == (5, 2)
    assert data.validation.facts.description.startswith(
        f'2 samples of data.dataset "{NAME}:splits" with split="validat'
    )
    assert data.validation.facts.fingerprint != data.train.facts.fingerprint
    assert torch.cat([batch.data["inputs"] for batch in validation_batches(data.validation, 2, Share(2))]).shape[0] == 2


def test_without_one_the_last_samples_are_held_out() -> None:
    for name, train, held in (("Pairs", 9, 3), ("no_validation", 15, 5)):
        data = opened(name, fraction=0.25)
        assert data.validation is not None
        assert (len(data.train), len(data.validation)) == (train, held)
    assert opened("no_validation").validation is None
    assert "data.dataset: has too few samples (1) to hold out" in refused(count=1, fraction=0.5)


def test_a_split_of_the_settings_is_used() -> None:
    assert len(opened("picky", split="test").train) == 12
    found = refused("picky")
    assert f'"{NAME}:picky" failed with split="validation": KeyError: \'validation\' (' in found
    assert "set split in data.settings" in found


def test_validation_has_the_shape_of_training() -> None:
    assert "has samples of shape [3, 8, 8]" in refused("wide")


def test_the_fingerprint_is_of_name_settings_length_and_sample_0() -> None:
    def of(name: str = "Given", **how: Any) -> str:
        return samples(name, **how).facts.fingerprint

    first = "(torch.ones(2) * (i + 1), 1)"
    assert of(sample=first) == of(sample=first)
    different = [of(sample=first), of(sample="(torch.ones(2) * i, 1)"), of(sample=first, count=4)]
    assert len({*different, of("Pairs"), of("Pairs", seed=8)}) == 5


# --- what is refused


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mydata", '"mydata" names no function'),
        ("no_such_module:Pairs", '"no_such_module:Pairs" cannot be imported: ModuleNotFoundError: No module named'),
        ("broken_data_of_a_test:Pairs", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package_at"),
        (f"{NAME}:Triples", f"cannot be imported: AttributeError: module '{NAME}' has no attribute 'Triples'"),
        (f"{NAME}:number", "is int, which cannot be called"),
    ],
)
def test_a_name_without_a_function_is_refused(name: str, text: str) -> None:
    found = refused(given={"dataset": name})
    assert "  data.dataset: " in found
    assert text in found
    assert 'allowed: "module:function", where Python can import the module, such as "mydata:Pairs"' in found


def test_a_function_that_fails_is_named_with_its_line() -> None:
    found = refused("BadLength")
    line = MODULE.splitlines().index('        raise RuntimeError("not indexed yet")') + 1
    assert f'"{NAME}:BadLength" has made a dataset without a length: RuntimeError: not indexed yet (' in found
    assert f"{NAME}.py:{line})" in found
    found = refused(cuont=4)
    assert f"\"{NAME}:Pairs\" failed: TypeError: Pairs.__init__() got an unexpected keyword argument 'cuont'\n" in found
    assert "allowed: what a call as Pairs(cuont=4) takes" in found
    assert "Traceback" not in found


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ("None", "has returned None, which lacks __len__ and __getitem__"),
        ("3", "has returned int, which lacks __len__ and __getitem__"),
        ("Unsized()", "has returned Unsized, which lacks __len__"),
        ("{'train': [1], 'test': [2]}", "has returned a dict, whose samples have no numbers"),
        ("{'train': [1], 'test': [2]}", "to do: return one of its parts: train, test"),
        ("'rows'", "has returned a str, whose samples have no numbers"),
        ("batches()", "has returned a DataLoader, which gives batches"),
        ("[]", "has made a dataset without samples"),
    ],
)
def test_what_is_no_dataset_is_refused(made: str, text: str) -> None:
    assert text in refused("made", what=made)


@pytest.mark.parametrize(
    ("sample", "text", "allowed"),
    [
        ("torch.zeros(2)", "is a torch Tensor", "(input, class), or a dict with inputs and targets"),
        ("None", "is None", "(input, class)"),
        ("(torch.zeros(2), 1, 2)", "is a tuple of 3 (Tensor, int, int)", "(input, class)"),
        ("(torch.zeros(2),)", "is a tuple of 1 (Tensor)", "(input, class)"),
        ('{"rows": 1, "label": 2}', "has no field of a usual name for its inputs", "its fields are: rows, label"),
        ('{"x": torch.zeros(2)}', "has no field of a usual name for its targets", "its fields are: x"),
        ('("a text", 1)', "has inputs that are a str", "a tensor or an array of numbers"),
        ("([[1.0], [1.0, 2.0]], 1)", "has inputs in a ragged list", "a tensor or an array"),
        ("(torch.zeros(2, dtype=torch.int64), 1)", "has inputs of int64", "a floating type, or uint8"),
        ("(torch.zeros(1, 2, 2, 2), 1)", "has inputs of shape [1, 2, 2, 2]", "[features]"),
        ("(torch.zeros(2), torch.zeros(3))", "has the target float32 [3]", "an integer, the number of a class"),
        ("(torch.zeros(2), 1.5)", "has the target float64 []", "an integer"),
        ("(torch.zeros(2), True)", "has the target bool []", "an integer"),
        ("(torch.zeros(2), 10)", "has the target 10", "0 to 9, for 10 classes"),
        ("(torch.zeros(2), -1)", "has the target -1", "0 to 9, for 10 classes"),
    ],
)
def test_images_that_do_not_serve_are_refused(sample: str, text: str, allowed: str) -> None:
    found = refused_sample(sample)
    assert found.startswith(f"{text}\n      allowed: {allowed}")


@pytest.mark.parametrize(
    ("sample", "text", "allowed"),
    [
        ("torch.zeros(5)", "has inputs of float32 [5]", "tokens: integers in one dimension"),
        ("torch.zeros(1, 5, dtype=torch.int64)", "has inputs of int64 [1, 5]", "tokens"),
        ("[1, 2, 3, 4, 5, 6]", "has 5 tokens with a target", "data.seq_len = 4"),
        ("([1, 2, 3], [2, 3, 4])", "has 3 tokens with a target", "data.seq_len = 4"),
        ("([1, 2, 3, 4], [2, 3, 4])", "has 3 targets and 4 inputs", "a target for each input"),
        ("[1, 2, 3, 4, 10]", "has the target 10", "0 to 9, for 10 tokens"),
        ("[10, 2, 3, 4, 5]", "has the input 10", "0 to 9, for 10 tokens"),
        ("([1, 2, 3, -100], [2, 3, 4, -100])", "has the input -100", "0 to 9"),
        ('"some words"', "is a str", "(inputs, targets)"),
        ('{"input_ids": [1, 2, 3, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}', "masks tokens", ""),
        ("([1, 2, 3, 4], [1, 2, 3, 4])", "has its inputs as targets", "as targets[i]"),
        ('{"input_ids": [1, 2, 3, 4, 5], "labels": [2, 3, 4, 5, 6]}', "has labels that are shifted", "as labels[i]"),
    ],
)
def test_tokens_that_do_not_serve_are_refused(sample: str, text: str, allowed: str) -> None:
    found = refused_sample(sample, "tokens").splitlines()
    assert found[0].startswith(text)
    assert found[1].startswith(f"      allowed: {allowed}")


def test_an_image_of_pillow_is_refused() -> None:
    pytest.importorskip("PIL.Image")
    found = refused_sample("(__import__('PIL.Image').Image.new('RGB', (4, 4)), 1)")
    assert found.startswith("has inputs that are a PIL Image\n")
    assert "to do: make it a tensor in __getitem__, such as by a transform of torchvision" in found


def test_the_number_of_tokens_is_what_to_set() -> None:
    assert "to do: set data.seq_len = 6" in refused_sample("[1, 2, 3, 4, 5, 6, 7]", "tokens")


def test_a_dataset_that_draws_from_elsewhere_is_refused() -> None:
    found = refused("Keeps")
    assert f'sample 0 of "{NAME}:Keeps" is not the same when it is read twice' in found
    assert "to do: draw by torch.rand, np.random.rand or random.random" in found


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        ("(torch.zeros(2 + (i == 2)), 1)", "has inputs of shape [3]\n      allowed: [2], as those of sample 0"),
        ("(torch.zeros(2), 11 * (i == 2))", "has the target 11\n      allowed: 0 to 9, for 10 classes"),
        ("(torch.zeros(2), 1) if i < 2 else None", "is None\n"),
    ],
)
def test_a_sample_unlike_the_first_is_named(sample: str, text: str) -> None:
    source = samples("Given", sample=sample)
    source.batch(np.array([1, 0]))
    with pytest.raises(UserError) as caught:
        source.batch(np.array([1, 2]))
    assert f'data.dataset: sample 2 of "{NAME}:Given" {text}' in str(caught.value)


def test_a_token_outside_the_vocabulary_is_named() -> None:
    source = samples("Given", wants="tokens", sample="[1, 2, 3, 4 + 9 * (i == 2), 5]")
    with pytest.raises(UserError, match=r"sample 2 of .* has the input 13"):
        source.batch(np.array([1, 2]))


def test_a_sample_that_fails_is_named_with_its_line() -> None:
    source = samples("Given", sample="(torch.zeros(2), 1 // (2 - i))")
    with pytest.raises(JobError) as caught:
        source.batch(np.array([1, 2]))
    assert str(caught.value).startswith(
        f'data.dataset "{NAME}:Given" failed at sample 2: ZeroDivisionError: integer division or modulo by zero ('
    )
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert f'"{NAME}:Given" failed at sample 0: ZeroDivisionError' in refused("Given", sample="1 // i")


def test_a_dataset_that_another_process_makes_longer_is_refused() -> None:
    source = pickle.loads(pickle.dumps(samples()))
    source.size = 13
    with pytest.raises(UserError, match="has made 13 samples and, called again, 12"):
        source.batch(np.array([0]))


def test_a_dataset_that_another_process_makes_anew_is_refused() -> None:
    source = pickle.loads(pickle.dumps(samples("Changes")))
    with pytest.raises(UserError) as caught:
        source.batch(np.array([3]))
    assert f'"{NAME}:Changes" has made another sample 0 when it was called again' in str(caught.value)
    assert "to do: let nothing but its arguments decide; sort what a folder lists" in str(caught.value)


def test_the_fingerprint_does_not_follow_threads_or_last_bits() -> None:
    threads, found = torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(samples("Normalised").facts.fingerprint)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    image = np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float32)
    assert outline_sample(image, 1) == outline_sample(image * np.float32(1 + 1e-7), 1)
    others = [outline_sample(image, 2), outline_sample(image * 1.1, 1), outline_sample(image[:, ::-1], 1)]
    assert len({outline_sample(image, 1), *others}) == 4
    tokens = np.arange(4)
    assert outline_sample(tokens, tokens) != outline_sample(tokens + np.array([0, 0, 0, 1]), tokens)


def test_what_the_model_must_say_is_asked_for() -> None:
    assert '"dataset" does not say how many classes there are\n      to do: set model.classes' in refused(limit=None)
    assert '"dataset" does not say what its vocabulary is' in refused(wants="tokens", limit=None)


def test_the_class_of_the_page_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[3] / "docs" / "data.md"
    _, _, block = page.read_text().partition("test_own_dataset.py -->\n```python\n")
    code, _, rest = block.partition("```")
    assert 'dataset = "mydata:Rows"\nsettings = {path = "rows.npy"}' in rest
    heads = "import numpy as np\nimport torch\nfrom torch.utils.data import Dataset\n\n"
    (tmp_path / "mydata_of_the_page.py").write_text(heads + code)
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", np.arange(600).reshape(150, 4) % 10)
    data = opened("mydata_of_the_page:Rows", path="rows.npy")
    sys.modules.pop("mydata_of_the_page")
    assert data.validation is not None
    assert (len(data.train), len(data.validation), data.train.facts.sample_shape) == (50, 100, (3,))
    assert data.train.batch(np.array([3]))["targets"].tolist() == [2]


def test_the_kind_takes_any_settings() -> None:
    assert load_plugin("data_sources", "dataset") is DatasetKind
    given = {"root": "x", "rows": [1, 2]}
    assert DatasetKind.read_settings(given) == given
    assert DatasetKind.takes_settings()
    assert not load_plugin("data_sources", "synthetic").takes_settings()
