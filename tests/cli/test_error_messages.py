"""What a person reads when something is wrong: whole messages, kept as files under tests/golden/errors.

Each file holds the command, what it prints to stderr, and its exit code.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import TINY, Shardway, write_text

from claimed import claim_from
from golden_files import Golden, golden_names
from shardway.rundir import lease
from shardway.rundir.directory import RunDir
from shardway.rundir.lease import LeaseVerdict

Setup = Callable[[Path], object]


def nothing(folder: Path) -> None:
    """No file is needed."""


def file(name: str, content: str | bytes) -> Setup:
    """A file with this content."""
    data = content.encode() if isinstance(content, str) else content

    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return write


def both(*setups: Setup) -> Setup:
    """One after the other."""
    return lambda folder: [setup(folder) for setup in setups]


def folder(name: str) -> Setup:
    """An empty folder."""
    return lambda root: (root / name).mkdir(parents=True)


def arrays(name: str, **contents: Any) -> Setup:
    """An .npz file."""
    return lambda root: np.savez(root / name, **contents)


@dataclass(frozen=True)
class Case:
    """A command that is refused, what it needs around it, and the exit code that says who can act."""

    name: str
    words: tuple[str, ...]
    setup: Setup = nothing
    code: int = 2


RUN_FILE = [
    Case("unknown-key", ("train", "my.toml"), file("my.toml", "[train]\n\nstep = 5\n")),
    Case("unknown-section", ("train", "my.toml"), file("my.toml", "[trian]\nsteps = 5\n")),
    Case("unknown-key-of-the-command-line", ("train", "optim.learning_rate=1.0")),
    Case("wrong-type", ("train", "my.toml"), file("my.toml", '[train]\nglobal_batch = "large"\n')),
    Case(
        "many-problems",
        ("train", "my.toml", "optim.lr=-1"),
        file("my.toml", '[model]\ndim = 1.5\nkind = "gpt"\n[train]\nsteps = "soon"\nbatch = 3\n'),
    ),
    Case("invalid-toml", ("train", "my.toml"), file("my.toml", "[train]\nsteps 5\n")),
    Case("not-utf-8", ("train", "my.toml"), file("my.toml", b"[train]\n# caf\xe9\n")),
    Case("missing-run-file", ("train", "gone.toml")),
    Case("folder-as-run-file", ("train", "."), nothing),
    Case("two-run-files", ("train", "a.toml", "b.toml", "train.steps=5")),
    Case("override-without-section", ("train", "steps=500")),
    Case(
        "variable-that-is-not-set",
        ("train", "my.toml"),
        file("my.toml", '[run]\nroot = "$NOWHERE/runs"\n[data]\npath = "${NOWHERE}/text"\n'),
    ),
    Case("variable-of-dir", ("train", "--dir", "$NOWHERE/runs/x")),
    Case(
        "variable-of-a-submission",
        ("submit", "my.toml", "--on", "laptop"),
        file("my.toml", '[run]\nroot = "$NOWHERE/runs"\n'),
    ),
    Case("missing-parent", ("train", "my.toml"), file("my.toml", 'extends = "base.toml"\n')),
    Case("two-parents", ("train", "my.toml"), file("my.toml", 'extends = ["a.toml", "b.toml"]\n')),
    Case(
        "parent-of-a-parent",
        ("train", "c.toml"),
        both(file("a.toml", ""), file("b.toml", 'extends = "a.toml"'), file("c.toml", 'extends = "b.toml"')),
    ),
    Case(
        "blend-with-many-problems",
        ("train", "my.toml"),
        file(
            "my.toml",
            '[data]\nseq_len = 64\n\n[[data.blend]]\npath = "web"\nweight = [[10, 0.7], [5, 0.2]]\nkind = "txt"\n\n'
            '[[data.blend]]\npth = "code"\nweight = 0\n',
        ),
    ),
    Case("newer-run-file", ("train", "my.toml"), file("my.toml", "format = 2\n")),
    Case("explain-unknown-key", ("config", "explain", "train.stpes")),
]

RULES = [
    Case("impossible-degree-product", ("train", "--nproc", "4", "parallel.dp_shard=3", "parallel.dp_replicate=2")),
    Case("degree-that-does-not-divide", ("train", "--nproc", "4", "parallel.dp_shard=3")),
    Case("degree-above-the-ranks", ("train", "--nproc", "2", "parallel.tp=4")),
    Case("many-axes", ("train", "--nproc", "8", "parallel.tp=8", "parallel.pp=2", "parallel.cp=3", "parallel.ep=2")),
    Case("axis-of-another-kind", ("config", "show", "--nproc", "2", "model.kind=encoder_decoder", "parallel.tp=2")),
    Case("sequence-and-context", ("config", "show", "--nproc", "2", "parallel.cp=2", "data.seq_len=130")),
    Case("tied-across-stages", ("train", "--nproc", "2", "parallel.pp=2")),
    Case("heads-and-tensor", ("train", "--nproc", "4", "parallel.tp=4", "model.heads=6", "model.dim=96")),
    Case(
        "pipeline",
        (
            *("config", "show", "--nproc", "8", "parallel.pp=4", "model.tied=false", "model.layers=6"),
            *("parallel.pp_schedule=zero_bubble", "parallel.dp_shard=auto", "parallel.reshard_after_forward=true"),
            *("train.compile=blocks", "train.micro_batch=3", "parallel.pp_split=[2, 2, 2]"),
        ),
    ),
    Case(
        "experts-and-ragged-batch",
        (
            *("train", "--nproc", "2", "parallel.pp=2", "model.tied=false", "model.experts=4"),
            *("train.global_batch=14", "train.micro_batch=4"),
        ),
    ),
    Case("float8", ("train", "precision.compute=float8")),
    Case("hugging-face", ("train", "model.hf=models/mine"), folder("models/mine")),
    Case("no-accelerator", ("train", "run.device=cuda")),
    Case("unknown-site", ("train", "site.name=leonrado")),
    Case("key-without-effect", ("train", "optim.momentum=0.9", "data.shape=[1, 2]")),
    Case(
        "blend-beside-a-path",
        ("train", "data.path=web", 'data.blend=[{path = "code", weight = 1}, {path = "x", weight = 1, kind = "idx"}]'),
    ),
    Case("heads", ("train", "model.dim=100", "model.heads=3", "model.kv_heads=2")),
    Case("batch-smaller-than-ranks", ("train", "--nproc", "4", "train.global_batch=2")),
]

DATA = [
    Case("missing-data-path", ("train", *TINY)),
    Case("empty-folder", ("train", *TINY, "data.path=texts"), folder("texts")),
    Case("no-file-that-matches", ("train", *TINY, "data.path=texts"), file("texts/a.md", "text")),
    Case("empty-text", ("train", *TINY), file("text.txt", "")),
    Case("short-text", ("train", *TINY), file("text.txt", "short")),
    Case("too-short-to-hold-out", ("train", *TINY), file("text.txt", "nine byte")),
    Case(
        "parts-of-a-blend",
        (
            *("train", *(word for word in TINY if not word.startswith("data.path"))),
            'data.blend=[{path = "web", weight = 0.7}, {path = "code", weight = [[0, 0.3], [100, 0]]}]',
        ),
        file("code/a.py", "short"),
    ),
    Case("missing-validation", ("train", *TINY, "data.validation=gone.txt"), write_text),
    Case("missing-tokenizer", ("train", *TINY, "data.tokenizer=words.json"), write_text),
    Case(
        "truncated-token-file",
        ("train", *TINY, "data.kind=tokens", "data.path=tokens.bin", "model.vocab=256"),
        file("tokens.bin", b"\x01" * 1001),
    ),
    Case(
        "truncated-npy",
        ("train", *TINY, "data.kind=tokens", "data.path=tokens.npy", "model.vocab=256"),
        lambda root: (np.save(root / "tokens.npy", np.arange(99)), cut(root / "tokens.npy", 400)),
    ),
    Case("text-as-token-file", ("train", *TINY, "data.kind=tokens", "model.vocab=256"), write_text),
    Case("tokens-without-vocabulary", ("train", "data.kind=tokens", "data.path=tokens.bin")),
    Case("nothing-held-out", ("train", *TINY, "train.validate_every=5", "data.validation_fraction=0.0")),
    Case(
        "token-above-the-vocabulary",
        ("train", *TINY, "data.kind=tokens", "data.path=tokens.bin", "model.vocab=100"),
        file("tokens.bin", np.full(500, 100, np.uint16).tobytes()),
    ),
    Case("vocabulary-too-small", ("train", *TINY, "model.vocab=100"), write_text),
    Case(
        "damaged-npz",
        ("train", "model.kind=mlp", "data.kind=arrays", "data.path=a.npz", "run.threads=1"),
        file("a.npz", b"PK nothing"),
    ),
    Case(
        "unknown-array",
        ("train", "model.kind=mlp", "data.kind=arrays", "data.path=a.npz", "data.inputs=image", "run.threads=1"),
        arrays("a.npz", images=np.zeros((4, 2, 2)), y=np.zeros(4, np.int64)),
    ),
    Case(
        "no-images",
        ("train", "model.kind=convnet", "data.kind=idx", "data.path=mnist", "run.threads=1"),
        folder("mnist"),
    ),
    Case("warm-up-too-long", ("train", *TINY, "optim.warmup=5"), write_text),
    Case("no-step", ("train", *TINY, "train.steps=0"), write_text),
]


def cut(path: Path, size: int) -> None:
    """Leave the first `size` bytes of a file."""
    with open(path, "r+b") as stream:
        stream.truncate(size)


def status(name: str, content: str) -> Setup:
    """A run directory whose status.json has this content."""
    return both(folder(f"{name}/events"), file(f"{name}/status.json", content))


RUN_DIRECTORIES = [
    Case("future-format", ("train", *TINY, "--dir", "a"), status("a", '{"format": 2, "state": "running"}')),
    Case("future-format-status", ("status", "a"), status("a", '{"format": 2, "state": "running"}')),
    Case("future-format-logs", ("logs", "a"), status("a", '{"format": 2, "state": "running"}')),
    Case("future-format-report", ("report", "a"), status("a", '{"format": 2, "state": "running"}')),
    Case("other-files", ("train", *TINY, "--dir", "thesis"), both(write_text, file("thesis/main.tex", "To be"))),
    Case("root-as-run-directory", ("train", *TINY, "--dir", "/"), write_text),
    Case("run-directory-is-a-file", ("train", *TINY, "--dir", "text.txt"), write_text),
    Case("no-run-logs", ("logs", "gone")),
    Case("no-run-report", ("report", "gone")),
    Case(
        "many-runs",
        ("logs",),
        both(status("runs/a", '{"format": 1}'), status("runs/b", '{"format": 1}'), folder("runs/other")),
    ),
    Case("no-such-rank", ("logs", "a", "--rank", "3"), both(status("a", "{}"), file("a/events/rank-00000.jsonl", ""))),
    Case("no-output", ("logs", "a", "--output"), status("a", "{}")),
    Case("init-over-a-file", ("init", "my.toml"), file("my.toml", "# mine\n")),
    Case("init-without-folder", ("init", "gone/my.toml")),
]

QUESTION = {"question": "q", "choices": ["a", "b"], "answer": 0}

EVALUATIONS = [
    Case("evaluate-options", ("evaluate", "runs/x", "model.dim=3", "--task-path", "no", "--out", "no/way.json")),
    Case("evaluate-no-model", ("evaluate", "no"), folder("no")),
    Case(
        "evaluate-wrong-questions",
        ("evaluate", "runs/x", "--choices", "q.jsonl"),
        file(
            "q.jsonl", "\n".join(map(json.dumps, (QUESTION, {**QUESTION, "answer": 2}, {**QUESTION, "choices": []}, 3)))
        ),
    ),
    Case("samples-without-prompts", ("train", "train.sample_every=9 steps")),
    Case("samples-and-tensor", ("train", "train.sample_every=9 steps", 'train.sample_prompts=["a"]', "parallel.tp=2")),
]

# These are refused before a model is opened, so none has to be there.
ALL_OUT_OF_RANGE = ("--temperature", "-1", "--top-p", "0", "--top-k", "-3", "--max-tokens", "0", "--stop", "")
WRONG_FILES = ("--template", "none.jinja", "--tokenizer", "none.json")
PROMPTS = '{"prompt": "one"}\n{"prompt": 3}\n\n{"text": "x"}\n{"messages": []}\n'

INFERENCE = [
    Case("generate-out-of-range", ("generate", "x", "--prompt", "a", *ALL_OUT_OF_RANGE)),
    Case(
        "generate-options",
        (
            *("generate", "x", "--prompt", "a", "--file", "b.txt", "--system", "c", "--top-k", "3", "--top-p", "0.5"),
            *("--best", "--step", "3", "--quantize", "int8", "--nproc", "2", "--out", "no/way.jsonl", *WRONG_FILES),
        ),
    ),
    Case("generate-without-file", ("generate", "x", "--prompt", "a", "--out", "b", "--batch", "4"), file("b", "")),
    Case("generate-no-file", ("generate", "x", "--file", "none.txt")),
    Case("generate-empty-file", ("generate", "x", "--file", "a.txt"), file("a.txt", "\n \n")),
    Case("generate-binary-file", ("generate", "x", "--file", "a.txt"), file("a.txt", b"a\xff\xfe\x00")),
    Case("generate-wrong-prompts", ("generate", "x", "--file", "a.jsonl"), file("a.jsonl", PROMPTS)),
    Case(
        "generate-wrong-prompts-and-options",
        ("generate", "x", "--file", "a.jsonl", "--out", "a.jsonl"),
        file("a.jsonl", PROMPTS),
    ),
    Case("generate-no-model", ("generate", "no", "--prompt", "a"), folder("no")),
    Case("generate-no-words", ("generate", "", "--prompt", "a")),
    Case("generate-no-weights", ("generate", "m", "--prompt", "a"), file("m/config.json", '{"model_type": "llama"}')),
    Case("generate-damaged-config", ("generate", "m", "--prompt", "a"), file("m/config.json", '{"model_type')),
    Case(
        "chat-options",
        ("chat", "x", "--temperature", "0", "--top-p", "0.5", "--history", "none.jsonl", *WRONG_FILES),
    ),
    Case("chat-half-a-history", ("chat", "x", "--history", "h"), file("h", '[{"role": "user", "content": "a"}]')),
    Case("chat-no-history", ("chat", "x", "--history", "h"), file("h", "hello\n")),
    Case(
        "evaluate-files",
        (
            *("evaluate", "x", "--data", "none.txt", "--choices", "none.jsonl", "--tokenizer", "t"),
            *("--out", "t", "--task", "arc_easy", "--nproc", "2"),
        ),
        folder("t"),
    ),
    Case("evaluate-wrong-key", ("evaluate", "x", "data.seq_len=soon", "data.none=3"), nothing),
    Case("evaluate-no-data", ("evaluate", "m"), file("m/config.json", "{}")),
    Case("evaluate-questions-and-options", ("evaluate", "x", "--choices", "q", "--out", "q"), file("q", "[]\n{}\n")),
]

LESSONS = [
    Case("learn-no-such-lesson", ("learn", "11")),
    Case("learn-check-of-nothing", ("learn", "check")),
    Case("learn-two-lessons", ("learn", "1", "2")),
]

CASES = [*LESSONS, *RUN_FILE, *RULES, *DATA, *RUN_DIRECTORIES, *EVALUATIONS, *INFERENCE]


def tell(words: tuple[str, ...], err: str, code: int) -> str:
    """The content of a golden file; what differs from run to run is named instead."""
    err = re.sub(r"process \d+ on host \S+ since [\d-]+ [\d:]+", "process PID on host HOST since TIME", err)
    err = re.sub(r"about [\d.]+ KiB", "about SIZE", err)
    command = " ".join(words).replace(" ".join(TINY), "TINY")
    return f"$ shardway {command}\n{err}exit code {code}\n"


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a folder, with its content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_message(case: Case, shardway: Shardway, tmp_path: Path, golden: Golden) -> None:
    case.setup(tmp_path)
    before = tree(tmp_path)
    ended = shardway(*case.words)
    assert ended.out == ""
    assert ended.code == case.code
    assert before.items() <= tree(tmp_path).items()
    golden(tell(case.words, ended.err, ended.code), f"errors/{case.name}.txt")


# --- what needs more than files around it


def refused(shardway: Shardway, golden: Golden, name: str, *words: str, code: int) -> None:
    """Compare one more message with its file."""
    ended = shardway(*words)
    assert (ended.code, ended.out) == (code, "")
    golden(tell(words, ended.err, ended.code), f"errors/{name}.txt")


def test_a_rank_that_is_to_start_ranks(shardway: Shardway, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    refused(shardway, golden, "nproc-under-a-launcher", "train", "--nproc", "2", code=2)


def test_variables_that_place_no_rank(shardway: Shardway, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    refused(shardway, golden, "half-a-launcher", "train", code=3)


def test_a_second_writer(shardway: Shardway, golden: Golden, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs/default")
    run.create()
    holder = run.writer_lock()
    holder.acquire()
    before = tree(run.path)
    refused(shardway, golden, "second-writer", "train", *TINY, code=2)
    assert tree(run.path) == before
    holder.release()


def test_a_run_of_another_host_that_was_not_released(
    shardway: Shardway, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is watched; here for an instant, in which nothing comes or a beat."""
    write_text(tmp_path)
    run = RunDir(tmp_path / "runs/default")
    run.create()
    held = run.writer_lock()
    held.acquire()
    claim_from(run, "n1")
    held._unlock()  # another host's lock is not seen
    assert held._stop_beats()
    monkeypatch.setattr(lease, "watch", lambda *_: LeaseVerdict.LIVES)
    refused(shardway, golden, "held-elsewhere", "train", *TINY, code=2)
    monkeypatch.setattr(lease, "watch", lambda *_: LeaseVerdict.SILENT)
    ended = shardway("train", *TINY)
    assert ended.code == 0
    assert ended.err.count("another host (n1) held this run; watching for 15 s whether it still does\n") == 1
    held.release()


def test_a_file_system_without_locks(shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    write_text(tmp_path)
    monkeypatch.setattr(lease.fcntl, "flock", refuse)
    assert shardway("train", *TINY).code == 0
    assert shardway("train", *TINY, "train.steps=4").code == 0
    assert [event["epoch"] for event in RunDir(tmp_path / "runs/default").all_events() if event["event"] == "started"]


# --- a run that was trained before


@pytest.fixture
def trained(shardway: Shardway, tmp_path: Path) -> Path:
    """A run of two steps, saved after each."""
    write_text(tmp_path)
    assert shardway("train", *TINY, "checkpoint.every=1 steps", "--dir", "a").code == 0
    return tmp_path / "a"


def kept(run: Path) -> dict[str, bytes]:
    """What must survive a failed attempt: all but the record of attempts."""
    records = ("events/rank-00000.jsonl", "status.json", "writer.lock", "run.toml", "resolved.toml")
    return {
        name: content for name, content in tree(run).items() if name not in records and not name.startswith("lease/")
    }


@pytest.mark.usefixtures("trained")
def test_another_seed_is_another_run(shardway: Shardway, golden: Golden, trained: Path) -> None:
    before = kept(trained)
    refused(shardway, golden, "changed-run", "train", *TINY, "train.seed=5", "--dir", "a", code=2)
    assert kept(trained) == before


def lose_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def lose_shard(checkpoint: Path) -> None:
    (checkpoint / "rank-00000.bin").unlink()


def flip_bit(checkpoint: Path) -> None:
    shard = checkpoint / "rank-00000.bin"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def come_from_the_future(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 3}))


@pytest.mark.parametrize(
    ("damage", "name", "code"),
    [
        (lose_manifest, "missing-manifest", 4),
        (lose_shard, "missing-shard", 4),
        (flip_bit, "flipped-bit", 4),
        (come_from_the_future, "newer-checkpoint", 2),
    ],
)
def test_no_checkpoint_is_whole(
    shardway: Shardway, golden: Golden, trained: Path, damage: Setup, name: str, code: int
) -> None:
    for step in (1, 2):
        damage(trained / f"checkpoints/step-{step:09d}")
    before = kept(trained)
    refused(shardway, golden, name, "train", *TINY, "train.steps=4", "--dir", "a", code=code)
    assert kept(trained) == before


def test_a_full_disk(shardway: Shardway, golden: Golden, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept(trained)
    usage = shutil.disk_usage(trained)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    words = ("train", *TINY, "train.steps=4", "--dir", "a")
    ended = shardway(*words)
    assert ended.code == 4
    golden(tell(words, ended.err, ended.code), "errors/full-disk.txt")
    assert before.items() <= kept(trained).items()


# --- the folder of golden messages


def test_no_message_is_left_over() -> None:
    more = {
        "nproc-under-a-launcher",
        "half-a-launcher",
        "second-writer",
        "held-elsewhere",
        "changed-run",
        "missing-manifest",
        "missing-shard",
        "flipped-bit",
        "newer-checkpoint",
        "full-disk",
    }
    assert golden_names("errors") == {f"{name}.txt" for name in more | {case.name for case in CASES}}
