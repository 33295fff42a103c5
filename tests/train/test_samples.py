"""train.sample_every: generations of the model in training, which change nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

from event_files import read_fields, read_records
from pool import ranks
from runs import COMMON, layout, lone_rank, open_tiny, pool_ranks, read_column, read_named, signal_at, train_tiny
from shardway.cli.status import _summary_lines
from shardway.data.tokenizers import ByteTokenizer
from shardway.errors import UserError
from shardway.models.transformer import Transformer, TransformerShape
from shardway.rundir.directory import RunDir
from shardway.train.run import train_run
from shardway.train.samples import Prompts, continue_prompts
from shardway.watch.facts import SampledEvent
from shardway.watch.progress import summarise
from shardway.watch.report import render_report
from shardway.watch.words import PlainLines, one_line, render_sampled
from trained import apply_shape, make_passes

PROMPTS = ("train.sample_every=4 steps", 'train.sample_prompts=["def f(", "the value of x"]', "train.sample_tokens=6")
SIZES = ("model.dim=16", "model.layers=2", "model.heads=2", "model.ffn_dim=32", "data.seq_len=24")
TEXT = (
    *(word for word in COMMON if not word.startswith("data.")),
    *SIZES,
    "data.kind=text",
    "train.steps=10",
    "optim.lr=0.01",
)


def words(folder: Path) -> tuple[str, ...]:
    """A run on a small text of its own."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text("".join(f"def f({number}): the value of x is {number * 7 % 13}\n" for number in range(80)))
    return (*TEXT, f"data.path={path}", f"data.cache={folder / 'cache'}")


def losses(folder: Path) -> list[tuple[float, float]]:
    return list(zip(read_column(folder), read_column(folder, "grad_norm"), strict=True))


OTHERS = [(), ("model.dropout=0.2",), ("model.experts=4",)]


@pytest.mark.parametrize("extra", OTHERS, ids=["dense", "dropout", "experts"])
def test_training_has_the_same_bits_with_and_without_samples(
    tmp_path: Path, extra: tuple[str, ...], quiet_threads: None
) -> None:
    base = (*words(tmp_path), "train.validate_every=5 steps", *extra)
    train_tiny(tmp_path / "with", lone_rank(), *PROMPTS, base=base)
    train_tiny(tmp_path / "without", lone_rank(), base=base)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    of = [[event["loss"] for event in read_named(tmp_path / name, "validation")] for name in ("with", "without")]
    assert of[0] == of[1]
    samples = read_named(tmp_path / "with", "sampled")
    assert [event["step"] for event in samples] == [4, 8, 10]  # and at the end
    assert [each["prompt"] for each in samples[0]["samples"]] == ["def f(", "the value of x"]
    assert all(each["text"] for event in samples for each in event["samples"])


@ranks(2)
def test_copies_and_shards_continue_a_prompt_alike(rank: int, tmp_path: Path) -> None:
    """In float32 on a CPU the texts of all layouts are those of one rank, and no bit of the training changes."""
    base = words(tmp_path)
    for name, axes in (("copies", layout(2, 1)), ("shards", layout(1, 2))):
        train_tiny(tmp_path / name, pool_ranks(), *PROMPTS, *axes, base=base)
        train_tiny(tmp_path / f"plain-{name}", pool_ranks(), *axes, base=base)
        assert losses(tmp_path / name) == losses(tmp_path / f"plain-{name}")
    if rank == 0:
        found = {name: read_named(tmp_path / name, "sampled") for name in ("copies", "shards")}
        texts = {name: [event["samples"] for event in events] for name, events in found.items()}
        assert len(texts["copies"]) == 3
        assert texts["copies"] == texts["shards"]


def test_a_continuation_is_what_one_token_after_the_other_gives(quiet_threads: None) -> None:
    """Against a plain loop over each prompt alone, unpadded, with the window sliding over a text that is longer."""
    with torch.device("meta"):
        model = Transformer(TransformerShape(vocab=256, dim=32, layers=2, heads=2, kv_heads=1, ffn_dim=64))
    passes = make_passes(apply_shape(model, lone_rank()), lone_rank(), global_batch=2)
    tokenizer, count, window = ByteTokenizer(end=None), 9, 16
    texts = ("a", "a prompt of 20 bytes")
    tokens = tuple(tuple(map(int, each[-window:])) for each in tokenizer.encode(texts))
    call = passes.parallel.call.eval()
    found = continue_prompts(passes, Prompts(texts, tokens, count, window, tokenizer, compiles=False))
    for made, prompt in zip(found or (), tokens, strict=True):
        row = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                row.append(int(call(torch.tensor([row[-window:]]))[0, -1].argmax()))
        assert made == tokenizer.decode(row[len(prompt) :])


def test_a_text_ends_with_the_token_that_ends_a_document(quiet_threads: None) -> None:
    with torch.device("meta"):
        model = Transformer(TransformerShape(vocab=256, dim=32, layers=1, heads=2, kv_heads=1, ffn_dim=64))
    passes = make_passes(apply_shape(model, lone_rank()), lone_rank())
    passes.parallel.call.eval()

    def run(end: int | None) -> str:
        prompts = Prompts(("ab",), ((97, 98),), 8, 16, ByteTokenizer(end=end), compiles=False)
        return (continue_prompts(passes, prompts) or [""])[0]

    row = [97, 98]
    with torch.no_grad():
        for _ in range(8):
            row.append(int(passes.parallel.call(torch.tensor([row]))[0, -1].argmax()))
    third = row[4]
    assert run(None) == ByteTokenizer().decode(row[2:])
    assert run(third) == ByteTokenizer().decode(row[2 : row.index(third, 2)])


def test_a_stop_breaks_samples_off_and_saves(tmp_path: Path, quiet_threads: None) -> None:
    """The signal comes during the passes of the samples of step 4."""
    from shardway.train import samples as rooms

    find, calls = rooms._find_likeliest, []
    base, on = words(tmp_path), lone_rank()
    with pytest.MonkeyPatch.context() as patch, open_tiny(tmp_path / "run", on, *PROMPTS, base=base) as run:

        def look(*arguments: Any) -> list[int]:
            calls.append(1)
            if len(calls) == 3:
                signal_at(4)(run, 4)
            return find(*arguments)

        patch.setattr(rooms, "_find_likeliest", look)
        outcome = train_run(run)
    assert (outcome.state, outcome.step) == ("stopped", 4)
    assert RunDir(tmp_path / "run").checkpoint_steps() == [4]
    assert read_named(tmp_path / "run", "sampled") == []
    train_tiny(tmp_path / "run", lone_rank(), *PROMPTS, base=words(tmp_path))
    train_tiny(tmp_path / "whole", lone_rank(), *PROMPTS, base=words(tmp_path))
    assert read_column(tmp_path / "run") == read_column(tmp_path / "whole")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (('train.sample_prompts=["x"]',), "has no effect without train.sample_every"),
        (("train.sample_every=5 steps",), "train.sample_prompts (default): names none, and train.sample_every is 5"),
        ((*PROMPTS, "parallel.tp=2"), '"4 steps", and parallel.tp = 2 cuts the model or its sequences into parts'),
        ((*PROMPTS, "data.kind=synthetic"), '"4 steps": data of kind synthetic name no tokenizer, and prompts are'),
        ((*PROMPTS, 'train.sample_prompts=["0123456789012345678901234"]'), "prompt 1 has 25 tokens"),
    ],
    ids=["off", "no prompt", "cut", "no tokenizer", "long"],
)
def test_what_cannot_be_sampled_is_refused(tmp_path: Path, given: tuple[str, ...], message: str) -> None:
    base = words(tmp_path)
    if "data.kind=synthetic" in given:
        base = tuple(word for word in base if not word.startswith(("data.path", "data.kind")))
    with pytest.raises(UserError) as refused:
        train_tiny(tmp_path / "run", lone_rank(), *given, base=base)
    assert message in str(refused.value)


def test_status_report_and_trackers_show_them(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path / "run", lone_rank(), *PROMPTS, "track.to=['tensorboard']", base=words(tmp_path))
    run = RunDir(tmp_path / "run")
    last = read_named(run.path, "sampled")[-1]["samples"]
    made = one_line(last[0]["text"])
    status = "\n".join(_summary_lines(summarise(run), []))
    assert f'  sample      "def f(" -> "{made}" (and 1 more) (step 10)' in status
    lines = PlainLines()
    shown = [line for event in run.all_events() for line in lines.lines(event)]
    assert any(line.startswith('step  4/10  sample  "def f(" -> ') for line in shown)
    assert render_sampled(SampledEvent(4, ((" a ", "b\n"),))) == '" a " -> "b "'
    page = render_report(run)
    assert "<h2>Samples</h2>" in page
    assert escape(made) in page
    (path,) = (run.path / "tensorboard").iterdir()
    texts = list(read_texts(path))
    assert [step for step, _ in texts] == [4, 8, 10]
    expected = {f"sample/{at}": f"{each['prompt']}{each['text']}" for at, each in enumerate(last)}
    assert texts[-1][1] == expected


def read_texts(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Step and texts of each summary of texts in an event file, by name."""
    for record in read_records(path):
        event = dict(read_fields(record))
        values = [dict(read_fields(value)) for _, value in read_fields(event.get(5, b""))]
        texts = [value for value in values if 8 in value]
        assert all(dict(read_fields(dict(read_fields(value[9]))[1])) == {1: b"text"} for value in texts)
        if texts:
            yield event[2], {value[1].decode(): dict(read_fields(value[8]))[8].decode() for value in texts}


def test_a_script_generates_by_itself(tmp_path: Path) -> None:
    from dataclasses import replace

    from shardway.resolve.request import ResolveRequest, resolve_request

    request = ResolveRequest(None, (*words(tmp_path), *PROMPTS), tmp_path / "run", False)
    with pytest.raises(UserError, match="does not know how a model of a script is asked for text"):
        resolve_request(replace(request, own_model=True), 1, 1)
