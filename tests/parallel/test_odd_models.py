"""Models that torch's wrappers do not take as they are: they train as on one rank, or one sentence says what to do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from pool import ranks
from runs import layout, lone_rank, open_tiny, pool_ranks
from shardway.errors import UserError
from shardway.ranks.start import Ranks
from shardway.train.engines import script_explained

SCRIPT = (
    "run.device=cpu",
    "run.threads=1",
    "train.steps=3",
    "checkpoint.every=100 steps",
    "checkpoint.background=false",
)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table((x[:, 0].abs() * 10).long() % 16))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        one = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(one, nn.Tanh()), nn.Sequential(one, nn.Tanh()), nn.Linear(4, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)
        self.steps = nn.Parameter(torch.arange(6), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, True, False, True]), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x * self.mask) + self.steps.sum()


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) * self.temperature


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)
        self.gain = nn.Parameter(torch.ones(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x * self.gain)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True)
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x[:, None])[0][:, 0])


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).double()])
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body[1](self.body[0](x).double()).float() * self.scale.float())


def sequential(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), *more, nn.Linear(6, 1))


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 1))


def spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 1))


def frozen() -> nn.Module:
    return sequential().requires_grad_(False)


def frozen_partly() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
    model[0].requires_grad_(False)
    return model


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = sequential().bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.bfloat16()).float()


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 1))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return sequential()


def compiled() -> nn.Module:
    return torch.compile(sequential(), backend="eager")


def sparse_buffer() -> nn.Module:
    model = sequential()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


def wrapped() -> nn.Module:
    return nn.DataParallel(sequential())


class Sides(nn.Module):
    """Two formats in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)
        self.gain = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x * self.gain.float() + self.bias)


TRAINED = (
    *(Complex, Shared, Integers, Narrow, Recurrent, Mixed, weight_norm, spectral_norm, frozen_partly, Half),
    compiled,
)
"""Models that every layout trains as one rank does."""

REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "sparse gradients": (Sparse, "table: sparse=True", "set sparse=False"),
    "lazy": (lazy, "0.weight: of a lazy module has no shape yet", "call the model once with a batch"),
    "no parameters": (Nothing, "the model: has no parameters", "call it as it is, without run.shard"),
    "wrapped": (
        wrapped,
        "is in the hands of torch's DataParallel already",
        "hand run.shard the model itself",
    ),
    "sparse buffer": (sparse_buffer, "graph: has the layout sparse_coo", "indices and values as buffers"),
    "meta": (on_meta, "was built on the meta device", "build it on a real device"),
    "frozen": (frozen, "no parameter that is trained took part in the loss", "requires_grad"),
}
"""Models that no layout trains, with what is said of them and what to do."""

LAYOUTS = {"replicated": (2, 1), "sharded": (1, 2)}


def train(
    folder: Path, on: Ranks, make: Callable[[], nn.Module], *words: str, batch: int = 8, loss: Any = F.mse_loss
) -> list[float]:
    """The losses of three steps."""
    torch.manual_seed(3)
    model = make()
    columns = torch.randn(24, 4), torch.randn(24, 1)
    data = TensorDataset(*columns) if loss is F.mse_loss else TensorDataset(columns[0])
    losses = []
    with open_tiny(folder, on, *words, base=SCRIPT) as run:
        net = run.shard(model)
        run.optimizer(torch.optim.SGD, net, lr=0.05)
        for step in run.steps(run.loader(data, batch_size=batch)):
            losses.append(run.step(net, step, loss))
    return losses


@pytest.mark.parametrize("make", TRAINED, ids=lambda make: make.__name__)
@ranks(2)
def test_every_layout_trains_as_one_rank_does(rank: int, tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    expected = [train(tmp_path / "one", lone_rank(), make)] if rank == 0 else [[]]
    dist.broadcast_object_list(expected, src=0)
    for name, shape in LAYOUTS.items():
        found = train(tmp_path / name, pool_ranks(), make, *layout(*shape))
        assert found == pytest.approx(expected[0], rel=5e-3 if make is Half else 1e-5), name


@pytest.mark.parametrize("case", REFUSED)
@ranks(2)
def test_what_no_layout_trains_is_refused_in_a_sentence(rank: int, tmp_path: Path, case: str) -> None:
    make, what, remedy = REFUSED[case]
    for name, shape in LAYOUTS.items():
        with pytest.raises(UserError) as told:
            train(tmp_path / name, pool_ranks(), make, *layout(*shape))
        assert what in str(told.value)
        assert remedy in str(told.value)
        dist.barrier()


@ranks(2)
def test_what_shards_do_not_take_is_refused_with_the_other_layout(rank: int, tmp_path: Path) -> None:
    for make, what in (
        (Scalar, "temperature of Scalar has no dimension"),
        (Sides, "gain is float64 and bias is float32"),
    ):
        with pytest.raises(UserError, match=what) as told:
            train(tmp_path / make.__name__, pool_ranks(), make, *layout(1, 2))
        assert "parallel.dp_shard = 1" in str(told.value)
        dist.barrier()
        assert len(train(tmp_path / f"{make.__name__}-2", pool_ranks(), make, *layout(2, 1))) == 3


@ranks(2)
def test_a_batch_norm_of_one_row_is_told_with_the_remedy(rank: int, tmp_path: Path) -> None:
    for name, shape in LAYOUTS.items():
        with pytest.raises(UserError, match=r"a batch norm was given a micro-batch of one row") as told:
            train(tmp_path / name, pool_ranks(), Norm, *layout(*shape), batch=2)
        assert "train.micro_batch" in str(told.value)
        dist.barrier()


# --- methods and attributes beside forward


class Coder(nn.Module):
    """A model with methods, attributes and names that torch's wrappers have as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.decoder = nn.Linear(3, 4)
        self.dim, self.device, self.temperature = "my dim", "my device", 1.0

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x) * self.temperature

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encode(x)))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """Without a call of the model itself."""
        return (self.decoder(self.encode(x)) - x).square().mean()

    @torch.no_grad()
    def clip(self) -> None:
        """As a critic's weights are clipped: in place."""
        for parameter in self.parameters():
            parameter.clamp_(-0.01, 0.01)


def by_method(model: Any, batch: Any) -> torch.Tensor:
    return model.loss(batch[0])


def by_both(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[0]).square().mean() + model.encode(batch[0]).square().mean()


@pytest.mark.parametrize("name", LAYOUTS)
@ranks(2)
def test_a_models_own_methods_and_attributes_are_there(rank: int, tmp_path: Path, name: str) -> None:
    torch.manual_seed(3)
    model = Coder()
    x = torch.randn(5, 4)
    expected = model.encode(x).detach().clone()
    with open_tiny(tmp_path / name, pool_ranks(), *layout(*LAYOUTS[name]), base=SCRIPT) as run:
        net: Any = run.shard(model)
        assert isinstance(net, Coder)
        assert (net.dim, net.device) == ("my dim", "my device")
        for _ in range(2):
            torch.testing.assert_close(net.encode(x).detach(), expected)
        with torch.no_grad():
            torch.testing.assert_close(net.encode(x), expected)
        net.temperature = 2.0
        torch.testing.assert_close(net.encode(x).detach(), 2 * expected)
        net.note = "mine"
        assert (net.note, model.temperature) == ("mine", 2.0)
        assert net.state_dict().keys() == Coder().state_dict().keys()
        net.clip()
        assert net.encode(torch.ones(1, 4)).abs().max() <= 2 * 0.05 + 1e-6
        if name == "replicated":
            copied = copy.deepcopy(net)
            assert type(copied) is Coder
            torch.testing.assert_close(copied.encode(x), net.encode(x))
            stream = io.BytesIO()
            torch.save(net, stream)
            stream.seek(0)
            assert type(torch.load(stream, weights_only=False)) is Coder


@ranks(2)
def test_a_submodule_of_a_model_in_shards_called_by_itself_is_told(rank: int, tmp_path: Path) -> None:
    """Its weights are not gathered; the line of the script is named."""
    with open_tiny(tmp_path, pool_ranks(), *layout(1, 2)) as run:
        model = run.shard(Coder())
        with (
            pytest.raises(UserError, match=r"in test_odd_models\.py, line \d+, a weight was used that is not gathered"),
            script_explained(),
        ):
            model.encoder(torch.ones(2, 4))
        with pytest.raises(RuntimeError, match="of the script"), script_explained():
            raise RuntimeError("of the script")


@pytest.mark.parametrize("loss", [by_method, by_both])
@ranks(2)
def test_a_loss_of_other_methods_has_the_gradients_of_one_rank(rank: int, tmp_path: Path, loss: Any) -> None:
    """Samples differ from rank to rank: without the sum over ranks the losses would part after the first step."""
    expected = [train(tmp_path / "one", lone_rank(), Coder, loss=loss)] if rank == 0 else [[]]
    dist.broadcast_object_list(expected, src=0)
    for name, shape in LAYOUTS.items():
        for words in ((), ("train.micro_batch=2",)) if loss is by_both else ((),):
            folder = tmp_path / f"{name}-{len(words)}"
            found = train(folder, pool_ranks(), Coder, *layout(*shape), *words, loss=loss)
            assert found == pytest.approx(expected[0], rel=1e-5), name


def dense() -> nn.Module:
    model = Sparse()
    model.table.sparse = False
    return model


@pytest.mark.parametrize("words", [(), ("train.micro_batch=2",), ("optim.clip=0.1",)])
def test_sparse_gradients_are_those_of_a_dense_table_on_one_rank(tmp_path: Path, words: tuple[str, ...]) -> None:
    found, expected = (train(tmp_path / make.__name__, lone_rank(), make, *words) for make in (Sparse, dense))
    assert found == pytest.approx(expected, rel=1e-6)
