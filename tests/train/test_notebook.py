"""A run in a notebook: each cell ends for itself, and the run goes on in the next, with the same bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from runs import read_column
from shardway.errors import Bug, Fenced, JobError, LateStop, LostContact, SiteError, UserError
from shardway.rundir.directory import RunDir
from speed import picked_pairs

START = """
import torch, shardway, signal
torch.manual_seed(3)
KEYS = ("run.device=cpu", "run.threads=1", "train.steps=8", "checkpoint.every=off", *MORE)
run = shardway.start(*KEYS, directory=PLACE)
net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
model = run.shard(net)
opt = run.optimizer(torch.optim.AdamW, model, lr=0.1)
data = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))
"""
LOOP = """
def loss_fn(model, batch):
    AT_LOSS
    return (model(batch) - 1).square().mean(1)[:, None].mean()
loader = run.loader([*data], batch_size=4)
for batch in run.steps(loader):
    BEFORE
    run.step(model, batch, loss_fn)
    AFTER
"""
INTERRUPT = "signal.raise_signal(signal.SIGINT)"


class Notebook:
    """A shell of IPython that runs cells as a kernel does."""

    def __init__(self, place: Path) -> None:
        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.colors = "nocolor"
        self.shell = InteractiveShell(config=config)
        self.shell.user_ns.update(PLACE=str(place), MORE=())

    def run(self, cell: str) -> BaseException | None:
        """What ends a cell."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a kernel does before each cell
        result = self.shell.run_cell(cell)
        return result.error_before_exec or result.error_in_exec

    def start(self) -> BaseException | None:
        return self.run(START)

    def train(self, **where: str) -> BaseException | None:
        """The training cell, with something at one place of the loop."""
        cell = LOOP
        for name in ("AT_LOSS", "BEFORE", "AFTER"):
            cell = cell.replace(name, where.get(name.lower(), "pass"))
        return self.run(cell)

    def value(self, expression: str) -> Any:
        return self.shell.ev(expression)


@pytest.fixture
def notebook(tmp_path: Path, quiet_threads: None) -> Iterator[Notebook]:
    before = signal.getsignal(signal.SIGINT)
    book = Notebook(tmp_path / "run")
    yield book
    book.run("run.close()")
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those of the run that nothing interrupts."""
    folder, threads, handler = (
        tmp_path_factory.mktemp("whole"),
        torch.get_num_threads(),
        signal.getsignal(signal.SIGINT),
    )
    torch.set_num_threads(1)
    book = Notebook(folder)
    book.start()
    assert book.train() is None
    book.run("run.close()")
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, handler)
    return read_column(folder)


def status(tmp_path: Path) -> tuple[str, int]:
    found = RunDir(tmp_path / "run").read_status()
    return found["state"], found["step"]


def test_cells_start_train_look_and_close(
    notebook: Notebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert notebook.start() is None
    assert notebook.train() is None
    assert notebook.value("run.step_number") == 8
    assert notebook.train() is None  # nothing is left
    assert notebook.run("run.close()") is None
    assert notebook.run("run.close()") is None
    assert status(tmp_path) == ("finished", 8)
    assert RunDir(tmp_path / "run").find_writer() is None
    said = capsys.readouterr()
    assert said.out.startswith("started, 8 steps  ")
    assert said.err == ""


def test_a_wrong_key_is_its_message_and_the_next_start_works(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.shell.user_ns["MORE"] = ("train.stepz=3",)
    assert isinstance(notebook.start(), UserError)
    said = capsys.readouterr().out
    assert said.startswith("shardway: 1 problem in the command line\n  train.stepz (command line): there is no key")
    assert "Traceback" not in said
    notebook.shell.user_ns["MORE"] = ()
    assert notebook.start() is None
    assert isinstance(notebook.run("run.steps(None)"), UserError)
    assert capsys.readouterr().out.startswith("shardway: run.steps takes what run.loader gives")
    assert notebook.train() is None


@pytest.mark.parametrize("error", [UserError, SiteError, JobError, LostContact, Fenced, LateStop, Bug, ValueError])
def test_errors_that_say_all_are_shown_without_a_traceback(
    error: type[Exception], notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.shell.user_ns["error"] = error("why\n  To do: this")
    notebook.run("raise error")
    said = capsys.readouterr().out
    assert (said == "shardway: why\n  To do: this\n") == (error not in (Bug, ValueError))


@pytest.mark.parametrize("where", ["at_loss", "before", "after"])
@pytest.mark.parametrize("case", picked_pairs([INTERRUPT, "raise ValueError('mine')"], [False, True]))
def test_a_run_goes_on_after_a_cell_that_was_interrupted(
    where: str, case: tuple[str, bool], notebook: Notebook, whole_losses: list[float], tmp_path: Path
) -> None:
    """By the training cell alone, and by all cells anew; with the bits of a run without it."""
    what, anew = case
    notebook.start()
    told = {where: f"if run.step_number == 5: {what}"}
    error = notebook.train(**told)
    assert isinstance(error, KeyboardInterrupt if what == INTERRUPT else ValueError)
    if anew:
        assert notebook.start() is None
    assert notebook.train() is None
    assert notebook.value("run.step_number") == 8
    assert read_column(tmp_path / "run") == whole_losses


def test_a_second_interrupt_comes_at_once(notebook: Notebook, whole_losses: list[float], tmp_path: Path) -> None:
    """Before the update has begun, that is as good as none."""
    notebook.start()
    assert isinstance(notebook.train(at_loss=f"{INTERRUPT}; {INTERRUPT}; never"), KeyboardInterrupt)
    assert notebook.value("run.step_number") == 0
    assert notebook.train() is None
    assert read_column(tmp_path / "run") == whole_losses


BREAK = """
update = opt.step
def broken():
    opt.step = update
    torch.nn.init.zeros_(net[0].weight)
    raise WHAT
"""


@pytest.mark.parametrize("saved", [0, 5])
@pytest.mark.parametrize("what", ["KeyboardInterrupt", "ValueError('mine')"])
def test_what_an_update_has_left_in_its_midst_is_never_saved(
    saved: int,
    what: str,
    notebook: Notebook,
    whole_losses: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    notebook.start()
    if saved:
        notebook.train(after="if run.step_number == 4: break")
        notebook.run("run.close()")
        notebook.start()
    notebook.run(BREAK.replace("WHAT", what))
    assert notebook.train(at_loss="if run.step_number in (0, 6): opt.step = broken") is not None
    capsys.readouterr()
    assert isinstance(notebook.train(), UserError)
    place = "step 5, which is saved" if saved else "the start, since nothing is saved yet"
    assert capsys.readouterr().out.endswith(f"the run goes on from {place}.\n")
    assert notebook.start() is None
    assert status(tmp_path) == ("stopped", 6 if saved else 0)
    assert notebook.train() is None
    assert read_column(tmp_path / "run") == whole_losses


def test_a_start_closes_the_run_that_is_open(
    notebook: Notebook, whole_losses: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.start()
    notebook.train(after="if run.step_number == 2: break")
    assert notebook.start() is None
    assert "the run that was still open is closed" in capsys.readouterr().err
    assert status(tmp_path) == ("stopped", 3)
    assert notebook.start() is None  # twice
    assert notebook.train() is None
    assert read_column(tmp_path / "run") == whole_losses


@pytest.mark.parametrize(
    "call",
    [
        "run.steps(loader)",
        "run.shard(net)",
        "run.optimizer(torch.optim.SGD, net, lr=1)",
        "run.loader([1])",
        "run.step(net, batch, loss_fn)",
    ],
)
def test_a_run_that_is_closed_is_not_used_again(
    call: str, notebook: Notebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.start()
    notebook.train()
    notebook.run("run.close()")
    before = sum(1 for _ in RunDir(tmp_path / "run").all_events())
    assert isinstance(notebook.run(call), UserError)
    assert f"{call.partition('(')[0]} was called after the end of the run" in capsys.readouterr().out
    assert sum(1 for _ in RunDir(tmp_path / "run").all_events()) == before


def test_a_loop_whose_run_is_closed_within_it_ends(notebook: Notebook, tmp_path: Path) -> None:
    notebook.start()
    assert notebook.train(after="run.close()") is None
    assert status(tmp_path) == ("stopped", 1)


def test_a_validation_that_was_interrupted_is_made_again(notebook: Notebook, tmp_path: Path) -> None:
    cell = """
asks = [True]
def judge(model, batch):
    if asks and run.step_number == 4: asks.clear(); torch.rand(9); signal.raise_signal(signal.SIGINT)
    return model(batch).square().mean()
validation = run.validation([*data], judge)
for batch in run.steps(run.loader([*data], batch_size=4), None, validation):
    run.step(model, batch, lambda model, batch: (model(batch) - 1).square().mean(1)[:, None].mean())
"""
    both = []
    for place, interrupts in (("whole", False), ("run", True)):
        notebook.shell.user_ns.update(PLACE=str(tmp_path / place), MORE=("train.validate_every=2",))
        notebook.start()
        text = cell if interrupts else cell.replace("asks = [True]", "asks = []")
        error = notebook.run(text)
        assert isinstance(error, KeyboardInterrupt) == interrupts
        assert notebook.run(text.replace("asks = [True]", "")) is None
        both.append(read_column(tmp_path / place))
        assert sorted(notebook.value("validation.results")) == [2, 4, 6, 8]
    assert both[0] == both[1]


def test_signals_of_the_kernel_are_left_to_it(notebook: Notebook) -> None:
    before = signal.getsignal(signal.SIGTERM)
    notebook.start()
    assert isinstance(notebook.run(INTERRUPT), KeyboardInterrupt)
    assert signal.getsignal(signal.SIGTERM) is before
