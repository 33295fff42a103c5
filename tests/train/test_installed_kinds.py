"""A model and a data source of another package: trained by a run file, counted, and refused in a sentence where the
planner does not know it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from installed_packages import Install, installing
from runs import COMMON, lone_rank, read_column, train_tiny
from shardway.errors import UserError
from shardway.plan.shapes import shape_of_section
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.runfile.schema import ModelSection
from shardway.train.param_count import count_model

MODEL = """
from shardway.models.build import ModelKind

class TwoLayers(ModelKind):
    takes = "images"
    keys = ("model.classes",)
    settings = {"width": 4}

    def build(self, section, sample):
        from torch import nn

        class Net(nn.Sequential):
            def init_weights(self, seed):
                for parameter in self.parameters():
                    nn.init.uniform_(parameter, -0.1, 0.1)

        width = self.read_settings(section.settings)["width"]
        channels, height, width_of_image = sample.shape
        layers = nn.Linear(channels * height * width_of_image, width), nn.ReLU(), nn.Linear(width, section.classes)
        return Net(nn.Flatten(), *layers)
"""
SOURCE = """
import numpy as np
from shardway.data.kinds import DataKind
from shardway.data.sources.base import SourceFacts

class Ramp:
    tokens_per_sample = 1
    facts = SourceFacts("a ramp", "ramp-1", (1, 2, 2), classes=3)

    def __len__(self):
        return 60

    def batch(self, ids):
        pixels = (ids[:, None, None, None] % 3 + np.zeros((1, 1, 2, 2))).astype(np.float32)
        return {"inputs": pixels, "targets": ids % 3}

class RampKind(DataKind):
    gives = ("images",)
    keys = ()
    needs_path = False

    def open(self, place, request):
        return Ramp()
"""
WORDS = ("model.kind=two_layers", "model.classes=3", "model.settings={width = 5}")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    packages = installing(tmp_path, monkeypatch)
    install: Install = next(packages)
    entries = {"shardway.models": {"two_layers": "foreign_model:TwoLayers"}}
    install("shardway-two", entries, foreign_model=MODEL)
    install("shardway-ramp", {"shardway.data_sources": {"ramp": "foreign_source:RampKind"}}, foreign_source=SOURCE)
    yield
    packages.close()


@pytest.mark.usefixtures("installed")
def test_they_train(tmp_path: Path) -> None:
    words = [word for word in COMMON if not word.startswith("data.")]
    train_tiny(tmp_path / "run", lone_rank(), *WORDS, "data.kind=ramp", "optim.lr=0.05", base=words)
    losses = read_column(tmp_path / "run")
    assert (len(losses), losses[-1] < losses[0]) == (20, True)


@pytest.mark.usefixtures("installed")
def test_its_keys_and_axes_are_those_of_its_class() -> None:
    words = (*WORDS, "data.kind=ramp")
    resolved = resolve_request(ResolveRequest(None, words)).resolved
    assert (resolved.values.model.settings, "settings = {width = 5}" in resolved.render()) == ({"width": 5}, True)
    for further, refusal in (
        ("model.dim=8", 'model.dim (command line): has no effect with model.kind = "two_layers"'),
        ("data.samples=8", 'data.samples (command line): has no effect with data.kind = "ramp"'),
        ("parallel.tp=2", 'model.kind = "two_layers" does not split along tp'),
        ("data.kind=text", '"text" cannot feed model.kind = "two_layers"'),
    ):
        with pytest.raises(UserError) as caught:
            resolve_request(ResolveRequest(None, (*words, further)), ranks=2)
        assert refusal in str(caught.value)


@pytest.mark.usefixtures("installed")
def test_it_is_counted_and_the_planner_says_that_it_does_not_know_it() -> None:
    words = (*WORDS, "data.kind=synthetic", "data.shape=[1, 4, 4]")
    values = resolve_request(ResolveRequest(None, words)).resolved.values
    assert count_model(values).parameters == 16 * 5 + 5 + 5 * 3 + 3
    with pytest.raises(UserError) as caught:
        shape_of_section(ModelSection(kind="two_layers"), (1, 4, 4))
    assert '"two_layers" is a model of another package, whose layers the planner does not know' in str(caught.value)
    assert "`shardway plan --trace`, which counts any model" in str(caught.value)
