"""`shardway generate` and `shardway chat`: what they print, write and refuse."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import TINY, Shardway, write_text

import warm
from runs import lone_rank, train_tiny
from shardway.cli.infer_options import ReplyInterrupt

SAYING = "To be, or not to be, that is the question."
LEARNS = ("model.dim=32", "data.seq_len=64", "train.steps=60", "train.global_batch=4", "optim.lr=0.03")


@pytest.fixture(name="saying", scope="module")
def _saying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt one sentence by heart."""
    folder = tmp_path_factory.mktemp("saying")
    write_text(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = (*LEARNS, "optim.warmup=5 steps", "checkpoint.every=60 steps", "checkpoint.background=false")
        train_tiny(folder / "run", lone_rank(), *words, f"data.path={folder}/text.txt", base=TINY)
    return folder / "run"


def test_a_run_continues_what_it_has_learnt(shardway: Shardway, saying: Path) -> None:
    ended = shardway("generate", str(saying), "--prompt", "To be, or not", "--max-tokens", "30")
    assert (ended.code, ended.out) == (0, f"{SAYING}\n")
    assert ended.err.splitlines()[0] == f"run {saying}, step 60: float32 on cpu"
    assert ended.err.splitlines()[1].startswith("30 tokens after 13 in ")


def test_facts_are_json(shardway: Shardway, saying: Path) -> None:
    ended = shardway("generate", str(saying), "--prompt", "To be, or", "--stop", "question", "--json")
    found = json.loads(ended.out)
    assert found["text"] == " not to be, that is the "
    assert found["finish"] == "stop"
    assert (found["prompt_tokens"], found["device"], found["dtype"]) == (9, "cpu", "float32")
    assert len(found["tokens"]) == len(" not to be, that is the question")


def test_a_file_gives_a_line_for_each_prompt(shardway: Shardway, saying: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "To be, ", "id": 7}\n{"prompt": "that is the"}\n')
    words = ("generate", str(saying), "--file", "in.jsonl", "--max-tokens", "9")
    ended = shardway(*words)
    first, second = map(json.loads, ended.out.splitlines())
    assert (first["prompt"], first["id"], first["text"]) == ("To be, ", 7, "or not to")
    assert second["text"] == " question"
    assert "2 prompts, 18 tokens in " in ended.err
    written = shardway(*words, "--out", "out.jsonl", "--batch", "1", "--json")
    assert json.loads(written.out)["prompts"] == 2
    assert [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        "or not to",
        " question",
    ]
    (tmp_path / "in.txt").write_text("\nTo be, \n\n \nthat is the\n\n")
    spaced = shardway("generate", str(saying), "--file", "in.txt", "--max-tokens", "9")
    assert len(spaced.out.splitlines()) == 2
    assert spaced.err.endswith("/s); left out: 3 empty lines between them\n")
    (tmp_path / "in.txt").write_text("that is the")
    single = shardway("generate", str(saying), "--file", "in.txt", "--max-tokens", "9")
    assert single.err.splitlines()[-1].startswith("1 prompt, 9 tokens in ")
    again = shardway(*words, "--out", "out.jsonl")
    assert (again.code, again.out) == (2, "")
    assert "out.jsonl exists, and is not overwritten" in again.err


def test_what_stdin_holds_is_continued(shardway: Shardway, saying: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("that is the"))
    assert shardway("generate", str(saying), "--max-tokens", "9").out == "that is the question\n"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--prompt", ""), "is empty"),
        (("--prompt", "long" * 40), "has 160 tokens, and run has 64 positions"),
        (("--prompt", "a", "--step", "3"), "no checkpoint of step 3"),
        (("--prompt", "a", "--best"), "none is the best"),
        (("--prompt", "a", "--chat"), "without a chat template"),
        (("--prompt", "a", "--nproc", "2", "--device", "cuda"), "sees 0 CUDA devices"),
    ],
)
def test_a_mistake_is_a_sentence(shardway: Shardway, saying: Path, words: tuple[str, ...], what: str) -> None:
    ended = shardway("generate", str(saying), *words)
    assert ended.code in (2, 3)
    assert what in ended.err
    assert ended.out == ""


def test_bytes_that_are_no_text_are_refused(shardway: Shardway, saying: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads them as lone surrogates, on a command line always and from stdin in some locales."""
    ended = shardway("generate", str(saying), "--prompt", "a\udcffb", "--stop", "\udcfe")
    assert (ended.code, ended.out) == (2, "")
    for option in ("--prompt", "--stop"):
        assert f"{option} (command line): is not text in UTF-8: a byte that is none at character" in ended.err
    for stdin in (io.StringIO("ab\udcff"), io.TextIOWrapper(io.BytesIO(b"ab\xff"), "utf-8")):
        monkeypatch.setattr(sys, "stdin", stdin)
        ended = shardway("generate", str(saying))
        assert (ended.code, "stdin (command line): is not text in UTF-8" in ended.err) == (2, True)
    Path("plain.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"/save c\n\xff\nTo be, or not\n"), "utf-8"))
    words = ("--template", "plain.jinja", "--temperature", "0", "--max-tokens", "9")
    ended = shardway("chat", str(saying), *words)
    assert (ended.code, ended.out) == (0, " to be, t\n")
    assert "this line holds bytes that are no text in UTF-8, and was left out." in ended.err
    assert "there is no exchange yet that could be saved." in ended.err
    assert not Path("c").exists()


def test_what_is_no_model_is_named(
    shardway: Shardway, saying: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = shardway("generate", str(saying.parent / "runn"), "--prompt", "a")
    assert (ended.code, "holds run, text.txt" in ended.err) == (2, True)
    ended = shardway("generate", str(saying / "run.toml"), "--prompt", "a")
    assert (ended.code, f"run.toml is a file of the run {saying}." in ended.err) == (2, True)
    (tmp_path / "empty").mkdir()
    ended = shardway("chat", "empty")
    assert (ended.code, "is neither a model nor a run" in ended.err) == (2, True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = shardway("generate", "runn", "--prompt", "a")
    assert (ended.code, "`shardway status` lists those that are" in ended.err) == (2, True)
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    ended = shardway("generate", "empty", "--prompt", "a")
    assert (ended.code, "empty is an adapter alone" in ended.err, "--merge" in ended.err) == (2, True, True)


def test_the_end_of_the_positions_is_named_apart(shardway: Shardway, saying: Path) -> None:
    ended = shardway("generate", str(saying), "--prompt", "a", "--max-tokens", "500")
    assert (ended.code, "the model has no more positions" in ended.err) == (0, True)
    ended = shardway("generate", str(saying), "--prompt", "a", "--max-tokens", "2")
    assert (ended.code, "no more were allowed" in ended.err) == (0, True)


# --- conversations


def test_a_chat_answers_each_line(shardway: Shardway, saying: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    Path("plain.jinja").write_text(template)
    lines = ["To be, or not", "/undo", "that is the", "/save c.jsonl", "/nope", "/system x", "/help", "", "/quit", "no"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    words = ("--template", "plain.jinja", "--temperature", "0", "--max-tokens", "9")
    ended = shardway("chat", str(saying), *words)
    assert (ended.code, ended.out) == (0, " to be, t\n question\n")
    assert "/nope is no command" in ended.err
    assert "The last exchange is taken back." in ended.err
    assert json.loads(Path("c.jsonl").read_text())["messages"] == [
        {"role": "user", "content": "that is the"},
        {"role": "assistant", "content": " question"},
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("."))
    ended = shardway("chat", str(saying), *words, "--history", "c.jsonl")
    assert ended.code == 0
    assert len(ended.out.strip()) > 3


def test_a_chat_needs_a_template(shardway: Shardway, saying: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    ended = shardway("chat", str(saying))
    assert (ended.code, ended.out) == (2, "")
    assert "--template" in ended.err


def test_a_long_chat_goes_on_without_its_beginning(
    shardway: Shardway, saying: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("To be, or not to be.\n" * 3 + "x" * 70 + "\n"))
    Path("plain.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    ended = shardway("chat", str(saying), "--template", "plain.jinja", "--max-tokens", "8")
    assert ended.code == 0
    assert len(ended.out.splitlines()) >= 3
    assert "did not fit into 64 positions and was left out" in ended.err
    assert "this turn has 70 tokens" in ended.err


def test_ctrl_c_ends_an_answer_and_a_second_one_the_program() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ReplyInterrupt() as interrupt:
        assert not interrupt.came
        signal.raise_signal(signal.SIGINT)
        assert interrupt.came
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# --- ranks


def test_ranks_are_started_here(saying: Path, tmp_path: Path) -> None:
    """Two ranks share the model; one of them talks, and none is left."""
    Path(tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    words = [
        "chat",
        str(saying),
        "--nproc",
        "2",
        "--template",
        "plain.jinja",
        "--temperature",
        "0",
        "--max-tokens",
        "9",
    ]
    with warm.starts():
        ended = subprocess.run(
            [sys.executable, "-m", "shardway", *words],
            input="To be, or not\nthat is the\n",
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert (ended.returncode, ended.stdout) == (0, " to be, t\n question\n"), ended.stderr
    assert "over 2 ranks" in ended.stderr
